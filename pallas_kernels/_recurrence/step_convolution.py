"""The convolution before a recurrent step, as a part of its kernel.

Pages have elements as wide as the state's, so that an element may hold two inputs of the
convolution: these are unpacked in registers.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import load, store
from pallas_kernels._recurrence.step_pieces import Item, pair_layout
from pallas_kernels._recurrence.step_shape import StepShape

# Interpret mode cannot reshape references. With False, values are reshaped instead.
RESHAPES_REFERENCES = True


def outputs_scratch(shape: StepShape) -> Any:
    """Returns shared memory for the outputs of the convolution of an item."""
    is_pairs = shape.packed == 2 and RESHAPES_REFERENCES
    size = (shape.channels // 2, 2) if is_pairs else (shape.channels,)
    return plgpu.SMEM(size, jnp.float32)


class StepConvolution:
    """The convolution's references, and its code.

    pages: [rows, K], of the whole pool.
    start: elements of a page before the inputs that it remembers.
    weights: [width, channels], or [width, channels / 2, 2] for packed inputs.
    bias: [channels], or [channels / 2, 2]; None: zeros.
    staged: shared memory, [width, channels of an item], in elements of the pages.
    mixed: shared memory, of `outputs_scratch`.
    """

    def __init__(
        self,
        shape: StepShape,
        pages: Any,
        start: int,
        weights: Any,
        bias: Any,
        staged: Any,
        mixed: Any,
    ) -> None:
        self.shape, self.pages, self.start = shape, pages, start
        self.weights, self.bias, self.staged, self.mixed = weights, bias, staged, mixed

    @property
    def outputs(self) -> Any:
        """The outputs of an item as a vector."""
        if self.shape.packed == 2 and RESHAPES_REFERENCES:
            return self.mixed.reshape(self.shape.channels)
        return self.mixed

    def words(self, page: Array, tap: int, column: Array, width: int) -> Any:
        """Returns a reference to inputs of the convolution in a page, in elements of the pages."""
        shape, row = self.shape, self.shape.rule.key_size
        start = self.start + (tap * shape.rule.columns + column) // shape.packed
        return self.pages.at[page + lax.div(start, row), pl.ds(lax.rem(start, row), width)]

    def taps(self, item: Item) -> list[tuple[list[Array], Array | None]]:
        """Returns the weights of the convolution, and its bias, for each segment of inputs."""
        taps = []
        for _, column, width in self.shape.segments(item.head, item.key_head):
            place, layout = self._channels(column, width)
            weights = [
                load(self.weights.at[t, place], layout) for t in range(self.shape.conv_width)
            ]
            bias = None if self.bias is None else load(self.bias.at[place], layout)
            taps.append((weights, bias))
        return taps

    def _channels(self, column: Array, width: int) -> tuple[Any, Any]:
        """Returns the place of channels in an array, and their layout."""
        if self.shape.packed == 2:
            return pl.ds(lax.div(column, 2), width // 2), pair_layout()
        return pl.ds(column, width), plgpu.Layout.WG_STRIDED((width,), vec_size=1)

    def run(self, item: Item, taps: Any, write_page: Array, is_known: Array) -> None:
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

        segments = shape.segments(item.head, item.key_head)
        for (place, _, width), (weights, bias) in zip(segments, taps, strict=True):
            total = bias
            for t, weight in enumerate(weights):
                source = self.staged.at[t, pl.ds(place // packed, width // packed)]
                product = self._unpack(source, width) * weight
                total = product if total is None else total + product
            total = total / (1.0 + jnp.exp(-total)) if shape.silu else total
            self._keep(place, width, total)
        plgpu.commit_smem()

        @pl.when(is_known)
        def _() -> None:
            for t in range(newest):
                for place, column, width in segments:
                    n = width // packed
                    plgpu.copy_smem_to_gmem(
                        self.staged.at[t + 1, pl.ds(place // packed, n)],
                        self.words(write_page, t, column, n),
                        commit_group=False,
                    )

        plgpu.commit_smem_to_gmem_group()

    def _unpack(self, source: Any, width: int) -> Array:
        """Loads inputs of the convolution: float32[width], or [width / 2, 2] of packed ones."""
        shape = self.shape
        if shape.packed == 1:
            return load(source, plgpu.Layout.WG_STRIDED((width,), vec_size=1))
        words = plgpu.load(source, layout=pair_layout().reduce(1), optimized=False)
        words = lax.bitcast_convert_type(words, jnp.uint32)
        words = lax.broadcast_in_dim(words, (width // 2, 2), [0])
        second = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=pair_layout()) == 1
        # A bfloat16 is the upper half of a float32.
        bits = jnp.where(second, words & jnp.uint32(0xFFFF0000), words << 16)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _keep(self, place: int, width: int, mixed: Array) -> None:
        if self.shape.packed == 1:
            self.mixed[pl.ds(place, width)] = mixed
        elif RESHAPES_REFERENCES:
            store(self.mixed.at[pl.ds(place // 2, width // 2)], mixed)
        else:
            store(self.mixed.at[pl.ds(place, width)], mixed.reshape(width))
