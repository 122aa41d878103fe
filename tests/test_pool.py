"""Reads and writes of a pool: groups kept apart, periods, formats of rows, refusals."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkv
from jaxkv._src.cache import CacheError, CacheFlags
from jaxkv._src.pool import copy_blocks, zero_blocks
from jaxkv._src.pool._layer import _status_after
from jaxkv._src.specs import MLASpec, SharedKVSpec, StateSpec
from jaxkv.testing import assert_in_place, assert_same_bytes
from tests import pool_cases as cases
from tests.helpers import as_ids, hybrid_plan
from tests.pool_cases import REQUESTS, TOKENS, Case, cross, hybrid, latent, windows


def poisoned(case: Case):
    """A cache of random bytes, a step of three requests, and its batch."""
    cache = cases.with_memory(cases.empty(case), case.reference().memory)
    step = cases.fixed_step(case.plan)
    return cache, step, step.batch(cache, case.plan)


# --- groups ---------------------------------------------------------------------------


def test_a_layer_writes_only_blocks_of_its_own_group() -> None:
    """Groups overlay each other and hold other blocks: a slot of one is never another's."""
    plan, counts = hybrid_plan(kv_dtype="bf16"), {"a": 7, "b": 5}
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=12)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    for request in counts:
        manager.start(request)
    specs = {x: plan.layout.placement_of(x).spec for group in plan.groups for x in group.layers}

    @jax.jit
    def written_blocks(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        written = {}
        for layer, spec in specs.items():
            ones: dict[str, Any] = {"keys": jnp.ones((12, 2, 4)), "values": jnp.ones((12, 2, 4))}
            if isinstance(spec, StateSpec):
                ones = {"arrays": [jnp.ones((2, *shape)) for shape in spec.shapes]}
            after = cases.write(cache, layer, batch, **ones)
            written[layer] = (after.buffers[0] != cache.buffers[0]).any(axis=(0, 2))
        return cache, written

    cache = jaxkv.make_cache(plan, max_requests=2)
    cache, written = written_blocks(cache, manager.step(shape, counts))
    jaxkv.check_errors(cache)
    for layer, blocks in written.items():
        group = plan.layout.placement_of(layer).group
        held = [set(manager.block_ids(request)[group]) for request in counts]
        got = set(np.flatnonzero(blocks).tolist())
        assert got == held[0] | held[1] and not held[0] & held[1], layer


# --- periods --------------------------------------------------------------------------

PERIODS = [
    Case(cases.three),
    Case(cases.three, "LHBNC"),
    Case(windows, "BHLNC", None, (2, 2)),
    Case(hybrid, "BLHNC"),
    Case(latent, "LBHNC"),
]


def writes_of_periods(case: Case, step: cases.Step) -> tuple[int, dict[str, cases.Arguments]]:
    """Returns the number of periods, and the arguments of `write`, a period per first index."""
    count = len(case.plan.groups[0].layers)
    each = [cases.writes_for(case.plan, step, seed) for seed in range(count)]
    writes = jax.tree.map(lambda *arrays: np.stack(arrays), *each)
    return count, {
        layer: writes[layer] for layer in cases.layers_of(case.plan)[: len(case.plan.groups)]
    }


def scanned(cache, batch, writes):
    """Writes and reads every layer of the groups, by the name of one, in a scan."""

    def body(cache, inputs):
        layer_index, arguments = inputs
        for layer in sorted(arguments):
            cache = cases.write(cache, layer, batch, **arguments[layer], layer_index=layer_index)
        return cache, {x: cases.read(cache, x, batch, layer_index=layer_index) for x in arguments}

    count = jax.tree.leaves(writes)[0].shape[0]
    return lax.scan(body, cache, (jnp.arange(count, dtype=jnp.int32), writes))


@pytest.mark.parametrize("case", [PERIODS[0], *PERIODS[2:]], ids=str)
def test_a_scan_over_periods_writes_and_reads_every_layer(case: Case) -> None:
    """Scales follow the period: each layer has its own."""
    (cache, step, batch), expected = poisoned(case), case.reference()
    count, writes = writes_of_periods(case, step)
    after, reads = jax.jit(scanned)(cache, batch, writes)
    jaxkv.check_errors(after)
    for layer_index in range(count):
        names = {layer: cache.stacked_layers(layer)[layer_index] for layer in sorted(writes)}
        for layer, name in names.items():
            arguments = jax.tree.map(lambda array, at=layer_index: array[at], writes[layer])
            cases.reference_write(expected, case.plan, name, step, arguments)
        for layer, name in names.items():
            wanted = cases.reference_read(expected, case.plan, name, step)
            for got, want in zip(reads[layer], wanted, strict=True):
                floats = [np.asarray(array).astype(np.float32) for array in (got, want)]
                np.testing.assert_allclose(
                    floats[0][layer_index], floats[1], rtol=0, atol=2.0**-126
                )
    np.testing.assert_array_equal(cases.memory_of(after), expected.memory)


@pytest.mark.parametrize("case", [PERIODS[0], *PERIODS[3:]], ids=str)
def test_a_layer_index_that_does_not_exist_touches_nothing_and_is_reported(case: Case) -> None:
    cache, step, batch = poisoned(case)
    count, writes = writes_of_periods(case, step)
    tokens = [x for x in writes if case.plan.layout.placement_of(x).spec.kind != "state"]

    @jax.jit
    def run(cache, batch, layer_index):
        for layer, arguments in jax.tree.map(lambda array: array[0], writes).items():
            cache = cases.write(cache, layer, batch, **arguments, layer_index=layer_index)
        reads = [cases.read(cache, layer, batch, layer_index=layer_index) for layer in writes]
        slots = [batch.slot_mapping(layer, layer_index=layer_index) + 1 for layer in tokens]
        tables = [batch.kernel_block_tables(layer, layer_index=layer_index) for layer in writes]
        return cache, reads, slots, tables

    for layer_index in (-1, count, 2**31 - 1, -(2**31)):
        after, *seen = run(cache, batch, jnp.int32(layer_index))
        assert_same_bytes(after.buffers, cache.buffers)
        assert not any(np.asarray(array).any() for array in jax.tree.leaves(seen))
        assert int(after.error_flags) == CacheFlags.BAD_LAYER_INDEX
        with pytest.raises(CacheError, match="a layer_index beyond the layers of its group"):
            jaxkv.check_errors(after)
    after, *seen = run(cache, batch, jnp.int32(count - 1))
    assert all(np.asarray(array).any() for array in jax.tree.leaves(seen))
    jaxkv.check_errors(after)


def read_layers(case: Case, cache, batch):
    return {layer: cases.read(cache, layer, batch) for layer in cases.layers_of(case.plan)}


@pytest.mark.parametrize("case", [*PERIODS, Case(cases.odd)], ids=str)
def test_gpus_and_cpus_read_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs gather elements, and CPUs bytes; here a CPU does both."""
    cache, _, batch = poisoned(case)
    reads = {}
    # Programs are kept by the precision of products, of which these have none.
    for branch, precision in (("cuda", "BF16_BF16_F32_X6"), ("default", "BF16_BF16_F32_X9")):
        choose = lambda *operands, by=branch, **branches: branches[by](*operands)  # noqa: E731
        monkeypatch.setattr(lax, "platform_dependent", choose)
        with jax.default_matmul_precision(precision):
            reads[branch] = jax.jit(lambda *step: read_layers(case, *step))(cache, batch)
    assert_same_bytes(reads["cuda"], reads["default"])
    assert all(np.asarray(array).tobytes().strip(b"\0") for array in jax.tree.leaves(reads))


@pytest.mark.parametrize("case", PERIODS[:2], ids=str)
def test_a_scan_over_periods_is_in_place(case: Case) -> None:
    cache, step = case.cache(20_000), cases.fixed_step(case.plan)
    assert cache.num_bytes > 50 * 100_000
    batch, (_, writes) = step.batch(cache, case.make_plan(20_000)), writes_of_periods(case, step)
    assert_in_place(scanned, cache, batch, writes, max_temp_bytes=100_000)


# --- formats --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "f16", "bf16", "f32", "int8"])
def test_what_is_too_large_saturates(dtype: str) -> None:
    """Conversion alone makes NaN of it (fp8) or Inf, and 0 * Inf is NaN again."""
    dtype = cases.attention(dtype=dtype).dtype
    values = jnp.array([jnp.inf, -jnp.inf, 3e38, 2.5, -3.5], jnp.float32)
    got = jaxkv.pool.quantize(values, dtype, 0.5).astype(jnp.float32)
    info = jnp.iinfo(dtype) if dtype == "int8" else jnp.finfo(dtype)
    np.testing.assert_array_equal(got, [float(info.max), float(info.min), float(info.max), 5, -7])
    if dtype != "int8":  # a NaN is the caller's to find, not ours to hide
        assert np.isnan(
            jaxkv.pool.quantize(jnp.array([jnp.nan]), dtype, 1.0).astype(jnp.float32)
        ).all()


def test_values_of_16_bits_are_divided_in_float32() -> None:
    """A quotient of 16 bits would be rounded before it is rounded to an integer."""
    values = jnp.linspace(-30, 30, 2001, dtype=jnp.bfloat16)
    quotients = np.asarray(values, np.float32) / np.float32(0.3)
    rounded = np.asarray(jaxkv.pool.quantize(values, "int8", 0.3), np.float32)
    assert np.abs(rounded - quotients).max() < 0.501


def test_int8_rounds_to_even() -> None:
    got = jaxkv.pool.quantize(jnp.array([2.6, -2.6, 2.5, 3.5, -0.5]), "int8", 1.0)
    np.testing.assert_array_equal(got, [3, -3, 2, 4, 0])


@pytest.mark.parametrize(
    "spec",
    [
        MLASpec(block_size=4, head_size=4, bytes_per_token=7),
        MLASpec(block_size=4, head_size=16, dtype="nvfp4"),
        cases.attention(dtype="int8", scale_bytes=4),
        cases.attention(),
    ],
    ids=["own format", "nvfp4", "scales inside", "plain"],
)
def test_rows_can_be_given_as_bytes_and_read_by_the_layers_that_share_them(spec) -> None:
    plan = cases.planned({"a": spec, "shared": SharedKVSpec("a")})
    cache, step = jaxkv.make_cache(plan, max_requests=REQUESTS), cases.fixed_step(plan)
    rows = np.random.default_rng(0).integers(0, 256, (TOKENS, spec.token_bytes), np.uint8)
    batch = step.batch(cache, plan)
    given = rows.view(np.int8) if spec.dtype == "int8" else rows
    cache = jax.jit(lambda *a: jaxkv.write_rows(a[0], "a", *a[1:]))(cache, batch, given)
    got = np.asarray(jaxkv.read_rows(cache, "shared", batch)).view(np.uint8)
    got = got.reshape(REQUESTS, -1, spec.token_bytes)
    for request, index, position in step.tokens():
        np.testing.assert_array_equal(got[request, position], rows[index])
    if spec.kind == "full" and spec.scale_bytes:
        with pytest.raises(TypeError, match="stores scales next to its int8 elements"):
            jaxkv.read_tokens(cache, "a", batch)


def test_a_layer_that_shares_a_cache_reads_with_the_scales_of_its_owner() -> None:
    spec, scales = cases.attention(), {"first": (4.0, 2.0), "a": (0.5, 0.25), "last": (8.0, 16.0)}
    layers = {"before": SharedKVSpec("a"), **dict.fromkeys(scales, spec), "b": SharedKVSpec("a")}
    plan = cases.planned(layers)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, scales=scales)
    batch = cases.fixed_step(plan).batch(cache, plan)
    ones = jnp.ones((*batch.token_shape, spec.num_kv_heads, spec.head_size))
    cache = jaxkv.write_tokens(cache, "a", batch, ones, ones)
    own = jaxkv.read_tokens(cache, "a", batch)
    assert all(set(np.unique(array)) >= {1.0} for array in own)
    for layer in ("before", "b"):
        assert_same_bytes(jaxkv.read_tokens(cache, layer, batch), own)


def test_encoder_tokens_can_be_given_as_bytes_and_left_out_by_a_mask() -> None:
    cache, step, batch = poisoned(Case(cross))
    rows = np.random.default_rng(0).normal(size=(REQUESTS, cases.ENCODER, 2, 8))
    rows = rows.astype(np.float32)
    flat = rows.reshape(*rows.shape[:2], -1).view(np.uint8)
    after = [jaxkv.write_rows(cache, "cross.0", batch, given) for given in (rows, flat)]
    assert_same_bytes(*after)
    mask = np.arange(cases.ENCODER) % 2 > np.zeros((REQUESTS, 1))
    after.append(jaxkv.write_rows(cache, "cross.0", batch, rows, mask=jnp.asarray(mask)))
    before, got, masked = (
        np.asarray(jaxkv.read_rows(one, "cross.0", batch)) for one in (cache, after[0], after[2])
    )
    for request, count in enumerate(step.encoder):
        np.testing.assert_array_equal(got[request, :count], rows[request, :count])
        wanted = before[request].copy()
        wanted[:count][mask[request, :count]] = rows[request, :count][mask[request, :count]]
        np.testing.assert_array_equal(masked[request], wanted)


def test_a_pool_is_read_in_every_mode_of_jax() -> None:
    """Indices stay int32, which strict promotion would not add to int64."""
    case = Case(windows, "BHLNC", None, (2, 2))
    cache, _, batch = poisoned(case)
    wanted = cases.read(cache, "full.0", batch)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert_same_bytes(cases.read(cache, "full.0", batch), wanted)


def test_a_worker_without_layers_has_nothing_to_zero_or_copy() -> None:
    plan = jaxkv.plan_cache([{"a": cases.attention()}, {}], [2**16] * 2, max_model_len=4)
    cache = jaxkv.make_cache(plan, max_requests=1, worker=1, order="BLHNC", kernel_block_sizes=[2])
    ids = as_ids([1])
    assert zero_blocks(cache, ids, ids).buffers == copy_blocks(cache, ids, ids, ids).buffers == ()


# --- refusals -------------------------------------------------------------------------

KEYS, VALUES = np.ones((TOKENS, 2, 4), np.float32), np.ones((TOKENS, 2, 2), np.float32)
ROWS = np.ones((TOKENS, 2 * 6 * 2), np.uint8)
LATENTS, MASK = np.ones((TOKENS, 3), np.float32), np.ones(8, bool)
STATES = [np.ones((REQUESTS, 3, 8), np.float32), np.ones((REQUESTS, 2, 3), np.float32)]
W, R = jaxkv.write_tokens, jaxkv.read_tokens
CALLS = [
    lambda c, b, **layer_index: W(c, "full.0", b, KEYS, VALUES, **layer_index),
    lambda c, b, **layer_index: jaxkv.write_rows(c, "full.0", b, ROWS, **layer_index),
    lambda c, b, **layer_index: R(c, "full.0", b, **layer_index),
    lambda c, b, **layer_index: jaxkv.read_rows(c, "full.0", b, **layer_index),
]


@pytest.mark.parametrize(
    ("plan", "call", "error", "message"),
    [
        (windows, lambda c, b: R(c, "kv", b), ValueError, "layer='kv' has no cache here"),
        (windows, lambda c, b: R(c, "full.0", b, dtype="uint8"), TypeError,
         "dtype=uint8 holds bytes of your own format, not numbers"),
        (hybrid, lambda c, b: R(c, "state.0", b), TypeError, "stores state, not keys and values"),
        (latent, lambda c, b: R(c, "mla.0", b), TypeError, "stores mla, .* use write_rows and"),
        (hybrid, lambda c, b: jaxkv.read_rows(c, "state.0", b), TypeError, "or read_state"),
        (windows, lambda c, b: jaxkv.read_state(c, "full.0", b), TypeError, "use read_tokens"),
        (latent, lambda c, b: W(c, "mla.0", b, KEYS, VALUES), TypeError, "stores mla, not keys"),
        (windows, lambda c, b: W(c, "full.0", b, KEYS[1:], VALUES), ValueError,
         r"keys has shape \(8, 2, 4\); layer 'full.0' wants \(9, 2, 4\)"),
        (windows, lambda c, b: W(c, "full.0", b, KEYS, KEYS), ValueError, r"values .*\(9, 2, 2\)"),
        (windows, lambda c, b: W(c, "full.0", b, KEYS.astype(np.int32), VALUES), TypeError,
         "keys has dtype int32; pass floats, or"),
        (windows, lambda c, b: W(c, "full.0", b, KEYS, VALUES.astype(np.int32)), TypeError,
         "values has dtype int32; pass floats, or"),
        (cross, lambda c, b: W(c, "cross.0", b, KEYS, KEYS), ValueError,
         r"keys has shape \(9, 2, 4\); cross attention wants the encoder's, \[3, encoder"),
        (cross, lambda c, b: jaxkv.write_rows(c, "cross.0", b, ROWS), ValueError,
         r"rows has shape \(9, 24\); cross"),
        (windows, lambda c, b: jaxkv.write_rows(c, "full.0", b, KEYS), ValueError,
         r"rows has shape \(9, 2, 4\) of float32; layer 'full.0' stores 24 bytes for each"),
        (windows, lambda c, b: jaxkv.write_rows(c, "full.0", b, LATENTS.repeat(2, 1)), TypeError,
         "rows has dtype float32; layer 'full.0' stores bfloat16: cast it"),
        (latent, lambda c, b: jaxkv.write_rows(c, "mla.0", b, LATENTS, mask=MASK),
         ValueError, r"mask has shape \(8,\); the batch wants \(9,\)"),
        (latent, lambda c, b: jaxkv.write_rows(c, "mla.0", b, LATENTS, mask=np.ones((1, 9), bool)),
         ValueError, r"mask has shape \(1, 9\); the batch wants \(9,\)"),
        (hybrid, lambda c, b: jaxkv.write_state(c, "state.0", b, STATES[:1]), ValueError,
         r"arrays have shapes \(\(3, 3, 8\),\); layer 'state.0' wants"),
        (hybrid, lambda c, b: jaxkv.write_state(c, "kv.0", b, STATES), TypeError, "not state"),
        (windows, lambda c, b: zero_blocks(c, as_ids([1]), as_ids([1])), ValueError,
         r"ends has shape \(1,\); wants \(2,\), one end per group"),
        (windows, lambda c, b: zero_blocks(c, as_ids([[1]]), as_ids([1, 1])), ValueError,
         r"block_ids has shape \(1, 1\); wants a flat list"),
        (windows, lambda c, b: zero_blocks(c, np.array([1]), as_ids([1, 1])), TypeError,
         "block_ids must be an array of int32, got int64"),
        (windows, lambda c, b: copy_blocks(c, as_ids([1]), as_ids([]), as_ids([1, 1])), ValueError,
         "these must have one shape: sources"),
        (windows, lambda c, b: jaxkv.pool.quantize(KEYS, "uint8", 1.0), TypeError,
         "use write_rows"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_by_name(plan, call, error, message) -> None:
    cache = cases.empty(Case(plan))
    with pytest.raises(error, match=message):
        call(cache, cases.fixed_step(plan()).batch(cache, plan()))


def test_a_function_of_a_layer_keeps_the_errors_of_its_cache_and_of_its_batch() -> None:
    for old, of_batch, late, first in itertools.product(
        (0, 1, 2, 3), (0, 1, 2, 3), (0, 1), (-1, 0)
    ):
        status = as_ids([old, 7]), as_ids([of_batch, 7 - late])
        wanted = (
            old | of_batch | late * CacheFlags.STALE_BATCH | -first * CacheFlags.BAD_LAYER_INDEX
        )
        assert _status_after(*status, np.int32(first)).tolist() == [wanted, 7]


@pytest.mark.parametrize(
    ("layer_index", "error", "message"),
    [
        (-1, ValueError, r"layer_index=-1 is not in 0\.\.1: layer='full.0' has 2 layers"),
        (2, ValueError, "layer_index=2 is not in"),
        (2**31 - 1, ValueError, "layer_index=2147483647 is not in"),
        (np.int64(2**32), TypeError, "layer_index must be an array of int32, got int64"),
        (as_ids([0, 1]), ValueError, r"layer_index has shape \(2,\); pass the index of one layer"),
    ],
)
def test_a_layer_index_that_names_no_layer_is_refused(layer_index, error, message) -> None:
    cache = cases.empty(Case(windows))
    batch = cases.fixed_step(windows()).batch(cache, windows())

    def use(cache, batch):
        methods = (batch.kernel_block_tables, batch.slot_mapping)
        for call in (
            *(functools.partial(call, cache, batch) for call in CALLS),
            *(functools.partial(method, "full.0") for method in methods),
        ):
            with pytest.raises(error, match=message):
                call(layer_index=layer_index)

    jax.eval_shape(use, cache, batch)


def test_a_batch_of_another_cache_and_writes_to_a_shared_one_are_refused() -> None:
    layers = {"full.0": cases.attention(head_size_v=2), "shared": SharedKVSpec("full.0")}
    latents = {"mla": MLASpec(block_size=4, head_size=4), "shared mla": SharedKVSpec("mla")}
    state = StateSpec(block_size=4, shapes=((2, 3),), dtypes=("f32",))
    plan = cases.planned(layers | latents | {"state": state, "shared state": SharedKVSpec("state")})
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS)
    batch = cases.fixed_step(plan).batch(cache, plan)
    for call in CALLS:
        with pytest.raises(ValueError, match="batch belongs to another cache; use the one that"):
            call(cases.empty(Case(windows)), batch)
    for write in (
        lambda: W(cache, "shared", batch, KEYS, VALUES),
        lambda: jaxkv.write_rows(cache, "shared", batch, ROWS),
        lambda: jaxkv.attend(cache, "shared mla", batch, KEYS, KEYS[:, 0]),
        lambda: jaxkv.write_state(cache, "shared state", batch, STATES[1:]),
    ):
        with pytest.raises(ValueError, match=r"layer='shared.*' shares the cache of '"):
            write()
