"""The table rows of running requests, and the work of a step by row. No jax."""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._src.blocks._write import Batch

FEW = 8  # requests up to which ints are faster than arrays
Work = Mapping[Any, int] | tuple[np.ndarray, np.ndarray]


class Rows:
    """The table rows of running requests, and the free rows.

    of: row of each running request.
    max_in_flight_tokens: most tokens that a request computes in one step.
    """

    def __init__(self, max_requests: int, max_in_flight_tokens: int):
        self._max_requests, self.max_in_flight_tokens = max_requests, max_in_flight_tokens
        self.of: dict[Hashable, int] = {}
        self._free = deque(range(max_requests))
        self._taken = np.zeros(max_requests, bool)
        self._last: tuple[list[Hashable], list[int], Batch] | None = None  # work of the last step

    def row(self, request: Hashable) -> int:
        """Returns the row of a running request."""
        if request not in self.of:
            raise ValueError(f"request={request!r} is not running; start it first")
        return self.of[request]

    def name(self, row: int) -> Hashable:
        """Returns the request that has a row."""
        return next(name for name, at in self.of.items() if at == row)

    def check_new(self, requests: Sequence[Hashable]) -> None:
        """Raises ValueError unless all requests can be started."""
        for request in requests:
            if not isinstance(request, Hashable):
                raise TypeError(
                    f"request={request!r} must be a hashable name, such as an int or a str"
                )
            if request in self.of:
                raise ValueError(f"request={request!r} is running already; finish it first")
        if len(set(requests)) < len(requests):
            raise ValueError(f"{list(requests)!r} names a request twice; give each its own name")
        if len(requests) > len(self._free):
            raise ValueError(
                f"{len(requests)} requests need rows, and {len(self._free)} rows are free: "
                f"{len(self.of)} requests are running; raise max_requests or finish one"
            )

    def take(self, request: Hashable) -> int:
        """Gives a request the row that has been free the longest."""
        row = self.of[request] = self._free.popleft()
        self._taken[row] = True
        self._last = None
        return row

    def give_back(self, request: Hashable) -> None:
        """Frees the row of a request."""
        row = self.of.pop(request)
        self._taken[row] = False
        self._free.append(row)
        self._last = None

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows, taken or free."""
        swapped = {first: second, second: first}
        self.of = {name: swapped.get(row, row) for name, row in self.of.items()}
        self._free = deque(swapped.get(row, row) for row in self._free)
        self._taken[[first, second]] = self._taken[[second, first]]
        self._last = None

    def batch(self, work: Work) -> Batch:
        """Returns the rows and new tokens of a step.

        Raises:
          TypeError, ValueError: a request is not running, or its number of tokens is not an int,
            is below 1, or is more than ``limits.max_in_flight_tokens`` of the plan.
        """
        if not isinstance(work, dict) and not isinstance(work, Mapping):
            batch = Batch.of(*self._checked_arrays(work))
            self._check_counts(batch)
            return batch
        names, values = list(work), list(work.values())
        if self._last is not None and self._last[0] == names:
            # Consecutive steps often have the same work. The type of the sum tells 1.0, which is
            # refused below, from the equal 1.
            if self._last[1] == values and type(sum(values)) is int:
                return self._last[2]
            rows = self._last[2].rows
        else:
            rows = self._rows_of(names)
        batch = self._few(rows, values)
        if batch is None:
            batch = Batch.of(rows, _as_counts(values))
            self._check_counts(batch)
        self._last = names, values, batch
        return batch

    def _few(self, rows: np.ndarray, values: Sequence[Any]) -> Batch | None:
        """Returns the batch of a few plain ints, without NumPy's overhead; None for others."""
        if not 0 < len(values) <= FEW:
            return None
        for value in values:
            if type(value) is not int or not 0 < value <= self.max_in_flight_tokens:
                return None  # `_as_counts` or `_check_counts` raises the error
        counts = np.array(values)
        ends = counts if len(values) == 1 else np.add.accumulate(counts)
        return Batch(rows, counts, ends, sum(values), max(values))

    def _rows_of(self, names: Sequence[Hashable]) -> np.ndarray:
        try:
            return np.array([self.of[name] for name in names], np.int64)
        except KeyError as error:
            raise ValueError(f"request={error.args[0]!r} is not running; start it first") from None

    def _checked_arrays(self, work: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(work, tuple) or len(work) != 2:
            raise TypeError(
                "work must map requests to their new tokens, or be a pair of arrays (rows, "
                f"new tokens); got {type(work).__name__}"
            )
        rows, counts = map(np.asarray, work)
        if rows.ndim != 1 or rows.shape != counts.shape or rows.dtype.kind not in "iu":
            raise ValueError(
                f"work: rows {rows.dtype}{list(rows.shape)} and tokens {list(counts.shape)} must "
                "be flat integer arrays of one length"
            )
        if counts.dtype.kind not in "iu":
            raise TypeError(f"work must count tokens in ints, got {counts.dtype}")
        known = (rows >= 0) & (rows < self._max_requests)
        if not known.all() or not self._taken[rows].all():
            raise ValueError(
                f"work names rows that no request has: {rows.tolist()}; see BlockManager.requests"
            )
        named = np.zeros(self._max_requests, bool)
        named[rows] = True
        if np.count_nonzero(named) < rows.size:
            raise ValueError(f"work names a row twice: {rows.tolist()}; list each request once")
        return rows.astype(np.int64), counts.astype(np.int64)

    def _check_counts(self, batch: Batch) -> None:
        if not batch.rows.size:
            return
        if np.minimum.reduce(batch.counts) < 1:
            name = self.name(int(batch.rows[batch.counts.argmin()]))
            raise ValueError(
                f"work: request {name!r} computes {batch.counts.min()} tokens; give at least 1, or "
                "leave it out"
            )
        if batch.longest > self.max_in_flight_tokens:
            name = self.name(int(batch.rows[batch.counts.argmax()]))
            raise ValueError(
                f"work: request {name!r} computes {batch.longest} tokens in a step; the plan "
                f"counts on limits.max_in_flight_tokens={self.max_in_flight_tokens}; split "
                "them, or plan with larger limits"
            )


def _as_counts(values: Sequence[Any]) -> np.ndarray:
    """Returns the new tokens of requests, int64[N]; raises TypeError unless they are ints."""
    try:
        counts = np.array(values) if values else np.zeros(0, np.int64)
    except ValueError:  # lists of different lengths
        counts = np.array(None)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        wrong = [
            value for value in values if np.ndim(value) or np.array(value).dtype.kind not in "iu"
        ]
        raise TypeError(
            f"work must count tokens in ints, got {next(iter(wrong), values)!r}; give the number "
            "of new tokens of each request"
        )
    return counts.astype(np.int64, copy=False)
