"""The convolution before a recurrent step, as a part of its kernel.

Pages have elements as wide as the state's, so that an element may be two inputs of the
convolution: these are unpacked in registers. Its inputs and weights are few bytes in many places:
threads load them. A copy by TMA of each takes longer to start.
"""

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Layout, Ref, store
from pallas_kernels._recurrence.step_common import Item, pair_layout
from pallas_kernels._recurrence.step_shape import StepShape

# Interpret mode cannot reshape references. With False, values are reshaped instead.
RESHAPES_REFERENCES = True


def outputs_scratch(shape: StepShape) -> pl.MemoryRef:
    """Returns shared memory for the outputs of the convolution of an item."""
    is_pairs = shape.packed == 2 and RESHAPES_REFERENCES
    size = (shape.channels // 2, 2) if is_pairs else (shape.channels,)
    return plgpu.SMEM(size, jnp.float32)


class Window(NamedTuple):
    """Some channels of an item as a convolution reads them, in elements of the pages.

    inputs: of the tokens that it covers, oldest first.
    taps: its weights, and its bias if there is one.
    """

    inputs: list[Array]
    taps: list[Array]


class StepConvolution:
    """The convolution's references, and its code.

    pages: [rows, K], of the whole pool.
    start: elements of a page before the inputs that it remembers.
    inputs: the new tokens', [tokens, channels], in elements of the pages.
    weights, bias: [width, channels] and [1, channels], the same; no bias: zeros.
    mixed: shared memory, of `outputs_scratch`.
    """

    def __init__(
        self,
        shape: StepShape,
        pages: Ref,
        start: int,
        inputs: Ref,
        weights: Ref,
        bias: Ref,
        mixed: Ref,
    ) -> None:
        self.shape, self.pages, self.start = shape, pages, start
        self.inputs, self.weights, self.bias, self.mixed = inputs, weights, bias, mixed

    @property
    def outputs(self) -> Ref:
        """The outputs of an item as a vector."""
        if self.shape.packed == 2 and RESHAPES_REFERENCES:
            return self.mixed.reshape(self.shape.channels)
        return self.mixed

    def read(self, item: Item) -> list[Window]:
        """Reads what each segment of an item's inputs needs."""
        shape, windows = self.shape, list[Window]()
        for _, column, width in shape.segments(item.head, item.key_head):
            n = width // shape.packed
            part = pl.ds(lax.div(column, shape.packed), n)
            sources = [self._kept(item.page, t, column, n) for t in range(shape.conv_width - 1)]
            sources.append(self.inputs.at[item.token, part])
            taps = [self.weights.at[t, part] for t in range(shape.conv_width)]
            taps += [self.bias.at[0, part]] if shape.conv_rows > shape.conv_width else []
            windows.append(Window([self._load(one, n) for one in sources],
                                  [self._load(one, n) for one in taps]))  # fmt: skip
        return windows

    def run(self, item: Item, windows: list[Window], write_page: Array, is_known: Array) -> None:
        """Computes an item's queries, keys and values, and moves the convolution's inputs on.

        Whoever reads the outputs has to wait for all threads.
        """
        shape, moved = self.shape, list[tuple[Ref, Array]]()
        segments = shape.segments(item.head, item.key_head)
        for (offset, column, width), (read, taps) in zip(segments, windows, strict=True):
            n = width // shape.packed
            resumed = lax.broadcast(item.is_known, (n,))
            inputs = [*(jnp.where(resumed, one, 0) for one in read[:-1]), read[-1]]
            for t, one in enumerate(inputs[1:]):
                moved.append((self._kept(write_page, t, column, n), one))
            products = (
                self._unpack(x) * self._unpack(w) for x, w in zip(inputs, taps, strict=False)
            )
            bias = (self._unpack(one) for one in taps[shape.conv_width :])
            total = functools.reduce(jnp.add, itertools.chain(bias, products))
            out = total / (1.0 + jnp.exp(-total)) if shape.silu else total
            self._store_outputs(out, offset, width)

        @pl.when(is_known)
        def _() -> None:
            for target, one in moved:
                store(target, one)

    def _kept(self, page: Array, tap: int, column: Array, width: int) -> Ref:
        """Returns a reference to inputs that it remembers beside the state of a page."""
        shape, row = self.shape, self.shape.rule.key_size
        start = self.start + (tap * shape.rule.columns + column) // shape.packed
        return self.pages.at[page + lax.div(start, row), pl.ds(lax.rem(start, row), width)]

    def _load(self, source: Ref, width: int) -> Array:
        layout: Layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)
        if self.shape.packed == 2:
            layout = pair_layout().reduce(1)
        return plgpu.load(source, layout=layout, optimized=False)

    def _unpack(self, words: Array) -> Array:
        """Returns the numbers in elements: float32[n], or [n, 2] of packed ones."""
        if self.shape.packed == 1:
            return words.astype(jnp.float32)
        words = lax.bitcast_convert_type(words, jnp.uint32)
        words = lax.broadcast_in_dim(words, (*words.shape, 2), [0])
        second = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=pair_layout()) == 1
        # A bfloat16 is the upper half of a float32.
        bits = jnp.where(second, words & jnp.uint32(0xFFFF0000), words << 16)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _store_outputs(self, mixed: Array, offset: int, width: int) -> None:
        if self.shape.packed == 2 and RESHAPES_REFERENCES:
            store(self.mixed.at[pl.ds(offset // 2, width // 2)], mixed)
        else:
            store(self.mixed.at[pl.ds(offset, width)], mixed.reshape(width))
