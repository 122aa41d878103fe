"""Tilings of pages, and the loop over work items: every part once, and nothing beyond the ids."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import _capability
from pallas_kernels._arguments import IdLists, PagedBuffer
from pallas_kernels._tiling import ACCESS_BYTES, THREADS, tile_page
from tests.helpers import kernels_run, needs_mosaic


@given(page=st.integers(1, 70_000), itemsize=st.sampled_from([1, 2, 4]))
def test_tiles_cover_a_page_and_store_aligned(page, itemsize) -> None:
    tiling = tile_page(page, itemsize)
    if tiling is None:
        assert page < THREADS
        return
    starts = [min(i * tiling.width, page - tiling.width) for i in range(tiling.strips)]
    assert starts[0] == 0 and starts[-1] + tiling.width == page
    assert all(b - a <= tiling.width for a, b in itertools.pairwise(starts))
    assert all(start % tiling.vector == 0 for start in [*starts, page])
    assert tiling.vector * itemsize <= ACCESS_BYTES
    assert tiling.width % (THREADS * tiling.vector) == 0
    assert (tiling.items - 1) * tiling.strips_per_item < tiling.strips
    assert tiling.strips <= tiling.items * tiling.strips_per_item


@given(
    n=st.integers(1, 70_000), alignment=st.integers(1, 70_000), itemsize=st.sampled_from([1, 2, 4])
)
def test_tiles_of_a_row_align_as_its_offset_does(n, alignment, itemsize) -> None:
    tiling, free = tile_page(n, itemsize, alignment), tile_page(n, itemsize)
    if tiling is None or free is None:
        assert n < THREADS
        return
    assert alignment % tiling.vector == 0 and tiling.vector <= free.vector
    assert tiling == free or alignment % free.vector


@needs_mosaic
def test_indices_of_work_items_stay_within_int32_when_the_last_stride_is_taken() -> None:
    from pallas_kernels._work_items import THREAD_BLOCKS_PER_SM, make_task

    pages: Any = jax.ShapeDtypeStruct((3 * 4, 1), jnp.uint8)
    most = 2**31 - 1 - _capability.max_thread_blocks(THREAD_BLOCKS_PER_SM)
    task = make_task(PagedBuffer(pages, num_blocks=4), most // 3)
    assert task.num_items == 3 * (most // 3)
    with pytest.raises(ValueError, match="work items, more than int32 counts"):
        make_task(PagedBuffer(pages, num_blocks=4), most // 3 + 1)


LENGTHS = [5, 4, 2]  # of the id lists
# (outer, blocks, page): blocks behind another axis, pages of one part and of three.
BUFFERS = [(1, 8, 4), (3, 8, 4), (2, 8, 6144)]
PARTS = [1, 1, 3]
TOTAL = 5 + 3 * 4 + 2 * 2 * 3  # work items


@functools.partial(jax.jit, static_argnames="thread_blocks")
def visit_all(num_ids, thread_blocks):
    """Returns pages that hold at the place of each part the thread block, from 1, that did it."""
    from pallas_kernels._work_items import launch, run_in_place

    del thread_blocks  # the program depends on it
    buffers = [
        PagedBuffer(jnp.zeros((outer * blocks, page), jnp.int32), blocks, i)
        for i, (outer, blocks, page) in enumerate(BUFFERS)
    ]
    # The ids of a list say here which entry it is.
    ids = IdLists([(jnp.arange(length, dtype=jnp.int32),) for length in LENGTHS], num_ids)

    def visit(item, lists, refs):
        ((entries,), (pages,)) = lists, refs
        pages[item.first_page + entries[item.entry], item.part] = 1 + jax.lax.axis_index("cta")

    return run_in_place(buffers, ids, lambda tasks, refs: launch("visit", visit, ids, tasks, refs))


@needs_mosaic
@pytest.mark.parametrize("num_ids", [None, -1, 0, 1, 3, 5, 2**31 - 1, 1 - 2**31])
@pytest.mark.parametrize("thread_blocks", [5, 100])
def test_thread_blocks_take_turns_at_the_parts_of_counted_ids(
    thread_blocks, num_ids, monkeypatch
) -> None:
    """None of them looks at what lies beyond the number of ids: padding costs nothing."""
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: thread_blocks)
    with kernels_run():
        visited = visit_all(None if num_ids is None else np.int32(num_ids), thread_blocks)
    turns = itertools.cycle(range(1, 1 + min(thread_blocks, TOTAL)))
    for (outer, blocks, page), length, parts, got in zip(
        BUFFERS, LENGTHS, PARTS, visited, strict=True
    ):
        counted = length if num_ids is None else min(max(num_ids, 0), length)
        expected = np.zeros((outer, blocks, page), np.int32)
        for place in itertools.product(range(outer), range(counted), range(parts)):
            expected[place] = next(turns)
        np.testing.assert_array_equal(got, expected.reshape(-1, page))
