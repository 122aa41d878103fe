"""The zeroing kernel against NumPy: every dtype, odd pages, bad ids, poisoned buffers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels._mosaic_gpu as mosaic
from jaxkv.testing import assert_in_place, assert_same_bytes, reference_zero_blocks
from pallas_kernels import default_implementation, zero_blocks
from tests.helpers import (
    IMPLEMENTATIONS,
    ON_GPU,
    kernels_run,
    needs_mosaic,
)

BLOCKS, IDS = 9, 6
block_ids = st.integers(-2, BLOCKS + 1) | st.sampled_from([-(2**31), 2**31 - 1])
id_lists = st.tuples(*[block_ids] * IDS)
# (shape, block axis): pages from 1 element up, odd ones, and blocks behind other axes.
FORMS = [
    ((BLOCKS, 1), 0),
    ((BLOCKS, 77), 0),
    ((BLOCKS, 128), 0),
    ((BLOCKS, 2, 1056), 0),
    ((2, BLOCKS, 515), 1),
    ((3, 2, BLOCKS, 4, 64), -3),
    ((2, BLOCKS), 1),
]


@functools.partial(jax.jit, static_argnames=("axis", "implementation", "include_null_block"))
def zero(buffers, ids, axis=0, **options):
    return zero_blocks(buffers, ids, block_axis=axis, **options)


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """All bytes 0xFF: NaN in every float format, -1 in integers."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=12)
@given(ids=id_lists, null=st.booleans())
def test_exactly_the_listed_blocks_become_zero(implementation, form, ids, null) -> None:
    shape, axis = form
    buffer = poisoned(shape, "bfloat16")
    expected = reference_zero_blocks(buffer, ids, block_axis=axis, include_null_block=null)
    with kernels_run():
        got = zero(
            jnp.array(buffer),
            np.array(ids, np.int32),
            axis=axis,
            implementation=implementation,
            include_null_block=null,
        )
    assert_same_bytes(got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", mosaic.DTYPES)
def test_every_dtype_is_cleared_of_nan_and_garbage(implementation, dtype) -> None:
    buffer, ids = poisoned((BLOCKS, 520), dtype), [1, 8, -1, 9, 8, 2]
    with kernels_run():
        got = zero(jnp.array(buffer), np.array(ids, np.int32), implementation=implementation)
    assert_same_bytes(got, reference_zero_blocks(buffer, ids))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tree_of_unlike_buffers_is_zeroed_in_one_call(implementation) -> None:
    buffers = {
        "kv": poisoned((2, 5, 96), "float8_e4m3fn"),
        "state": (poisoned((7, 33), "float32"), poisoned((BLOCKS, 640), "bfloat16")),
    }
    axes = {"kv": 1, "state": (0, 0)}
    ids = {"kv": [4, 5, -1], "state": ([6, 1, 0], [8, 8, 3, 2])}
    with kernels_run():
        got = zero_blocks(
            jax.tree.map(jnp.array, buffers),
            jax.tree.map(lambda i: jnp.array(i, jnp.int32), ids, is_leaf=_is_ids),
            block_axis=axes,
            implementation=implementation,
        )
    expected = [
        reference_zero_blocks(buffer, listed, block_axis=axis)
        for buffer, listed, axis in zip(
            jax.tree.leaves(buffers),
            jax.tree.leaves(ids, is_leaf=_is_ids),
            jax.tree.leaves(axes),
            strict=True,
        )
    ]
    assert jax.tree.structure(got) == jax.tree.structure(buffers)
    for array, wanted in zip(jax.tree.leaves(got), expected, strict=True):
        assert_same_bytes(array, wanted)


def _is_ids(value: object) -> bool:
    return isinstance(value, list)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("buffers", "ids"),
    [
        ([], jnp.zeros(3, jnp.int32)),
        ([jnp.ones((4, 8))], jnp.zeros(0, jnp.int32)),
        ([jnp.ones((0, 8)), jnp.ones((4, 0))], jnp.zeros(3, jnp.int32)),
    ],
)
def test_nothing_to_zero_is_no_error(implementation, buffers, ids) -> None:
    with kernels_run():
        got = zero_blocks(buffers, ids, implementation=implementation)
    for array, before in zip(got, buffers, strict=True):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_composes_with_scan(implementation) -> None:
    @jax.jit
    def run(buffer, ids):
        def body(carry, listed):
            return zero_blocks(carry, listed, implementation=implementation), None

        return jax.lax.scan(body, buffer, ids)[0]

    buffer, ids = poisoned((BLOCKS, 130), "float16"), np.array([[1, 2], [5, -1]], np.int32)
    with kernels_run():
        got = run(jnp.array(buffer), ids)
    assert_same_bytes(got, reference_zero_blocks(buffer, [1, 2, 5]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_composes_with_shard_map_over_heads(implementation) -> None:
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    spec = PartitionSpec(None, None, "heads")
    buffer = poisoned((BLOCKS, 4, 4 * len(mesh.devices), 16), "float8_e5m2")
    ids = np.array([3, 8, -1, 0], np.int32)
    sharded = jax.device_put(buffer, NamedSharding(mesh, spec))
    run = jax.jit(
        jax.shard_map(
            functools.partial(zero_blocks, implementation=implementation),
            mesh=mesh,
            in_specs=(spec, PartitionSpec()),
            out_specs=spec,
            check_vma=False,
        ),
        donate_argnums=0,
    )
    with kernels_run():
        got = run(sharded, ids)
    assert got.sharding == NamedSharding(mesh, spec)
    assert_same_bytes(got, reference_zero_blocks(buffer, ids))


@pytest.mark.parametrize(
    "implementation",
    # Interpret mode simulates the GPU's memory beside the real one, so in-place can be
    # seen in it only from the lowered text, below.
    ["xla", pytest.param("mosaic_gpu", marks=needs_mosaic)] if ON_GPU else ["xla"],
)
def test_donated_buffers_stay_where_they_are(implementation) -> None:
    make = jax.jit(lambda: [jnp.ones((BLOCKS, 4096), jnp.uint8), jnp.ones((BLOCKS, 100))])
    run = functools.partial(zero_blocks, implementation=implementation)
    assert_in_place(run, make(), jnp.array([1, 5], jnp.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS if ON_GPU else ["xla"])
def test_256_buffers_of_pages_of_their_own_are_zeroed_in_one_call(implementation) -> None:
    shapes = [(BLOCKS, 128 + 4 * (i % 7) + 512 * (i % 3)) for i in range(256)]
    buffers = [poisoned(shape, "uint8") for shape in shapes]
    got = jax.jit(functools.partial(zero_blocks, implementation=implementation))(
        [jnp.array(buffer) for buffer in buffers], np.array([3, 8, -1], np.int32)
    )
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_zero_blocks(buffer, [3, 8]))


@needs_mosaic
@pytest.mark.parametrize(("count", "donate"), [(5, True), (5, False), (256, True)])
def test_the_cuda_lowering_is_one_aliased_kernel(count, donate) -> None:
    buffers = [jax.ShapeDtypeStruct((64, 2112), jnp.uint8)] * count
    run = jax.jit(
        functools.partial(zero_blocks, implementation="mosaic_gpu"),
        donate_argnums=0 if donate else (),
    )
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = run.trace(buffers, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("stablehlo.output_operand_alias<") == count
    assert text.count("tf.aliasing_output") == (count if donate else 0)
    assert "__gpu$xla.gpu.triton" not in text


@needs_mosaic
def test_a_list_shared_by_many_buffers_is_passed_once() -> None:
    buffers = [jax.ShapeDtypeStruct((64, 2112), jnp.uint8)] * 7
    run = jax.jit(functools.partial(zero_blocks, implementation="mosaic_gpu"))
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = run.trace(buffers, ids).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    operands = call.split("@mosaic_gpu_v2(")[1].split(")")[0].split(",")
    assert len(operands) == 7 + 1


@needs_mosaic
def test_the_kernel_counts_in_int32_under_x64_too() -> None:
    with jax.enable_x64(True):
        buffer, ids = poisoned((BLOCKS, 3000), "float32"), np.array([1, 8], np.int32)
        run = jax.jit(functools.partial(zero_blocks, implementation="mosaic_gpu"))
        run.trace(jnp.array(buffer), ids).lower(lowering_platforms=("cuda",))
        with kernels_run():
            got = run(jnp.array(buffer), ids)
    assert_same_bytes(got, reference_zero_blocks(buffer, [1, 8]))


@pytest.mark.parametrize("dtype", ["int32", "float32", "int4", "float4_e2m1fn", "int8"])
def test_without_a_choice_every_dtype_is_zeroed(dtype) -> None:
    buffer = jnp.ones((BLOCKS, 130), dtype)
    got = zero_blocks({"a": buffer, "b": jnp.ones((4, 3))}, jnp.array([2, 3], jnp.int32))
    assert [int(i) for i in np.flatnonzero((np.asarray(got["a"]) == 0).all(axis=1))] == [2, 3]
    assert np.asarray(got["b"]).sum() == 6


def test_a_program_for_the_cpu_is_no_matter_where_a_gpu_is_the_default() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(zero_blocks)(jnp.ones((4, 256)), jnp.array([1], jnp.int32))
    assert np.asarray(got).sum() == 3 * 256


@needs_mosaic
@given(page=st.integers(1, 70_000), itemsize=st.sampled_from([1, 2, 4]))
def test_tiles_cover_a_page_and_store_aligned(page, itemsize) -> None:
    tiling = mosaic.tile_page(page, itemsize)
    if tiling is None:
        assert page < mosaic.THREADS
        return
    starts = [min(i * tiling.width, page - tiling.width) for i in range(tiling.strips)]
    assert starts[0] == 0 and starts[-1] + tiling.width == page
    assert all(b - a <= tiling.width for a, b in itertools.pairwise(starts))
    assert all(start % tiling.vector == 0 for start in [*starts, page])
    assert tiling.vector * itemsize <= 16 and tiling.width % (128 * tiling.vector) == 0
    assert (tiling.items - 1) * tiling.strips_per_item < tiling.strips
    assert tiling.strips <= tiling.items * tiling.strips_per_item


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"implementation": "triton"}, ValueError, "implementation='triton'"),
        ({"block_ids": np.array([2**32 + 1])}, TypeError, "block_ids must be int32"),
        ({"block_axis": 0.5}, TypeError, "block_axis must be an int"),
        ({"block_axis": 2}, ValueError, "block_axis=2"),
        ({"block_axis": [0, 0]}, ValueError, "block_axis is neither"),
        ({"block_ids": [jnp.zeros(1, jnp.int32)] * 2}, ValueError, "block_ids is neither"),
        ({"block_ids": jnp.zeros(3)}, TypeError, "block_ids must be int32"),
        ({"block_ids": jnp.zeros((3, 1), jnp.int32)}, TypeError, "block_ids must be int32"),
        ({"buffers": jnp.ones((3, 2), bool)}, TypeError, "buffers must be real and numeric"),
        ({"buffers": jnp.ones((3, 2), complex)}, TypeError, "buffers must be real and numeric"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, error, message) -> None:
    good = {"buffers": jnp.ones((4, 8)), "block_ids": jnp.zeros(2, jnp.int32)}
    with pytest.raises(error, match=message):
        zero_blocks(**{**good, **arguments})


@needs_mosaic
def test_mosaic_refuses_a_dtype_it_cannot_store() -> None:
    with pytest.raises(TypeError, match='"mosaic_gpu" cannot store int4'):
        zero_blocks(
            jnp.ones((4, 256), jnp.int4), jnp.zeros(2, jnp.int32), implementation="mosaic_gpu"
        )


@needs_mosaic
@pytest.mark.skipif(ON_GPU, reason="a GPU runs it")
def test_mosaic_on_a_cpu_is_refused_by_jax() -> None:
    with pytest.raises(ValueError, match="interpret mode"):
        zero_blocks(jnp.ones((4, 256)), jnp.zeros(2, jnp.int32), implementation="mosaic_gpu")


def test_an_old_jax_is_told_what_mosaic_needs(monkeypatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert default_implementation() == "xla"
    with pytest.raises(NotImplementedError, match=r"jax >= 0\.11, this is 0\.10\.2"):
        zero_blocks(jnp.ones((4, 8)), jnp.zeros(2, jnp.int32), implementation="mosaic_gpu")


def test_the_default_suits_the_device() -> None:
    assert default_implementation() == ("mosaic_gpu" if ON_GPU else "xla")


@pytest.mark.skipif(not ON_GPU, reason="takes 4.3 GB of one buffer; on a GPU")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("shape", "axis"), [((65_552, 65_536), 0), ((2, 32_776, 65_536), 1)])
def test_a_buffer_beyond_int32_elements_and_4_gib(implementation, shape, axis) -> None:
    last = shape[axis] - 1
    make = jax.jit(lambda: jnp.ones(shape, jnp.uint8))
    run = jax.jit(
        functools.partial(zero_blocks, block_axis=axis, implementation=implementation),
        donate_argnums=0,
    )
    got = run(make(), jnp.array([last, 1, last + 1, 2**31 - 1], jnp.int32))
    sums = np.asarray(jax.jit(lambda b: b.sum(-1, dtype=jnp.uint32))(got))
    expected = np.full(shape[:-1], shape[-1])
    expected[..., [1, last]] = 0
    np.testing.assert_array_equal(sums, expected)


@needs_mosaic
def test_more_work_than_int32_counts_is_refused() -> None:
    pages = jax.ShapeDtypeStruct((2**20, 2**22), jnp.uint8)
    ids = jax.ShapeDtypeStruct((2**24,), jnp.int32)
    with pytest.raises(ValueError, match="work items"):
        jax.eval_shape(functools.partial(zero_blocks, implementation="mosaic_gpu"), pages, ids)
