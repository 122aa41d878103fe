"""One layer's part of a pool: as a typed array for kernels, as numbers for connectors."""

import jax.numpy as jnp
from jax import Array

from jaxkv.checks import check_positive
from jaxkv.kernel_blocks import ViewDescription, describe, rows_per_block
from jaxkv.pool._bytes import buffer_of, from_bytes, to_bytes, with_buffer
from jaxkv.pool._state import KVPool
from jaxkv.pool._tokens import row_shape_of, token_spec


def layer_view(pool: KVPool, layer: str, *, blocks_per_kv_block: int = 1) -> Array:
    """A token layer's part of the pool as its own dtype, for attention kernels.

    On a GPU this costs nothing inside ``jit``: XLA passes the same bytes on. XLA's CPU
    backend does copy, so prefer `read_tokens` there.

    Args:
      blocks_per_kv_block: kernel blocks per block, k below; block ``b`` is the entries
        ``b * k .. b * k + k - 1`` of axis B, as in expanded tables.

    Returns:
      The layer's buffer, its axes in the physical order of the pool: in a buffer per slot
      dtype[N * k, block_size / k, heads, K + V widths] in LBNHC (axes BNHC), heads before
      tokens in LBHNC (BHNC), and before blocks in LHBNC (HBNC). Latent rows and rows of
      bytes have no axis of heads. In one buffer for all slots the other slots are there,
      too: L and B are one axis in LBNHC and LBHNC, ``S * N * k`` slot by slot, and in the
      other orders L keeps its own (index `PoolLayout.place_of(layer).slot`).

    Raises:
      ValueError: a padded page, a block that does not split into k parts, or parts
        (where there are tiles: blocks) that do not follow each other at one stride; pools
        made with ``kernel_block_sizes`` have a view at those in any order.
    """
    spec = token_spec(pool, layer)
    rows = rows_per_block(spec)
    check_positive(blocks_per_kv_block=blocks_per_kv_block)
    if rows % blocks_per_kv_block:
        raise ValueError(f"blocks_per_kv_block={blocks_per_kv_block} does not divide {rows} rows")
    _check_dense(pool, layer)
    view = pool.cache_layout(layer).view(
        spec, **pool.form.where(layer), kernel_block_size=spec.block_size // blocks_per_kv_block
    )
    row_shape, dtype = row_shape_of(spec)
    sizes = dict(zip(view.axes, view.shape, strict=True)) | {"L": len(pool.layout.slots)}
    axes = pool.order if pool.stacked else view.axes
    axes = axes if len(row_shape) > 1 else axes.replace("H", "")
    if axes.startswith("LB"):
        axes, sizes["B"] = axes[1:], sizes["L"] * sizes["B"]
    shape = [sizes[axis] for axis in axes]
    return from_bytes(buffer_of(pool, layer).reshape(-1), shape, dtype)


def with_layer_view(pool: KVPool, layer: str, view: Array) -> KVPool:
    """The way back: the pool with a layer's part replaced by what a kernel made of it.

    Args:
      view: with its axes as `layer_view` gave them, of any ``blocks_per_kv_block``. Only size
        and dtype can be checked here; a transposed view would be taken for what it is not.
    """
    _check_dense(pool, layer)
    dtype = jnp.dtype(row_shape_of(token_spec(pool, layer))[1])
    wanted = buffer_of(pool, layer).size // dtype.itemsize
    if view.size != wanted or view.dtype != dtype:
        raise ValueError(
            f"view is {view.dtype}{list(view.shape)}; layer {layer!r} wants {wanted} elements of "
            f"{dtype}"
        )
    return with_buffer(pool, layer, to_bytes(view, 1))


def describe_layer(
    pool: KVPool, layer: str, *, kernel_block_size: int | None = None
) -> ViewDescription:
    """Where a layer's elements lie in its buffer: what connectors register.

    Args:
      kernel_block_size: tokens per entry of the block axis; None: whole blocks.

    Returns:
      Axes in the physical order of the pool, without L, and H (of 1) also where `layer_view`
      has no such axis: `offset_bytes` is where the
      layer's part of the buffer begins. States and rows of several dtypes are ``uint8``.

    Raises:
      ValueError: as `CacheLayout.view`; `describe_bytes` then still works.
    """
    pool.check_whole()
    spec, where = pool.layout.place_of(layer).spec, pool.form.where(layer)
    view = pool.cache_layout(layer).view(spec, **where, kernel_block_size=kernel_block_size)
    return describe(view)


def describe_bytes(pool: KVPool, layer: str) -> ViewDescription:
    """The same memory as contiguous runs of bytes of whole blocks, in any order and tiling.

    For whoever copies blocks and need not know what is in them: axis B counts blocks and
    C the bytes of a run; N counts tiles, and H heads where they lie apart.
    """
    pool.check_whole()
    spec, where = pool.layout.place_of(layer).spec, pool.form.where(layer)
    return describe(pool.cache_layout(layer).byte_view(spec, **where))


def _check_dense(pool: KVPool, layer: str) -> None:
    pool.check_whole()
    spec = token_spec(pool, layer)
    page_bytes = pool.layout.slots[pool.layout.place_of(layer).slot].page_bytes
    if page_bytes != spec.data_bytes:
        raise ValueError(
            f"layer={layer!r} has {spec.data_bytes} of {page_bytes} bytes of each page, so "
            "its blocks are not contiguous; use read_tokens and write_tokens"
        )
