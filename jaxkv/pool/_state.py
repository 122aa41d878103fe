"""The buffers, and how a plan allocates them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.allocation import Device, zeros
from jaxkv.checks import check_positive
from jaxkv.groups import PoolLayout
from jaxkv.kernel_blocks import CacheLayout
from jaxkv.planning import Plan
from jaxkv.pool._form import Form, Tiles, choose_form


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KVPool:
    """N blocks in S slots, in one buffer per slot, or in one for all of them.

    buffers: uint8, by order, where run = page / H:

      ============  ================  ====================
      order         one per slot      one for all: stacked
      ============  ================  ====================
      LBNHC, LBHNC  S x [N, page]     1 x [S, N, page]
      LHBNC         S x [H, N, run]   1 x [S, H, N, run]
      BLNHC, BLHNC                    1 x [N, S, page]
      BHLNC                           1 x [N, H, S, run]
      ============  ================  ====================

    order: one of `jaxkv.kernel_blocks.LAYOUT_ORDERS`.
    tiles: per group, the tokens of a tile, None for whole blocks (`CacheLayout`); ()
      if no group has tiles.
    """

    buffers: tuple[Array, ...]  # see above
    layout: PoolLayout = dataclasses.field(metadata={"static": True})
    order: str = dataclasses.field(default="LBNHC", metadata={"static": True})
    tiles: Tiles = dataclasses.field(default=(), metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.buffers[0].shape[self.block_axis] if self.buffers else 0

    @property
    def stacked(self) -> bool:
        axes = CacheLayout(self.order).run_axes
        return any(buffer.ndim > len(axes) for buffer in self.buffers)

    @property
    def block_axis(self) -> int:
        """The axis of the buffers that counts blocks."""
        return Form(self.layout, 0, self.order, self.stacked).axes.index("B")

    @property
    def form(self) -> Form:
        return Form(self.layout, self.num_blocks, self.order, self.stacked)

    def cache_layout(self, layer: str) -> CacheLayout:
        """The order and the tiles in which a layer lies."""
        group = self.layout.place_of(layer).group
        return CacheLayout(self.order, self.tiles[group] if self.tiles else None)

    def check_whole(self) -> None:
        """Raises ValueError unless every page is as large as the layout says.

        It is not outside of ``shard_map`` for a pool sharded by KV head, where a write
        would reach the first device's part only.
        """
        pages = self.num_blocks * (len(self.layout.slots) if self.stacked else 1)
        for buffer, slot in zip(self.buffers, self.layout.slots, strict=False):
            if buffer.size != pages * slot.page_bytes:
                raise ValueError(
                    f"the pool has pages of {buffer.size // pages} bytes and its layout "
                    f"{slot.page_bytes}: a sharded pool is used under shard_map"
                )

    @property
    def num_bytes(self) -> int:
        return sum(buffer.size for buffer in self.buffers)

    def __repr__(self) -> str:
        if not all(hasattr(buffer, "shape") for buffer in self.buffers):  # of shardings, say
            return f"KVPool({self.order}, buffers={self.buffers})"
        form = "stacked" if self.stacked else "one buffer per slot"
        slots = len(self.layout.slots)
        return (
            f"KVPool({self.num_blocks} blocks, {slots} slots, {self.order}, {form}, "
            f"{self.num_bytes:,} bytes)"
        )


def pool_shapes(
    layout: PoolLayout, num_blocks: int, *, stacked: bool | None = None, order: str = "LBNHC"
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the buffers; their bytes are ``num_blocks * layout.bytes_per_block``.

    Args, raises: as `make_pool`.
    """
    check_positive(num_blocks=num_blocks)
    shapes = choose_form(layout, num_blocks, order, stacked).shapes()
    return tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)


def make_pool(
    plan: Plan,
    *,
    worker: int = 0,
    stacked: bool | None = None,
    order: str = "LBNHC",
    kernel_block_sizes: Sequence[int | None] | None = None,
    device: Device = None,
) -> KVPool:
    """Allocates the pool of one worker, zeroed, straight on the device.

    Args:
      plan: gives blocks and layout.
      worker: index into ``plan.layouts``.
      stacked: one buffer for all slots, which suits models that loop over layers; one
        per slot suits unrolled ones and is faster there. None: one per slot, unless the
        order has one for all (those that begin with B).
      order: physical order of layer, block, head, token and content: one of
        `jaxkv.kernel_blocks.LAYOUT_ORDERS`, ``"NHD"`` or ``"HND"``.
      kernel_block_sizes: per group, as for `make_block_tables`: blocks are laid out so
        that `layer_view` shows kernel blocks of these sizes, as tiles where it takes them
        (`CacheLayout`). None: whole blocks, of one group or of all.
      device: a device or a sharding; None: the default device.

    Raises:
      ValueError: no such worker or order; an order that the layout does not go with
        (slots of unlike pages in one buffer; layers of unlike KV heads on one page that is
        dealt out among heads); kernel block sizes that do not divide a group's blocks, or
        that cut overlaid blocks in different ways where nothing is zeroed.
    """
    layout = _layout_of(plan, worker)
    form = choose_form(layout, plan.num_blocks, order, stacked)
    shapes, tiles = form.shapes(), form.tiles(kernel_block_sizes)
    buffers = zeros(tuple(shapes), jnp.uint8, device)
    return KVPool(buffers=buffers, layout=layout, order=form.order, tiles=tiles)


def make_sharded_pool(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    axis: str,
    *,
    worker: int = 0,
    stacked: bool | None = None,
    order: str = "LBNHC",
    kernel_block_sizes: Sequence[int | None] | None = None,
) -> KVPool:
    """Allocates a pool of which every device of a mesh axis holds its own KV heads.

    Block ids mean the same on all devices; each holds its part of every block. Use the
    pool under ``shard_map`` only, where every device sees the pool that the plan describes:
    partition the pool as its buffers are (``pool.buffers[0].sharding.spec``: along heads
    where the order gives them an axis, else along the bytes of a page, ``P(None, axis)``, or
    ``P(None, None, axis)`` when it is stacked), and tables and uploads by ``P()``;
    ``check_vma=False`` lets the kernels through.

    Args:
      plan: of one rank: from layers whose heads are divided by the size of the axis already
        (``layers_from_config(..., tensor_parallel=mesh.shape[axis])``).
      mesh, axis: where the heads go.
      worker, stacked, order, kernel_block_sizes: as for `make_pool`; every order will do.

    Raises:
      ValueError: no such axis, or as `make_pool`.
    """
    if axis not in mesh.shape:
        raise ValueError(f"axis={axis!r} is not an axis of the mesh, which has {mesh.axis_names}")
    layout = _layout_of(plan, worker)
    form = choose_form(layout, plan.num_blocks, order, stacked)
    tiles, split = form.tiles(kernel_block_sizes), (form.axes + "H").index("H")
    shapes = [
        (*shape[:split], shape[split] * mesh.shape[axis], *shape[split + 1 :])
        for shape in form.shapes()
    ]
    spec = jax.sharding.PartitionSpec(*[None] * split, axis)
    buffers = zeros(tuple(shapes), jnp.uint8, jax.sharding.NamedSharding(mesh, spec))
    return KVPool(buffers=buffers, layout=layout, order=form.order, tiles=tiles)


def _layout_of(plan: Plan, worker: int) -> PoolLayout:
    if not 0 <= worker < len(plan.layouts):
        raise ValueError(f"worker={worker}: the plan has {len(plan.layouts)} workers")
    return plan.layouts[worker]
