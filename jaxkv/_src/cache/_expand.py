"""Expansion of logical block ids to kernel block ids."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from jaxkv._src.internal.checks import check_at_most
from jaxkv._src.internal.indexing import within
from jaxkv._src.internal.jit_int32 import jit_int32
from jaxkv._src.internal.numbers import INT32_MAX


@jit_int32("block_ids", static_argnames="blocks_per_kv_block")
def expand_blocks(
    block_ids: Int32[Array, "... blocks"], blocks_per_kv_block: int
) -> Int32[Array, "... kernel_blocks"]:
    """Expands logical block ids to the ids of their kernel blocks.

    Example::

        jaxkv.expand_blocks(jnp.array([3, 0], jnp.int32), 2)     # [6, 7, 0, 1]

    Args:
      block_ids: int32[..., N].
      blocks_per_kv_block: kernel blocks in a logical block; static.

    Returns:
      int32[..., N * blocks_per_kv_block]: id ``b`` becomes ``b * k .. b * k + k - 1``; an id
      that is negative, or whose kernel ids do not fit int32, becomes -1.
    """
    check_at_most(INT32_MAX, blocks_per_kv_block=blocks_per_kv_block)
    k = blocks_per_kv_block
    known = within(block_ids, (INT32_MAX - k + 1) // k + 1) if k > 1 else block_ids >= 0
    first = jnp.repeat(jnp.where(known, block_ids * k, -1), k, axis=-1)
    part = lax.broadcasted_iota(jnp.int32, first.shape, first.ndim - 1) % k
    return jnp.where(first < 0, -1, first + part)
