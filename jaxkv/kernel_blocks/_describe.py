"""What whoever moves blocks must know of a layer's memory, in one form.

Knows shapes, strides and bytes. Does not know how a view was made: a layout, a kernel's
view or an array that someone else allocated all give one description of one memory.
"""

import dataclasses
import math
from typing import Any

from jaxkv.checks import check_count, check_positive
from jaxkv.kernel_blocks._view import LayerView

_AXES = frozenset("BHNC")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewDescription:
    """One layer's memory: equal descriptions, equal bytes, whichever path built them.

    axes: the letters of `shape`: B and N, and H and C where there are such axes.
    shape: elements along each axis; B counts blocks, or equal parts of blocks.
    strides_bytes: bytes from one element of an axis to the next; of one head or one row,
      where any number would do, what an array without gaps has.
    dtype: name of the element type.
    num_blocks: blocks of the pool (the manager's, whatever `shape` counts).
    offset_bytes: where the first element lies in its buffer.

    Raises:
      ValueError: axes, shape and strides that do not fit each other, or a block axis
        that does not count whole blocks.
    """

    axes: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    num_blocks: int
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        check_positive(num_blocks=self.num_blocks)
        check_count(offset_bytes=self.offset_bytes)
        letters = set(self.axes)
        if len(letters) < len(self.axes) or not {"B", "N"} <= letters <= _AXES:
            raise ValueError(
                f"axes={self.axes!r} must name B and N, and H and C where there are such axes, "
                "each once"
            )
        if not len(self.axes) == len(self.shape) == len(self.strides_bytes):
            raise ValueError(
                f"axes={self.axes!r}, shape={self.shape} and strides_bytes={self.strides_bytes} "
                "must have one entry per axis"
            )
        check_positive(**{f"shape[{i}]": size for i, size in enumerate(self.shape)})
        if self.shape[self.block_axis] % self.num_blocks:
            raise ValueError(
                f"shape={self.shape} counts {self.shape[self.block_axis]} blocks on axis "
                f"{self.block_axis}, no multiple of num_blocks={self.num_blocks}; check which "
                "axis counts blocks"
            )
        strides = list(self.strides_bytes)
        for axis in reversed(range(len(strides) - 1)):
            if self.shape[axis] == 1 and self.axes[axis] in "HN":
                strides[axis] = self.shape[axis + 1] * strides[axis + 1]
        object.__setattr__(self, "strides_bytes", tuple(strides))

    @property
    def block_axis(self) -> int:
        return self.axes.index("B")

    @property
    def blocks_per_kv_block(self) -> int:
        """Entries of the block axis per block."""
        return self.shape[self.block_axis] // self.num_blocks

    @property
    def granularity(self) -> str:
        """``"kernel"`` if the block axis counts parts of blocks, else ``"manager"``."""
        return "kernel" if self.blocks_per_kv_block > 1 else "manager"

    def as_manager(self) -> "ViewDescription":
        """The same memory in whole blocks; itself if it is in whole blocks already.

        Raises:
          ValueError: rows that do not run on from part to part of a block.
        """
        return self._regrouped(1)

    def as_kernel(self, blocks_per_kv_block: int) -> "ViewDescription":
        """The same memory in kernel blocks, that many per block.

        Raises:
          ValueError: a number that does not divide the rows of a block, or kernel
            blocks that would not follow each other at one stride.
        """
        check_positive(blocks_per_kv_block=blocks_per_kv_block)
        if blocks_per_kv_block == self.blocks_per_kv_block:
            return self
        whole = self.as_manager()
        rows = whole.shape[whole.axes.index("N")]
        if rows % blocks_per_kv_block:
            raise ValueError(
                f"blocks_per_kv_block={blocks_per_kv_block} does not divide the {rows} rows of a "
                "block; use a divisor"
            )
        return whole._regrouped(blocks_per_kv_block)

    def _regrouped(self, parts: int) -> "ViewDescription":
        if parts == self.blocks_per_kv_block:
            return self
        block, token = self.block_axis, self.axes.index("N")
        shape, strides = list(self.shape), list(self.strides_bytes)
        if strides[block] != shape[token] * strides[token]:
            raise ValueError(
                f"blocks of {shape[token]} rows lie {strides[block]} bytes apart and rows "
                f"{strides[token]}: {parts} parts per block would have no common stride, for "
                "padding, heads or layers lie between; use LBNHC and pages without padding, or "
                "kernel blocks as large as blocks"
            )
        rows = shape[token] * self.blocks_per_kv_block
        shape[block], shape[token] = self.num_blocks * parts, rows // parts
        strides[block] = shape[token] * strides[token]
        return dataclasses.replace(self, shape=tuple(shape), strides_bytes=tuple(strides))


def describe(view: LayerView) -> ViewDescription:
    """The description of a view that a `CacheLayout` gave."""
    return ViewDescription(
        axes=view.axes,
        shape=view.shape,
        strides_bytes=view.strides_bytes,
        dtype=view.dtype,
        num_blocks=view.num_blocks,
        offset_bytes=view.offset_bytes,
    )


def describe_array(
    array: Any, axes: str, *, num_blocks: int, offset_bytes: int = 0
) -> ViewDescription:
    """The description of an array that holds one layer, however it was made.

    Args:
      array: anything with ``shape`` and ``dtype``, and ``strides`` in bytes (NumPy);
        without strides (jax) it is taken as dense, the last axis fastest.
      axes: the letters of its axes, such as ``"BNHC"``.
      num_blocks: blocks of the pool; the block axis may count parts of them.
      offset_bytes: where its first element lies in the buffer.
    """
    shape = tuple(array.shape)
    strides = getattr(array, "strides", None)
    if strides is None:
        steps = (math.prod(shape[i + 1 :]) for i in range(len(shape)))
        strides = (step * array.dtype.itemsize for step in steps)
    return ViewDescription(
        axes=axes,
        shape=shape,
        strides_bytes=tuple(strides),
        dtype=array.dtype.name,
        num_blocks=num_blocks,
        offset_bytes=offset_bytes,
    )
