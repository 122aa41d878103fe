"""The Mosaic GPU kernel of a convolution over prompts.

A thread block convolves some channels of a run of tokens, as if all were of one request. The first
tokens of each request are then computed once more, by XLA.
"""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._bitcast import from_words
from pallas_kernels._mosaic import Ref, call_kernel
from pallas_kernels._recurrence.conv_xla import resume
from pallas_kernels._recurrence.limits import THREADS, channels_per_thread
from pallas_kernels._recurrence.rule import Convolution, Requests

ROWS = 32  # tokens of a thread block
TOGETHER = 4  # tokens that are loaded together, to overlap their latencies


def convolve_prompts(
    conv: Convolution, inputs: Array, requests: Requests, rows: int
) -> tuple[Array, Array]:
    """Returns the data of the pages with the new inputs, and the outputs, [rows, channels].

    Outputs of tokens of no request, and of rows past the tokens, are undefined.
    """
    outputs = _convolve(conv, inputs, rows)
    # XLA scatters elements faster than their bytes.
    typed = conv._replace(pages=conv.pages.typed())
    elements, outputs = resume(typed, inputs, requests, outputs)
    return from_words(elements, conv.pages.data), outputs


def _convolve(conv: Convolution, inputs: Array, rows: int) -> Array:
    """Convolves as if all tokens were of one request."""
    count, channels = inputs.shape
    vector = channels_per_thread(conv)
    size, saved = THREADS * vector, conv.width - 1
    parts = channels // size
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    given = (conv.weights, *(() if conv.bias is None else (conv.bias,)))

    def kernel(x: Ref, weights: Ref, *rest: Ref) -> None:
        bias, out = (None, *rest) if conv.bias is None else rest
        index = lax.axis_index("cta")
        first = lax.div(index, parts) * ROWS
        here = pl.ds(pl.multiple_of(lax.rem(index, parts) * size, size), size)

        def load(ref: Ref) -> Array:
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        def token(t: Array) -> Array:
            value = load(x.at[jnp.clip(t, 0, count - 1), here])
            return value.astype(conv.pages.dtype).astype(jnp.float32)

        taps = [load(weights.at[t, here]) for t in range(conv.width)]
        constant = [] if bias is None else [load(bias.at[here])]

        def convolve(window: list[Array]) -> Array:
            products = map(operator.mul, window, taps)
            total = functools.reduce(jnp.add, itertools.chain(constant, products))
            if not conv.silu:
                return total
            root = lax.rsqrt(1.0 + jnp.exp(-total))  # faster than a division
            return total * (root * root)

        def some(turn: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
            start = first + turn * TOGETHER
            window = [*before, *(token(start + t) for t in range(TOGETHER))]
            for t in range(TOGETHER):
                result = convolve(window[t : t + conv.width]).astype(out.dtype)

                @pl.when(start + t < count)
                def _(t: int = t, result: Array = result) -> None:
                    out[start + t, here] = result

            return tuple(window[TOGETHER:])

        before = tuple(token(first - saved + t) for t in range(saved))
        lax.fori_loop(0, ROWS // TOGETHER, some, before)

    (out,) = call_kernel(
        kernel,
        name="causal_conv1d_tiles",
        num_thread_blocks=-(-count // ROWS) * parts,
        operands=[inputs, *given],
        refs=[],
        out_type=[jax.ShapeDtypeStruct((rows, channels), inputs.dtype)],
        approx_math=True,
    )
    return out
