"""The writing kernel against NumPy: rows of every width, bad places, every dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels._mosaic_gpu as mosaic
from jaxkv.testing import assert_in_place, assert_same_bytes, reference_write_rows
from pallas_kernels import write_rows
from tests.helpers import (
    IMPLEMENTATIONS,
    ON_GPU,
    as_ids,
    garbage,
    kernels_run,
    needs_mosaic,
)

PAGES, ROWS = 5, 6
EXTREMES = [-(2**31), 2**31 - 1]
# (page, n, align, dtype): rows too short for a warpgroup, odd ones, what attention writes
# per token, a whole page, and pages that align worse than rows do.
FORMS = [
    (60, 12, 4, "float32"),
    (600, 132, 1, "uint8"),
    (2336, 584, 8, "uint8"),
    (2624, 656, 16, "uint8"),
    (4608, 1152, 1152, "uint8"),
    (8200, 2048, 16, "bfloat16"),
    (4097, 4097, 1, "uint8"),
]


@functools.partial(jax.jit, static_argnames=("align", "implementation"))
def write(pages, ids, offsets, rows, **options):
    return write_rows(pages, ids, offsets, rows, **options)


def apart(ids: list[int], offsets: list[int], n: int) -> list[int]:
    """The ids, with -1 for rows that would overlap an earlier one."""
    kept: list[tuple[int, int]] = []
    for block_id, offset in zip(ids, offsets, strict=True):
        free = all(block_id != i or abs(offset - o) >= n for i, o in kept)
        kept.append((block_id if free else -1, offset))
    return [block_id for block_id, _ in kept]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_rows_are_written_where_they_fit(implementation, form, data) -> None:
    page, n, align, dtype = form
    aligned = st.integers(0, (page - n) // align).map(lambda i: i * align)
    offset = aligned | st.integers(-n, page + 1) | st.sampled_from([page - n, *EXTREMES])
    block_id = st.integers(0, PAGES - 1) | st.integers(-2, PAGES + 1) | st.sampled_from(EXTREMES)
    offsets = data.draw(st.lists(offset, min_size=ROWS, max_size=ROWS))
    ids = apart(data.draw(st.lists(block_id, min_size=ROWS, max_size=ROWS)), offsets, n)
    pages, rows = garbage((PAGES, page), dtype), garbage((ROWS, n), dtype)[::-1]
    with kernels_run():
        got = write(
            jnp.array(pages),
            as_ids(ids),
            as_ids(offsets),
            jnp.array(rows),
            align=align,
            implementation=implementation,
        )
    assert_same_bytes(got, reference_write_rows(pages, ids, offsets, rows, align=align))


def everywhere(n: int, align: int, dtype: str = "uint8") -> tuple[np.ndarray, ...]:
    """Pages, ids, offsets and rows: two rows in every page and some that go nowhere."""
    stride = -(-n // align) * align
    ids, offsets = [], []
    for block_id in range(-1, PAGES + 1):
        ids += [block_id] * 2
        offsets += [stride, 0]
    pages, rows = garbage((PAGES, 2 * stride), dtype), garbage((len(ids), n), dtype)
    return pages, as_ids(ids), as_ids(offsets), rows[::-1]


@needs_mosaic
@pytest.mark.parametrize("n", [100, 132, 1152, 4096, 4097, 20_000])
def test_few_thread_blocks_do_all_the_work(n, monkeypatch) -> None:
    monkeypatch.setattr(mosaic, "GRID", 3)
    arguments = everywhere(n, 16)
    with kernels_run():
        got = write_rows(*map(jnp.array, arguments), align=16, implementation="mosaic_gpu")
    assert_same_bytes(got, reference_write_rows(*arguments, align=16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", mosaic.DTYPES)
def test_every_dtype_keeps_its_bytes(implementation, dtype) -> None:
    arguments = everywhere(264, 8, dtype)
    with kernels_run():
        got = write(*arguments, align=8, implementation=implementation)
    assert_same_bytes(got, reference_write_rows(*arguments, align=8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("pages", "rows"),
    [((4, 8), (0, 8)), ((4, 8), (3, 0)), ((0, 8), (3, 4)), ((4, 0), (3, 0)), ((0, 0), (0, 0))],
)
def test_nothing_to_write_is_no_error(implementation, pages, rows) -> None:
    before, ids = jnp.ones(pages), jnp.zeros(rows[0], jnp.int32)
    with kernels_run():
        got = write_rows(before, ids, ids, jnp.zeros(rows), implementation=implementation)
    np.testing.assert_array_equal(got, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_composes_with_scan(implementation) -> None:
    @jax.jit
    def run(pages, steps):
        def body(carry, step):
            return write_rows(carry, *step, implementation=implementation), None

        return jax.lax.scan(body, pages, steps)[0]

    pages, rows = garbage((PAGES, 700), "float16"), garbage((2, 2, 130), "float16")[::-1]
    ids, offsets = as_ids([[1, 2], [1, -1]]), as_ids([[0, 500], [100, 0]])
    with kernels_run():
        got = run(jnp.array(pages), (ids, offsets, jnp.array(rows)))
    for step in zip(ids, offsets, rows, strict=True):
        pages = reference_write_rows(pages, *step)
    assert_same_bytes(got, pages)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_composes_with_shard_map_over_pools(implementation) -> None:
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    ranks = len(mesh.devices)
    one, spec = PartitionSpec(), PartitionSpec("ranks")
    pages, ids, offsets, rows = everywhere(656, 16)
    shares = np.concatenate([np.roll(rows, i, axis=0) for i in range(ranks)])
    sharded = jax.device_put(np.concatenate([pages] * ranks), NamedSharding(mesh, spec))
    run = jax.jit(
        jax.shard_map(
            functools.partial(write_rows, align=16, implementation=implementation),
            mesh=mesh,
            in_specs=(spec, one, one, spec),
            out_specs=spec,
            check_vma=False,
        ),
        donate_argnums=0,
    )
    with kernels_run():
        got = run(sharded, ids, offsets, shares)
    assert got.sharding == NamedSharding(mesh, spec)
    split = np.split(shares, ranks)
    expected = [reference_write_rows(pages, ids, offsets, share) for share in split]
    assert_same_bytes(got, np.concatenate(expected))


@pytest.mark.parametrize(
    "implementation",
    # Interpret mode simulates the GPU's memory beside the real one, so in-place can be
    # seen in it only from the lowered text, below.
    ["xla", pytest.param("mosaic_gpu", marks=needs_mosaic)] if ON_GPU else ["xla"],
)
def test_donated_pages_stay_where_they_are(implementation) -> None:
    pages, ids = jax.jit(lambda: jnp.ones((64, 8192), jnp.uint8))(), as_ids([1, 5])
    run = functools.partial(write_rows, implementation=implementation)
    assert_in_place(run, pages, ids, ids, jnp.zeros((2, 1152), jnp.uint8))


@needs_mosaic
@pytest.mark.parametrize("donate", [True, False])
def test_the_cuda_lowering_is_one_aliased_kernel(donate) -> None:
    write = functools.partial(write_rows, align=16, implementation="mosaic_gpu")
    run = jax.jit(write, donate_argnums=0 if donate else ())
    ids = jax.ShapeDtypeStruct((2000,), jnp.int32)
    pages, rows = (jax.ShapeDtypeStruct(s, jnp.uint8) for s in ((64, 65536), (2000, 1152)))
    text = run.trace(pages, ids, ids, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("stablehlo.output_operand_alias<") == 1
    assert text.count("tf.aliasing_output") == donate
    assert "__gpu$xla.gpu.triton" not in text


@needs_mosaic
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_no_pages_and_no_rows_trace_as_they_do_elsewhere(sizes) -> None:
    num_pages, num_rows = sizes
    ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    got = jax.eval_shape(
        functools.partial(write_rows, align=512, implementation="mosaic_gpu"),
        jax.ShapeDtypeStruct((num_pages, 4096), jnp.uint8),
        ids,
        ids,
        jax.ShapeDtypeStruct((num_rows, 512), jnp.uint8),
    )
    assert got.shape == (num_pages, 4096)


@needs_mosaic
def test_the_kernel_counts_in_int32_under_x64_too() -> None:
    arguments = everywhere(1152, 16)
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(write_rows, align=16, implementation="mosaic_gpu"))
        run.trace(*arguments).lower(lowering_platforms=("cuda",))
        with kernels_run():
            got = run(*arguments)
    assert_same_bytes(got, reference_write_rows(*arguments, align=16))


@pytest.mark.parametrize("dtype", ["int32", "int4", "float4_e2m1fn", "int8", "bool", "complex64"])
def test_without_a_choice_every_dtype_is_written(dtype) -> None:
    pages, rows = jnp.zeros((PAGES, 130), dtype), jnp.ones((2, 3), dtype)
    got = np.asarray(write_rows(pages, as_ids([1, 4]), as_ids([7, 127]), rows))
    ones = got == np.ones((), got.dtype)
    assert ones.sum() == 6 and ones[1, 7:10].all() and ones[4, 127:].all()


@needs_mosaic
@given(
    n=st.integers(1, 70_000),
    alignment=st.integers(1, 70_000),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_tiles_of_a_row_align_as_its_offset_does(n, alignment, itemsize) -> None:
    tiling = mosaic.tile_page(n, itemsize, alignment)
    free = mosaic.tile_page(n, itemsize)
    if tiling is None or free is None:
        assert n < mosaic.THREADS
        return
    assert alignment % tiling.vector == 0 and tiling.vector <= free.vector
    assert tiling == free or alignment % free.vector


GOOD = {
    "pages": jnp.ones((4, 8)),
    "block_ids": jnp.zeros(2, jnp.int32),
    "offsets": jnp.zeros(2, jnp.int32),
    "rows": jnp.ones((2, 3)),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"implementation": "triton"}, ValueError, "implementation='triton'"),
        ({"block_ids": np.array([2**32, 1])}, TypeError, "block_ids must be int32"),
        ({"offsets": jnp.zeros(2)}, TypeError, "offsets must be int32"),
        ({"offsets": jnp.zeros((2, 1), jnp.int32)}, TypeError, "offsets must be int32"),
        ({"offsets": jnp.zeros(3, jnp.int32)}, ValueError, "as many, got 2, 3 and 2"),
        ({"rows": jnp.ones((3, 3))}, ValueError, "as many, got 2, 2 and 3"),
        ({"rows": jnp.ones((2, 9))}, ValueError, "n <= 8 elements of a page"),
        ({"rows": jnp.ones(2)}, ValueError, "rows must be"),
        ({"rows": jnp.ones((2, 3), jnp.int32)}, TypeError, "rows must be float32"),
        ({"pages": jnp.ones((4, 8, 2))}, ValueError, "pages must be"),
        ({"align": 0}, ValueError, "align=0"),
        ({"align": 0.5}, TypeError, "align must be an int"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        write_rows(**{**GOOD, **arguments})


@needs_mosaic
def test_mosaic_refuses_a_dtype_it_cannot_store() -> None:
    pages, rows = jnp.ones((4, 256), jnp.int4), jnp.ones((2, 128), jnp.int4)
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(TypeError, match='"mosaic_gpu" cannot store int4'):
        write_rows(pages, ids, ids, rows, implementation="mosaic_gpu")
