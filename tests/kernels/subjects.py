"""The kernels as `test_suite` calls them, with operands and a NumPy reference for each."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.testing import reference_copy_blocks, reference_write_rows, reference_zero_blocks
from pallas_kernels import copy_blocks, write_rows, zero_blocks
from tests.helpers import as_ids, garbage
from tests.kernels.arg_specs import BLOCKS

ALIGN = 16  # of the rows that are written, where the page has as much


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel with operands that exercise it.

    name: of the parametrised test.
    kernel: ``kernel(pages, *operands, implementation=...)``.
    reference: the same in NumPy, without ``implementation``.
    make_operands: ``make_operands(rng, size, dtype)``; of pages that `make` returns.
    launches: of Mosaic kernels.
    num_read: arrays that these read, all launches counted.
    takes_trees: one call for many pages, with the same operands.
    """

    name: str
    kernel: Callable[..., Any]
    reference: Callable[..., np.ndarray]
    make_operands: Callable[..., tuple[np.ndarray, ...]]
    launches: int = 1
    num_read: int = 1
    takes_trees: bool = True

    def make(self, size: int, dtype: str = "uint8", seed: int = 0) -> tuple[np.ndarray, ...]:
        """Returns pages, `BLOCKS` of them, and operands; size: of what one entry moves."""
        page = size if self.takes_trees else 2 * self.stride(size)
        rng = np.random.default_rng(seed)
        return garbage((BLOCKS, page), dtype), *self.make_operands(rng, size, dtype)

    @staticmethod
    def stride(size: int) -> int:
        """Returns the distance of two rows of that size in a page."""
        return -(-size // ALIGN) * ALIGN


def zero_operands(rng: np.random.Generator, size: int, dtype: str) -> tuple[np.ndarray]:
    del size, dtype
    return (as_ids([0, *rng.integers(-2, BLOCKS + 2, 5)]),)


def copy_operands(rng: np.random.Generator, size: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Returns pairs that swap two blocks, name one destination twice, and some random ones."""
    del size, dtype
    sources = [1, 0, 7, 2, *rng.integers(-2, BLOCKS + 2, 4)]
    return as_ids(sources), as_ids([0, 1, 6, 6, *rng.integers(-2, BLOCKS + 2, 4)])


def fresh_operands(rng: np.random.Generator, size: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Returns pairs from low blocks to high ones."""
    del size, dtype
    sources, destinations = rng.integers(-1, 4, 6), rng.integers(5, BLOCKS + 1, 6)
    return as_ids(sources), as_ids(destinations)


def write_operands(rng: np.random.Generator, size: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Returns rows for some of the two slots in every page, and two that go nowhere."""
    slots = [-1, 2 * BLOCKS, *rng.permutation(2 * BLOCKS)[:6]]
    ids, offsets = as_ids(slots) // 2, as_ids(slots) % 2 * Subject.stride(size)
    return ids, offsets, garbage((len(slots), size), dtype)[::-1]


def counted(make_operands: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., Any]:
    """Returns operands with good ids behind those that count, and how many count."""

    def make(*args: Any) -> tuple[np.ndarray, ...]:
        operands = make_operands(*args)
        padded = [np.concatenate([ids, as_ids([4, 3, 5])]) for ids in operands]
        return *padded, np.int32(len(operands[0]))

    return make


def first_ids(reference: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Returns a reference that takes the number of ids after the lists."""

    def of_first(pages: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        *lists, num_ids = operands
        return reference(pages, *[ids[:num_ids] for ids in lists])

    return of_first


def zero_counted(pages: Any, ids: Any, num_ids: Any, **options: Any) -> Any:
    return zero_blocks(pages, ids, num_ids=num_ids, **options)


def copy_counted(pages: Any, sources: Any, destinations: Any, num_ids: Any, **options: Any) -> Any:
    return copy_blocks(pages, sources, destinations, num_ids=num_ids, **options)


def copy_fresh(pages: Any, sources: Any, destinations: Any, **options: Any) -> Any:
    return copy_blocks(pages, sources, destinations, disjoint=True, **options)


def write_aligned(pages: Any, ids: Any, offsets: Any, rows: Any, **options: Any) -> Any:
    align = math.gcd(ALIGN, pages.shape[1])
    return write_rows(pages, ids, offsets, rows, align=align, **options)


SUBJECTS = (
    Subject(
        "zero_counted",
        zero_counted,
        first_ids(reference_zero_blocks),
        counted(zero_operands),
        num_read=2,
    ),
    Subject(
        "copy_counted",
        copy_counted,
        first_ids(reference_copy_blocks),
        counted(copy_operands),
        launches=2,
        num_read=8,
    ),
    Subject("copy_fresh", copy_fresh, reference_copy_blocks, fresh_operands, num_read=2),
    Subject(
        "write", write_aligned, reference_write_rows, write_operands, num_read=3, takes_trees=False
    ),
)
