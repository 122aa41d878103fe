"""Context parallelism: positions of a request interleaved among ranks, a few at a time.

For layers that keep all tokens, with heads or latent: plans refuse it for windows and chunks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv.testing import ReferenceTables, assert_same_bytes
from tests.helpers import needs_devices

REQUESTS, LENGTH, HEADS, SIZE = 2, 48, 2, 4
DEVICES = jax.devices()
SAME, BY_RANK = PartitionSpec(), PartitionSpec("context")


class Interleaving(NamedTuple):
    """The way positions are interleaved."""

    ranks: int
    block_size: int
    interleave_tokens: int
    kernel_block_size: int | None = None


# Turns of one token, of a few and of a block, which may be longer than a kernel block.
INTERLEAVINGS = [
    Interleaving(2, 8, 1, 8),
    Interleaving(2, 8, 8, 2),
    Interleaving(3, 4, 2, 1),
    Interleaving(1, 8, 4, 8),
]
STEPS = ({0: 29, 1: 3}, {1: 40, 0: 1}, {0: 18})


@functools.cache
def plan_for(ranks: int, block_size: int, dtype: str = "bf16") -> jaxkv.Plan:
    """Keys and values, and latent vectors: the kinds of layers whose positions are divided."""
    common = {"block_size": block_size, "dtype": dtype}
    full = jaxkv.FullAttentionSpec(num_kv_heads=HEADS, head_size=SIZE, **common)
    latent = jaxkv.MLASpec(head_size=4 * SIZE, value_size=3 * SIZE, **common)
    return jaxkv.plan_cache(
        {"full": full, "latent": latent},
        2**20,
        max_model_len=LENGTH,
        context_parallel=ranks,
        limits=jaxkv.Limits(max_in_flight_tokens=LENGTH),
    )


def shape_for(plan: jaxkv.Plan) -> jaxkv.StepShape:
    return jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=LENGTH)


def started(plan: jaxkv.Plan) -> jaxkv.BlockManager:
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    for name in range(REQUESTS):
        manager.start(name)
    return manager


@pytest.mark.parametrize("interleaving", INTERLEAVINGS, ids=str)
def test_slots_equal_those_found_one_by_one(interleaving) -> None:
    """Every position of a chunk has one slot over all ranks, and no slot is used twice.

    The second layer of the stack has the same ones, behind those of all blocks of the first.
    """
    plan = plan_for(interleaving.ranks, interleaving.block_size)
    manager, shape = started(plan), shape_for(plan)
    caches = [cache_of_rank(interleaving, rank) for rank in range(interleaving.ranks)]
    used = [set() for _ in caches]
    for work in STEPS:
        before = {name: manager.num_computed_tokens(name) for name in work}
        upload = manager.step(shape, work)
        computed = [(name, before[name] + i) for name, n in work.items() for i in range(n)]
        found = []
        for rank, cache in enumerate(caches):
            caches[rank], *slots_of = slots_after(cache, upload)
            slots, latent = map(np.asarray, slots_of)
            stacked = slots + plan.num_blocks * interleaving.block_size
            np.testing.assert_array_equal(latent, np.where(slots < 0, -1, stacked))
            reference = reference_tables(interleaving, rank, manager)
            expected = [reference.slot(0, name, position) for name, position in computed]
            np.testing.assert_array_equal(slots[: len(computed)], expected)
            assert (slots[len(computed) :] == -1).all()
            mine = [slot for slot in expected if slot >= 0]
            assert not used[rank] & set(mine) and len(set(mine)) == len(mine)
            used[rank] |= set(mine)
            found.append(np.array(expected) >= 0)
        assert (np.sum(found, axis=0) == 1).all()
    for cache in caches:
        jaxkv.check_errors(cache)


@jax.jit
def slots_after(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    return cache, batch.slot_mapping("full"), batch.slot_mapping("latent")


def options_of(interleaving: Interleaving, rank: int) -> dict[str, Any]:
    sizes = [interleaving.kernel_block_size] * len(
        plan_for(interleaving.ranks, interleaving.block_size).groups
    )
    own = {"rank": rank, "interleave_tokens": interleaving.interleave_tokens}
    return {"max_requests": REQUESTS, "kernel_block_sizes": sizes, **own}


def cache_of_rank(interleaving: Interleaving, rank: int) -> jaxkv.KVCache:
    plan = plan_for(interleaving.ranks, interleaving.block_size)
    return jaxkv.make_cache(plan, **options_of(interleaving, rank), tables_only=True)


def reference_tables(
    interleaving: Interleaving, rank: int, manager: jaxkv.BlockManager
) -> ReferenceTables:
    plan, rows = plan_for(interleaving.ranks, interleaving.block_size), manager.requests
    reference = ReferenceTables(plan, **options_of(interleaving, rank))
    reference.append(jaxkv.TableEntry(rows[name], manager.block_ids(name)) for name in rows)
    return reference


# --- over a mesh ------------------------------------------------------------------------


CAP, SINKS = 2.0, (-1.0, 0.0, 1.0, 2.0)


class Inputs(NamedTuple):
    """Queries, keys and values of a step: of the layer with heads, and of the latent one.

    Keys and values are multiples of 1/4 up to 2, which bfloat16 holds, and fp8 over a scale.
    """

    queries: Any
    keys: Any
    values: Any
    latent_queries: Any
    latents: Any

    @classmethod
    def sampled(cls, rng: np.random.Generator, dtype: str) -> "Inputs":
        heads = ((2 * HEADS, SIZE), (HEADS, SIZE), (HEADS, SIZE), (3, 4 * SIZE), (4 * SIZE,))
        arrays = [rng.integers(-8, 9, (LENGTH, *shape)) / 4 for shape in heads]
        return cls(*(array.astype(jnp.dtype(dtype)) for array in arrays))


@functools.partial(jax.jit, donate_argnums=0)
def attend_step(cache, upload, inputs):
    """Both layers, one of them with a cap on its scores and with sinks."""
    cache, batch = jaxkv.apply_step(cache, upload)
    sinks = jnp.array(SINKS, inputs.queries.dtype)
    cache, full = jaxkv.attend(cache, "full", batch, *inputs[:3], sinks=sinks, soft_cap=CAP)
    cache, latent = jaxkv.attend(cache, "latent", batch, inputs.latent_queries, inputs.latents)
    return cache, (full, latent)


def attention(queries, keys, values, cap=np.inf, sinks=None) -> np.ndarray:
    """[n, heads, V] in float64: attention of the last n tokens of a request, each up to itself."""
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    keys, values = (x.repeat(queries.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    scores = np.einsum("nhk,mhk->hnm", queries, keys) * queries.shape[-1] ** -0.5
    if sinks is not None:
        scores = cap * np.tanh(scores / cap)
    new, total = len(queries), len(keys)
    scores[:, np.arange(total) > np.arange(total - new, total)[:, None]] = -np.inf
    weights = np.exp(scores)
    sums = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        sums += np.exp(np.array(sinks))[:, None, None]
    return np.einsum("hnm,mhv->nhv", weights / sums, values)


def expected_of(work: dict[int, int], inputs: Inputs, seen: dict[int, list[Any]]) -> list[Any]:
    """Returns what each layer's tokens attend to, and notes what the caches hold from now on."""
    first, outs = 0, []
    for name, count in work.items():
        new = [array[first : first + count] for array in inputs]
        stored = [new[1], new[2], new[4][:, None]]
        if name in seen:
            stored = [np.concatenate(pair) for pair in zip(seen[name], stored, strict=True)]
        seen[name] = keys, values, latents = stored
        full = attention(new[0], keys, values, CAP, SINKS)
        outs.append((full, attention(new[3], latents, latents[..., : 3 * SIZE])))
        first += count
    return [np.concatenate(parts) for parts in zip(*outs, strict=True)]


MESHES = [
    (Interleaving(1, 8, 4), AxisType.Auto, "bf16", "float32"),
    (Interleaving(2, 8, 1), AxisType.Auto, "bf16", "float32"),
    (Interleaving(4, 4, 2), AxisType.Explicit, "fp8_e4m3", "bfloat16"),
]


@pytest.mark.parametrize(
    ("interleaving", "types", "dtype", "queries"),
    [case for case in MESHES if case[0].ranks <= len(DEVICES)],
    ids=str,
)
def test_ranks_together_attend_to_the_whole_of_each_request(
    interleaving, types, dtype, queries
) -> None:
    """Any number of ranks, one too, is as close to attention in float64 as its dtypes allow.

    What is stored is exact, and outputs are means of values up to 2. In float32 a weight is the
    exponential of a score below 16, computed with some 16 roundings of 2**-24 relative to it,
    and there are up to 50 terms. With bfloat16 queries each weight is rounded to 2**-8 for its
    product with a value, and so is the output.
    """
    bound = 2 * (16 * 16 + 50) * 2.0**-24 if queries == "float32" else 2 * 2 * 2.0**-8
    mesh = jax.make_mesh(
        (interleaving.ranks,),
        ("context",),
        axis_types=(types,),
        devices=DEVICES[: interleaving.ranks],
    )
    plan = plan_for(interleaving.ranks, interleaving.block_size, dtype)
    manager, shape = started(plan), shape_for(plan)
    cache = jaxkv.make_cache(
        plan,
        max_requests=REQUESTS,
        interleave_tokens=interleaving.interleave_tokens,
        scales={"full": (0.5, 0.25)},
        mesh=mesh,
        axis="context",
    )
    rng, seen = np.random.default_rng(0), {}
    for work in STEPS:
        inputs = Inputs.sampled(rng, queries)
        cache, out = attend_step(cache, manager.step(shape, work), inputs)
        for array, expected in zip(out, expected_of(work, inputs, seen), strict=True):
            got = np.asarray(array, np.float64)
            np.testing.assert_allclose(got[: len(expected)], expected, rtol=0, atol=bound)
            assert not got[len(expected) :].any(), "padding"
    jaxkv.check_errors(cache)


RANKS = max(n for n in (1, 2, 4) if n <= len(DEVICES))
DIVIDED = Interleaving(RANKS, 8, 4)


def divided_cache(plan: jaxkv.Plan, interleave_tokens: int) -> jaxkv.KVCache:
    mesh = Mesh(np.array(DEVICES[:RANKS]), ("context",))
    return jaxkv.make_cache(
        plan,
        max_requests=REQUESTS,
        interleave_tokens=interleave_tokens,
        mesh=mesh,
        axis="context",
    )


def test_inside_shard_map_each_rank_knows_its_slots_and_reads_its_rows() -> None:
    """Only reads need that: `write_rows` writes the same outside of it."""
    plan = plan_for(*DIVIDED[:2])
    manager, fresh = started(plan), divided_cache(plan, DIVIDED.interleave_tokens)
    upload = manager.step(shape_for(plan), {0: 30, 1: 18})
    rows = np.arange(1, LENGTH + 1).astype(jnp.bfloat16).repeat(4 * SIZE).reshape(LENGTH, -1)

    def body(cache, upload, rows):
        cache, batch = jaxkv.apply_step(cache, upload)
        cache = jaxkv.write_rows(cache, "latent", batch, rows)
        read = jaxkv.read_rows(cache, "latent", batch)
        return cache, batch.slot_mapping("latent")[None], read[None, ..., 0]

    specs = fresh.partition_specs()
    run = jax.jit(
        jax.shard_map(
            body,
            mesh=fresh.layout.mesh,
            in_specs=(specs, SAME, SAME),
            out_specs=(specs, BY_RANK, BY_RANK),
            check_vma=False,
        )
    )
    cache, slots, read = run(fresh, upload, rows)
    jaxkv.check_errors(cache)

    @jax.jit
    def outside(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        return jaxkv.write_rows(cache, "latent", batch, rows)

    assert_same_bytes(outside(fresh, upload).buffers, cache.buffers)
    slots, read = np.asarray(slots), np.asarray(read, np.float32)
    assert slots.shape == (RANKS, LENGTH) and ((slots >= 0).sum(axis=0) == 1).all()
    positions = np.concatenate([np.arange(30), np.arange(18)])
    np.testing.assert_array_equal((slots >= 0).argmax(axis=0), positions // 4 % RANKS)
    for rank in range(RANKS):
        for request, first, count in ((0, 1, 30), (1, 31, 18)):
            mine = [first + p for p in range(count) if p // 4 % RANKS == rank]
            assert read[rank, request, : len(mine)].tolist() == mine


@needs_devices(2)
def test_what_only_one_rank_knows_is_refused_outside_of_shard_map() -> None:
    plan = plan_for(*DIVIDED[:2])

    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        for use in (
            lambda: batch.slot_mapping("full"),
            lambda: jaxkv.read_tokens(cache, "full", batch),
            lambda: jaxkv.read_rows(cache, "latent", batch),
            lambda: jaxkv.layer_view(cache, "full"),
            lambda: jaxkv.with_layer_view(cache, "full", jnp.zeros(1)),
        ):
            with pytest.raises(ValueError, match=r"positions.* inside jax\.shard_map"):
                use()

    jax.eval_shape(step, divided_cache(plan, 4), shape_for(plan).idle())


# --- refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "plan has context_parallel=2: pass either mesh= and axis=, or rank="),
        ({"rank": 2}, ValueError, r"rank=2 is not in 0\.\.1; the plan has"),
        ({"rank": 0, "interleave_tokens": 3}, ValueError, "interleave_tokens=3 does not divide"),
        (
            {"mesh": Mesh(np.array(DEVICES[:1]), ("context",)), "axis": "context", "rank": 0},
            ValueError,
            "pass either mesh= and axis=, or rank=",
        ),
        (
            {"mesh": Mesh(np.array(DEVICES[:1]), ("context",)), "axis": "context"},
            ValueError,
            "axis='context' has 1 devices and the plan context_parallel=2",
        ),
    ],
)
def test_options_that_contradict_the_plan_are_refused(options, error, message) -> None:
    with pytest.raises(error, match=message):
        jaxkv.make_cache(plan_for(2, 8), max_requests=REQUESTS, **options)


@pytest.mark.parametrize("has_mesh", [False, True])
def test_attention_of_a_rank_on_its_own_is_refused(has_mesh: bool) -> None:
    plan = plan_for(2, 8)
    device = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec()) if has_mesh else None
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, rank=0, device=device)

    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        queries = jnp.zeros((LENGTH, 2 * HEADS, SIZE))
        return jaxkv.attend(cache, "full", batch, queries)

    with pytest.raises(ValueError, match="no mesh axis over which attend could combine the ranks"):
        jax.eval_shape(step, cache, shape_for(plan).idle())
