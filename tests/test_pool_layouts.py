"""Every byte of a pool in every physical order, in place, by XLA and by the kernels.

`ReferencePool` finds a byte by counting all that lies before it, in nested loops over the
axes. Tables are any ids at all, so that what is no block's is seen to go nowhere.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import jaxkv
from jaxkv._src.pool import copy_blocks, zero_blocks
from jaxkv.testing import assert_in_place, assert_same_bytes, assert_unchanged
from tests import pool_cases as cases
from tests.helpers import as_ids, kernels_run, needs_devices, needs_mosaic
from tests.pool_cases import BLOCKS, CASES, NO_BLOCKS, WINDOWS, Case

TINY = 448 * 2.0**-126  # XLA may take a smaller scale for zero, and elements are up to 448
any_block = st.integers(-1, BLOCKS) | st.sampled_from(NO_BLOCKS)


def change(cache, batch, blocks, writes, *, disjoint: bool = False, implementation=None):
    """Every write there is: zeroes and copies blocks, then writes a layer of each group."""
    zero_ids, zero_ends, *copies = blocks
    cache = zero_blocks(cache, zero_ids, zero_ends, implementation=implementation)
    cache = copy_blocks(cache, *copies, disjoint=disjoint, implementation=implementation)
    for layer in sorted(writes):  # in this order, because groups overlay each other
        cache = cases.write(cache, layer, batch, **writes[layer], implementation=implementation)
    return cache


@jax.jit
def change_and_read(cache, batch, other, blocks, writes):
    cache = change(cache, batch, blocks, writes)
    return cache, {layer: cases.read(cache, layer, other) for layer in writes}


@st.composite
def block_lists(draw, groups: int):
    """Ids to zero, pairs to copy to distinct blocks, and where each group's end."""
    six = st.lists(any_block, min_size=6, max_size=6)
    targets = draw(st.permutations([*range(-1, BLOCKS + 1), 2**31 - 1]))[:6]
    zero_ends, ends = (
        sorted(draw(st.lists(st.integers(0, 6), min_size=groups, max_size=groups)))
        for _ in range(2)
    )
    return tuple(map(as_ids, (draw(six), zero_ends, draw(six), targets, ends)))


def by_group(ids: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, ends)[:-1]]


def reference_change(expected, plan, step, blocks, writes) -> None:
    zero_ids, zero_ends, sources, targets, ends = blocks
    expected.zero(by_group(zero_ids, zero_ends))
    expected.copy(by_group(sources, ends), by_group(targets, ends))
    for layer in sorted(writes):
        cases.reference_write(expected, plan, layer, step, writes[layer])


# Other plans have heads in these orders, in their blocks and in tiles.
ELSEWHERE = Case(cases.windows, "BHLNC"), Case(cases.windows, "BLHNC", None, (2, 2))
WRITTEN = [case for case in CASES if case not in ELSEWHERE]


# Also in more tiles than a tile has rows.
@pytest.mark.parametrize("case", [*WRITTEN, Case(cases.windows, "BHLNC", None, (1, 1))], ids=str)
@settings(max_examples=5)
@given(data=st.data())
def test_every_byte_lies_where_the_order_says(case: Case, data) -> None:
    plan, expected = case.plan, case.reference()
    step = data.draw(cases.steps(plan, rectangular=case.stacked is False))
    other = step._replace(tables=data.draw(cases.any_tables(plan, distinct=False)))
    blocks = data.draw(block_lists(len(plan.groups)))
    writes = cases.writes_for(plan, step, seed=data.draw(st.integers(0, 99)))
    cache = cases.with_memory(cases.empty(case), expected.memory)
    batches = (one.batch(cache, plan) for one in (step, other))
    cache, got = change_and_read(cache, *batches, blocks, writes)

    reference_change(expected, plan, step, blocks, writes)
    np.testing.assert_array_equal(cases.memory_of(cache), expected.memory)
    for layer in writes:
        wanted = cases.reference_read(expected, plan, layer, other)
        for pair in zip(got[layer], wanted, strict=True):
            floats = [np.asarray(array).astype(np.float32) for array in pair]
            np.testing.assert_allclose(*floats, rtol=0, atol=TINY, err_msg=layer)
    jaxkv.check_errors(cache)


@pytest.mark.parametrize(
    ("order", "stacked", "sizes"),
    [
        ("LBNHC", False, (4, 3)),
        ("LBNHC", False, (3, 4)),
        ("LHBNC", False, (3, 4)),
        ("LBNHC", True, (4, 3)),
        ("LHBNC", True, (4, 3)),
        ("BLHNC", True, (3, 4)),
    ],
)
def test_blocks_are_zeroed_and_copied_in_the_tensors_of_their_group(order, stacked, sizes) -> None:
    """In a stack a block goes whole: its bytes past its group's layers are nobody's."""
    plan = cases.windows(BLOCKS, *sizes)
    cache = Case(lambda: plan, order, stacked).cache()
    axes = cache.layout.buffers.axes
    ids = np.arange(1, BLOCKS + 1, dtype=np.uint8)
    ids = np.expand_dims(ids, [*range(1, len(axes) + 1 - axes.index("B"))])
    content = [np.broadcast_to(ids, buffer.shape).reshape(-1) for buffer in cache.buffers]
    cache = cases.with_memory(cache, np.concatenate(content))
    lists = [1, 2, -1, 9], [1, 3], [3, 5, 6], [4, 6, 5], [1, 3]
    cache = jax.jit(change)(cache, None, tuple(map(as_ids, lists)), {})
    for tensor in range(4):
        page = np.asarray(cache.buffers[0 if stacked else tensor])
        page = page.take(tensor, axes.index("L")) if stacked else page
        page = np.moveaxis(page, axes.replace("L", "").index("B"), 0)
        wanted = [*range(1, BLOCKS + 1)]
        if tensor < sizes[0] or stacked:
            wanted[1], wanted[4] = 0, 4
        if tensor < sizes[1] or stacked:
            wanted[2], wanted[5], wanted[6] = 0, 7, 6
        assert [set(block.reshape(-1).tolist()) for block in page] == [{i} for i in wanted]


# --- in place, and on a GPU -----------------------------------------------------------

TILED = Case(cases.windows, "BHLNC", None, (2, 2))
IN_PLACE = [
    *(Case(cases.windows, order) for order in ("LBNHC", "BLHNC")),
    Case(cases.windows, "LHBNC", False),
    Case(cases.hybrid, "LBHNC", None, (2, 4)),
    TILED,
]


def arguments_of_change(case: Case, *num_blocks: int):
    """Returns what `change` takes; of the blocks to copy none is a destination too."""
    step, cache = cases.fixed_step(case.plan), case.cache(*num_blocks)
    if not num_blocks:
        cache = cases.with_memory(cache, case.reference().memory)
    batch = step.batch(cache, case.make_plan(*num_blocks))
    groups = len(case.plan.groups)
    ids, ends = as_ids([1, 2, -1, 4, 0, 0]), as_ids([4 * (g + 1) // groups for g in range(groups)])
    blocks = (ids, ends, ids, as_ids([5, 6, 3, 8, 0, 0]), ends)
    return cache, batch, blocks, cases.writes_for(case.plan, step)


@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_every_write_is_in_place_in_a_donating_jit(case: Case) -> None:
    cache, *arguments = arguments_of_change(case, 50_000)
    assert cache.num_bytes > 25 * 100_000
    run = functools.partial(change, disjoint=True)
    assert_in_place(run, cache, *arguments, max_temp_bytes=100_000)


def test_the_old_cache_stays_valid_without_donation() -> None:
    cache, batch, *arguments = arguments_of_change(WINDOWS[0])
    with assert_unchanged(cache):
        after, _ = change_and_read(cache, batch, batch, *arguments)
    assert cases.memory_of(after).tobytes() != cases.memory_of(cache).tobytes()


IN_CUDA = [  # tokens, states and rows, in each kind of buffers
    WINDOWS[0],
    Case(cases.windows, "LHBNC", False),
    TILED,
    Case(cases.states, "BLNHC"),
    Case(cases.latent),
]


@needs_mosaic
@pytest.mark.parametrize("case", IN_CUDA, ids=str)
def test_the_cuda_lowering_has_one_aliased_kernel_for_each_write(case: Case) -> None:
    cache, batch, blocks, writes = arguments_of_change(case)
    run = functools.partial(change, disjoint=True, implementation="mosaic_gpu")
    traced = jax.jit(run, donate_argnums=0).trace(cache, batch, blocks, writes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    different = {case.plan.layout.placement_of(layer).spec: writes[layer] for layer in writes}
    count = sum(len(arguments.get("arrays", "1")) for arguments in different.values())
    assert text.count("custom_call @mosaic_gpu") == 2 + count
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(cache))
    assert text.count("stablehlo.output_operand_alias<") == 2 * len(cache.buffers) + count


@needs_mosaic
@pytest.mark.parametrize("case", [TILED, Case(cases.packed)], ids=str)
def test_the_kernels_write_what_the_order_says(case: Case) -> None:
    cache, batch, blocks, writes = arguments_of_change(case)
    with kernels_run():
        run = jax.jit(functools.partial(change, implementation="mosaic_gpu"))
        cache = run(cache, batch, blocks, writes)
    expected = case.reference()
    reference_change(expected, case.plan, cases.fixed_step(case.plan), blocks, writes)
    np.testing.assert_array_equal(cases.memory_of(cache), expected.memory)


# --- sharded --------------------------------------------------------------------------


def change_heads(num_heads: int, **place) -> tuple[list, list]:
    """Writes, copies, zeroes, reads and views layers of all heads; returns the reads and views."""
    spec = cases.attention(num_kv_heads=num_heads)
    plan = cases.planned({"a": spec, "b": spec})
    cache = jaxkv.make_cache(plan, max_requests=2, kernel_block_sizes=[2], **place)
    upload = jaxkv.pack_step(
        jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=8, forks=1),
        entries=[jaxkv.TableEntry(0, [[5, 2]]), jaxkv.TableEntry(1, [[3, 6]])],
        rows=[0, 1],
        num_computed_tokens=[0, 3],
        num_new_tokens=[5, 2],
        copies=[[(1, 3)]],
    )
    rows = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(jnp.bfloat16)

    @jax.jit
    def run(cache, upload, rows):
        cache, batch = jaxkv.apply_step(cache, upload)
        cache = jaxkv.write_tokens(cache, "a", batch, rows[..., :4], rows[..., 4:])
        cache = jaxkv.write_rows(cache, "b", batch, rows)
        cache = jaxkv.with_layer_view(cache, "b", 2 * jaxkv.layer_view(cache, "b"))
        views = [jaxkv.layer_view(cache, layer) for layer in "ab"]
        return [jaxkv.read_tokens(cache, layer, batch) for layer in "ab"], views

    return jax.tree.map(np.asarray, run(cache, upload, rows))


@functools.cache
def change_all_heads() -> tuple[list, list]:
    return change_heads(4)


@needs_devices(2)
@pytest.mark.parametrize("order", ["LBNHC", "LHBNC"])
def test_two_ranks_hold_their_heads_in_any_order(order) -> None:
    """As one device holds all heads in the first of them."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    reads, views = change_heads(2, mesh=mesh, axis="heads", order=order)
    if order == "LHBNC":  # whose views have axes of layers and of heads before that of blocks
        views = [np.moveaxis(view, 1, 3).reshape(-1, 2, 4, 8) for view in views]
    assert all(wanted.any() for wanted in jax.tree.leaves(change_all_heads()))
    assert_same_bytes((reads, views), change_all_heads())
