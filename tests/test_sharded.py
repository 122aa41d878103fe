"""A pool sharded by KV head over a mesh holds what one device with all heads holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.block_tables import check_overflow, make_block_tables
from jaxkv.blocks import BlockManager
from jaxkv.planning import Plan, plan_cache
from jaxkv.pool import KVPool, make_pool, make_sharded_pool, read_tokens, write_tokens
from jaxkv.specs import FullAttentionSpec, Limits, SlidingWindowSpec
from jaxkv.step import StepShape, apply_step, pack_step
from tests.helpers import ON_GPU, kernels_run, needs_mosaic, pointers

HEADS, SIZE, TOKENS = 8, 4, 16
LAYERS = ("full", "window")
MESHES = [n for n in (1, 2, 4, 8) if n <= len(jax.devices())]
REPLICATED = PartitionSpec()
# Interpreted kernels run a device at a time, so only one mesh is tried with them.
RUNS = [("xla", n) for n in MESHES] + [
    pytest.param("mosaic_gpu", n, marks=needs_mosaic) for n in MESHES if ON_GPU or n == 2
]


def plan_for(ranks: int) -> Plan:
    """The plan of one rank: its share of the heads."""
    common = {"block_size": 4, "num_kv_heads": HEADS // ranks, "head_size": SIZE, "dtype": "bf16"}
    layers = {
        "full": FullAttentionSpec(**common),
        "window": SlidingWindowSpec(sliding_window=6, **common),
    }
    return plan_cache(
        layers,
        2**20,
        max_model_len=24,
        num_blocks_override=24,
        limits=Limits(max_in_flight_tokens=8),
    )


TABLES = make_block_tables(plan_for(1), max_requests=2)
SHAPE = StepShape(
    entries=2,
    block_ids=16,
    zero_ids=8,
    copies=2,
    batch=2,
    tokens=TOKENS,
    widths=TABLES.widths,
)


def step(implementation, tables, pool, upload, tokens):
    """Tables, zeroing, copies, then each layer writes its tokens and reads all it has."""
    tables, pool, batch = apply_step(
        tables, pool, upload, shape=SHAPE, implementation=implementation
    )
    read = {}
    for layer in LAYERS:
        group = pool.layout.place_of(layer).group
        pool = write_tokens(
            pool, layer, batch.slots[group], tokens, -tokens, implementation=implementation
        )
        read[layer] = read_tokens(pool, layer, batch.block_tables[group])
    return tables, pool, read


def sharded_step(mesh: Mesh, pages: PartitionSpec, implementation: str):
    heads = PartitionSpec(None, "heads")
    return jax.jit(
        jax.shard_map(
            functools.partial(step, implementation),
            mesh=mesh,
            in_specs=(REPLICATED, pages, REPLICATED, heads),
            out_specs=(REPLICATED, pages, PartitionSpec(None, None, "heads")),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )


def serve(run, tables, pool, check=lambda pool: None) -> list[dict[str, tuple[np.ndarray, ...]]]:
    """A few steps of two requests, one of which starts over; what each step read."""
    manager = BlockManager(plan_for(1), max_requests=2, zero_policy="always")
    rng, seen = np.random.default_rng(0), []
    lengths = {"a": 0, "b": 0}
    for name in lengths:
        manager.start(name)
    for turn in range(6):
        if turn == 3:
            manager.finish("a")
            manager.start("a")
            lengths["a"] = 0
        new = {name: int(rng.integers(1, 5)) for name in lengths}
        for name, length in lengths.items():
            manager.grow(name, length, length + new[name])
        held = [ids[-1] for ids in manager.block_ids("b")]
        upload = pack_step(
            SHAPE,
            update=manager.take_update(),
            rows=[manager.requests[name] for name in lengths],
            first_positions=list(lengths.values()),
            lengths=list(new.values()),
            # Blocks that nobody holds serve as a scratch pad: out and back again.
            copies=[[(block_id, 23), (23, 22)] for block_id in held] if turn > 3 else (),
        )
        tokens = jnp.asarray(rng.normal(size=(TOKENS, HEADS, SIZE)), jnp.bfloat16)
        with kernels_run():
            tables, pool, read = run(tables, pool, upload, tokens)
        seen.append(jax.tree.map(np.asarray, read))
        lengths = {name: length + new[name] for name, length in lengths.items()}
        check(pool)
    check_overflow(tables)
    return seen


@functools.cache
def on_one_device() -> list[dict[str, tuple[np.ndarray, ...]]]:
    run = jax.jit(functools.partial(step, "xla"), donate_argnums=(0, 1))
    plan = plan_for(1)
    return serve(run, make_block_tables(plan, max_requests=2), make_pool(plan))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("implementation", "ranks"), RUNS)
def test_ranks_together_read_what_one_device_reads(ranks, stacked, implementation) -> None:
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("heads",))
    plan, replicated = plan_for(ranks), NamedSharding(mesh, REPLICATED)
    pages = PartitionSpec(*[None] * (2 if stacked else 1), "heads")
    pool = make_sharded_pool(plan, mesh, "heads", stacked=stacked)
    assert all(b.sharding.spec == pages for b in pool.buffers)
    got = serve(
        sharded_step(mesh, pages, implementation),
        make_block_tables(plan, max_requests=2, device=replicated),
        pool,
    )
    for read, wanted in zip(got, on_one_device(), strict=True):
        for layer in LAYERS:
            for array, other in zip(read[layer], wanted[layer], strict=True):
                np.testing.assert_array_equal(array, other)


def test_a_sharded_step_keeps_every_device_s_part_where_it_is() -> None:
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    plan = plan_for(len(mesh.devices))
    where = []

    def remember(pool: KVPool) -> None:
        shards = [shard.data for b in pool.buffers for shard in b.addressable_shards]
        where.append(pointers(shards))

    serve(
        sharded_step(mesh, PartitionSpec(None, "heads"), "xla"),
        make_block_tables(plan, max_requests=2, device=NamedSharding(mesh, REPLICATED)),
        make_sharded_pool(plan, mesh, "heads"),
        remember,
    )
    assert all(pointers == where[0] for pointers in where)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_sharded_pool_outside_of_shard_map_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    pool = make_sharded_pool(plan_for(2), mesh, "heads")
    slots, tokens = jnp.zeros(1, jnp.int32), jnp.zeros((1, HEADS // 2, SIZE))
    with pytest.raises(ValueError, match="a sharded pool is used under shard_map"):
        write_tokens(pool, "full", slots, tokens, tokens)


def test_an_axis_that_the_mesh_lacks_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("heads",))
    with pytest.raises(ValueError, match="axis='model' is not an axis of the mesh"):
        make_sharded_pool(plan_for(1), mesh, "model")
