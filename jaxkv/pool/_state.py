"""The buffers, and how a plan allocates them."""

import dataclasses

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
    if not 0 <= worker < len(plan.layouts):
        raise ValueError(f"worker={worker}: the plan has {len(plan.layouts)} workers")
    layout = plan.layouts[worker]
    shapes = pool_shapes(layout, plan.num_blocks, stacked=stacked)

    def allocate():
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

    return KVPool(buffers=jax.jit(allocate, out_shardings=as_sharding(device))(), layout=layout)
