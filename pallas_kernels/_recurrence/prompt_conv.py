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
    parts = channels // (THREADS * channels_per_thread(conv))
    (out,) = call_kernel(
        lambda *refs: _Convolver(conv, parts, refs).run(),
        name="causal_conv1d_tiles",
        num_thread_blocks=-(-count // ROWS) * parts,
        operands=[inputs, conv.weights, *(() if conv.bias is None else (conv.bias,))],
        refs=[],
        out_type=[jax.ShapeDtypeStruct((rows, channels), inputs.dtype)],
        approx_math=True,
    )
    return out


class _Convolver:
    """The code of one thread block."""

    def __init__(self, conv: Convolution, parts: int, refs: tuple[Ref, ...]) -> None:
        self.conv, (self.inputs, weights, *bias, self.out) = conv, refs
        self.count, channels = self.inputs.shape
        size = channels // parts
        self.layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)
        index = lax.axis_index("cta")
        self.first = lax.div(index, parts) * ROWS
        self.channels = pl.ds(pl.multiple_of(lax.rem(index, parts) * size, size), size)
        self.taps = [self._load(weights.at[t, self.channels]) for t in range(conv.width)]
        self.bias = [self._load(ref.at[self.channels]) for ref in bias]

    def run(self) -> None:
        saved = self.conv.width - 1
        before = tuple(self._token(self.first - saved + t) for t in range(saved))
        lax.fori_loop(0, ROWS // TOGETHER, self._run_some, before)

    def _run_some(self, turn: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
        """Convolves some tokens, given the tokens before; returns the last of them."""
        start = self.first + turn * TOGETHER
        window = [*before, *(self._token(start + t) for t in range(TOGETHER))]
        for t in range(TOGETHER):
            result = self._weigh(window[t : t + self.conv.width]).astype(self.out.dtype)

            @pl.when(start + t < self.count)
            def _(t: int = t, result: Array = result) -> None:
                self.out[start + t, self.channels] = result

        return tuple(window[TOGETHER:])

    def _weigh(self, window: list[Array]) -> Array:
        products = map(operator.mul, window, self.taps)
        total = functools.reduce(jnp.add, itertools.chain(self.bias, products))
        if not self.conv.silu:
            return total
        root = lax.rsqrt(1.0 + jnp.exp(-total))  # faster than a division
        return total * (root * root)

    def _token(self, t: Array) -> Array:
        """Loads a token's inputs, rounded as pages store them."""
        value = self._load(self.inputs.at[jnp.clip(t, 0, self.count - 1), self.channels])
        return value.astype(self.conv.pages.dtype).astype(jnp.float32)

    def _load(self, ref: Ref) -> Array:
        return plgpu.load(ref, layout=self.layout).astype(jnp.float32)
