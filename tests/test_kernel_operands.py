"""Kernels take operands that callers cut out of larger arrays, wherever they lie in them.

XLA passes a contiguous slice on where it lies, and Mosaic refuses what lies at no multiple
of 256 bytes: on a GPU this fails if kernels do not ask for buffers of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing import (
    assert_same_bytes,
    reference_copy_blocks,
    reference_write_rows,
    reference_zero_blocks,
)
from pallas_kernels import copy_blocks, write_rows, zero_blocks
from tests.helpers import IMPLEMENTATIONS, kernels_run, needs_mosaic

PAGE = 384
PAGES = np.random.default_rng(0).integers(1, 256, (9, PAGE), np.uint8)
TABLE = np.random.default_rng(1).integers(-1, 10, (4, 3, 32)).astype(np.int32)  # 128 bytes a row
ROWS = np.random.default_rng(2).integers(1, 256, (12, 128), np.uint8)
CUTS = [0, 1, 2]


def zero(implementation: str, pages, table, rows, cut):
    del rows
    return zero_blocks(pages, table[1, cut], implementation=implementation)


def copy(implementation: str, pages, table, rows, cut):
    del rows
    return copy_blocks(pages, table[1, cut], FRESH[: table.shape[2]], implementation=implementation)


def write(implementation: str, pages, table, rows, cut):
    del table
    rows = rows[cut : cut + 8]
    ids = jnp.arange(8, dtype=jnp.int32)
    return write_rows(pages, ids, 128 * (ids % 3), rows, align=128, implementation=implementation)


FRESH = jnp.array([5, 6, 7, 8] + 28 * [-1], jnp.int32)
READ_ONLY = {zero: 1, copy: 3, write: 3}
EXPECTED = {
    zero: lambda cut: reference_zero_blocks(PAGES, TABLE[1, cut]),
    copy: lambda cut: reference_copy_blocks(PAGES, TABLE[1, cut], np.asarray(FRESH)),
    write: lambda cut: reference_write_rows(
        PAGES, range(8), [128 * (i % 3) for i in range(8)], ROWS[cut : cut + 8]
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kernel", EXPECTED, ids=lambda kernel: kernel.__name__)
def test_operands_may_be_slices(kernel, cut: int, implementation: str) -> None:
    with kernels_run():
        step = jax.jit(lambda pages, table, rows: kernel(implementation, pages, table, rows, cut))
        got = step(PAGES, TABLE, ROWS)
    assert_same_bytes(got, EXPECTED[kernel](cut))


@needs_mosaic
@pytest.mark.parametrize("kernel", EXPECTED, ids=lambda kernel: kernel.__name__)
def test_no_slice_is_lowered_straight_into_a_kernel(kernel) -> None:
    """What a GPU would trip over can be seen without one: each operand passes a barrier."""
    step = jax.jit(lambda pages, table, rows: kernel("mosaic_gpu", pages, table, rows, 1))
    lowered = step.trace(PAGES, TABLE, ROWS).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in lowered.splitlines() if "@mosaic_gpu" in line]
    assert calls
    barriers = [line for line in lowered.splitlines() if "optimization_barrier" in line]
    settled = {line.split("=")[0].strip().split(":")[0] for line in barriers}
    for call in calls:
        operands = call.split("(", 1)[1].split(")", 1)[0].split(", ")
        # All but the pages, which a kernel writes, and what it has set aside for itself.
        assert sum(operand.split("#")[0] in settled for operand in operands) == READ_ONLY[kernel]
