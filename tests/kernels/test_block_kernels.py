"""Zeroing, copies and writes against NumPy: pages of every size, bad ids, chains, counts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv.testing import (
    assert_same_bytes,
    reference_copy_blocks,
    reference_write_rows,
    reference_zero_blocks,
)
from pallas_kernels import copy_blocks, write_rows, zero_blocks
from tests.helpers import IMPLEMENTATIONS, ON_GPU, TREES, as_ids, garbage, kernels_run, runs_of
from tests.kernels.arg_specs import (
    BLOCKS,
    INTERPRETED_BUFFERS,
    INTERPRETED_WRITES,
    PAGES,
    ROWS,
    SMALL_BUFFERS,
    SMALL_WRITES,
)

IDS = 6
EXTREMES = [-(2**31), 2**31 - 1]
bad_ids = st.sampled_from([*EXTREMES, -2, -1, BLOCKS, BLOCKS + 1])
id_lists = st.tuples(*[st.integers(0, BLOCKS - 1) | bad_ids] * IDS)
# What a promise of disjoint lists allows; bad ids may be in both.
low_ids = st.tuples(*[st.integers(0, 4) | bad_ids] * IDS)
high_ids = st.tuples(*[st.integers(5, BLOCKS - 1) | bad_ids] * IDS)
counts = st.integers(-1, IDS + 2) | st.sampled_from(EXTREMES)
each_buffer = pytest.mark.parametrize(
    ("implementation", "spec"), runs_of(SMALL_BUFFERS, INTERPRETED_BUFFERS), ids=str
)
REFERENCES = {zero_blocks: reference_zero_blocks, copy_blocks: reference_copy_blocks}


@functools.partial(jax.jit, static_argnames=("kernel", "block_axis", "implementation", "disjoint"))
def run(kernel: Any, buffers: Any, *lists: Any, **options: Any) -> Any:
    return kernel(buffers, *lists, **options)


def check(kernel: Any, spec: Any, lists: Any, num_ids: int, **options: Any) -> None:
    """Compares a kernel on one buffer, which has NaN of every payload, with its reference."""
    buffer = garbage(spec.shape, "bfloat16")
    counted = [ids[: max(num_ids, 0)] for ids in lists]
    expected = REFERENCES[kernel](buffer, *counted, block_axis=spec.block_axis)
    options |= {"num_ids": np.int32(num_ids), "block_axis": spec.block_axis}
    with kernels_run():
        got = run(kernel, jnp.array(buffer), *map(as_ids, lists), **options)
    assert_same_bytes(got, expected)


@each_buffer
@settings(max_examples=8)
@given(ids=id_lists, num_ids=counts)
@example(ids=(0, 8, 8, -1, 9, 2), num_ids=IDS)  # block 0 is one like others
@example(ids=(0, 8, 1, 2, 3, 4), num_ids=2)
def test_exactly_the_listed_blocks_become_zero(implementation, spec, ids, num_ids) -> None:
    check(zero_blocks, spec, (ids,), num_ids, implementation=implementation)


@each_buffer
@settings(max_examples=8 if ON_GPU else 2)
@given(sources=id_lists, destinations=id_lists, num_ids=counts)
@example((1, 2, 3, 4, 5, 6), (2, 3, 4, 5, 6, 7), IDS)  # a chain
@example((1, 2, 3, 4, 5, 0), (2, 1, 4, 5, 3, 0), IDS)  # a swap and a ring; block 0 stays
@example((1, 2, 3, 4, 9, -1), (5, 5, 5, 6, 5, 6), IDS)  # the last good one counts
@example((1, 5, 5, 2, 3, 0), (5, 5, 6, 3, 0, 7), IDS)  # a block onto itself, and block 0
@example((1, 2, 3, 4, 5, 6), (5, 6, 1, 5, 3, 2), 3)  # what is not counted overrules nothing
def test_destinations_become_what_sources_were(
    implementation, spec, sources, destinations, num_ids
) -> None:
    check(copy_blocks, spec, (sources, destinations), num_ids, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", SMALL_BUFFERS[3:5], ids=str)
@settings(max_examples=12)
@given(sources=low_ids, destinations=high_ids, num_ids=counts)
def test_disjoint_lists_are_copied_directly(
    implementation, spec, sources, destinations, num_ids
) -> None:
    options = {"implementation": implementation, "disjoint": True}
    check(copy_blocks, spec, (sources, destinations), num_ids, **options)


NO_IDS = as_ids([])
# Lists of every length for an idle buffer, keys and values, and two states.
FORESTS = {
    zero_blocks: [[NO_IDS, as_ids([4, 5]), as_ids([6, 1, 0]), as_ids([8, 8, 3, 2])]],
    copy_blocks: [
        [NO_IDS, as_ids([4, 5, 1]), as_ids([6, 1]), as_ids([8, 3, 3, 2])],
        [NO_IDS, as_ids([1, 2, 4]), as_ids([1, 6]), as_ids([3, 8, 7, 7])],
    ],
}


@pytest.mark.parametrize(("implementation", "num_ids"), TREES)
@pytest.mark.parametrize("kernel", FORESTS)
def test_a_tree_of_unlike_buffers_goes_through_one_call(kernel, implementation, num_ids) -> None:
    """One count holds for lists of all lengths."""
    buffers = {
        "idle": garbage((5, 640), "bfloat16"),
        "kv": garbage((2, 5, 96), "float8_e4m3fn"),
        "state": (garbage((7, 33), "float32"), garbage((BLOCKS, 640), "bfloat16")),
    }
    axes = {"idle": 0, "kv": 1, "state": (0, 0)}
    structure = jax.tree.structure(buffers)
    lists = [structure.unflatten(ids) for ids in FORESTS[kernel]]
    call = functools.partial(kernel, block_axis=axes, implementation=implementation)
    with kernels_run():
        got = jax.jit(call)(buffers, *lists, num_ids=num_ids and np.int32(num_ids))

    def expect(buffer: Any, axis: int, *own: Any) -> Any:
        return REFERENCES[kernel](buffer, *[ids[:num_ids] for ids in own], block_axis=axis)

    assert_same_bytes(got, jax.tree.map(expect, buffers, axes, *lists))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS if ON_GPU else ["xla"])
def test_many_buffers_with_pages_of_different_sizes_are_zeroed_in_one_call(implementation) -> None:
    count = 256 if ON_GPU else 64
    shapes = [(BLOCKS, 128 + 4 * (i % 7) + 512 * (i % 3)) for i in range(count)]
    buffers = [garbage(shape, "uint8") for shape in shapes]
    got = run(zero_blocks, buffers, as_ids([3, 8, -1]), implementation=implementation)
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_zero_blocks(buffer, [3, 8]))


@pytest.mark.parametrize("shared", ["sources", "destinations"])
def test_buffers_may_share_one_of_the_two_lists(shared) -> None:
    buffers = [garbage((BLOCKS, n), "uint8") for n in (1, 3, 17)]
    one, each = as_ids([0, 1, 2]), [as_ids(ids) for ids in ([6, 5, 4], [8, 7, 6], [6, 5, 4])]
    lists = (one, each) if shared == "sources" else (each, one)
    got = run(copy_blocks, buffers, *lists, implementation="xla")
    for array, buffer, own in zip(got, buffers, each, strict=True):
        pair = (one, own) if shared == "sources" else (own, one)
        assert_same_bytes(array, reference_copy_blocks(buffer, *pair))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_range_of_ids_depends_on_the_buffer(implementation) -> None:
    buffers = [garbage((4, 130), "uint8"), garbage((8, 130), "uint8")]
    pairs = as_ids([1, 6, 3]), as_ids([2, 2, 5])  # the second wins where there is a block 6
    with kernels_run():
        got = run(copy_blocks, buffers, *pairs, implementation=implementation)
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_copy_blocks(buffer, *pairs))


def apart(ids: list[int], offsets: list[int], n: int) -> list[int]:
    """Returns the ids, with -1 for rows that would overlap an earlier one."""
    found: list[tuple[int, int]] = []
    for block_id, offset in zip(ids, offsets, strict=True):
        free = all(block_id != i or abs(offset - o) >= n for i, o in found)
        found.append((block_id if free else -1, offset))
    return [block_id for block_id, _ in found]


@functools.partial(jax.jit, static_argnames=("align", "implementation"))
def write(pages, ids, offsets, rows, **options):
    return write_rows(pages, ids, offsets, rows, **options)


@pytest.mark.parametrize(
    ("implementation", "spec"), runs_of(SMALL_WRITES, INTERPRETED_WRITES), ids=str
)
@settings(max_examples=12)
@given(data=st.data())
def test_rows_are_written_where_they_fit(implementation, spec, data) -> None:
    page, n, align, dtype = spec
    aligned = st.integers(0, (page - n) // align).map(lambda i: i * align)
    beside = aligned.map(lambda i: i + 1)  # of the same word, where rows are written as words
    far = st.integers(-n, page + 1) | st.sampled_from([page - n, *EXTREMES])
    block_id = st.integers(0, PAGES - 1) | st.integers(-2, PAGES + 1) | st.sampled_from(EXTREMES)
    offsets = data.draw(st.lists(aligned | beside | far, min_size=ROWS, max_size=ROWS))
    ids = apart(data.draw(st.lists(block_id, min_size=ROWS, max_size=ROWS)), offsets, n)
    pages, rows = garbage((PAGES, page), dtype), garbage((ROWS, n), dtype)[::-1]
    options = {"align": align, "implementation": implementation}
    with kernels_run():
        got = write(jnp.array(pages), as_ids(ids), as_ids(offsets), jnp.array(rows), **options)
    assert_same_bytes(got, reference_write_rows(pages, ids, offsets, rows, align=align))
