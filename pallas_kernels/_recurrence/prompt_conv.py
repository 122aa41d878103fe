"""The Mosaic GPU kernel of a convolution over prompts.

A thread block convolves some channels of a tile of tokens, as if no request had earlier inputs. The
few tokens that see inputs of earlier steps are then computed once more, by XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import call_kernel
from pallas_kernels._recurrence.conv_xla import offsets_of, resume
from pallas_kernels._recurrence.limits import THREADS, channels_per_thread
from pallas_kernels._recurrence.pages import from_rows
from pallas_kernels._recurrence.rule import Convolution, Requests

ROWS = 32  # tokens of a thread block
TOGETHER = 8  # tokens that are loaded together, to overlap their latencies


def convolve_prompts(conv: Convolution, inputs: Array, requests: Requests) -> tuple[Array, Array]:
    """Returns the data of the pages with the new inputs, and the outputs, [T, channels].

    Outputs of tokens of no request are undefined.
    """
    spans: Any = requests.spans
    outputs = _convolve(conv, inputs, offsets_of(spans, inputs.shape[0], conv.width - 1))
    # XLA scatters elements faster than their bytes.
    typed = conv._replace(pages=conv.pages.as_elements())
    elements, outputs = resume(typed, inputs, requests, spans, outputs)
    return from_rows(elements, conv.pages.data), outputs


def _convolve(conv: Convolution, inputs: Array, offsets: Array) -> Array:
    """Convolves as if no request had earlier inputs.

    Args:
      offsets: int32[T], as from `offsets_of`.
    """
    count, channels = inputs.shape
    vector = channels_per_thread(conv)
    size, kept = THREADS * vector, conv.width - 1
    parts = channels // size
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    given = (conv.weights, *(() if conv.bias is None else (conv.bias,)))

    def kernel(offsets: Any, x: Any, weights: Any, *rest: Any) -> None:
        bias, out = (None, *rest) if conv.bias is None else rest
        index = lax.axis_index("cta")
        first = lax.div(index, parts) * ROWS
        place = pl.ds(pl.multiple_of(lax.rem(index, parts) * size, size), size)

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        def token(t: Array) -> Array:
            value = load(x.at[jnp.clip(t, 0, count - 1), place])
            return value.astype(conv.pages.dtype).astype(jnp.float32)

        taps = [load(weights.at[t, place]) for t in range(conv.width)]
        constant = None if bias is None else load(bias.at[place])

        def convolve(window: list[Array], offset: Array) -> Array:
            total = window[-1] * taps[-1]
            for back in range(1, conv.width):
                seen = lax.broadcast(offset >= back, (size,))
                total += jnp.where(seen, window[-1 - back], 0.0) * taps[-1 - back]
            total = total if constant is None else total + constant
            return total / (1.0 + jnp.exp(-total)) if conv.silu else total

        def some(turn: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
            start = first + turn * TOGETHER
            window = [*before, *(token(start + t) for t in range(TOGETHER))]
            marks = [offsets[jnp.minimum(start + t, count - 1)] for t in range(TOGETHER)]
            for t, mark in enumerate(marks):
                result = convolve(window[: kept + t + 1], mark).astype(out.dtype)

                @pl.when(start + t < count)
                def _(t: int = t, result: Array = result) -> None:
                    out[start + t, place] = result

            return tuple(window[TOGETHER:])

        before = tuple(token(first - kept + t) for t in range(kept))
        lax.fori_loop(0, ROWS // TOGETHER, some, before)

    (out,) = call_kernel(
        kernel,
        name="causal_conv1d_tiles",
        num_thread_blocks=-(-count // ROWS) * parts,
        operands=[offsets, inputs, *given],
        refs=[],
        out_type=[jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)],
    )
    return out
