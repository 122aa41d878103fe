"""`write_token_heads` by NumPy, bit by bit: on a GPU as it is, elsewhere in interpret mode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing import assert_same_bytes, reference_write_rows
from pallas_kernels import TokenHeadRow, _capability, write_token_heads
from tests.helpers import IMPLEMENTATIONS, ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.reference_token_heads import BY_HEADS, pack_by_heads

INT8, FP8, INT4 = BY_HEADS
# Heads, their width and tokens: zeros behind the scales or not, items that are shifted back, and
# fewer heads than a thread block has at once.
CASES = [(INT8, 5, 64, 4, "bfloat16"), (FP8, 2, 256, 3, "float32"), (INT4, 8, 64, 3, "float16")]
LARGE = [(dtype, 8, 128, 1003, "bfloat16") for dtype in BY_HEADS]


def tokens_of_all_kinds(seed: int, *shape: int) -> np.ndarray:
    """Returns random heads, some of them zeros, tiny, or with what is no number."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=shape).astype(np.float32)
    found *= 10.0 ** rng.integers(-4, 4, (*shape[:2], 1))
    for kind, value in enumerate((np.nan, np.inf, -np.inf)):
        found[kind % len(found), rng.integers(shape[1]), rng.integers(shape[2])] = value
    found[-1, 0], found[-1, 1] = -0.0, 1e-7 * found[-1, 1]
    return found


@needs_mosaic
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "heads", "width", "count", "given"), CASES + LARGE * ON_GPU)
def test_a_kernel_writes_what_the_definition_packs(
    dtype: Any, heads: int, width: int, count: int, given: str, implementation: Any, monkeypatch
) -> None:
    """Pages keep all other bytes, and rows out of range are not written."""
    from pallas_kernels import _mosaic

    if not ON_GPU:
        monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
        monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 2)
    row, rng = TokenHeadRow(dtype, heads, width, width), np.random.default_rng(0)
    keys, values = (
        jnp.asarray(tokens_of_all_kinds(seed, count, heads, width), given) for seed in (1, 2)
    )
    slots = rng.permutation(2 * count + 2)[:count]
    pages = rng.integers(0, 256, (count + 1, 2 * row.row_bytes + 32), np.uint8)
    ids, offsets = as_ids(slots // 2), as_ids(slots % 2 * row.row_bytes + 32)
    ids[1], offsets[2] = [-1, -(2**31), len(pages)][count % 3], [40, row.row_bytes + 64][count % 2]
    write = functools.partial(write_token_heads, row=row, align=32, implementation=implementation)
    with kernels_run():
        got = jax.jit(write)(pages, ids, offsets, keys, values)
    rows = pack_by_heads(dtype, np.asarray(keys), np.asarray(values))
    assert_same_bytes(got, reference_write_rows(pages, ids, offsets, rows, align=32))


@needs_mosaic
@pytest.mark.parametrize(
    ("dtype", "capability", "heads", "width", "kernel"),
    [
        (FP8, (9, 0), 8, 128, "write_token_heads"),
        (FP8, (8, 6), 8, 128, "write_rows"),  # which has no instruction for fp8
        (INT8, (8, 0), 8, 128, "write_token_heads"),
        (INT8, (9, 0), 8, 96, "write_rows"),
        (INT4, (9, 0), 2, 64, ""),  # short
    ],
)
def test_what_the_kernel_does_not_take_is_packed_by_xla(
    dtype: Any, capability: Any, heads: int, width: int, kernel: str, monkeypatch
) -> None:
    monkeypatch.setattr(_capability, "compute_capability", lambda: capability)
    row = TokenHeadRow(dtype, heads, width, width)
    ids, tokens = as_ids([0, 1]), jnp.ones((2, heads, width), jnp.bfloat16)
    write = jax.jit(functools.partial(write_token_heads, row=row, align=32))
    pages = jnp.zeros((3, row.row_bytes), jnp.uint8)
    lowered = write.trace(pages, ids, ids, tokens, tokens).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "custom_call @mosaic_gpu" in line]
    assert len(calls) == bool(kernel) and all(f"{kernel}\\00" in call for call in calls)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("pages", jnp.zeros((3, 512)), TypeError, "pages must be uint8, got float32"),
        ("keys", jnp.ones((2, 2, 8), "int8"), TypeError, "floats of one dtype, got int8 and float"),
        ("values", jnp.ones((2, 2, 8), "f2"), TypeError, "of one dtype, got float32 and float16"),
        (
            "keys",
            jnp.ones((2, 3, 8)),
            ValueError,
            r"keys must be float\[2, 2, 8\] by block_ids and",
        ),
        ("values", jnp.ones((2, 2, 4)), ValueError, r"got shape \(2, 2, 4\)"),
        ("offsets", as_ids([0]), ValueError, "one length, got 2 and 1"),
        ("pages", jnp.zeros((3, 31), "uint8"), ValueError, "64 bytes of a row in a page"),
        ("row", "int8", TypeError, "row must be of type TokenHeadRow, got str"),
        ("align", 0, ValueError, "align must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Any, error: Any, message: str) -> None:
    tokens = jnp.ones((2, 2, 8))
    good = {"pages": jnp.zeros((3, 512), jnp.uint8), "block_ids": as_ids([0, 1])}
    good |= {"offsets": as_ids([0, 0]), "keys": tokens, "values": tokens}
    with pytest.raises(error, match=message):
        write_token_heads(**{**good, "row": TokenHeadRow(INT8, 2, 8, 8), name: value})
