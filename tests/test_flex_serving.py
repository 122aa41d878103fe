"""Page lists made from a step's own tables, over the pool's own typed view, while it serves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.block_tables import check_overflow, make_block_tables
from jaxkv.blocks import BlockManager
from jaxkv.flex_attention import (
    MetadataSizes,
    build_page_lists,
    check_metadata,
    reference_attention,
)
from jaxkv.planning import plan_cache
from jaxkv.pool import layer_view, make_pool, write_tokens
from jaxkv.specs import FullAttentionSpec, Limits, SlidingWindowSpec
from jaxkv.step import StepShape, apply_step, pack_step

BLOCK, KERNEL, WINDOW, HEADS, SIZE = 8, 4, 7, 2, 4
REQUESTS, TOKENS, LENGTH = 3, 16, 48
COMMON = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": "f32"}
PLAN = plan_cache(
    {
        "full": FullAttentionSpec(**COMMON),
        "window": SlidingWindowSpec(sliding_window=WINDOW, **COMMON),
    },
    2**20,
    max_model_len=LENGTH,
    num_blocks_override=50,
    limits=Limits(max_in_flight_tokens=TOKENS),
)
WINDOWS = {"full": None, "window": WINDOW}


def sizes_of(layer: str, num_pages: int) -> MetadataSizes:
    return MetadataSizes(
        max_num_batched_tokens=TOKENS,
        max_num_seqs=REQUESTS,
        max_model_len=LENGTH,
        page_size=KERNEL,
        q_block_tokens=4,
        num_blocks=num_pages,
        sliding_window=WINDOWS[layer],
    )


def tokens_of(name: str, positions: range) -> np.ndarray:
    """[3, tokens, HEADS, SIZE]: queries, keys and values that a request's name decides."""
    rng = np.random.default_rng(ord(name))
    return rng.normal(size=(LENGTH, 3, HEADS, SIZE)).astype(np.float32)[positions].swapaxes(0, 1)


def expected(name: str, positions: range, window: int | None) -> np.ndarray:
    queries, keys, values = tokens_of(name, range(LENGTH))
    rows = []
    for position in positions:
        first = 0 if window is None else max(0, position - window + 1)
        seen = slice(first, position + 1)
        scores = np.einsum("hd,thd->ht", queries[position], keys[seen]) / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        rows.append(np.einsum("ht,thd->hd", weights, values[seen]))
    return np.array(rows)


@pytest.mark.parametrize("layer", WINDOWS)
def test_a_served_batch_attends_through_its_page_lists(layer: str) -> None:
    """Chunked prefill and decode mixed, from kernel blocks half as large as blocks."""
    tables = make_block_tables(PLAN, max_requests=REQUESTS, kernel_block_sizes=[KERNEL] * 2)
    pool, manager = make_pool(PLAN), BlockManager(PLAN, max_requests=REQUESTS)
    shape = StepShape(
        entries=REQUESTS,
        block_ids=40,
        zero_ids=20,
        batch=REQUESTS,
        tokens=TOKENS,
        widths=tables.widths,
    )
    group = pool.layout.place_of(layer).group
    sizes = sizes_of(layer, PLAN.num_blocks * BLOCK // KERNEL)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(tables, pool, upload, queries, keys, values):
        tables, pool, batch = apply_step(tables, pool, upload, shape=shape)
        pool = write_tokens(pool, layer, batch.slots[group], keys, values)
        lists = build_page_lists(
            batch.block_tables[group], batch.token_ends, batch.first_positions, sizes=sizes
        )
        view = layer_view(pool, layer, blocks_per_kv_block=BLOCK // KERNEL)
        out = reference_attention(queries, view[..., :SIZE], view[..., SIZE:], lists)
        return tables, pool, lists, out

    rows = {name: manager.start(name) for name in "abc"}
    done = dict.fromkeys("abc", 0)
    for lengths in ((9, 5, 2), (1, 8, 7), (1, 1, 1), (12, 1, 3), (0, 1, 15)):
        names = [name for name, length in zip("abc", lengths, strict=True) if length]
        spans = {
            name: range(done[name], done[name] + length)
            for name, length in zip("abc", lengths, strict=True)
            if length
        }
        for name in names:
            manager.grow(name, done[name], spans[name].stop)
            done[name] = spans[name].stop
        batch = np.concatenate([tokens_of(name, spans[name]) for name in names], axis=1)
        padded = np.full((3, TOKENS, HEADS, SIZE), np.nan, np.float32)
        padded[:, : batch.shape[1]] = batch
        upload = pack_step(
            shape,
            update=manager.take_update(),
            rows=[rows[name] for name in names],
            first_positions=[spans[name].start for name in names],
            lengths=[len(spans[name]) for name in names],
        )
        tables, pool, lists, out = step(tables, pool, upload, *map(jnp.array, padded))
        check_metadata(lists.problems)
        wanted = [expected(name, spans[name], WINDOWS[layer]) for name in names]
        np.testing.assert_allclose(
            np.asarray(out)[: batch.shape[1]], np.concatenate(wanted), rtol=2e-4, atol=2e-5
        )
    check_overflow(tables)
    assert step._cache_size() == 1
