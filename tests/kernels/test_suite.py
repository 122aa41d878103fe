"""One suite for all kernels: use within a caller's program, lowering for CUDA, and refusals.

On a machine without a GPU the Mosaic kernels run in interpret mode, and are lowered for CUDA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.testing import (
    assert_in_place,
    assert_same_bytes,
    reference_copy_blocks,
    reference_zero_blocks,
)
from pallas_kernels import _capability, copy_blocks, default_implementation, write_rows, zero_blocks
from tests.helpers import IMPLEMENTATIONS, ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.kernels.arg_specs import (
    COPY_SPECS,
    INTERPRETED_PAGES,
    SMALL_PAGES,
    WRITE_SPECS,
    ZERO_SPECS,
)
from tests.kernels.subjects import SUBJECTS, Subject, copy_fresh

each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# Of what interpret mode does not show, or another test asks of an interpreted run: it simulates the
# GPU's memory next to the real one, so in-place can be seen only from the lowered text.
where_each_runs = pytest.mark.parametrize("implementation", IMPLEMENTATIONS if ON_GPU else ["xla"])
IDS = jnp.zeros(2, jnp.int32)


def lower(function: Any, *args: Any) -> str:
    """Returns the program for CUDA, as text; the first argument is donated."""
    traced = jax.jit(function, donate_argnums=0).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def launches(text: str) -> list[list[str]]:
    """Returns the operands of each Mosaic kernel in a lowered program."""
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    return [call.split("@mosaic_gpu_v2(")[1].split(")")[0].split(", ") for call in calls]


def check_together(subject: Subject, cases: list[tuple[np.ndarray, ...]], **options: Any) -> None:
    """Checks a kernel on several pages in one program, and in one call if it takes trees."""
    kernel = functools.partial(subject.kernel, **options)

    @jax.jit
    def run(cases):
        if subject.takes_trees:
            return kernel([pages for pages, *_ in cases], *cases[0][1:])
        return [kernel(*case) for case in cases]

    with kernels_run():
        got = run(cases)
    for array, case in zip(got, cases, strict=True):
        assert_same_bytes(array, subject.reference(*case))


@each_subject
@where_each_runs
def test_every_dtype_keeps_its_bytes(implementation: str, subject: Subject) -> None:
    cases = [subject.make(528, dtype) for dtype in _capability.DTYPES]
    check_together(subject, cases, implementation=implementation)


@needs_mosaic
@each_subject
def test_few_thread_blocks_do_all_the_work(subject: Subject, monkeypatch) -> None:
    """On pages of many sizes; interpreted, of elements of each width, too.

    XLA makes words of elements before a kernel sees them.
    """
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 3)
    cases = [subject.make(size) for size in (SMALL_PAGES if ON_GPU else INTERPRETED_PAGES)]
    if not ON_GPU:
        cases += [subject.make(528, dtype) for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
    check_together(subject, cases, implementation="mosaic_gpu")


@each_subject
@each_implementation
def test_a_kernel_composes_with_scan(implementation: str, subject: Subject) -> None:
    @jax.jit
    def run(pages, steps):
        def body(carry, step):
            return subject.kernel(carry, *step, implementation=implementation), None

        return jax.lax.scan(body, pages, steps)[0]

    pages, *first = subject.make(260, "float16", seed=0)
    _, *second = subject.make(260, "float16", seed=1)
    with kernels_run():
        got = run(pages, [np.stack(both) for both in zip(first, second, strict=True)])
    for operands in (first, second):
        pages = subject.reference(pages, *operands)
    assert_same_bytes(got, pages)


@each_subject
@each_implementation
def test_a_kernel_composes_with_shard_map_over_heads(implementation: str, subject: Subject) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    split, whole = PartitionSpec(None, "heads"), PartitionSpec()
    parts = [subject.make(656, "float8_e5m2", seed=seed) for seed in range(len(mesh.devices))]
    # Pages and rows have a part on each device; what says where they go is the same on all.
    specs = [split if array.ndim == 2 else whole for array in parts[0]]
    pages, *operands = [
        np.concatenate(arrays, axis=1) if spec == split else arrays[0]
        for arrays, spec in zip(zip(*parts, strict=True), specs, strict=True)
    ]
    run = jax.jit(
        jax.shard_map(
            functools.partial(subject.kernel, implementation=implementation),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=split,
            check_vma=False,
        ),
        donate_argnums=0,
    )
    with kernels_run():
        got = run(jax.device_put(pages, NamedSharding(mesh, split)), *operands)
    assert got.sharding == NamedSharding(mesh, split)
    expected = [
        subject.reference(
            mine[0],
            *[
                own if spec == split else given
                for own, given, spec in zip(mine[1:], operands, specs[1:], strict=True)
            ],
        )
        for mine in parts
    ]
    assert_same_bytes(got, np.concatenate(expected, axis=1))


@each_subject
@where_each_runs
def test_donated_pages_stay_where_they_are(implementation: str, subject: Subject) -> None:
    pages, *operands = subject.make(2**13)
    pages = jnp.ones((64, pages.shape[1]), jnp.uint8)
    pages = [pages, jnp.ones((64, 100))] if subject.takes_trees else pages
    # Few of them, because XLA and the staging of copies take memory for each.
    operands = [jnp.array(operand[:2] if operand.ndim else operand) for operand in operands]
    assert_in_place(
        functools.partial(subject.kernel, implementation=implementation), pages, *operands
    )


@needs_mosaic
@each_subject
def test_the_cuda_lowering_is_one_aliased_kernel(subject: Subject) -> None:
    pages, *operands = subject.make(2112)
    run = functools.partial(subject.kernel, implementation="mosaic_gpu")
    count = 5 if subject.takes_trees else 1
    text = lower(run, [pages] * count if subject.takes_trees else pages, *operands)
    found = launches(text)
    assert len(found) == subject.launches
    # Lists that many buffers share are passed once. Each launch has the pages, and what is
    # staged is written by one and read by the next.
    num_pages = count * (2 * subject.launches - 1)
    assert sum(map(len, found)) == subject.num_read + num_pages
    assert text.count("stablehlo.output_operand_alias<") == count
    assert text.count("tf.aliasing_output") == count
    assert "__gpu$xla.gpu.triton" not in text


@each_subject
@where_each_runs
@pytest.mark.parametrize("cut", [1, 2] if ON_GPU else [1])
def test_operands_may_be_slices(cut: int, implementation: str, subject: Subject) -> None:
    """A GPU fails here if a kernel takes operands at their place within a larger array.

    XLA passes on what lies at a multiple of 128 bytes, which Mosaic refuses where it is none
    of 256: an odd multiple is what a cut of 32 ids, and one of 32 rows of 516 bytes, begins at.
    """
    pages, *_ = subject.make(516)
    each = [[pad(operand) for operand in subject.make(516, seed=i)[1:]] for i in range(3)]
    tables = [np.stack(operands) for operands in zip(*each, strict=True)]

    @jax.jit
    def step(pages, tables):
        cuts = [table[cut] for table in tables]
        return subject.kernel(pages, *cuts, implementation=implementation)

    with kernels_run():
        got = step(pages, tables)
    assert_same_bytes(got, subject.reference(pages, *each[cut]))


def pad(operand: np.ndarray, length: int = 32) -> np.ndarray:
    """Pads a list with ids that go nowhere, or rows for them; a number stays what it is."""
    if not operand.ndim:
        return operand
    widths = [(0, length - len(operand))] + [(0, 0)] * (operand.ndim - 1)
    return np.pad(operand, widths, constant_values=-1 if operand.ndim == 1 else 0)


@needs_mosaic
@each_subject
def test_a_kernel_counts_in_int32_under_x64_too(subject: Subject) -> None:
    arguments = subject.make(3000, "float32")
    run = functools.partial(subject.kernel, implementation="mosaic_gpu")
    with jax.enable_x64(True):
        lower(run, *arguments)
        if ON_GPU:
            assert_same_bytes(jax.jit(run)(*arguments), subject.reference(*arguments))


@each_subject
@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=needs_mosaic)])
def test_without_a_choice_every_dtype_is_served(on_gpu, subject, monkeypatch) -> None:
    """Buffers that Mosaic cannot store are left to XLA, also next to others that it can."""
    if on_gpu:  # as kernels see it; the program is for the device that is there
        monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    pages, *operands = subject.make(1056, "int8")

    @jax.jit
    def run(calls):
        return [subject.kernel(buffers, *operands) for buffers, operands in calls]

    calls = []
    for dtype in ("int32", "float32", "int4", "float4_e2m1fn", "int8"):
        buffers = [as_dtype(pages, each) for each in (dtype, "uint8", dtype)]
        own = [as_dtype(operand, dtype) for operand in operands]
        calls.append((buffers if subject.takes_trees else buffers[0], own))
    for got, (buffers, own) in zip(run(calls), calls, strict=True):
        before, after = (jax.tree.leaves(tree) for tree in (buffers, got))
        for array, array_before in zip(after, before, strict=True):
            assert_same_bytes(array, subject.reference(array_before, *own))


def as_dtype(operand: np.ndarray, dtype: str) -> np.ndarray:
    """Returns pages or rows as zeros and ones in another dtype; ids stay what they are."""
    return (operand % 2).astype(jnp.dtype(dtype)) if operand.ndim == 2 else operand


@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_rows_need_not_be_real_numbers(dtype: str) -> None:
    pages, rows = np.zeros((4, 130), dtype), np.ones((2, 3), dtype)
    got = np.asarray(jax.jit(write_rows)(pages, as_ids([1, 3]), as_ids([7, 127]), rows))
    assert got.sum() == 6 and got[1, 7:10].all() and got[3, 127:].all()


@needs_mosaic
@each_subject
def test_the_device_of_a_program_decides_and_not_the_default(subject: Subject, monkeypatch) -> None:
    """One program serves CUDA and the CPU, on a machine whose default device is a GPU."""
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    arguments = subject.make(1056)
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(subject.kernel)(*map(jnp.array, arguments))
    assert_same_bytes(got, subject.reference(*arguments))
    assert len(launches(lower(subject.kernel, *arguments))) == subject.launches


@needs_mosaic
@pytest.mark.parametrize(("n", "dtype"), [(511, "uint8"), (512, "uint8"), (255, "f"), (128, "f")])
def test_rows_of_half_a_kilobyte_are_written_by_mosaic(n: int, dtype: str, monkeypatch) -> None:
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    text = lower(write_rows, jnp.zeros((4, 512), dtype), IDS, IDS, jnp.zeros((2, n), dtype))
    assert len(launches(text)) == (n * jnp.dtype(dtype).itemsize >= 512)


COUNT = np.int32(2)
NO_BLOCKS = [
    ([], 3, 0, None),
    ([(4, 8)], 0, 0, None),
    ([(4, 8)], 0, 0, COUNT),
    ([(0, 8), (4, 0)], 3, 0, None),
    ([(0, 4, 8), (2, 0, 8)], 3, 1, COUNT),
    ([(0, 4096), (4, 8)], 3, 0, COUNT),  # one buffer has none, the other has
]


@each_implementation
@pytest.mark.parametrize("kernel", [zero_blocks, copy_blocks, copy_fresh])
def test_no_blocks_are_no_error(kernel, implementation) -> None:
    @jax.jit
    def run(cases):
        found = []
        for buffers, (_, num_entries, axis, num_ids) in zip(cases, NO_BLOCKS, strict=True):
            lists = [as_ids([0] * num_entries)] * (1 if kernel is zero_blocks else 2)
            options = {"block_axis": axis, "num_ids": num_ids, "implementation": implementation}
            found.append(kernel(buffers, *lists, **options))
        return found

    cases = [[np.zeros(shape, np.uint8) for shape in shapes] for shapes, *_ in NO_BLOCKS]
    with kernels_run():
        got = run(cases)
    assert_same_bytes(got, cases)


NO_ROWS = [
    ((4, 4096), (0, 512)),
    ((4, 4096), (3, 0)),
    ((0, 4096), (3, 512)),
    ((0, 4096), (0, 512)),
    ((4, 0), (3, 0)),
    ((0, 0), (0, 0)),
]


@each_implementation
def test_no_rows_are_no_error(implementation) -> None:
    run = jax.jit(functools.partial(write_rows, align=512, implementation=implementation))
    for pages, rows in NO_ROWS:
        before, ids = np.ones(pages, np.uint8), as_ids([0] * rows[0])
        with kernels_run():
            got = run(before, ids, ids, np.zeros(rows, np.uint8))
        assert_same_bytes(got, before)


GOOD = {
    zero_blocks: {"buffers": jnp.ones((4, 8)), "block_ids": IDS},
    copy_blocks: {"buffers": jnp.ones((4, 8)), "sources": IDS, "destinations": IDS},
    write_rows: {
        "pages": jnp.ones((4, 8)),
        "block_ids": IDS,
        "offsets": IDS,
        "rows": jnp.ones((2, 3)),
    },
}
BAD = [
    (zero_blocks, "implementation", "triton", ValueError, "implementation='triton'; use one of"),
    (zero_blocks, "block_ids", np.array([2**32 + 1]), TypeError, "block_ids must be int32"),
    (zero_blocks, "block_ids", jnp.zeros(3), TypeError, "block_ids must be int32"),
    (zero_blocks, "block_ids", IDS[:, None], TypeError, "block_ids must be int32"),
    (zero_blocks, "block_ids", [IDS] * 2, ValueError, "block_ids must be one value, or a tree"),
    (zero_blocks, "block_ids", [1, 3], ValueError, "an int32 array of ids: not a list"),
    (zero_blocks, "block_axis", 0.5, TypeError, "block_axis must be an int"),
    (zero_blocks, "block_axis", 2, ValueError, "block_axis=2"),
    (zero_blocks, "block_axis", -3, ValueError, "block_axis=-3"),
    (zero_blocks, "block_axis", [0, 0], ValueError, "block_axis must be one value, or a tree"),
    (zero_blocks, "num_ids", 1, TypeError, r"num_ids must be int32\[\] or None, got int"),
    (zero_blocks, "num_ids", np.int64(1), TypeError, "num_ids must be int32.*, got int64"),
    (zero_blocks, "num_ids", IDS, TypeError, "num_ids must be int32"),
    (zero_blocks, "buffers", jnp.ones((3, 2), bool), TypeError, "buffers must be real and num"),
    (zero_blocks, "buffers", jnp.ones((3, 2), complex), TypeError, "buffers must be real and num"),
    (zero_blocks, "buffers", 2**40, TypeError, "buffers must be an array of numbers, got int"),
    (copy_blocks, "sources", np.array([2**32 + 1]), TypeError, "sources must be int32"),
    (copy_blocks, "destinations", jnp.zeros(2), TypeError, "destinations must be int32"),
    (copy_blocks, "destinations", jnp.zeros(3, jnp.int32), ValueError, "one length, got 2 and 3"),
    (write_rows, "implementation", "triton", ValueError, "implementation='triton'"),
    (write_rows, "block_ids", np.array([2**32, 1]), TypeError, "block_ids must be int32"),
    (write_rows, "offsets", jnp.zeros(2), TypeError, "offsets must be int32"),
    (write_rows, "offsets", IDS[:, None], TypeError, "offsets must be int32"),
    (write_rows, "offsets", jnp.zeros(3, jnp.int32), ValueError, "one length, got 2, 3 and 2"),
    (write_rows, "rows", jnp.ones((3, 3)), ValueError, "one length, got 2, 2 and 3"),
    (write_rows, "rows", jnp.ones((2, 9)), ValueError, "n <= 8 elements of a page"),
    (write_rows, "rows", jnp.ones(2), ValueError, "rows must be"),
    (write_rows, "rows", jnp.ones((2, 3), jnp.int32), TypeError, "rows must be float32"),
    (write_rows, "pages", jnp.ones((4, 8, 2)), ValueError, "pages must be"),
    (write_rows, "rows", None, TypeError, "rows must be an array of numbers, got NoneType"),
    (write_rows, "rows", [[1], [1, 2]], TypeError, "rows must be an array of numbers, got list"),
    (write_rows, "align", 0, ValueError, "align must be at least 1, got 0"),
    (write_rows, "align", 0.5, TypeError, "align must be an int"),
]


@pytest.mark.parametrize(
    ("kernel", "argument", "value", "error", "message"),
    BAD,
    ids=[f"{kernel.__name__}-{argument}-{i}" for i, (kernel, argument, *_) in enumerate(BAD)],
)
def test_bad_input_is_refused_by_name(kernel, argument, value, error, message) -> None:
    with pytest.raises(error, match=message):
        kernel(**{**GOOD[kernel], argument: value})


@needs_mosaic
@each_subject
def test_mosaic_refuses_a_dtype_it_cannot_store(subject: Subject) -> None:
    """Wherever it is among buffers that it can."""
    pages, *operands = subject.make(256)
    narrow, operands = pages.astype(jnp.int4), [as_dtype(operand, "int4") for operand in operands]
    trees: list[Any] = [[narrow, pages], [pages, pages, narrow]] if subject.takes_trees else []
    run = functools.partial(subject.kernel, implementation="mosaic_gpu")
    for buffers in (narrow, *trees):
        with pytest.raises(TypeError, match='"mosaic_gpu" cannot store int4; use "xla" or one of'):
            jax.eval_shape(run, buffers, *operands)


@needs_mosaic
@pytest.mark.parametrize("kernel", [zero_blocks, copy_blocks, copy_fresh])
def test_more_work_than_int32_counts_is_refused(kernel) -> None:
    pages = jax.ShapeDtypeStruct((2**28, 1, 2**13), jnp.uint8)
    ids = [jax.ShapeDtypeStruct((2**8,), jnp.int32)] * (1 if kernel is zero_blocks else 2)
    with pytest.raises(ValueError, match="work items, more than int32 counts"):
        jax.eval_shape(
            functools.partial(kernel, block_axis=1, implementation="mosaic_gpu"), pages, *ids
        )


@each_subject
def test_an_old_jax_is_told_what_mosaic_needs(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert default_implementation() == "xla"
    with pytest.raises(NotImplementedError, match=r"jax >= 0\.11, and this is jax 0\.10\.2; use"):
        subject.kernel(*subject.make(256), implementation="mosaic_gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert _capability.why_unsupported(["decode"], any_platform=True) is None


def of_bytes(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def of_ids(length: int, count: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((length,), jnp.int32)] * count


FEW = 3  # of a model's buffers: the kernel has the same code for each
OF_MODELS = [
    *[
        (
            functools.partial(zero_blocks, block_axis=int(spec.stacked)),
            [of_bytes(spec.buffers, spec.blocks, spec.page)]
            if spec.stacked
            else [of_bytes(spec.blocks, spec.page)] * min(spec.buffers, FEW),
            of_ids(spec.ids, 1),
            1,
        )
        for spec in ZERO_SPECS
    ],
    *[
        (
            functools.partial(copy_blocks, disjoint=disjoint),
            [of_bytes(spec.blocks, spec.page)] * min(spec.buffers, FEW),
            of_ids(spec.pairs, 2),
            1 if disjoint else 2,
        )
        for spec in COPY_SPECS
        for disjoint in (True, False)
    ],
    *[
        (
            functools.partial(write_rows, align=spec.row),
            of_bytes(spec.blocks, spec.page),
            [*of_ids(spec.tokens, 2), of_bytes(spec.tokens, spec.row)],
            1,
        )
        for spec in WRITE_SPECS
    ],
]


@needs_mosaic
@pytest.mark.parametrize(("kernel", "pages", "operands", "num_launches"), OF_MODELS)
def test_the_shapes_of_models_lower_for_cuda(kernel, pages, operands, num_launches) -> None:
    text = lower(functools.partial(kernel, implementation="mosaic_gpu"), pages, *operands)
    assert len(launches(text)) == num_launches
    assert text.count("stablehlo.output_operand_alias<") == len(jax.tree.leaves(pages))


HUGE = [((65_552, 65_536), 0), ((2, 32_776, 65_536), 1)]


@pytest.mark.skipif(not ON_GPU, reason="takes 4.3 GB of one buffer; on a GPU")
@each_implementation
@pytest.mark.parametrize(("shape", "axis"), HUGE)
@pytest.mark.parametrize("kernel", [zero_blocks, copy_blocks, copy_fresh])
def test_a_buffer_beyond_int32_elements_and_4_gib(kernel, shape, axis, implementation) -> None:
    last, page = shape[axis] - 1, shape[-1]
    lists = [as_ids([last, 1, last + 1, 2**31 - 1])]
    lists += [] if kernel is zero_blocks else [as_ids([2, last - 1, 3, 4])]
    numbers = np.arange(1, np.prod(shape[:-1]) + 1).reshape(shape[:-1]) % 251
    make = jax.jit(lambda: jnp.broadcast_to(jnp.array(numbers, jnp.uint8)[..., None], shape))
    run = functools.partial(kernel, block_axis=axis, implementation=implementation)
    got = jax.jit(run, donate_argnums=0)(make(), *lists)
    sums = np.asarray(jax.jit(lambda b: b.sum(-1, dtype=jnp.uint32))(got))
    reference = reference_zero_blocks if kernel is zero_blocks else reference_copy_blocks
    np.testing.assert_array_equal(sums, page * reference(numbers, *lists, block_axis=axis))


@pytest.mark.skipif(not ON_GPU, reason="takes 4.3 GB of one buffer; on a GPU")
@each_implementation
def test_pages_beyond_int32_elements_and_4_gib(implementation) -> None:
    (num_pages, page), n = HUGE[0][0], 4096
    ids, offsets = as_ids([num_pages - 1, 1, num_pages]), as_ids([page - n, 0, 0])
    make = jax.jit(lambda: jnp.zeros((num_pages, page), jnp.uint8))
    run = functools.partial(write_rows, align=16, implementation=implementation)
    got = jax.jit(run, donate_argnums=0)(make(), ids, offsets, jnp.ones((3, n), jnp.uint8))
    sums = np.zeros(num_pages)
    sums[[1, -1]] = n
    np.testing.assert_array_equal(jax.jit(lambda b: b.sum(-1, dtype=jnp.uint32))(got), sums)
    assert np.asarray(got[1, :n]).all() and np.asarray(got[-1, -n:]).all()
