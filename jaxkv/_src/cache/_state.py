"""The state of a cache on the device: block tables, pool and scales in one pytree."""

import copy
import dataclasses
from typing import Any, ClassVar, NoReturn

import jax
import numpy as np
from jax import Array

from jaxkv._src.cache._layout import CacheLayout
from jaxkv._src.internal.checks import FlagsError, check_kind
from jaxkv._src.internal.html import html_table
from jaxkv._src.uploads import StepShape, register_upload

BAD_ROW = 1

BAD_BLOCK_ID = 2

BAD_LOGICAL_BLOCK = 4

NO_BLOCK = 8

TOO_LONG = 16

BAD_BATCH = 32

LOST_UPLOAD = 64

REPEATED_UPLOAD = 128

BAD_LAYER_INDEX = 256

STALE_BATCH = 512

MAX_SHOWN = 8  # rows, and ids per row, that Jupyter shows

_REASONS = {
    BAD_ROW: "a row out of range",
    BAD_BLOCK_ID: "a block id outside the pool",
    BAD_LOGICAL_BLOCK: "more blocks for a row than it has columns",
    NO_BLOCK: "a request lacks a block: the manager did not grow it, or an upload was lost",
    TOO_LONG: "a request with more tokens than the step's shape allows",
    BAD_BATCH: "new tokens that are negative, more than the step's shape allows, or not where "
    "the step looks for them",
    LOST_UPLOAD: "an upload was lost: the numbers of two uploads in a row have a gap. Run every "
    "upload once and in order, or call BlockManager.reset and compute all requests again",
    REPEATED_UPLOAD: "an upload was applied twice, or to another cache",
    BAD_LAYER_INDEX: "a period beyond the layers of its group",
    STALE_BATCH: "a batch of another step than the cache's: go on with the cache that each call "
    "returns, and with the batch that apply_step returned with it",
}


class CacheError(FlagsError):
    """Errors that jitted functions recorded in a cache, raised by `check_errors`.

    flags: bits such as `jaxkv.cache.BAD_ROW`; the message explains each that is set.
    """

    what, reasons = "the device found errors", _REASONS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KVCache:
    """The block tables and the pool of one worker: a frozen pytree of device arrays.

    `make_cache` returns one. Donate it to your jitted step, and keep the one that comes back::

        step = jax.jit(jaxkv.apply_step, donate_argnums=0)
        cache, batch = step(cache, upload)

    Functions take a cache and return the next one. The old one stays valid unless you donate it.
    With R rows (one per request), W columns and G groups of layers:

    rows: int32[R, W + G], of each request its `block_tables` and then its `row_lengths`, so that
      a step writes both at once.
    status: int32[2], the error flags and the number of the last upload.
    buffers: the pool, uint8 arrays; see `jaxkv.layout.PoolBuffers`.
    scales: f32[layers, 2], factors that reads multiply the stored K and V of each layer by, in the
      order of ``layout.layer_index``; None: 1 everywhere.
    layout: the static description of all of these.
    """

    rows: Array
    status: Array
    buffers: tuple[Array, ...]
    scales: Array | None = None
    layout: CacheLayout = dataclasses.field(metadata={"static": True})
    error: ClassVar[type[FlagsError]] = CacheError

    def __copy__(self) -> "KVCache":
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        return jax.tree.map(copy.deepcopy, self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a KVCache cannot be pickled, because its arrays lie on devices of this process; make "
            "one by make_cache in the other process, from the plan, which can be pickled"
        )

    @property
    def block_tables(self) -> Array:
        """int32[R, W], logical block ids, the columns of all groups side by side.

        Columns past a row's length hold stale ids, which no function returns.
        """
        return self.rows[..., : self.layout.column_starts[-1]]

    @property
    def row_lengths(self) -> Array:
        """int32[R, G], columns of each group in use."""
        return self.rows[..., self.layout.column_starts[-1] :]

    @property
    def error_flags(self) -> Array:
        """int32[], a bit for each kind of error so far; see `check_errors`."""
        return self.status[0]

    @property
    def max_requests(self) -> int:
        """Rows of the block tables."""
        return self.layout.max_requests

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, including the null block."""
        return self.layout.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, over all devices together."""
        return sum(buffer.size for buffer in self.buffers)

    def stacked_layers(self, layer: str) -> tuple[str, ...]:
        """Returns the layers that ``layer_index=`` indexes: those of the layer's group and spec.

        Raises:
          ValueError: the layers lie in several buffers, or share one page.
        """
        return self.layout.buffers.stacked_layers(layer)

    def partition_specs(self) -> "KVCache":
        """Returns the cache's sharding for ``jax.shard_map``: a cache of PartitionSpecs."""
        same = jax.sharding.PartitionSpec()
        return dataclasses.replace(
            self,
            rows=same,
            status=same,
            buffers=(self.layout.buffer_spec,) * len(self.buffers),
            scales=None if self.scales is None else same,
        )

    def __repr__(self) -> str:
        layout = self.layout
        pool = "no pool"
        if layout.has_buffers:
            bytes_ = self.num_blocks * layout.buffers.layout.bytes_per_block
            count = f"{len(self.buffers)} buffer{'s' * (len(self.buffers) != 1)}"
            each = "" if layout.axis is None else " on each device"
            pool = f"{bytes_:,} bytes{each} in {count}, {layout.buffers.order}"
        return (
            f"KVCache({self.max_requests} rows of {layout.row_blocks} blocks, "
            f"{self.num_blocks:,} blocks, {pool})"
        )

    def _repr_html_(self) -> str | None:
        """Shows the first rows; None, for the plain repr, in ``jit`` or once donated."""
        try:
            used = np.asarray(self.row_lengths[:MAX_SHOWN])
            ids = np.asarray(self.block_tables[:MAX_SHOWN])
        except (jax.errors.TracerArrayConversionError, RuntimeError, TypeError):
            return None
        if ids.ndim != 2:  # a cache of several replicas
            return None
        starts = self.layout.column_starts
        rows = [
            (
                row,
                *(
                    _ids_text(ids[row, start:], n)
                    for start, n in zip(starts, lengths, strict=False)
                ),
            )
            for row, lengths in enumerate(used.tolist())
        ]
        stores = [f"group {g} ({growth.stores})" for g, growth in enumerate(self.layout.growths)]
        return html_table(rows, caption=repr(self), header=["row", *stores])


def _ids_text(ids: np.ndarray, used: int) -> str:
    text = ", ".join(map(str, ids[: min(used, MAX_SHOWN)].tolist()))
    return text if used <= MAX_SHOWN else f"{text}, ... ({used} ids)"


register_upload()


def check_cache(cache: Any) -> None:
    """Raises TypeError or ValueError unless this is a cache whose arrays still exist."""
    check_kind(KVCache, cache=cache)
    status = cache.status
    if (
        isinstance(status, Array)
        and not isinstance(status, jax.core.Tracer)
        and status.is_deleted()
    ):
        raise ValueError(
            "cache is used up: it was donated to an earlier call, or went to sleep; use the one "
            "that this call returned, and make one for each engine"
        )


def check_layout(layout: CacheLayout, shape: StepShape) -> None:
    """Raises TypeError or ValueError unless a step's shape belongs to the plan of the cache."""
    check_kind(StepShape, shape=shape)
    shape.check_made_for(
        "cache",
        growths=layout.growths,
        num_blocks=layout.num_blocks,
        context_parallel=layout.context_parallel,
        max_requests=layout.max_requests,
    )
