"""The convolution before a recurrent step, as a part of its kernel.

Pages have elements as wide as the state's, so that an element may be two inputs of the
convolution: these are unpacked in registers.
"""

import functools
import itertools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, load, store
from pallas_kernels._recurrence.step_common import Item, pair_layout
from pallas_kernels._recurrence.step_shape import StepShape

# Interpret mode cannot reshape references. With False, values are reshaped instead.
RESHAPES_REFERENCES = True


def outputs_scratch(shape: StepShape) -> pl.MemoryRef:
    """Returns shared memory for the outputs of the convolution of an item."""
    is_pairs = shape.packed == 2 and RESHAPES_REFERENCES
    size = (shape.channels // 2, 2) if is_pairs else (shape.channels,)
    return plgpu.SMEM(size, jnp.float32)


class StepConvolution:
    """The convolution's references, and its code.

    pages: [rows, K], of the whole pool.
    start: elements of a page before the inputs that it remembers.
    weights, bias: [width, channels] and [1, channels], in elements of the pages; no bias: zeros.
    staged: shared memory, [width, channels of an item], in elements of the pages.
    taps: the same for weights, and for the bias in a last row.
    mixed: shared memory, of `outputs_scratch`.
    """

    def __init__(
        self,
        shape: StepShape,
        pages: Ref,
        start: int,
        weights: Ref,
        bias: Ref,
        staged: Ref,
        taps: Ref,
        mixed: Ref,
    ) -> None:
        self.shape, self.pages, self.start = shape, pages, start
        self.weights, self.bias, self.staged = weights, bias, staged
        self.taps, self.mixed = taps, mixed

    @property
    def outputs(self) -> Ref:
        """The outputs of an item as a vector."""
        if self.shape.packed == 2 and RESHAPES_REFERENCES:
            return self.mixed.reshape(self.shape.channels)
        return self.mixed

    def words(self, page: Array, tap: int, column: Array, width: int) -> Ref:
        """Returns a reference to inputs that it remembers beside the state of a page.

        In elements of the pages.
        """
        shape, row = self.shape, self.shape.rule.key_size
        start = self.start + (tap * shape.rule.columns + column) // shape.packed
        return self.pages.at[page + lax.div(start, row), pl.ds(lax.rem(start, row), width)]

    def fetch_taps(self, item: Item, ready: Ref) -> None:
        """Starts loading the weights of the convolution, and its bias."""
        width, packed = self.shape.conv_width, self.shape.packed
        for t in range(self.shape.conv_rows):
            source, row = (self.weights, t) if t < width else (self.bias, 0)
            for offset, column, n in self.shape.segments(item.head, item.key_head):
                target = self.taps.at[t, pl.ds(offset // packed, n // packed)]
                words = source.at[row, pl.ds(lax.div(column, packed), n // packed)]
                plgpu.copy_gmem_to_smem(words, target, ready)

    def run(self, item: Item, write_page: Array, is_known: Array) -> None:
        """Computes an item's queries, keys and values, and moves the convolution's inputs on."""
        shape, packed = self.shape, self.shape.packed
        newest = shape.conv_width - 1

        @pl.when(~item.is_known)
        def _() -> None:
            for t in range(newest):
                whole = self.staged.at[t]
                zeros = jnp.zeros(whole.shape, whole.dtype)
                whole[...] = plgpu.layout_cast(
                    zeros, plgpu.Layout.WG_STRIDED(whole.shape, vec_size=1)
                )
            plgpu.commit_smem()  # a barrier: other threads read them

        rows = range(shape.conv_rows)
        taps = [self._unpack(self.taps.at[t]) for t in rows]
        bias = taps[shape.conv_width :]
        products = (self._unpack(self.staged.at[t]) * taps[t] for t in range(shape.conv_width))
        total = functools.reduce(jnp.add, itertools.chain(bias, products))
        self._store_outputs(total / (1.0 + jnp.exp(-total)) if shape.silu else total)
        plgpu.commit_smem()

        @pl.when(is_known)
        def _() -> None:
            for t in range(newest):
                for offset, column, width in shape.segments(item.head, item.key_head):
                    n = width // packed
                    plgpu.copy_smem_to_gmem(
                        self.staged.at[t + 1, pl.ds(offset // packed, n)],
                        self.words(write_page, t, column, n),
                        commit_group=False,
                    )

        plgpu.commit_smem_to_gmem_group()

    def _unpack(self, source: Ref) -> Array:
        """Loads the numbers of an item: float32[channels], or [channels / 2, 2] of packed ones."""
        shape = self.shape
        if shape.packed == 1:
            return load(source, plgpu.Layout.WG_STRIDED((shape.channels,), vec_size=1))
        words = plgpu.load(source, layout=pair_layout().reduce(1), optimized=False)
        words = lax.bitcast_convert_type(words, jnp.uint32)
        words = lax.broadcast_in_dim(words, (shape.channels // 2, 2), [0])
        second = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=pair_layout()) == 1
        # A bfloat16 is the upper half of a float32.
        bits = jnp.where(second, words & jnp.uint32(0xFFFF0000), words << 16)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _store_outputs(self, mixed: Array) -> None:
        if self.shape.packed == 1:
            self.mixed[...] = mixed
        else:
            store(self.mixed, mixed if RESHAPES_REFERENCES else mixed.reshape(self.shape.channels))
