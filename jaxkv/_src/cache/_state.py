"""The state of a cache on the device: block tables, pool and scales in one pytree."""

import copy
import dataclasses
from typing import Any, ClassVar, NoReturn

import jax
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, UInt8

from jaxkv._src.cache._flags import CacheError
from jaxkv._src.cache._layout import CacheLayout
from jaxkv._src.internal.checks import check_kind, check_known
from jaxkv._src.internal.html import html_table
from jaxkv._src.uploads import StepShape, register_upload

MAX_SHOWN = 8  # rows, and ids per row, that Jupyter shows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KVCache:
    """The block tables and the pool of one worker: a frozen pytree of device arrays.

    `make_cache` returns one. Donate it to your jitted step, and keep the one that comes back::

        step = jax.jit(jaxkv.apply_step, donate_argnums=0)
        cache, batch = step(cache, upload)

    Functions take a cache and return the next one. The old one stays valid unless you donate it.
    With R rows (one per request), W logical blocks in a row and G groups of layers:

    rows: int32[R, W + G], of each request its `block_tables` and then its `row_lengths`, so that
      a step writes both at once.
    status: int32[2], the error flags and the number of the last upload.
    buffers: the pool, uint8 arrays; see `jaxkv.layout.PoolBuffers`.
    scales: f32[layers, 2], factors that reads multiply the stored K and V of each layer by, in the
      order of ``layout.layer_numbers``; None: 1 everywhere.
    layout: the static description of all of these.
    """

    rows: Int32[Array, "rows width"]
    status: Int32[Array, "2"]
    buffers: tuple[UInt8[Array, "..."], ...]
    scales: Float32[Array, "layers 2"] | None = None
    layout: CacheLayout = dataclasses.field(metadata={"static": True})
    error: ClassVar[type[CacheError]] = CacheError

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
    def block_tables(self) -> Int32[Array, "rows logical_blocks"]:
        """int32[R, W], logical block ids, the tables of all groups side by side.

        Ids past a row's length are stale, and no function returns them.
        """
        return self.rows[..., : self.layout.table_offsets[-1]]

    @property
    def row_lengths(self) -> Int32[Array, "rows groups"]:
        """int32[R, G], logical blocks of each group in use."""
        return self.rows[..., self.layout.table_offsets[-1] :]

    @property
    def error_flags(self) -> Int32[Array, ""]:
        """int32[], the `CacheFlags` that were set so far; see `check_errors`."""
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
        """Returns the layers that ``layer_index=`` indexes: all of the layer's group and spec.

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
        starts = self.layout.table_offsets
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
            "cache is used up: an earlier call took it, by donate_argnums, an engine or sleep; use "
            "the one that this call returned (wake_up, after sleep), and make one for each engine"
        )


def check_errors(cache: KVCache) -> None:
    """Raises an error if a jitted function dropped anything since the cache was made.

    Waits for the device, so call it every hundred steps or so, not in every step::

        jaxkv.check_errors(cache)

    Raises:
      CacheError: at least one error flag is set; the message explains each.
      TypeError: no cache, or one that jax traces.
    """
    check_cache(cache)
    check_known(cache=cache.error_flags)
    flags, upload = np.asarray(cache.status).tolist()
    if flags:
        raise CacheError(flags, upload)


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
