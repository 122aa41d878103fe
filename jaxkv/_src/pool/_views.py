"""One layer's part of a pool: a typed array for kernels, or strides for connectors."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Shaped

from jaxkv._src.cache import KVCache, check_cache
from jaxkv._src.internal.checks import check_array, check_choice
from jaxkv._src.layout import LayerView
from jaxkv._src.pool._bytes import as_dtype, on_devices, to_bytes
from jaxkv._src.pool._layer import LayerLocation, check_pool, check_whole, locate
from jaxkv._src.pool._tokens import check_rank_known, token_spec

#: the ids of a block axis: of `StepBatch.kernel_block_tables`, or of `BlockManager.block_ids`
Ids = Literal["kernel", "manager"]


def layer_view(cache: KVCache, layer: str) -> Shaped[Array, "..."]:
    """Returns a layer's part of the pool as an array of its own dtype, for your own kernel.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        pages = jaxkv.layer_view(cache, "layer")                # [blocks, block_size, heads, K + V]
        tables = batch.kernel_block_tables("layer")             # ids on the first axis of pages
        lens = batch.seq_lens, batch.query_start_loc
        requests = pallas_kernels.RequestPages(tables, *lens)
        out = pallas_kernels.paged_attention(queries, pages, requests)

    The block axis counts kernel blocks of the cache's ``kernel_block_sizes``. On a GPU the view
    costs nothing inside ``jit``: XLA passes the same bytes on. XLA's CPU backend copies the pool,
    so prefer `read_tokens` there.

    Args:
      cache: with a pool.
      layer: name of a layer that stores tokens.

    Returns:
      The layer's buffer in the physical order of the pool, with N blocks of k kernel blocks each:
      dtype[N * k, block_size / k, heads, K + V widths] in LBNHC (axes BNHC), heads before tokens
      in LBHNC (BHNC), and before blocks in LHBNC (HBNC). Latent vectors and bytes have no
      axis of heads. A stacked pool's buffer contains other layers, too: in LBNHC and LBHNC the
      block axis runs through all of them, and in the other orders there is an axis L, on which
      this layer has the index ``cache.layout.buffers.page_placement(layer).layer``.

    Raises:
      TypeError: the layer stores states.
      ValueError: a padded page, or kernel blocks that are not evenly spaced.
    """
    location = _locate(cache, layer)

    def view(cache: KVCache) -> Array:
        buffer = cache.buffers[location.buffer]
        check_whole(buffer, location.form.buffer_shape)
        shape, dtype = _view_shape(cache, layer)
        return as_dtype(buffer.reshape(-1), dtype).reshape(shape)

    return on_devices(view, cache, in_specs=(), out_specs=_by_head(cache, layer))


def with_layer_view(cache: KVCache, layer: str, view: Shaped[Array, "..."]) -> KVCache:
    """Returns the cache with a `layer_view` replaced, for your own kernels that write.

    Example::

        cache = jaxkv.with_layer_view(cache, "layer", 2 * jaxkv.layer_view(cache, "layer"))

    Args:
      cache: with a pool.
      layer: name of a layer that stores tokens.
      view: with the axes that `layer_view` gave it. Only its shape and dtype are checked; a
        transposed view of the same shape is misread.

    Raises:
      TypeError: the layer stores states.
      ValueError: a view of another shape or dtype.
    """
    location = _locate(cache, layer)
    check_array(view=view)

    def replace(cache: KVCache, view: Array) -> KVCache:
        check_whole(cache.buffers[location.buffer], location.form.buffer_shape)
        shape, dtype = _view_shape(cache, layer)
        if view.shape != shape or view.dtype != jnp.dtype(dtype):
            raise ValueError(
                f"view is {view.dtype}{list(view.shape)}; layer {layer!r} wants "
                f"{dtype}{list(shape)}"
            )
        buffers = list(cache.buffers)
        buffers[location.buffer] = to_bytes(view, 1).reshape(location.form.buffer_shape)
        return dataclasses.replace(cache, buffers=tuple(buffers))

    in_specs = (_by_head(cache, layer),)
    return on_devices(replace, cache, view, in_specs=in_specs, out_specs=cache.partition_specs())


def describe_layer(cache: KVCache, layer: str, *, ids: Ids = "kernel") -> LayerView:
    """Returns the shape, strides and offset of a layer's elements in its buffer.

    Example::

        view = jaxkv.pool.describe_layer(cache, "layer", ids="manager")
        print(view.axes, view.shape, view.strides_bytes, view.offset_bytes)

    Args:
      cache: with a pool.
      layer: name of a layer.
      ids: the ids that the block axis counts. "kernel": the kernel blocks of
        ``batch.kernel_block_tables(layer)``, which run through all layers of the buffer as in
        `layer_view`. "manager", for connectors that move blocks: the whole blocks of this
        layer, as in `BlockManager.block_ids`.

    Returns:
      Axes in the physical order of the pool, without L. States and rows of several dtypes are
      ``uint8``.

    Raises:
      ValueError: blocks that are not evenly spaced; `describe_bytes` works for these, too.
    """
    check_cache(cache)
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
    """Returns a layer's memory as contiguous extents of whole blocks, for any order and tiling.

    For code that copies blocks without interpreting them: axis B counts blocks and C the bytes of
    an extent; N counts tiles, and H heads if they lie apart.
    """
    return cache.layout.buffers.byte_view(layer)


def kernel_block_size(cache: KVCache, layer: str) -> int:
    """Returns the tokens of a layer's kernel blocks."""
    placement = cache.layout.placement_of(layer)
    return placement.spec.block_size // cache.layout.blocks_per_kv_block[placement.group]


def _locate(cache: KVCache, layer: str) -> LayerLocation:
    """Returns the location of a layer that stores tokens, in a cache with a pool."""
    check_pool(cache)
    token_spec(layer, cache.layout.placement_of(layer).spec)
    check_rank_known(cache.layout, layer)
    return locate(cache.layout, layer)


def _view_shape(cache: KVCache, layer: str) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype of `layer_view`, on one device."""
    form, buffers = locate(cache.layout, layer).form, cache.layout.buffers
    spec = token_spec(layer, form.spec)
    page_bytes = buffers.page_placement(layer).page_bytes
    if page_bytes != spec.data_bytes:
        raise ValueError(
            f"layer={layer!r} has {spec.data_bytes} of {page_bytes} bytes of each page, so "
            "its blocks are not contiguous; use read_tokens and write_tokens"
        )
    view = buffers.view(layer, kernel_block_size(cache, layer))
    sizes = dict(zip(view.axes, view.shape, strict=True))
    sizes["L"] = buffers.page_placement(layer).num_layers
    axes = _view_axes(cache, layer)
    if buffers.counts_through:
        sizes["B"] *= sizes["L"]
    return tuple(sizes[axis] for axis in axes), form.row.dtype


def _view_axes(cache: KVCache, layer: str) -> str:
    """Returns the letters of the axes of `layer_view`."""
    buffers = cache.layout.buffers
    axes = buffers.order if buffers.stacked else buffers.order.replace("L", "")
    if not locate(cache.layout, layer).form.has_heads:
        axes = axes.replace("H", "")
    return axes[1:] if buffers.counts_through else axes


def _by_head(cache: KVCache, layer: str) -> PartitionSpec:
    """Returns the PartitionSpec of `layer_view`; rows without an axis of heads are not divided."""
    form = locate(cache.layout, layer).form
    return form.by_head(_view_axes(cache, layer).find("H"))
