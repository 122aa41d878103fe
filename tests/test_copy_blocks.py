"""The copying kernel against NumPy: chains, swaps, duplicates, bad ids, every dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels._mosaic_gpu as mosaic
from jaxkv.testing import assert_in_place, assert_same_bytes, reference_copy_blocks
from pallas_kernels import copy_blocks
from tests.helpers import (
    IMPLEMENTATIONS,
    ON_GPU,
    as_ids,
    garbage,
    kernels_run,
    needs_mosaic,
)

BLOCKS, PAIRS = 9, 6
bad_ids = st.sampled_from([-(2**31), -2, -1, BLOCKS, BLOCKS + 1, 2**31 - 1])
block_ids = st.integers(0, BLOCKS - 1) | bad_ids
id_lists = st.tuples(*[block_ids] * PAIRS)
# What a promise of disjoint lists allows; bad ids and the null block may be in both.
low_ids = st.tuples(*[st.integers(0, 4) | bad_ids] * PAIRS)
high_ids = st.tuples(*[st.integers(5, BLOCKS - 1) | st.just(0) | bad_ids] * PAIRS)
# (shape, block axis): pages from 1 element up, odd ones, and blocks behind other axes.
FORMS = [
    ((BLOCKS, 1), 0),
    ((BLOCKS, 33), 0),
    ((BLOCKS, 2, 1056), 0),
    ((2, BLOCKS, 515), 1),
    ((2, 2, BLOCKS, 4, 32), -3),
]


@functools.partial(jax.jit, static_argnames=("axis", "implementation", "disjoint"))
def copy(buffers, sources, destinations, axis=0, **options):
    return copy_blocks(buffers, sources, destinations, block_axis=axis, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=8)
@given(sources=id_lists, destinations=id_lists)
@example(sources=(1, 2, 3, 4, 5, 6), destinations=(2, 3, 4, 5, 6, 7))  # a chain
@example(sources=(1, 2, 3, 4, 5, 0), destinations=(2, 1, 4, 5, 3, 8))  # a swap and a ring
@example(sources=(1, 2, 3, 4, 9, -1), destinations=(5, 5, 5, 6, 5, 6))  # the last good one
@example(sources=(1, 5, 5, 2, 3, 3), destinations=(5, 5, 6, 3, 0, 7))  # itself, and null
def test_destinations_become_what_sources_were(implementation, form, sources, destinations) -> None:
    shape, axis = form
    buffer = garbage(shape, "bfloat16")
    expected = reference_copy_blocks(buffer, sources, destinations, block_axis=axis)
    with kernels_run():
        got = copy(
            jnp.array(buffer),
            as_ids(sources),
            as_ids(destinations),
            axis=axis,
            implementation=implementation,
        )
    assert_same_bytes(got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=12)
@given(sources=low_ids, destinations=high_ids)
def test_disjoint_lists_are_copied_directly(implementation, sources, destinations) -> None:
    buffer = garbage((2, BLOCKS, 1030), "uint8")
    with kernels_run():
        got = copy(
            jnp.array(buffer),
            as_ids(sources),
            as_ids(destinations),
            axis=1,
            implementation=implementation,
            disjoint=True,
        )
    assert_same_bytes(got, reference_copy_blocks(buffer, sources, destinations, block_axis=1))


@needs_mosaic
@pytest.mark.parametrize("page", [20, 515, 20_000, 28_672])
def test_few_thread_blocks_do_all_the_work(page, monkeypatch) -> None:
    monkeypatch.setattr(mosaic, "GRID", 3)
    buffers = [garbage((BLOCKS, page), "uint8"), garbage((2, BLOCKS, page), "uint8")[1]]
    pairs = as_ids([1, 2, 8, 0]), as_ids([2, 1, 3, 7])
    with kernels_run():
        got = copy_blocks([jnp.array(b) for b in buffers], *pairs, implementation="mosaic_gpu")
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_copy_blocks(buffer, *pairs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_dtype_keeps_its_bytes(implementation) -> None:
    buffers = [garbage((BLOCKS, 520), dtype) for dtype in mosaic.DTYPES]
    pairs = as_ids([1, 8, -1, 9, 3, 2]), as_ids([2, 3, 4, 5, 8, 0])
    with kernels_run():
        got = copy([jnp.array(b) for b in buffers], *pairs, implementation=implementation)
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_copy_blocks(buffer, *pairs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tree_of_unlike_buffers_is_copied_in_one_call(implementation) -> None:
    buffers = {
        "kv": garbage((2, 5, 96), "float8_e4m3fn"),
        "state": (garbage((7, 33), "float32"), garbage((BLOCKS, 640), "bfloat16")),
    }
    axes = {"kv": 1, "state": (0, 0)}
    sources = {"kv": as_ids([4, 5, 1]), "state": (as_ids([6, 1]), as_ids([8, 3, 3, 2]))}
    destinations = {"kv": as_ids([1, 2, 4]), "state": (as_ids([1, 6]), as_ids([3, 8, 7, 7]))}
    with kernels_run():
        got = copy_blocks(
            jax.tree.map(jnp.array, buffers),
            sources,
            destinations,
            block_axis=axes,
            implementation=implementation,
        )
    expected = jax.tree.map(
        lambda buffer, axis, *pairs: reference_copy_blocks(buffer, *pairs, block_axis=axis),
        buffers,
        axes,
        sources,
        destinations,
    )
    jax.tree.map(assert_same_bytes, got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_which_ids_are_in_range_depends_on_the_buffer(implementation) -> None:
    buffers = [garbage((4, 130), "uint8"), garbage((8, 130), "uint8")]
    pairs = as_ids([1, 6, 3]), as_ids([2, 2, 5])  # the second wins where there is a block 6
    with kernels_run():
        got = copy([jnp.array(b) for b in buffers], *pairs, implementation=implementation)
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_copy_blocks(buffer, *pairs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("buffers", "ids"),
    [
        ([], jnp.zeros(3, jnp.int32)),
        ([jnp.ones((4, 8))], jnp.zeros(0, jnp.int32)),
        ([jnp.ones((0, 8)), jnp.ones((4, 0))], jnp.zeros(3, jnp.int32)),
    ],
)
def test_nothing_to_copy_is_no_error(implementation, buffers, ids) -> None:
    with kernels_run():
        got = copy_blocks(buffers, ids, ids, implementation=implementation)
    for array, before in zip(got, buffers, strict=True):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_composes_with_scan(implementation) -> None:
    @jax.jit
    def run(buffer, pairs):
        def body(carry, listed):
            return copy_blocks(carry, *listed, implementation=implementation), None

        return jax.lax.scan(body, buffer, pairs)[0]

    buffer = garbage((BLOCKS, 130), "float16")
    sources, destinations = as_ids([[1, 2], [1, -1]]), as_ids([[2, 1], [5, 4]])
    with kernels_run():
        got = run(jnp.array(buffer), (sources, destinations))
    for pairs in zip(sources, destinations, strict=True):
        buffer = reference_copy_blocks(buffer, *pairs)
    assert_same_bytes(got, buffer)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_composes_with_shard_map_over_heads(implementation) -> None:
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    spec = PartitionSpec(None, None, "heads")
    buffer = garbage((BLOCKS, 4, 4 * len(mesh.devices), 16), "float8_e5m2")
    pairs = as_ids([3, 8, -1, 1]), as_ids([8, 3, 2, 0])
    sharded = jax.device_put(buffer, NamedSharding(mesh, spec))
    run = jax.jit(
        jax.shard_map(
            functools.partial(copy_blocks, implementation=implementation),
            mesh=mesh,
            in_specs=(spec, PartitionSpec(), PartitionSpec()),
            out_specs=spec,
            check_vma=False,
        ),
        donate_argnums=0,
    )
    with kernels_run():
        got = run(sharded, *pairs)
    assert got.sharding == NamedSharding(mesh, spec)
    assert_same_bytes(got, reference_copy_blocks(buffer, *pairs))


@pytest.mark.parametrize("disjoint", [True, False])
@pytest.mark.parametrize(
    "implementation",
    # Interpret mode simulates the GPU's memory beside the real one, so in-place can be
    # seen in it only from the lowered text, below.
    ["xla", pytest.param("mosaic_gpu", marks=needs_mosaic)] if ON_GPU else ["xla"],
)
def test_donated_buffers_stay_where_they_are(implementation, disjoint) -> None:
    make = jax.jit(lambda: [jnp.ones((40, 4096), jnp.uint8), jnp.ones((40, 100))])
    copy = functools.partial(copy_blocks, implementation=implementation, disjoint=disjoint)
    assert_in_place(copy, make(), as_ids([1, 5]), as_ids([6, 7]))


def lowered(buffers, num_pairs: int, donate: bool = False, **options) -> str:
    """The program for CUDA, as text."""
    run = jax.jit(
        functools.partial(copy_blocks, implementation="mosaic_gpu", **options),
        donate_argnums=0 if donate else (),
    )
    ids = jax.ShapeDtypeStruct((num_pairs,), jnp.int32)
    return run.trace(buffers, ids, ids).lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("disjoint", [True, False])
def test_the_cuda_lowering_is_one_aliased_kernel_or_two(donate, disjoint) -> None:
    buffers = [jax.ShapeDtypeStruct((64, 2112), jnp.uint8)] * 5
    text = lowered(buffers, 8, donate, disjoint=disjoint)
    assert text.count("custom_call @mosaic_gpu") == (1 if disjoint else 2)
    assert text.count("stablehlo.output_operand_alias<") == 5
    assert text.count("tf.aliasing_output") == (5 if donate else 0)
    assert ("tensor<8x528xui32>" in text) == (not disjoint)  # what is set aside
    assert "__gpu$xla.gpu.triton" not in text


@needs_mosaic
def test_lists_shared_by_many_buffers_are_passed_once() -> None:
    text = lowered([jax.ShapeDtypeStruct((64, 2112), jnp.uint8)] * 7, 8, disjoint=True)
    (call,) = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    operands = call.split("@mosaic_gpu_v2(")[1].split(")")[0].split(",")
    assert len(operands) == 7 + 2


@needs_mosaic
@pytest.mark.parametrize(("shape", "axis"), [((0, 4096), 0), ((0, 4, 8), 1), ((2, 0, 8), 1)])
def test_no_blocks_trace_as_they_do_elsewhere(shape, axis) -> None:
    copied = functools.partial(copy_blocks, block_axis=axis, implementation="mosaic_gpu")
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert jax.eval_shape(copied, jax.ShapeDtypeStruct(shape, jnp.uint8), ids, ids).shape == shape


@needs_mosaic
def test_the_kernel_counts_in_int32_under_x64_too() -> None:
    pairs = as_ids([1, 8, 2]), as_ids([8, 1, 2])
    with jax.enable_x64(True):
        buffer = garbage((BLOCKS, 3000), "float32")
        run = jax.jit(functools.partial(copy_blocks, implementation="mosaic_gpu"))
        run.trace(jnp.array(buffer), *pairs).lower(lowering_platforms=("cuda",))
        with kernels_run():
            got = run(jnp.array(buffer), *pairs)
    assert_same_bytes(got, reference_copy_blocks(buffer, *pairs))


@pytest.mark.parametrize("dtype", ["int32", "float32", "int4", "float4_e2m1fn", "int8"])
def test_without_a_choice_every_dtype_is_copied(dtype) -> None:
    rows = jnp.arange(BLOCKS).astype(dtype)
    buffer = jnp.broadcast_to((rows == rows[1]).astype(dtype)[:, None], (BLOCKS, 130))
    got = copy_blocks({"a": buffer, "b": buffer[:4]}, as_ids([1, 1]), as_ids([3, 8]))
    ones = {name: np.flatnonzero((np.asarray(a) == 1).all(axis=1)) for name, a in got.items()}
    assert ones["a"].tolist() == [1, 3, 8] and ones["b"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"implementation": "triton"}, ValueError, "implementation='triton'"),
        ({"sources": np.array([2**32 + 1])}, TypeError, "sources must be int32"),
        ({"destinations": jnp.zeros(2)}, TypeError, "destinations must be int32"),
        ({"destinations": jnp.zeros((2, 1), jnp.int32)}, TypeError, "destinations must be int32"),
        ({"destinations": jnp.zeros(3, jnp.int32)}, ValueError, "pairs, got 2 and 3"),
        ({"sources": [jnp.zeros(2, jnp.int32)] * 2}, ValueError, "sources is neither"),
        ({"block_axis": 2}, ValueError, "block_axis=2"),
        ({"buffers": jnp.ones((3, 2), bool)}, TypeError, "buffers must be real and numeric"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, error, message) -> None:
    ids = jnp.zeros(2, jnp.int32)
    good = {"buffers": jnp.ones((4, 8)), "sources": ids, "destinations": ids}
    with pytest.raises(error, match=message):
        copy_blocks(**{**good, **arguments})


@needs_mosaic
def test_mosaic_refuses_what_it_cannot_do() -> None:
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(TypeError, match='"mosaic_gpu" cannot store int4'):
        copy_blocks(jnp.ones((4, 256), jnp.int4), ids, ids, implementation="mosaic_gpu")
    pages = jax.ShapeDtypeStruct((2**28, 1, 2**13), jnp.uint8)
    with pytest.raises(ValueError, match="work items"):
        lowered(pages, 2**8, block_axis=1, disjoint=True)
