"""Steps of a few requests that write no shared block, in plain ints. NumPy only.

An array takes as long for one number as for a hundred, so such a step is planned and packed
without arrays. The results equal those of the same step in arrays.
"""

import itertools
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._books import Books, FewChanges, RowStep
from jaxkv._src.blocks._few_changes import are_few, grow_rows
from jaxkv._src.blocks._rows import Rows, Work
from jaxkv._src.blocks._runs import Run
from jaxkv._src.blocks._shape import StepShape

NO_CHANGES = FewChanges([], [], [], [], [])


class SmallStep(NamedTuple):
    """A step of N requests, and what it changes.

    requests: the row of each request, and its tokens in the cache before and after the step.
    ends: cumulative sums of the requests' new tokens.
    longest_query: most new tokens of one request.
    longest_seq: most tokens of one request after the step.
    changes: changes to the books.
    num_fresh: blocks that the step takes.
    """

    requests: list[RowStep]
    ends: list[int]
    longest_query: int
    longest_seq: int
    changes: FewChanges
    num_fresh: int

    def fits(self, shape: StepShape, *, zeroes: bool) -> bool:
        """Returns whether a shape has room for the step, which zeroes all its blocks or none."""
        return (
            len(self.requests) <= shape.batch_size
            and self.ends[-1] <= shape.max_tokens
            and self.longest_query <= shape.max_query_len
            and self.longest_seq <= shape.max_seq_len
            and self.num_fresh <= shape.block_ids
            and (not zeroes or self.num_fresh <= shape.zero_ids)
        )


def plan_small_step(books: Books, rows: Rows, work: Work, max_model_len: int) -> SmallStep | None:
    """Returns a small step; None for a step that needs arrays, or that must be refused."""
    if not isinstance(work, dict) or not work or not are_few(books, len(work)):
        return None
    requests: list[RowStep] = []
    ends: list[int] = []
    growing: list[RowStep] = []
    end = longest_query = longest_seq = num_fresh = 0
    computed_of, unchanged_until = books.computed.item, books.unchanged_until.item
    for name, count in work.items():
        row = rows.of.get(name)
        if row is None or type(count) is not int or not 0 < count <= rows.max_in_flight_tokens:
            return None
        computed = computed_of(row)
        request = row, computed, computed + count
        requests.append(request)
        if computed + count > unchanged_until(row):
            growing.append(request)
        end += count
        ends.append(end)
        longest_query = max(longest_query, count)
        longest_seq = max(longest_seq, computed + count)
    if longest_seq > max_model_len:
        return None
    changes = NO_CHANGES
    if growing:
        if books.any_may_share([row for row, _, _ in growing]):
            return None
        changes = grow_rows(books, growing)
        num_fresh = sum([count for _, _, _, count in changes.fresh])
        if num_fresh > books.pool.num_free_blocks:
            return None
    return SmallStep(requests, ends, longest_query, longest_seq, changes, num_fresh)


def write_small_batch(shape: StepShape, data: np.ndarray, step: SmallStep) -> None:
    """Fills an upload with padding and the requests of a step."""
    data[:] = shape.format.padding
    starts, out = shape.format.starts, memoryview(data)  # writes an int much faster than NumPy
    row_at, computed_at = starts["request_rows"], starts["num_computed_tokens"]
    end_at = starts["query_start_loc"] + 1
    for (row, computed, _), end in zip(step.requests, step.ends, strict=True):
        out[row_at], out[computed_at], out[end_at] = row, computed, end
        row_at, computed_at, end_at = row_at + 1, computed_at + 1, end_at + 1
    data[end_at : end_at + shape.batch_size - len(step.requests)] = step.ends[-1]


def write_small_changes(
    shape: StepShape, data: np.ndarray, changes: FewChanges, ids: np.ndarray, *, zeroes: bool
) -> None:
    """Writes changes that replace no block.

    Args:
      ids: int32[cells], the blocks of the fresh cells.
      zeroes: whether these blocks are zeroed.
    """
    starts, out = shape.format.starts, memoryview(data)
    row_at, length_at = starts["changed_rows"], starts["row_lengths"]
    for row, (_, _, lengths) in zip(changes.rows, changes.held, strict=True):
        out[row_at] = row
        for at, length in enumerate(lengths, length_at):
            out[at] = length
        row_at, length_at = row_at + 1, length_at + len(lengths)
    if not ids.size:
        return
    ends = _write_cells(shape, data, changes.fresh)
    _write_ids(data, starts["entry_ids"], ids, starts["entry_ends"], ends)
    if zeroes:
        _write_ids(data, starts["zero_ids"], ids, starts["zero_ends"], ends)


def _write_cells(shape: StepShape, data: np.ndarray, runs: list[Run]) -> list[int]:
    """Writes the rows and columns of cells. Returns the end of each group's cells."""
    starts, out, counts = shape.format.starts, memoryview(data), [0] * len(shape.growths)
    row_at, column_at = starts["entry_rows"], starts["entry_columns"]
    for group, row, column, count in runs:
        if count == 1:
            out[row_at], out[column_at] = row, column
        else:
            data[row_at : row_at + count] = row
            data[column_at : column_at + count] = np.arange(column, column + count, dtype=np.int32)
        row_at, column_at, counts[group] = row_at + count, column_at + count, counts[group] + count
    return list(itertools.accumulate(counts))


def _write_ids(
    data: np.ndarray, ids_at: int, ids: np.ndarray, ends_at: int, ends: list[int]
) -> None:
    data[ids_at : ids_at + ids.size] = ids
    data[ends_at : ends_at + len(ends)] = ends
