"""Arrays of ints that belong to requests: `NamedInts` maps names to them. No jax."""

import functools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np


class NamedInts(Mapping[Any, int]):
    """Ints by the names of requests, in order. It builds a dict when somebody first reads one.

    names: object[N].
    ints: int64[N].
    """

    def __init__(self, names: np.ndarray, ints: np.ndarray):
        self.names, self.ints = names, ints

    @functools.cached_property
    def _by_name(self) -> dict[Any, int]:
        return dict(zip(self.names.tolist(), self.ints.tolist(), strict=True))

    def __getitem__(self, name: Hashable) -> int:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return self.names.size

    def __repr__(self) -> str:
        return repr(self._by_name)


def are_distinct(index: np.ndarray, is_used: np.ndarray) -> bool:
    """Returns whether int64[N] are distinct indices into bool[M] of entries that are in use."""
    if np.minimum.reduce(index, initial=0) < 0:
        return False
    times = np.bincount(index, minlength=is_used.size)
    return times.size == is_used.size and not np.count_nonzero(times > is_used)
