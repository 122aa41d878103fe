"""Pages of keys and values with scales of heads in 16 bits, for prompts. Does not import Mosaic.

A prompt reads each key once for every 128 of its queries, so that it is faster to widen the pages
of a prompt once, into memory that does not grow with the pool or with the tables.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int32

from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tiles import AttentionArrays

WORKSPACE = 2**28  # bytes of widened pages


class WidePages(NamedTuple):
    """The pages that prompts read, and where they lie once they are widened.

    ids: the page of each place; undefined from ``count`` on.
    count: places that hold a page.
    block_tables: as in `AttentionArrays`, with places; -1 where there is no page.
    fits: whether all pages of a request that has a prompt have a place.
    """

    ids: Int32[Array, " places"]
    count: Int32[Array, ""]
    block_tables: Int32[Array, "requests pages"]
    fits: Bool[Array, " requests"]


def count_places(arrays: AttentionArrays, config: Config, least: int) -> tuple[int, bool]:
    """Returns how many pages there is room for, and whether prompts may need more.

    Args:
      least: queries of the shortest prompt.
    """
    batch, width = arrays.block_tables.shape
    most = max(1, min(batch, arrays.queries.shape[0] // least) * width)
    page_bytes = config.page_tokens * config.kv_heads * config.row_width * 2
    room = max(1, WORKSPACE // page_bytes)
    return min(most, room), most > room


def describe_places(arrays: AttentionArrays, config: Config, places: int) -> StridedPages:
    """Returns widened pages of the dtype of queries, without their data."""
    shape = places, config.page_tokens * config.kv_heads * config.row_width
    data: Array = jax.ShapeDtypeStruct(shape, arrays.queries.dtype)  # pyrefly: ignore
    sizes = config.page_tokens, config.kv_heads, config.row_width
    return StridedPages(data, arrays.queries.dtype, places, *sizes)


def list_pages(arrays: AttentionArrays, config: Config, least: int, places: int) -> WidePages:
    """Gives a place to each page that prompts read; requests with few pages come first."""
    tables, page_tokens = jnp.asarray(arrays.block_tables), config.page_tokens
    width = tables.shape[1]
    loc = jnp.clip(arrays.query_start_loc, 0, arrays.queries.shape[0])
    query_lens, lens = loc[1:] - loc[:-1], jnp.maximum(arrays.seq_lens, 0)
    first = jnp.zeros_like(lens)
    if config.causal:
        position = jnp.maximum(lens - query_lens, 0)
        first = lax.div(config.first_visible(position, arrays.chunk_offsets), page_tokens)
    ends = config.allocated_before(lens, arrays.rank)
    last = jnp.minimum(lax.div(ends + (page_tokens - 1), page_tokens), width)
    is_prompt = query_lens >= least
    counts = jnp.where(is_prompt, jnp.maximum(last - first, 0), 0)
    index = jnp.arange(counts.shape[0])
    is_before = (counts[None] < counts[:, None]) | (
        (counts[None] == counts[:, None]) & (index[None] < index[:, None])
    )
    begins = jnp.where(is_before, counts[None], 0).sum(axis=1)
    fits = is_prompt & (begins + counts <= places)
    counts = jnp.where(fits, counts, 0)

    place = jnp.arange(places)[:, None]
    is_owner = (place >= begins[None]) & (place < (begins + counts)[None])
    owner = jnp.where(is_owner, index[None], 0).sum(axis=1)
    within = jnp.arange(places) - begins[owner] + first[owner]
    ids = tables.at[owner, within].get(mode="clip")
    known = (ids >= 0) & (ids < arrays.pages.num_pages)

    block = jnp.arange(width)[None]
    is_hole = (tables < 0) | (tables >= arrays.pages.num_pages)
    held = begins[:, None] + block - first[:, None]
    # What lies before the first page that is read is no hole.
    held = jnp.where(block < first[:, None], 0, jnp.where(is_hole, -1, held))
    return WidePages(jnp.where(known, ids, 0), counts.sum(), held, fits)
