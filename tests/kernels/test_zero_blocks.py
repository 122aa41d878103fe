"""Zeroing against NumPy: pages of every size, bad ids, counts, buffers full of NaN."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv.testing import assert_same_bytes, reference_zero_blocks
from pallas_kernels import zero_blocks
from tests.helpers import IMPLEMENTATIONS, ON_GPU, TREES, as_ids, kernels_run, needs_mosaic, runs_of
from tests.kernels.arg_specs import BLOCKS, INTERPRETED_BUFFERS, SMALL_BUFFERS

IDS = 6
block_ids = st.integers(-2, BLOCKS + 1) | st.sampled_from([-(2**31), 2**31 - 1])
id_lists = st.tuples(*[block_ids] * IDS)
counts = st.integers(-1, IDS + 2) | st.sampled_from([-(2**31), 2**31 - 1])


@functools.partial(jax.jit, static_argnames=("axis", "implementation"))
def zero(buffers, ids, num_ids, axis, implementation):
    return zero_blocks(
        buffers, ids, num_ids=num_ids, block_axis=axis, implementation=implementation
    )


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an array of bytes 0xFF: NaN in every float format, -1 in integers."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize(
    ("implementation", "spec"), runs_of(SMALL_BUFFERS, INTERPRETED_BUFFERS), ids=str
)
@settings(max_examples=8)
@given(ids=id_lists, num_ids=counts)
@example(ids=(0, 8, 8, -1, 9, 2), num_ids=IDS)  # block 0 is one like others
@example(ids=(0, 8, 1, 2, 3, 4), num_ids=2)
def test_exactly_the_listed_blocks_become_zero(implementation, spec, ids, num_ids) -> None:
    buffer = poisoned(spec.shape, "bfloat16")
    counted = ids[: max(num_ids, 0)]
    expected = reference_zero_blocks(buffer, counted, block_axis=spec.block_axis)
    with kernels_run():
        got = zero(
            jnp.array(buffer),
            as_ids(ids),
            np.int32(num_ids),
            axis=spec.block_axis,
            implementation=implementation,
        )
    assert_same_bytes(got, expected)


@pytest.mark.parametrize(("implementation", "num_ids"), TREES)
def test_a_tree_of_unlike_buffers_is_zeroed_in_one_call(implementation, num_ids) -> None:
    buffers = {
        "idle": poisoned((5, 640), "bfloat16"),
        "kv": poisoned((2, 5, 96), "float8_e4m3fn"),
        "state": (poisoned((7, 33), "float32"), poisoned((BLOCKS, 640), "bfloat16")),
    }
    axes = {"idle": 0, "kv": 1, "state": (0, 0)}
    # Lists of every length: one count holds for all of them.
    lists = (as_ids([6, 1, 0]), as_ids([8, 8, 3, 2]))
    ids = {"idle": as_ids([]), "kv": as_ids([4, 5]), "state": lists}
    run = functools.partial(zero_blocks, block_axis=axes, implementation=implementation)
    count = None if num_ids is None else np.int32(num_ids)
    with kernels_run():
        got = jax.jit(run)(buffers, ids, num_ids=count)
    expected = jax.tree.map(
        lambda buffer, axis, listed: reference_zero_blocks(
            buffer, listed[:num_ids], block_axis=axis
        ),
        buffers,
        axes,
        ids,
    )
    assert_same_bytes(got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS if ON_GPU else ["xla"])
def test_many_buffers_with_pages_of_different_sizes_are_zeroed_in_one_call(implementation) -> None:
    count = 256 if ON_GPU else 64
    shapes = [(BLOCKS, 128 + 4 * (i % 7) + 512 * (i % 3)) for i in range(count)]
    buffers = [poisoned(shape, "uint8") for shape in shapes]
    got = jax.jit(functools.partial(zero_blocks, implementation=implementation))(
        [jnp.array(buffer) for buffer in buffers], as_ids([3, 8, -1])
    )
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_zero_blocks(buffer, [3, 8]))


@needs_mosaic
def test_a_slice_of_an_array_is_zeroed() -> None:
    """XLA may pass a slice in place, and return other bytes than what a kernel wrote there."""

    @jax.jit
    def zero_some(array, ids):
        return zero_blocks((array + array)[:5], ids, implementation="mosaic_gpu")

    array, ids = np.ones((7, 256), np.float32), as_ids([1, 4, 6])
    with kernels_run():
        got = zero_some(array, ids)
    assert_same_bytes(got, reference_zero_blocks(2 * array[:5], [1, 4]))
    text = zero_some.trace(array, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"optimization_barrier %\w+ : tensor<5x256xf32>", text)


@needs_mosaic
def test_many_buffers_are_one_aliased_kernel() -> None:
    buffers = [jax.ShapeDtypeStruct((64, 2112), jnp.uint8)] * 64
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    run = jax.jit(functools.partial(zero_blocks, implementation="mosaic_gpu"), donate_argnums=0)
    text = run.trace(buffers, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("stablehlo.output_operand_alias<") == 64
    assert text.count("tf.aliasing_output") == 64
