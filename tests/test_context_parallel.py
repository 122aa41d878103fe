"""Context parallelism: positions of a request dealt out among ranks, by the manager's block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.block_tables import (
    BAD_RANK,
    NO_BLOCK,
    BlockTables,
    append_block_ids,
    check_overflow,
    make_block_tables,
    map_slots,
)
from jaxkv.blocks import BlockManager, TableEntry
from jaxkv.planning import Plan, plan_cache
from jaxkv.specs import FullAttentionSpec, Limits
from jaxkv.step import StepShape, apply_step, pack_entries, pack_step
from jaxkv.testing import ReferenceTables

ROWS, LENGTH = 2, 96
# (ranks, block size, interleave, kernel block size): turns of one token, of a few, of a block.
FORMS = [(2, 8, 1, 8), (2, 8, 8, 2), (3, 8, 4, 4), (4, 4, 2, 1), (1, 8, 4, 8), (8, 4, 4, 2)]


@functools.cache
def plan_for(ranks: int, block_size: int) -> Plan:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=4, dtype="bf16")
    return plan_cache(
        {"layer": spec},
        2**20,
        max_model_len=LENGTH,
        context_parallel=ranks,
        limits=Limits(max_in_flight_tokens=LENGTH),
    )


def filled(form: tuple[int, int, int, int]) -> tuple[BlockTables, list[list[list[int]]]]:
    """Tables whose rows hold all the blocks of a longest request, and their ids."""
    ranks, block_size, interleave, kernel = form
    plan = plan_for(ranks, block_size)
    manager = BlockManager(plan, max_requests=ROWS)
    tables = make_block_tables(
        plan, max_requests=ROWS, kernel_block_sizes=[kernel], interleave_tokens=interleave
    )
    for name in range(ROWS):
        manager.start(name)
        manager.grow(name, 0, LENGTH)
    entries = manager.take_update().entries
    packed = pack_entries(entries, num_groups=1, max_entries=ROWS, max_block_ids=64)
    tables = append_block_ids(tables, packed)
    return tables, [list(map(list, manager.block_ids(name))) for name in range(ROWS)]


def all_slots(form: tuple[int, int, int, int], rank: int) -> np.ndarray:
    """int32[ROWS, LENGTH]: the slot of every position on one rank."""
    tables, _ = filled(form)
    rows = jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    tables, slots = map_slots(tables, rows, jnp.arange(LENGTH, dtype=jnp.int32)[None], rank=rank)
    check_overflow(tables)
    return np.asarray(slots)[0]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_position_has_exactly_one_slot_over_all_ranks(form) -> None:
    ranks, block_size = form[:2]
    _, ids = filled(form)
    by_rank = [all_slots(form, rank) for rank in range(ranks)]
    assert (sum((slots >= 0).astype(int) for slots in by_rank) == 1).all()
    for slots in by_rank:
        used = slots[slots >= 0]
        assert len(set(used.tolist())) == len(used), "a slot is used twice"
        for row in range(ROWS):
            mine = slots[row][slots[row] >= 0]
            assert set((mine // block_size).tolist()) <= set(ids[row][0]), "outside its blocks"


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(data=st.data())
def test_slots_equal_those_dealt_out_one_by_one(form, data) -> None:
    ranks, block_size, interleave, kernel = form
    rank = data.draw(st.integers(0, ranks - 1))
    positions = data.draw(st.lists(st.integers(-1, LENGTH - 1), min_size=6, max_size=6))
    tables, ids = filled(form)
    plan = plan_for(ranks, block_size)
    reference = ReferenceTables(
        [group.spec for group in plan.groups],
        tables.widths,
        max_requests=ROWS,
        pool_blocks=plan.num_blocks,
        kernel_block_sizes=[kernel],
        context_parallel=ranks,
        interleave_tokens=interleave,
        rank=rank,
    )
    reference.append([TableEntry(row, held) for row, held in enumerate(ids)])
    rows = [1] * len(positions)
    _, slots = map_slots(
        tables, jnp.array(rows, jnp.int32), jnp.array(positions, jnp.int32), rank=rank
    )
    np.testing.assert_array_equal(slots, reference.slots(rows, positions))
    assert reference.flags == 0


def test_a_turn_longer_than_a_kernel_block_goes_round_all_ranks() -> None:
    """Dealt by the kernel's block of 64, all of the tokens would go to rank 0."""
    block, kernel, interleave, ranks = 128, 64, 128, 2
    positions = np.arange(512)
    by_kernel = positions % (kernel * ranks) // interleave % ranks
    assert not by_kernel.any()
    plan = plan_cache(
        {"layer": FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=4)},
        2**22,
        max_model_len=512,
        context_parallel=ranks,
    )
    tables = make_block_tables(
        plan, max_requests=1, kernel_block_sizes=[kernel], interleave_tokens=interleave
    )
    entries = [TableEntry(0, [[5, 9]])]
    packed = pack_entries(entries, num_groups=1, max_entries=1, max_block_ids=2)
    tables = append_block_ids(tables, packed)
    for rank, expected in enumerate(([0, 256], [128, 384])):
        _, slots = map_slots(
            tables, jnp.zeros(512, jnp.int32), jnp.arange(512, dtype=jnp.int32), rank=rank
        )
        held = np.flatnonzero(np.asarray(slots)[0] >= 0)
        np.testing.assert_array_equal(
            held, [*range(expected[0], expected[0] + 128), *range(expected[1], expected[1] + 128)]
        )
        own = np.asarray(slots)[0][held]
        np.testing.assert_array_equal(own, [*range(5 * 128, 6 * 128), *range(9 * 128, 10 * 128)])


RANKS = max(n for n in (1, 2, 4) if n <= len(jax.devices()))


def test_under_shard_map_the_rank_comes_from_the_mesh() -> None:
    form = (RANKS, 8, 4, 4)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("context",))
    plan, replicated = plan_for(*form[:2]), PartitionSpec()
    tables = make_block_tables(
        plan, max_requests=ROWS, interleave_tokens=4, device=NamedSharding(mesh, replicated)
    )
    manager = BlockManager(plan, max_requests=ROWS)
    rows = [manager.start(name) for name in range(ROWS)]
    for name in range(ROWS):
        manager.grow(name, 0, 40)
    shape = StepShape(
        entries=ROWS, block_ids=32, zero_ids=16, batch=ROWS, tokens=80, widths=tables.widths
    )

    def step(tables, upload):
        rank = jax.lax.axis_index("context")
        tables, _, batch = apply_step(tables, None, upload, shape=shape, rank=rank)
        return tables, batch.slots[None]

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(replicated, replicated),
            out_specs=(replicated, PartitionSpec("context")),
            check_vma=False,
        )
    )
    upload = pack_step(
        shape,
        update=manager.take_update(),
        rows=rows,
        first_positions=[0] * ROWS,
        lengths=[40] * ROWS,
    )
    tables, slots = run(tables, upload)
    check_overflow(tables)
    slots = np.asarray(slots)[:, 0]
    assert slots.shape == (RANKS, 80) and ((slots >= 0).sum(axis=0) == 1).all()
    positions = np.tile(np.arange(40), ROWS)
    np.testing.assert_array_equal((slots >= 0).argmax(axis=0), positions // 4 % RANKS)


def test_a_missing_block_is_reported_by_the_rank_that_was_dealt_the_token() -> None:
    plan = plan_for(2, 8)
    for rank, flag in enumerate((NO_BLOCK, 0)):
        tables = make_block_tables(plan, max_requests=1, interleave_tokens=8)
        tables, slots = map_slots(tables, *2 * (jnp.zeros(1, jnp.int32),), rank=rank)
        assert int(tables.overflow) == flag and int(slots[0, 0]) == -1


@pytest.mark.parametrize("rank", [-1, 2, 2**31 - 1])
def test_a_rank_out_of_range_is_reported(rank) -> None:
    tables, _ = filled((2, 8, 1, 8))
    tables, slots = map_slots(tables, *2 * (jnp.zeros(1, jnp.int32),), rank=rank)
    assert int(tables.overflow) == BAD_RANK and int(slots[0, 0]) == -1


@pytest.mark.parametrize(
    ("interleave", "error"), [(3, ValueError), (16, ValueError), (0, ValueError), (1.5, TypeError)]
)
def test_an_interleave_that_does_not_divide_a_block_is_refused(interleave, error) -> None:
    with pytest.raises(error, match="interleave_tokens"):
        make_block_tables(plan_for(2, 8), max_requests=1, interleave_tokens=interleave)
