"""Writes of rows against NumPy: rows of every width, bad places, pages that align worse."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.testing import assert_same_bytes, reference_write_rows
from pallas_kernels import write_rows
from tests.helpers import as_ids, garbage, kernels_run, runs_of
from tests.kernels.arg_specs import INTERPRETED_WRITES, PAGES, ROWS, SMALL_WRITES

EXTREMES = [-(2**31), 2**31 - 1]


@functools.partial(jax.jit, static_argnames=("align", "implementation"))
def write(pages, ids, offsets, rows, **options):
    return write_rows(pages, ids, offsets, rows, **options)


def apart(ids: list[int], offsets: list[int], n: int) -> list[int]:
    """Returns the ids, with -1 for rows that would overlap an earlier one."""
    kept: list[tuple[int, int]] = []
    for block_id, offset in zip(ids, offsets, strict=True):
        free = all(block_id != i or abs(offset - o) >= n for i, o in kept)
        kept.append((block_id if free else -1, offset))
    return [block_id for block_id, _ in kept]


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
    offset = aligned | beside | far
    block_id = st.integers(0, PAGES - 1) | st.integers(-2, PAGES + 1) | st.sampled_from(EXTREMES)
    offsets = data.draw(st.lists(offset, min_size=ROWS, max_size=ROWS))
    ids = apart(data.draw(st.lists(block_id, min_size=ROWS, max_size=ROWS)), offsets, n)
    pages, rows = garbage((PAGES, page), dtype), garbage((ROWS, n), dtype)[::-1]
    with kernels_run():
        got = write(
            jnp.array(pages),
            as_ids(ids),
            as_ids(offsets),
            jnp.array(rows),
            align=align,
            implementation=implementation,
        )
    assert_same_bytes(got, reference_write_rows(pages, ids, offsets, rows, align=align))
