"""The same model over dense arrays, nothing paged or shared: what paging must equal."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.demo.caches import DenseCache
from jaxkv.demo.model import Model, Params, forward
from jaxkv.demo.trace import Request
from jaxkv.specs import LayerSpec

BATCH, CHUNK = 16, 64  # requests side by side, each in rows of its own; prefill chunk


def dense_outputs(
    model: Model,
    params: Params,
    layers: Mapping[str, LayerSpec],
    trace: Sequence[Request],
    *,
    max_model_len: int,
    on_finish: Callable[[], object],
) -> dict[int, list[int]]:
    """Greedy tokens of every request, by name."""
    step = jax.jit(functools.partial(_dense_step, model), donate_argnums=1)
    outputs: dict[int, list[int]] = {}
    for start in range(0, len(trace), BATCH):
        batch = trace[start : start + BATCH]
        cache = DenseCache.empty(layers, BATCH, max_model_len)
        tokens = [list(request.prompt) for request in batch]
        computed = [0] * len(batch)
        while any(_unfinished(r, t) for r, t in zip(batch, tokens, strict=True)):
            prefilling = any(len(t) - c > 1 for t, c in zip(tokens, computed, strict=True))
            cache = _advance(step, params, cache, batch, tokens, computed, prefilling)
        for request, known in zip(batch, tokens, strict=True):
            outputs[request.name] = known[len(request.prompt) :]
            on_finish()
    return outputs


def _advance(step, params, cache, batch, tokens, computed, prefilling):
    """One step of the whole batch; prompts first, then one token of each request."""
    chunk = CHUNK if prefilling else 1
    ids, positions = np.zeros((BATCH, chunk), np.int32), np.full((BATCH, chunk), -1, np.int32)
    for i, (request, known) in enumerate(zip(batch, tokens, strict=True)):
        waiting = len(known) - computed[i]
        if not _unfinished(request, known) or (prefilling and waiting == 1):
            continue
        length = min(chunk, waiting)
        ids[i, :length] = known[computed[i] : computed[i] + length]
        positions[i, :length] = np.arange(computed[i], computed[i] + length)
    cache, picked = step(params, cache, ids, positions)
    picked = np.asarray(picked)
    for i, known in enumerate(tokens):
        computed[i] += int((positions[i] >= 0).sum())
        if computed[i] == len(known) and (positions[i] >= 0).any():
            known.append(int(picked[i]))
    return cache


def _unfinished(request: Request, tokens: Sequence[int]) -> bool:
    return len(tokens) < len(request.prompt) + request.max_new_tokens


def _dense_step(model, params, cache, tokens, positions):
    cache = dataclasses.replace(cache, positions=positions)
    with jax.default_matmul_precision("highest"):
        cache, logits = forward(model, params, tokens, positions, cache)
    # The positions go back in the shape they came, so that every step has one signature.
    cache = dataclasses.replace(cache, positions=positions[:, :1])
    return cache, jnp.argmax(logits, axis=-1)
