"""The device's side of an engine: the model's step, and the tokens that go on to the next one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv._src.blocks import Upload
from jaxkv._src.cache import KVCache
from jaxkv._src.engine._context import StepContext
from jaxkv._src.engine._draw import draw
from jaxkv._src.engine._samples import COLUMNS
from jaxkv._src.engine._sampling import Kind
from jaxkv._src.step import UploadRing

Forward = Callable[[Any, StepContext], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The device's state between two calls.

    drawn: tokens of the latest steps; each step says in its upload where its own begin.
    """

    cache: KVCache
    drawn: Array  # int32[N]


def run_steps(
    forward: Forward,
    note_vocab_size: Callable[[int], object],
    params: Any,
    state: State,
    uploads: tuple[Upload, ...],
    *,
    kind: Kind,
) -> tuple[State, Array]:
    """Runs steps of one shape, each over the tokens that those before it drew.

    Args:
      forward: the model, see `Engine`.
      note_vocab_size: called with the width of the logits while the step is traced.
      uploads: their ``extra`` holds what `extra_size` counts, for S samples.
      kind: of the sampler; static.

    Returns:
      The state, and int32[steps, 2 * S + 1]: tokens, the bits of their log-probabilities, and the
      error flags of the cache.
    """

    def one(state: State, upload: Upload) -> tuple[State, Array]:
        context = StepContext(state.cache, upload, newest_tokens=state.drawn)
        result = forward(params, context)
        logits, context = result if isinstance(result, tuple) else (result, context)
        _check_logits(logits, context)
        note_vocab_size(logits.shape[-1])
        cache, extra = context.done(), context.batch.extra[upload.shape.max_tokens :]
        tokens, logprobs = draw(logits, extra[1:].reshape(-1, len(COLUMNS)), kind)
        drawn = lax.dynamic_update_slice(state.drawn, tokens, extra[:1])
        bits = lax.bitcast_convert_type(logprobs, jnp.int32)
        out = jnp.concatenate([tokens, bits, cache.error_flags[None]])
        return State(cache, drawn), out

    if len(uploads) == 1:
        state, out = one(state, uploads[0])
        return state, out[None]
    memory = jax.memory.Space.Device  # uploads of a ring are in the host's
    data = jnp.stack([jax.device_put(upload.data, memory) for upload in uploads])
    return lax.scan(one, state, Upload(data=data, shape=uploads[0].shape))


def _check_logits(logits: Any, context: Any) -> None:
    if not isinstance(context, StepContext):
        raise TypeError(
            f"forward returned a pair whose second element is {type(context).__name__}; it returns "
            "logits, or (logits, step)"
        )
    batch, shape = context.batch.shape.batch_size, getattr(logits, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != batch:
        raise ValueError(
            f"forward returned {type(logits).__name__} of shape {shape}; it returns the logits of "
            f"each request's last token, [{batch}, vocab]: index with step.last_tokens"
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"forward returned logits of dtype {logits.dtype}; they are floats")


def check_same(old: Any, new: Any) -> None:
    """Raises ValueError unless two pytrees have the same structure, shapes and dtypes."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError("params has another tree structure than the engine was made with")
    olds, news = jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new)
    for (path, was), now in zip(olds, news, strict=True):
        if (np.shape(was), jnp.result_type(was)) != (np.shape(now), jnp.result_type(now)):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(now)}{np.shape(now)}; the "
                f"engine was made with {jnp.result_type(was)}{np.shape(was)}"
            )


def ring_for(cache: KVCache, depth: int) -> UploadRing | None:
    """Returns a ring of page-locked uploads, for a cache on one GPU."""
    devices = cache.status.devices()
    if len(devices) > 1 or next(iter(devices)).platform != "gpu":
        return None
    return UploadRing(depth=depth, device=next(iter(devices)))
