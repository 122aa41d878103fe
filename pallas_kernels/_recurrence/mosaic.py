"""Recurrent layers by Mosaic GPU kernels: steps, prompts, and mixtures of both."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._bitcast import from_words
from pallas_kernels._recurrence.checkpoints import cut_at_checkpoints
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.conv import convolve_step
from pallas_kernels._recurrence.conv_xla import convolve_xla
from pallas_kernels._recurrence.limits import MAX_STEP_TOKENS, why_not_convolution, why_not_prompt
from pallas_kernels._recurrence.prompt import GRANULE, run_prompts
from pallas_kernels._recurrence.prompt_conv import convolve_prompts
from pallas_kernels._recurrence.rings import empty_rings
from pallas_kernels._recurrence.rule import Convolution, Replay, Requests, Rule, Spans, Tokens
from pallas_kernels._recurrence.step import can_fuse, step_mosaic
from pallas_kernels._recurrence.step_draft_rings import FLUSH
from pallas_kernels._recurrence.xla import run_chunks
from pallas_kernels._zero_blocks import zero_blocks


def run_mosaic(
    rule: Rule,
    tokens: Tokens,
    requests: Requests,
    conv: Convolution | None,
    most: int,
    out: jnp.dtype,
) -> tuple[Array, Array]:
    """Returns the data of the pages with the new states, and the outputs, [T, value_heads, V].

    Args:
      most: most tokens of a request.
      out: dtype of the outputs.
    """
    spans, count = requests.spans, tokens.inputs.shape[0]
    by_kernels = most > MAX_STEP_TOKENS and not why_not_prompt(rule, tokens, out)
    if conv is not None and not can_fuse(rule, tokens, requests, conv):
        rows = count + (-count % CHUNK if by_kernels else 0)
        tokens = tokens.after(*convolve_mosaic(conv, tokens.inputs, requests, most, rows))
        conv = None
    rows = count + (-count % GRANULE if by_kernels else 0)
    wanted = jax.ShapeDtypeStruct((rows, rule.value_heads, rule.value_size), out)
    if spans is None:
        return step_mosaic(rule, tokens, requests, conv, 1, wanted)
    if tokens.replay is not None and tokens.replay.drafts:
        given = rule, tokens, requests, tokens.replay
        data, outputs = _run_drafts(*given, most, by_kernels, wanted)
        return data, clear_padding(requests, outputs)[:count]
    if most <= MAX_STEP_TOKENS and tokens.replay is None:
        data, outputs = step_mosaic(rule, tokens, requests, None, most, wanted)
        return data, clear_padding(requests, outputs)
    # Requests of one token and longer ones, each by what is faster for them.
    single = spans.counts == 1
    ones, others = requests._replace(spans=spans.only(single)), spans.only(~single)
    if tokens.replay is not None:
        ones = ones.writing_last()
    data, outputs = step_mosaic(rule, tokens, ones, None, 1, wanted)
    run, longer = run_prompts if by_kernels else _run_chunks, requests._replace(spans=others)
    parts: list[tuple[Any, tuple[Requests, Spans]]] = [(run, (longer, others))]
    if tokens.replay is not None and by_kernels:  # which know states alone
        first, whole, rest = cut_at_checkpoints(tokens.replay, longer, others)
        run_few = functools.partial(_run_few, most=max(tokens.replay.rows - 1, 2))
        parts = [(run_few, first), (run, whole), (run_few, rest)]
    for run_part, part in parts:
        tokens = tokens.after(data, tokens.inputs)
        data, outputs = run_part(rule, tokens, *part, outputs)
    return data, clear_padding(requests, outputs)[:count]


def _run_drafts(
    rule: Rule,
    tokens: Tokens,
    requests: Requests,
    replay: Replay,
    most: int,
    by_kernels: bool,
    wanted: jax.ShapeDtypeStruct,
) -> tuple[Array, Array]:
    """Runs requests over rings that take drafts, of which longer ones leave none."""
    few, spans = 1 + replay.drafts, requests.spans or Spans.from_batch_size(requests.batch)
    if most <= few:
        return step_mosaic(rule, tokens, requests, None, most, wanted)
    are_few, longer = spans.counts <= few, spans.only(spans.counts > few)
    first = spans.only(are_few)
    if by_kernels:  # which know states alone
        first = spans._replace(counts=jnp.where(are_few, spans.counts, FLUSH))
    data, outputs = step_mosaic(rule, tokens, requests._replace(spans=first), None, few, wanted)
    tokens = tokens.after(data, tokens.inputs)
    if not by_kernels:
        return _run_chunks(rule, tokens, requests._replace(spans=longer), longer, outputs)
    page = jnp.where(are_few, -1, requests.last_page())
    others = requests._replace(read_ids=page, spans=longer)
    data, outputs = run_prompts(rule, tokens, others, longer, outputs)
    elements = empty_rings(replay, tokens.states._replace(data=data).typed().data, page)
    return from_words(elements, data), outputs


def _run_few(
    rule: Rule, tokens: Tokens, requests: Requests, spans: Spans, outputs: Array, *, most: int
) -> tuple[Array, Array]:
    """Runs requests whose tokens, ``most`` of them, end at the next checkpoint or before."""
    return step_mosaic(rule, tokens, requests._replace(spans=spans), None, most, outputs)


def _run_chunks(
    rule: Rule, tokens: Tokens, requests: Requests, spans: Spans, outputs: Array
) -> tuple[Array, Array]:
    """Runs prompts by XLA on a GPU, where elements are scattered faster than their bytes."""
    data = tokens.states.data
    tokens = tokens._replace(states=tokens.states.typed())
    elements, longer = run_chunks(rule, tokens, requests, spans, outputs.dtype)
    rows = outputs.shape[0]  # kernels of prompts want other multiples
    longer = jnp.pad(longer, ((0, max(rows - longer.shape[0], 0)), (0, 0), (0, 0)))[:rows]
    is_covered = spans.cover(rows)[:, None, None]
    return from_words(elements, data), jnp.where(is_covered, longer, outputs)


def convolve_mosaic(
    conv: Convolution, inputs: Array, requests: Requests, most: int, rows: int | None = None
) -> tuple[Array, Array]:
    """Returns the data of the pages, and the outputs: [T, channels] in the dtype of inputs.

    Outputs of tokens of no request are undefined.

    Args:
      most: most tokens of a request.
      rows: of the outputs of prompts, at least T; None: T.
    """
    lists_pages = requests.spans is not None and requests.spans.write_after is not None
    if why_not_convolution(conv) or (conv.takes_drafts and lists_pages):
        typed = conv._replace(pages=conv.pages.typed())
        elements, out = convolve_xla(typed, inputs, requests)
        return from_words(elements, conv.pages.data), out
    if requests.spans is None or most <= MAX_STEP_TOKENS:
        return convolve_step(conv, inputs, requests, most)
    return convolve_prompts(conv, inputs, requests, rows or inputs.shape[0])


def clear_padding(requests: Requests, outputs: Array) -> Array:
    """Returns outputs with zeros for tokens of no request."""
    if requests.spans is None:
        return outputs
    token = jnp.arange(outputs.shape[0], dtype=jnp.int32)
    padding = jnp.where(requests.spans.cover(token.size), -1, token)
    return zero_blocks(outputs, padding, implementation="mosaic_gpu")
