"""Attention that reads page lists, in plain jnp: documentation that runs, and a test oracle.

Shows all that a kernel must do with `PageLists`: gather the listed pages of a query group
and nothing else, let a token see keys of its own request only, apply the mask, and never
let bytes that nobody may see (they can be NaN) touch a sum. Not fast, not meant to be.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.block_tables._index import take
from jaxkv.flex_attention._metadata import PageLists
from jaxkv.flex_sizes import MetadataSizes


@jax.jit
def reference_attention(
    queries: Array, keys: Array, values: Array, lists: PageLists, scale: float | None = None
) -> Array:
    """Scaled dot-product attention of a batch over paged keys and values.

    Args:
      queries: float[T, heads, D], the tokens of the batch laid end to end.
      keys: float[num_blocks, page_size, kv_heads, D], the pool, this step's keys written.
      values: float[num_blocks, page_size, kv_heads, V].
      lists: of `build_page_lists`.
      scale: of the scores; None: ``D ** -0.5``.

    Returns:
      float32[T, heads, V]; 0 for padding tokens.

    Raises:
      ValueError: shapes that do not fit the sizes of the lists or each other.
    """
    _check_shapes(queries, keys, values, lists.sizes)
    sizes = lists.sizes
    rows = sizes.num_query_groups * sizes.q_block_tokens
    padding = rows - sizes.max_num_batched_tokens
    scaled = queries.astype(jnp.float32) * (queries.shape[-1] ** -0.5 if scale is None else scale)

    def by_group(array: Array, fill: int) -> Array:
        widths = ((0, padding), *[(0, 0)] * (array.ndim - 1))
        array = jnp.pad(array, widths, constant_values=fill)
        return array.reshape(sizes.num_query_groups, sizes.q_block_tokens, *array.shape[1:])

    def attend(group: tuple[Array, ...]) -> Array:
        queries, documents, positions, ends, pages, logical_pages, owners, count = group
        listed = jnp.arange(sizes.list_width, dtype=jnp.int32) < count
        listed &= pages > 0  # the null page stands for a page that is missing
        mask = _mask(documents, positions, ends, logical_pages, owners, listed, sizes)
        return _softmax_attention(queries, _rows(keys, pages), _rows(values, pages), mask)

    # The last position that each token sees, plus one.
    ends = lists.positions + 1
    if not sizes.causal:
        ends = take(lists.seq_lengths, lists.documents)
    out = lax.map(
        attend,
        (
            by_group(scaled, 0),
            by_group(lists.documents, -1),
            by_group(lists.positions, -1),
            by_group(ends, 0),
            lists.pages,
            lists.logical_pages,
            lists.owners,
            lists.counts,
        ),
    )
    return out.reshape(rows, *out.shape[2:])[: sizes.max_num_batched_tokens]


def _rows(pool: Array, pages: Array) -> Array:
    """[pages * page_size, kv_heads, D] of a group's pages."""
    gathered = pool.at[pages].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return gathered.reshape(-1, *pool.shape[2:]).astype(jnp.float32)


def _mask(
    documents: Array,
    positions: Array,
    ends: Array,
    logical_pages: Array,
    owners: Array,
    listed: Array,
    sizes: MetadataSizes,
) -> Array:
    """bool[Q, L * page_size]: which keys of the listed pages each query sees."""
    offset = jnp.arange(sizes.page_size, dtype=jnp.int32)
    key_positions = (logical_pages[:, None] * sizes.page_size + offset[None]).reshape(-1)
    owners = jnp.repeat(owners, sizes.page_size)
    mask = (documents[:, None] == owners[None]) & (documents >= 0)[:, None]
    mask &= jnp.repeat(listed, sizes.page_size)[None]
    mask &= key_positions[None] < ends[:, None]
    if sizes.sliding_window is not None:
        mask &= key_positions[None] > positions[:, None] - sizes.sliding_window
    return mask


def _softmax_attention(queries: Array, keys: Array, values: Array, mask: Array) -> Array:
    """[Q, heads, V]; keys that no query sees may hold anything, NaN included."""
    # A probability of 0 does not silence NaN: 0 * NaN is NaN. So what nobody sees goes first.
    seen = mask.any(axis=0)[:, None, None]
    copies = queries.shape[1] // keys.shape[1]
    keys, values = (
        jnp.repeat(jnp.where(seen, array, 0), copies, axis=1) for array in (keys, values)
    )
    scores = jnp.einsum("qhd,khd->hqk", queries, keys, precision="highest")
    scores = jnp.where(mask[None], scores, -jnp.inf)
    highest = scores.max(axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)  # a padding token sees nothing
    return jnp.einsum("hqk,khv->qhv", weights, values, precision="highest")


def _check_shapes(queries: Array, keys: Array, values: Array, sizes: MetadataSizes) -> None:
    pool = (sizes.num_blocks, sizes.page_size)
    if queries.ndim != 3 or queries.shape[0] != sizes.max_num_batched_tokens:
        raise ValueError(
            f"queries has shape {queries.shape}; wanted [{sizes.max_num_batched_tokens}, heads, D]"
        )
    for name, array in {"keys": keys, "values": values}.items():
        if array.ndim != 4 or array.shape[:2] != pool:
            raise ValueError(
                f"{name} has shape {array.shape}; wanted [{pool[0]}, {pool[1]}, kv_heads, width], "
                "the num_blocks and page_size of the sizes"
            )
    if keys.shape[2] != values.shape[2] or queries.shape[1] % keys.shape[2]:
        raise ValueError(
            f"{queries.shape[1]} heads of queries do not share {keys.shape[2]} heads of keys and "
            f"{values.shape[2]} of values evenly"
        )
    if queries.shape[2] != keys.shape[3]:
        raise ValueError(f"queries are {queries.shape[2]} wide and keys {keys.shape[3]}")
