"""The table rows of running requests, and the work of a step by row. No jax."""

import operator
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._src.internal.checks import check_kind, check_name, check_new_names
from jaxkv._src.internal.named_ints import NamedInts, are_distinct
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.uploads import Batch

Work = Mapping[Any, int]
PLAIN_NAMES = (str, int, bytes)  # names that are the same if they are equal


class RowWork(NamedInts):
    """New tokens of requests by name, which a manager reads by row as long as it gives out none.

    batch: the rows and new tokens.
    """

    def __init__(self, names: np.ndarray, batch: Batch, version: object):
        super().__init__(names, batch.counts)
        self.batch, self.version = batch, version


class RowAllocator:
    """The table rows of running requests, and the free rows.

    by_name: row of each running request.
    max_in_flight_tokens: most tokens that a request computes in one step.
    """

    def __init__(self, max_requests: int, max_in_flight_tokens: int):
        self.max_in_flight_tokens = max_in_flight_tokens
        self.by_name: dict[Hashable, int] = {}
        self._names, self._is_taken = np.empty(max_requests, object), np.zeros(max_requests, bool)
        self._free = deque(range(max_requests))
        self._num_odd_names = 0  # running requests whose names are not `PLAIN_NAMES`
        self._version = object()  # a new one whenever a row changes hands
        # The names and counts that were read last; steps of the same requests follow.
        self._last: tuple[list[Hashable], list[Any], Batch] | None = None

    def row(self, request: Hashable) -> int:
        """Returns the row of a running request."""
        try:
            return self.by_name[request]
        except (KeyError, TypeError):
            check_name(request)
            raise _not_running(request) from None

    def name(self, row: int) -> Hashable:
        """Returns the request that has a row."""
        return self._names[row]

    def check_new(self, requests: Sequence[Hashable]) -> None:
        """Raises TypeError or ValueError unless all requests can be started."""
        check_new_names(requests, self.by_name)
        if len(requests) > len(self._free):
            raise ValueError(
                f"{len(requests)} requests need rows, and {len(self._free)} rows are free: "
                f"{len(self.by_name)} requests are running; raise max_requests or finish one"
            )

    def take(self, request: Hashable) -> int:
        """Gives a request the row that has been free the longest."""
        row = self.by_name[request] = self._free.popleft()
        self._names[row], self._is_taken[row] = request, True
        self._num_odd_names += type(request) not in PLAIN_NAMES
        self._version = object()
        return row

    def give_back(self, request: Hashable) -> None:
        """Frees the row of a request."""
        row = self.by_name.pop(request)
        self._names[row], self._is_taken[row] = None, False
        self._num_odd_names -= type(request) not in PLAIN_NAMES
        self._free.append(row)
        self._version, self._last = object(), None

    def work(self, rows: np.ndarray, num_tokens: np.ndarray) -> RowWork:
        """Returns the work of requests in distinct rows, for `batch`."""
        check_kind(np.ndarray, rows=rows, num_tokens=num_tokens)
        if not rows.dtype == num_tokens.dtype == np.int64 or not rows.shape == num_tokens.shape:
            raise TypeError(
                "rows and num_tokens must be int64[N], got arrays of "
                f"{rows.dtype}{list(rows.shape)} and {num_tokens.dtype}{list(num_tokens.shape)}"
            )
        if not are_distinct(rows, self._is_taken):
            raise ValueError(f"rows={rows.tolist()} must be distinct rows of running requests")
        batch = Batch.from_counts(rows, num_tokens)
        self._check_counts(batch)
        return RowWork(self._names[rows], batch, self._version)

    def batch(self, work: Work) -> Batch:
        """Returns the rows and new tokens of a step.

        Raises:
          TypeError, ValueError: a request is not running, or its number of tokens is not an int,
            is below 1, or is more than ``limits.max_in_flight_tokens`` of the plan.
        """
        if isinstance(work, RowWork) and work.version is self._version:
            return work.batch
        if not isinstance(work, Mapping):
            raise TypeError(
                f"work must map requests to their new tokens, got {type(work).__name__}"
            )
        names, counts, rows = list(work), list(work.values()), None
        if self._last is not None:
            last_names, last_counts, last = self._last
            if self._are_same(names, last_names):
                if _sum_is_int(counts) and last_counts == counts:
                    return last
                rows = last.rows
        batch = Batch.from_counts(
            self._rows_of(names) if rows is None else rows, _as_counts(counts)
        )
        self._check_counts(batch)
        self._last = names, counts, batch
        return batch

    def _are_same(self, names: list[Hashable], others: list[Hashable]) -> bool:
        """Returns whether two lists name the same requests, which takes half as long as rows.

        Names of NumPy and tuples of them are compared element by element, so equality says little.
        """
        if self._num_odd_names:
            return len(names) == len(others) and all(map(operator.is_, names, others))
        return names == others

    def _rows_of(self, names: list[Hashable]) -> np.ndarray:
        try:
            return np.array([self.by_name[name] for name in names], np.int64)
        except KeyError as error:
            raise _not_running(error.args[0]) from None

    def _check_counts(self, batch: Batch) -> None:
        """Raises ValueError for a request that computes no token, or more than the plan admits."""
        most, counts = self.max_in_flight_tokens, batch.counts
        if counts.size and (np.minimum.reduce(counts) < 1 or batch.longest > most):
            at = int(((counts < 1) | (counts > most)).argmax())
            raise ValueError(
                f"work: request {self.name(int(batch.rows[at]))!r} computes {counts[at]} tokens in "
                f"a step; give 1 to limits.max_in_flight_tokens={most} of the plan: leave the "
                "request out, split its tokens, or plan with larger limits"
            )


def _not_running(request: Hashable) -> ValueError:
    return ValueError(
        f"request={request!r} is not running; start it first or, if it has ended, leave it out"
    )


def _sum_is_int(counts: Sequence[Any]) -> bool:
    """Returns whether counts are ints or bools, because other numbers have other sums."""
    try:
        return type(sum(counts)) is int
    except (TypeError, ValueError):
        return False


def _as_counts(counts: Sequence[Any]) -> np.ndarray:
    """Returns the new tokens of requests, int64[N]; raises TypeError unless they are ints."""
    try:
        array = np.array(counts) if counts else np.zeros(0, np.int64)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.ndim == 1 and array.dtype.kind in "iu" and array.dtype != np.uint64:
        return array.astype(np.int64, copy=False)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise TypeError(
                f"work must count tokens in ints, got {count!r}; give the number of new tokens of "
                "each request"
            )
    # Past int64, and refused for that.
    return np.array([max(-1, min(int(count), INT32_MAX)) for count in counts], np.int64)
