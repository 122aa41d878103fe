"""A convolution over the tokens of requests in XLA, and the inputs that it saves."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._recurrence.rule import Convolution, Requests, Spans


def convolve_xla(conv: Convolution, inputs: Array, requests: Requests) -> tuple[Array, Array]:
    """Returns the data of the pages with the new inputs, and the outputs, [T, channels]."""
    x, count = _round_as_saved(conv, inputs), inputs.shape[0]
    total = x * _tap(conv, 0)
    for back in range(1, conv.width):
        total += jnp.pad(x, ((back, 0), (0, 0)))[:count] * _tap(conv, back)
    return resume(conv, inputs, requests, _finish(conv, total).astype(inputs.dtype))


def resume(
    conv: Convolution, inputs: Array, requests: Requests, outputs: Array
) -> tuple[Array, Array]:
    """Returns the data of the pages with the new inputs, and the outputs of all tokens.

    Args:
      outputs: [rows, channels], still undefined for the first ``width - 1`` tokens of a request.
    """
    saved = conv.width - 1
    spans = requests.spans or Spans.from_batch_size(requests.batch)
    starts, counts, _ = spans.arrays()
    x = inputs.astype(conv.pages.dtype)
    stored = conv.pages.read(requests.read_ids)  # [B, rows, channels]
    before = _newest(conv, stored, requests)  # [B, width - 1, channels]
    steps = jnp.arange(saved, dtype=jnp.int32)[None]
    first = x.at[starts[:, None] + steps].get(mode="clip")
    if conv.takes_drafts:
        written = _written_by_position(stored.shape[1], requests, spans, x, stored)
    else:
        written = _written(saved, requests, spans, x, before)
    # What is written may not depend on what is read, which must come first nevertheless.
    before, written = lax.optimization_barrier((before, written))
    window = jnp.concatenate([before, first], axis=1).astype(jnp.float32)
    totals = [
        sum(window[:, o + saved - back] * _tap(conv, back) for back in range(conv.width))
        for o in range(saved)
    ]
    resumed = _finish(conv, jnp.stack(totals, axis=1)).astype(outputs.dtype)
    tokens = jnp.where(steps < counts[:, None], starts[:, None] + steps, len(outputs))
    outputs = outputs.at[tokens].set(resumed, mode="drop")
    data = conv.pages.data
    for ids, new in written:
        data = conv.pages._replace(data=data).write(ids, new)
    return data, outputs


def _newest(conv: Convolution, stored: Array, requests: Requests) -> Array:
    """Returns the inputs before the call, [B, width - 1, channels], oldest first."""
    if not conv.takes_drafts:
        return stored
    saved, rows = conv.width - 1, stored.shape[1]
    steps = jnp.arange(saved, dtype=jnp.int32)[None]
    position = (requests.tokens_before()[:, None] - saved + steps)[..., None]
    newest = jnp.take_along_axis(stored, position % rows, axis=1)
    return jnp.where(position >= 0, newest, 0)


def _written_by_position(
    rows: int, requests: Requests, spans: Spans, x: Array, stored: Array
) -> list[tuple[Array, Array]]:
    """Returns the pages to write, int32[B], and the inputs that each stores, [B, rows, channels].

    Args:
      rows: of a page.
      x: [T, channels], the inputs of all tokens.
      stored: [B, rows, channels], those of the pages that are read.
    """
    starts, counts, after = spans.arrays()
    computed, row = requests.tokens_before(), jnp.arange(rows, dtype=jnp.int32)[None]
    written: list[tuple[Array, Array]] = []
    for w in range(requests.write_ids.shape[1]):
        last = after[:, w, None] - 1
        index = last - (computed[:, None] + last - row) % rows  # the newest token of each row
        new = x.at[starts[:, None] + jnp.maximum(index, 0)].get(mode="clip")
        due = (after[:, w] > 0) & (after[:, w] <= counts)
        ids = jnp.where(due, requests.write_ids[:, w], -1)
        written.append((ids, jnp.where((index >= 0)[..., None], new, stored)))
    return written


def _written(
    saved: int, requests: Requests, spans: Spans, x: Array, before: Array
) -> list[tuple[Array, Array]]:
    """Returns the pages to write, int32[B], and the inputs that each stores, [B, saved, channels].

    Args:
      saved: inputs that a page stores.
      x: [T, channels], the inputs of all tokens.
      before: [B, saved, channels], the inputs of the tokens before.
    """
    starts, counts, after = spans.arrays()
    steps = jnp.arange(saved, dtype=jnp.int32)[None]
    written: list[tuple[Array, Array]] = []
    for w in range(requests.write_ids.shape[1]):
        index = after[:, w, None] - saved + steps
        recent = x.at[starts[:, None] + jnp.maximum(index, 0)].get(mode="clip")
        old = jnp.take_along_axis(before, jnp.clip(saved + index, 0, saved - 1)[..., None], axis=1)
        due = (after[:, w] > 0) & (after[:, w] <= counts)
        ids = jnp.where(due, requests.write_ids[:, w], -1)
        written.append((ids, jnp.where((index >= 0)[..., None], recent, old)))
    return written


def _round_as_saved(conv: Convolution, inputs: Array) -> Array:
    """Returns inputs rounded as pages store them, in float32.

    Not by conversions alone: XLA may drop one to fewer bits and back, and does on GPUs.
    """
    x = inputs.astype(conv.pages.dtype).astype(jnp.float32)
    bits = jnp.finfo(conv.pages.dtype).nmant
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)


def _tap(conv: Convolution, back: int) -> Array:
    """Returns the weights of the inputs ``back`` tokens ago, [1, channels]."""
    return conv.weights[conv.width - 1 - back][None].astype(jnp.float32)


def _finish(conv: Convolution, total: Array) -> Array:
    if conv.bias is not None:
        total += conv.bias.reshape(*[1] * (total.ndim - 1), -1).astype(jnp.float32)
    return jax.nn.silu(total) if conv.silu else total
