"""The buffers, and how a plan allocates them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.block_tables import as_sharding
from jaxkv.checks import check_positive
from jaxkv.groups import PoolLayout
from jaxkv.planning import Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KVPool:
    """N blocks in S slots: one buffer per slot, or one stacked buffer for all of them."""

    buffers: tuple[Array, ...]  # S x uint8[N, page], or stacked: 1 x uint8[S, N, page]
    layout: PoolLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.buffers[0].shape[-2] if self.buffers else 0

    @property
    def stacked(self) -> bool:
        return any(buffer.ndim == 3 for buffer in self.buffers)

    def check_whole(self) -> None:
        """Raises ValueError unless every page is as wide as the layout says.

        It is not outside of ``shard_map`` for a pool sharded by KV head, where a write
        would reach the first device's part only.
        """
        for buffer, slot in zip(self.buffers, self.layout.slots, strict=False):
            if buffer.shape[-1] != slot.page_bytes:
                raise ValueError(
                    f"the pool has pages of {buffer.shape[-1]} bytes and its layout "
                    f"{slot.page_bytes}: a sharded pool is used under shard_map"
                )

    @property
    def num_bytes(self) -> int:
        return sum(buffer.size for buffer in self.buffers)

    def __repr__(self) -> str:
        form = "stacked" if self.stacked else "one buffer per slot"
        slots = len(self.layout.slots)
        return f"KVPool({self.num_blocks} blocks, {slots} slots, {form}, {self.num_bytes:,} bytes)"


def pool_shapes(
    layout: PoolLayout, num_blocks: int, *, stacked: bool = False
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the buffers; their bytes are ``num_blocks * layout.bytes_per_block``."""
    check_positive(num_blocks=num_blocks)
    pages = [slot.page_bytes for slot in layout.slots]
    if not stacked:
        return tuple(jax.ShapeDtypeStruct((num_blocks, page), jnp.uint8) for page in pages)
    if len(set(pages)) > 1:
        raise ValueError(
            f"stacked=True needs slots of one page size; this layout has {sorted(set(pages))} bytes"
        )
    shapes = [(len(pages), num_blocks, page) for page in pages[:1]]
    return tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)


def make_pool(
    plan: Plan,
    *,
    worker: int = 0,
    stacked: bool = False,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> KVPool:
    """Allocates the pool of one worker, zeroed, straight on the device.

    Args:
      plan: gives blocks and layout.
      worker: index into ``plan.layouts``.
      stacked: one buffer for all slots, which suits models that loop over layers; one
        per slot suits unrolled ones and is faster there.
      device: a device or a sharding; None: the default device.
    """
    layout = _layout_of(plan, worker)
    shapes = [shape.shape for shape in pool_shapes(layout, plan.num_blocks, stacked=stacked)]
    return KVPool(buffers=_allocate(shapes, as_sharding(device)), layout=layout)


def make_sharded_pool(
    plan: Plan, mesh: jax.sharding.Mesh, axis: str, *, worker: int = 0, stacked: bool = False
) -> KVPool:
    """Allocates a pool of which every device of a mesh axis holds its own KV heads.

    Block ids mean the same on all devices; each holds its part of every block. Use the
    pool under ``shard_map`` only, where every device sees the pool that the plan describes:
    partition the pool by ``P(None, axis)``, or ``P(None, None, axis)`` when it is stacked,
    and tables and uploads by ``P()``; ``check_vma=False`` lets the kernels through.

    Args:
      plan: of one rank: from layers whose heads are divided by the size of the axis already
        (``layers_from_config(..., tensor_parallel=mesh.shape[axis])``).
      mesh, axis: where the heads go.
      worker, stacked: as for `make_pool`.

    Raises:
      ValueError: no such axis or worker.
    """
    if axis not in mesh.shape:
        raise ValueError(f"axis={axis!r} is not an axis of the mesh, which has {mesh.axis_names}")
    layout = _layout_of(plan, worker)
    shapes = [
        (*shape.shape[:-1], shape.shape[-1] * mesh.shape[axis])
        for shape in pool_shapes(layout, plan.num_blocks, stacked=stacked)
    ]
    lead = (None, None) if stacked else (None,)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*lead, axis))
    return KVPool(buffers=_allocate(shapes, sharding), layout=layout)


def _layout_of(plan: Plan, worker: int) -> PoolLayout:
    if not 0 <= worker < len(plan.layouts):
        raise ValueError(f"worker={worker}: the plan has {len(plan.layouts)} workers")
    return plan.layouts[worker]


def _allocate(
    shapes: Sequence[tuple[int, ...]], sharding: jax.sharding.Sharding | None
) -> tuple[Array, ...]:
    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, jnp.uint8) for shape in shapes)

    return jax.jit(zeros, out_shardings=sharding)()
