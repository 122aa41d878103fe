"""The Mosaic GPU kernel of `write_token_heads`.

Some lanes of a warp have a key, and the same lanes the value of that head. They find its largest
magnitude among themselves, and store to the page of its token.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability
from pallas_kernels._mosaic import Ref, call_kernel, writable, written
from pallas_kernels._paged_attention import TokenHeadRow
from pallas_kernels._quantize_heads import ELEMENTS, LANES, WARPS, layout_of, load, quantize
from pallas_kernels._store_heads import Part, Slots, store

THREAD_BLOCKS_PER_SM = 8


def write_pages(
    pages: Array, block_ids: Array, offsets: Array, keys: Array, values: Array, row: TokenHeadRow
) -> Array:
    """Writes keys and values into pages, in one launch; rows out of their page do nothing.

    Args:
      offsets: int32[T], multiples of 8 or negative.
      keys, values: [T, heads, width].
    """
    lanes = row.key_bytes // ELEMENTS
    together = WARPS * LANES // lanes  # heads of a work item
    short = max(0, -(-together // row.kv_heads) - len(block_ids))
    block_ids = jnp.pad(block_ids, (0, short), constant_values=-1)
    offsets = jnp.pad(offsets, (0, short))
    keys, values = (
        jnp.pad(array, ((0, short), (0, 0), (0, 0))).reshape(-1, array.shape[-1])
        for array in (keys, values)
    )
    num_heads = len(keys)
    items = -(-num_heads // together)
    grid = min(items, _capability.max_thread_blocks(THREAD_BLOCKS_PER_SM))
    layout = layout_of(lanes)

    def kernel(
        ids_ref: Ref, offsets_ref: Ref, keys_ref: Ref, values_ref: Ref, pages_ref: Ref
    ) -> None:
        @pl.loop(lax.axis_index("cta"), items, step=grid)
        def _(item: Array) -> None:
            # The last item is shifted back, and writes some heads again.
            first = jnp.minimum(item * together, num_heads - together)
            heads = plgpu.broadcasted_iota(jnp.int32, (together,), 0, layout=layout.reduce(1))
            slots = Slots.find(ids_ref, offsets_ref, first + heads, layout, row.kv_heads)
            here = pl.ds(first, together)
            loaded = [load(ref, here, row, layout) for ref in (keys_ref, values_ref)]
            own_keys, own_values = (Part(*quantize(halves, row, layout)) for halves in loaded)
            store(pages_ref, slots, own_keys, own_values, layout, row)

    ref = writable(pages)
    call_kernel(
        kernel,
        name="write_token_heads",
        num_thread_blocks=grid,
        operands=[block_ids, offsets, keys, values],
        refs=[ref],
    )
    return written(ref)
