"""One layer's part of a pool: as a typed array for kernels, as numbers for connectors."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxkv._internal.checks import check_choice
from jaxkv.cache import KVCache
from jaxkv.layout import LayerView
from jaxkv.pool._bytes import from_bytes, locate, on_devices, to_bytes, with_buffer
from jaxkv.pool._tokens import check_rank_known, row_shape_of, token_spec

#: ids that a block axis counts: those of `StepBatch.block_tables`, or of `BlockManager.block_ids`
Ids = Literal["block_tables", "manager"]


def layer_view(cache: KVCache, layer: str) -> Array:
    """Returns a token layer's part of the pool as its own dtype, for attention kernels.

    Its block axis counts kernel blocks of the cache's ``kernel_block_sizes``, and
    ``batch.block_tables(layer)`` indexes it. On a GPU this costs nothing inside ``jit``: XLA
    passes the same bytes on. XLA's CPU backend copies, so prefer `read_tokens` there.

    Returns:
      The layer's buffer in the physical order of the pool: dtype[N * k, block_size / k, heads,
      K + V widths] in LBNHC (axes BNHC), heads before tokens in LBHNC (BHNC), and before blocks
      in LHBNC (HBNC). Latent rows and rows of bytes have no axis of heads. In a stacked pool the
      buffer's other layers are there, too: L and B are one axis in LBNHC and LBHNC, and in the
      other orders L keeps its own, whose index for this layer is
      ``cache.layout.buffers.page_placement(layer).layer``.

    Raises:
      ValueError: a padded page, or kernel blocks that are not evenly spaced.
    """
    token_spec(cache, layer)
    check_rank_known(cache, layer)

    def view(cache: KVCache) -> Array:
        located = locate(cache, layer)
        shape, dtype = _view_shape(cache, layer)
        return from_bytes(cache.buffers[located.buffer].reshape(-1), shape, dtype)

    heads = _view_axes(cache, layer).find("H")
    by_head = cache.layout.heads_spec(layer, heads) if heads >= 0 else PartitionSpec()
    return on_devices(view, cache, in_specs=(), out_specs=by_head)


def with_layer_view(cache: KVCache, layer: str, view: Array) -> KVCache:
    """Returns the cache with the bytes of a `layer_view` replaced, for kernels that write.

    Args:
      view: with its axes as `layer_view` gave them. Only shape and dtype are checked; a view
        that was transposed and has the same shape is misinterpreted.

    Raises:
      ValueError: a view of another shape or dtype.
    """
    token_spec(cache, layer)
    check_rank_known(cache, layer)

    def replace(cache: KVCache, view: Array) -> KVCache:
        shape, dtype = _view_shape(cache, layer)
        if view.shape != shape or view.dtype != jnp.dtype(dtype):
            raise ValueError(
                f"view is {view.dtype}{list(view.shape)}; layer {layer!r} wants "
                f"{dtype}{list(shape)}"
            )
        return with_buffer(cache, locate(cache, layer).buffer, to_bytes(view, 1))

    heads = _view_axes(cache, layer).find("H")
    by_head = cache.layout.heads_spec(layer, heads) if heads >= 0 else PartitionSpec()
    return on_devices(replace, cache, view, in_specs=(by_head,), out_specs=cache.partition_specs())


def describe_layer(cache: KVCache, layer: str, *, ids: Ids = "block_tables") -> LayerView:
    """Returns where a layer's elements lie in its buffer: shape, strides and offset.

    Args:
      ids: what the block axis counts. "block_tables": kernel blocks, as
        ``batch.block_tables(layer)`` lists them, through all layers of the buffer where
        `layer_view` does so; for kernels. "manager": whole blocks of this layer, as
        `BlockManager.block_ids` lists them; for connectors that move blocks.

    Returns:
      Axes in the physical order of the pool, without L. States and rows of several dtypes are
      ``uint8``.

    Raises:
      ValueError: blocks that are not evenly spaced; `describe_bytes` then still works.
    """
    check_choice(get_args(Ids), ids=ids)
    buffers = cache.layout.buffers
    if ids == "manager":
        return buffers.view(layer)
    view = buffers.view(layer, kernel_block_size(cache, layer))
    shape, block = list(view.shape), view.block_axis
    through = buffers.page_placement(layer).num_layers if buffers.counts_through else 1
    shape[block] *= through
    before = cache.layout.id_offset(layer) * view.blocks_per_kv_block
    return dataclasses.replace(
        view,
        shape=tuple(shape),
        num_blocks=view.num_blocks * through,
        offset_bytes=view.offset_bytes - before * view.strides_bytes[block],
    )


def describe_bytes(cache: KVCache, layer: str) -> LayerView:
    """Returns the same memory as contiguous extents of whole blocks, in any order and tiling.

    For code that copies blocks without looking into them: axis B counts blocks and C the bytes
    of an extent; N counts tiles, and H heads where they lie apart.
    """
    return cache.layout.buffers.byte_view(layer)


def kernel_block_size(cache: KVCache, layer: str) -> int:
    """Returns the tokens of a layer's kernel blocks."""
    place = cache.layout.place_of(layer)
    return place.spec.block_size // cache.layout.blocks_per_kv_block[place.group]


def _view_shape(cache: KVCache, layer: str) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype of `layer_view`, on one device."""
    spec, buffers = token_spec(cache, layer), cache.layout.buffers
    page_bytes = buffers.page_placement(layer).page_bytes
    if page_bytes != spec.data_bytes:
        raise ValueError(
            f"layer={layer!r} has {spec.data_bytes} of {page_bytes} bytes of each page, so "
            "its blocks are not contiguous; use read_tokens and write_tokens"
        )
    view = buffers.view(layer, kernel_block_size(cache, layer))
    _, dtype = row_shape_of(spec)
    sizes = dict(zip(view.axes, view.shape, strict=True))
    sizes["L"] = buffers.page_placement(layer).num_layers
    axes = _view_axes(cache, layer)
    if buffers.counts_through:
        sizes["B"] *= sizes["L"]
    return tuple(sizes[axis] for axis in axes), dtype


def _view_axes(cache: KVCache, layer: str) -> str:
    """Returns the letters of the axes of `layer_view`."""
    buffers = cache.layout.buffers
    axes = buffers.order if buffers.stacked else buffers.order.replace("L", "")
    if not cache.layout.has_heads(layer):
        axes = axes.replace("H", "")
    return axes[1:] if buffers.counts_through else axes
