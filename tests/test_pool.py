"""The pool against bytes in NumPy: overlaid dtypes, every layer kind, in-place proofs."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.block_tables import make_block_tables
from jaxkv.planning import Plan, plan_cache
from jaxkv.pool import (
    KVPool,
    copy_blocks,
    layer_view,
    make_pool,
    pool_shapes,
    quantize,
    read_rows,
    read_state,
    read_tokens,
    with_layer_view,
    write_rows,
    write_state,
    write_tokens,
    zero_new_blocks,
)
from jaxkv.specs import (
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    SlidingWindowMLASpec,
    StateSpec,
)
from jaxkv.testing import ReferencePool, assert_in_place, assert_no_recompilation
from tests.helpers import IMPLEMENTATIONS, ON_GPU, hybrid_plan, kernels_run, pointers

NUM_BLOCKS = 7
FLOATS = ["fp8_e4m3", "fp8_e5m2", "bf16", "f16", "f32"]
EXTREMES = [-(2**31), -1, 0, NUM_BLOCKS, 2**31 - 1]
block_ids = st.integers(1, NUM_BLOCKS - 1)
any_block_ids = block_ids | st.sampled_from(EXTREMES)


def overlay(kv_dtype: str, pad: bool = False) -> Plan:
    """Two groups on the same bytes: keys and values, and fp32 state (a padded page)."""
    attention = FullAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=8, head_size_v=4, dtype=kv_dtype
    )
    if pad:
        attention = FullAttentionSpec(
            block_size=4,
            num_kv_heads=2,
            head_size=8,
            head_size_v=4,
            dtype=kv_dtype,
            page_bytes_padded=448,
        )
    state = StateSpec(block_size=4, shapes=((3, 2), (2, 2, 2)), dtypes=("f32", "bf16"))
    layers = {"kv.0": attention, "kv.1": attention, "state.0": state, "state.1": state}
    return plan_cache(layers, 2**20, max_model_len=12, num_blocks_override=NUM_BLOCKS)


def poisoned(plan: Plan, stacked: bool = False) -> KVPool:
    """Every byte 0xFF, NaN in each dtype, except the null block."""
    shapes = pool_shapes(plan.layout, plan.num_blocks, stacked=stacked)
    buffers = [jnp.full(shape.shape, 0xFF, jnp.uint8).at[..., 0, :].set(0) for shape in shapes]
    return KVPool(buffers=tuple(buffers), layout=plan.layout)


def reference(plan: Plan) -> ReferencePool:
    pool = ReferencePool(plan.layout, plan.num_blocks, fill=0xFF)
    for slot in pool.slots:
        slot[0] = 0
    return pool


def assert_same(pool: KVPool, expected: ReferencePool) -> None:
    slots = pool.buffers[0] if pool.stacked else pool.buffers
    for slot, wanted in zip(slots, expected.slots, strict=True):
        np.testing.assert_array_equal(slot, wanted)


def numpy_quantize(values: np.ndarray, dtype: str, scale: float) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    largest = float(ml_dtypes.finfo(kind).max)
    scaled = np.asarray(values, np.float32) / np.float32(scale)
    return np.clip(scaled, -largest, largest).astype(kind)


@functools.partial(jax.jit, static_argnames="layer")
def write_and_read(pool, layer, slots, keys, values, ids, scales):
    names = {"key_scale": scales[0], "value_scale": scales[1]}
    pool = write_tokens(pool, layer, slots, keys, values, **names)
    return pool, read_tokens(pool, layer, ids, **names)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("kv_dtype", FLOATS)
@settings(max_examples=15)
@given(data=st.data())
def test_tokens_land_in_their_bytes_and_read_back(kv_dtype, pad, stacked, data) -> None:
    plan = overlay(kv_dtype, pad)
    spec = plan.layout.place_of("kv.1").spec
    slots = data.draw(
        st.lists(
            st.integers(4, 4 * NUM_BLOCKS - 1) | st.sampled_from([-1, 4 * NUM_BLOCKS, *EXTREMES]),
            min_size=5,
            max_size=5,
            unique=True,
        )
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    keys = rng.normal(size=(5, 2, 8)).astype(np.float32) * 100
    values = rng.normal(size=(5, 2, 4)).astype(np.float32)
    ids = np.array([[1, 2, 0], [6, -1, 2**31 - 1]], np.int32)
    scales = np.array([0.5, 0.25], np.float32)
    pool, (got_keys, got_values) = write_and_read(
        poisoned(plan, stacked), "kv.1", np.array(slots, np.int32), keys, values, ids, scales
    )
    expected = reference(plan)
    for slot, key, value in zip(slots, keys, values, strict=True):
        row = [numpy_quantize(key, spec.dtype, 0.5), numpy_quantize(value, spec.dtype, 0.25)]
        block_id, offset = divmod(slot, 4)
        expected.write("kv.1", block_id, offset * spec.token_bytes, np.concatenate(row, axis=-1))
    assert_same(pool, expected)
    pages = [[expected.page("kv.1", i)[: spec.data_bytes] for i in row] for row in ids]
    rows = np.array(pages).reshape(2, 12, 2, -1)
    kind = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    rows = np.ascontiguousarray(rows).view(kind).astype(np.float32)
    np.testing.assert_array_equal(got_keys, rows[..., :8] * np.float32(0.5))
    np.testing.assert_array_equal(got_values, rows[..., 8:] * np.float32(0.25))


@functools.partial(jax.jit, static_argnames="layer")
def write_and_read_state(pool, layer, ids, arrays):
    pool = write_state(pool, layer, ids, arrays)
    return pool, read_state(pool, layer, ids)


@pytest.mark.parametrize("stacked", [False, True])
@settings(max_examples=15)
@given(ids=st.lists(any_block_ids, min_size=3, max_size=3, unique=True), seed=st.integers(0, 99))
def test_state_of_mixed_dtypes_shares_the_bytes_of_keys_and_values(stacked, ids, seed) -> None:
    plan = overlay("fp8_e4m3")
    rng = np.random.default_rng(seed)
    conv = rng.normal(size=(3, 3, 2)).astype(np.float32)
    state = rng.normal(size=(3, 2, 2, 2)).astype(ml_dtypes.bfloat16)
    pool, (got_conv, got_state) = write_and_read_state(
        poisoned(plan, stacked), "state.1", np.array(ids, np.int32), (conv, state)
    )
    expected = reference(plan)
    for i, block_id in enumerate(ids):
        expected.write("state.1", block_id, 0, conv[i])
        expected.write("state.1", block_id, conv[i].nbytes, state[i])
        known = 0 < block_id < NUM_BLOCKS
        np.testing.assert_array_equal(got_conv[i], conv[i] if known else 0 * conv[i])
        np.testing.assert_array_equal(got_state[i], state[i] if known else 0 * state[i])
    assert_same(pool, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("stacked", [False, True])
@settings(max_examples=6)
@given(data=st.data())
def test_fresh_blocks_are_zeroed_in_the_slots_of_their_group_only(
    implementation, stacked, data
) -> None:
    plan = hybrid_plan(num_blocks=NUM_BLOCKS, max_model_len=4)
    groups = len(plan.groups)
    rows = st.lists(any_block_ids, min_size=3, max_size=3)
    zero_ids = data.draw(st.lists(rows, min_size=groups, max_size=groups))
    run = _zeroing(implementation)
    with kernels_run():
        pool = run(poisoned(plan, stacked), np.array(zero_ids, np.int32))
    expected = reference(plan)
    expected.zero(zero_ids)
    assert_same(pool, expected)


@functools.cache
def _zeroing(implementation):
    return jax.jit(functools.partial(zero_new_blocks, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("stacked", [False, True])
@settings(max_examples=6)
@given(data=st.data())
def test_blocks_are_copied_at_once_in_the_slots_of_their_group_only(
    implementation, stacked, data
) -> None:
    plan = hybrid_plan(num_blocks=NUM_BLOCKS, max_model_len=4)
    groups = len(plan.groups)
    sources = data.draw(st.lists(st.tuples(*[any_block_ids] * 3), min_size=groups, max_size=groups))
    # Windows that overlap: of two copies into one block the later group's counts.
    targets = data.draw(st.permutations(range(-1, NUM_BLOCKS + 1)))
    targets = [targets[i : i + 3] for i in range(groups)]
    before = poisoned(plan, stacked)
    marks = jnp.arange(NUM_BLOCKS, dtype=jnp.uint8)[:, None]
    buffers = tuple(jnp.broadcast_to(marks, b.shape).at[..., 0, :].set(0) for b in before.buffers)
    run = _copying(implementation)
    with kernels_run():
        pool = run(
            KVPool(buffers=buffers, layout=plan.layout),
            np.array(sources, np.int32),
            np.array(targets, np.int32),
        )
    expected = reference(plan)
    for slot in expected.slots:
        slot[:] = np.arange(NUM_BLOCKS)[:, None]
    expected.copy(sources, targets)
    assert_same(pool, expected)


@functools.cache
def _copying(implementation):
    return jax.jit(functools.partial(copy_blocks, implementation=implementation))


def test_the_hybrid_plan_has_groups_of_unlike_size() -> None:
    sizes = {len(group.layers) for group in hybrid_plan().groups}
    assert len(sizes) > 1, "else the test above would not see a slot that must stay"


@pytest.mark.parametrize("stacked", [False, True])
def test_the_pool_has_exactly_the_bytes_that_were_planned(stacked) -> None:
    plan = overlay("bf16")
    pool = make_pool(plan, stacked=stacked)
    assert pool.num_bytes == plan.num_blocks * plan.bytes_per_block[0]
    assert pool.stacked == stacked and pool.num_blocks == NUM_BLOCKS
    assert all(not np.asarray(buffer).any() for buffer in pool.buffers)
    assert "Array" not in repr(pool) and "\n" not in repr(pool)


def test_mixed_pages_of_one_group_cannot_be_stacked() -> None:
    layers: dict[str, LayerSpec] = {
        "wide": MLASpec(block_size=4, head_size=8),
        "narrow": MLASpec(block_size=4, head_size=3, dtype="uint8"),
    }
    plan = plan_cache(layers, 2**16, max_model_len=8)
    assert [buffer.shape[1] for buffer in make_pool(plan).buffers] == [64, 12]
    with pytest.raises(ValueError, match="stacked=True"):
        make_pool(plan, stacked=True)


def test_compressed_rows_are_written_once_for_all_the_tokens_that_share_them() -> None:
    spec = MLASpec(block_size=8, head_size=6, dtype="bf16", compress_ratio=4)
    plan = plan_cache({"mla": spec}, 2**12, max_model_len=16, num_blocks_override=4)
    rows = jnp.arange(12, dtype=jnp.bfloat16).reshape(2, 6)
    pool = write_rows(make_pool(plan), "mla", jnp.array([8, 23], jnp.int32), rows)
    got = read_rows(pool, "mla", jnp.array([1, 2], jnp.int32))
    assert got.shape == (4, 6)  # two rows a block
    np.testing.assert_array_equal(got[0], rows[0])
    np.testing.assert_array_equal(got[3], rows[1])
    assert not np.asarray(got[1:3]).any()


def test_rows_of_a_custom_format_are_bytes() -> None:
    spec = MLASpec(block_size=2, head_size=4, bytes_per_token=7, dtype="uint8")
    plan = plan_cache({"mla": spec}, 2**12, max_model_len=4, num_blocks_override=3)
    rows = jnp.arange(7, dtype=jnp.uint8)[None]
    pool = write_rows(make_pool(plan), "mla", jnp.array([3], jnp.int32), rows)
    np.testing.assert_array_equal(read_rows(pool, "mla", jnp.array([1], jnp.int32))[1], rows[0])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_layer_view_shows_kernel_blocks_of_what_was_written(stacked, parts) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bf16")
    plan = plan_cache({"a": spec, "b": spec}, 2**16, max_model_len=8, num_blocks_override=5)
    keys = jnp.arange(3 * 16, dtype=jnp.bfloat16).reshape(3, 2, 8)
    slots = jnp.array([4, 9, 19], jnp.int32)
    pool = write_tokens(make_pool(plan, stacked=stacked), "b", slots, keys, -keys)
    view = jax.jit(layer_view, static_argnames=("layer", "blocks_per_kv_block"))(
        pool, "b", blocks_per_kv_block=parts
    )
    first = 5 * parts if stacked else 0  # layer b is in the second slot
    assert view.shape == ((10 if stacked else 5) * parts, 4 // parts, 2, 16)
    tokens = view[first:].reshape(20, 2, 16)
    np.testing.assert_array_equal(tokens[slots, :, :8], keys)
    np.testing.assert_array_equal(tokens[slots, :, 8:], -keys)
    doubled = jax.jit(
        lambda pool: with_layer_view(
            pool, "b", 2 * layer_view(pool, "b", blocks_per_kv_block=parts)
        )
    )(pool)
    got, _ = read_tokens(doubled, "b", jnp.array([1, 2, 4], jnp.int32))
    np.testing.assert_array_equal(got[jnp.array([0, 5, 11])], 2 * keys.astype(jnp.float32))


def test_a_view_and_the_way_back_cost_nothing_on_a_gpu() -> None:
    """XLA's CPU backend copies, which `layer_view` says; there only the answer counts."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bf16")
    plan = plan_cache({"a": spec}, 2**26, max_model_len=64)

    def touch(pool: KVPool) -> KVPool:
        view = layer_view(pool, "a")
        return with_layer_view(pool, "a", view.at[3, 2].set(1.0))

    pool = make_pool(plan)
    compiled = jax.jit(touch, donate_argnums=0).lower(pool).compile()
    if ON_GPU:
        assert compiled.memory_analysis().temp_size_in_bytes < 100_000
    where = pointers(pool)
    pool = compiled(pool)
    assert pointers(pool) == where
    keys, _ = read_tokens(pool, "a", jnp.array([3], jnp.int32))
    assert float(keys.sum()) == 2 * 64


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_fp8_saturates_instead_of_turning_into_nan(dtype) -> None:
    values = jnp.array([1e9, -1e9, jnp.inf, 0.0, jnp.nan], jnp.float32)
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=dtype)
    got = np.asarray(quantize(values, spec.dtype, 1.0).astype(jnp.float32))
    largest = float(jnp.finfo(spec.dtype).max)
    np.testing.assert_array_equal(got[:4], [largest, -largest, largest, 0.0])
    assert np.isnan(got[4])  # a NaN is the caller's to find, not ours to hide


def test_float16_saturates_instead_of_turning_into_inf() -> None:
    got = quantize(jnp.array([1e6, -jnp.inf]), "float16", 1.0)
    np.testing.assert_array_equal(got, np.array([65504, -65504], np.float16))


def test_rows_with_scales_inside_are_written_as_bytes() -> None:
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=4, dtype="int8", scale_bytes=4)
    plan = plan_cache({"a": spec}, 2**10, max_model_len=4)
    row = jnp.arange(16, dtype=jnp.uint8)[None]
    pool = write_rows(make_pool(plan), "a", jnp.array([3], jnp.int32), row)
    got = read_rows(pool, "a", jnp.array([1], jnp.int32))
    np.testing.assert_array_equal(got[1], row[0])
    with pytest.raises(TypeError, match="stores scales beside its int8 elements"):
        read_tokens(pool, "a", jnp.array([1], jnp.int32))


def test_an_empty_batch_writes_nothing() -> None:
    pool = make_pool(overlay("bf16"))
    none = jnp.zeros((0,), jnp.int32)
    pool = write_tokens(pool, "kv.0", none, jnp.ones((0, 2, 8)), jnp.ones((0, 2, 4)))
    state = jnp.ones((0, 3, 2)), jnp.ones((0, 2, 2, 2))
    pool = write_state(pool, "state.0", none, state)
    assert not np.asarray(pool.buffers[0]).any()


@pytest.mark.parametrize("worker", [0, 1])
def test_each_worker_gets_the_pool_of_its_own_layers(worker) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    stages: list[dict[str, LayerSpec]] = [{"a": spec}, {"b": spec, "c": spec}]
    plan = plan_cache(stages, [2**12, 2**12], max_model_len=8)
    pool = make_pool(plan, worker=worker)
    assert len(pool.buffers) == worker + 1
    assert pool.num_bytes == plan.num_blocks * plan.bytes_per_block[worker]
    with pytest.raises(ValueError, match="worker=-1"):
        make_pool(plan, worker=-1)


def test_packed_layers_keep_apart_in_one_slot() -> None:
    latent = MLASpec(block_size=8, head_size=5, dtype="f32")
    window = SlidingWindowMLASpec(block_size=4, head_size=3, dtype="f32", sliding_window=4)
    layers: dict[str, LayerSpec] = {"a": latent, "b": latent, "w": window, "x": window}
    plan = plan_cache(layers, 2**14, max_model_len=16)
    assert len(plan.layout.slots) == 1 and len(plan.groups) == 2
    pool = make_pool(plan)
    ids = jnp.array([1], jnp.int32)
    for number, layer in enumerate(layers, start=1):
        spec = plan.layout.place_of(layer).spec
        assert isinstance(spec, MLASpec)
        block = 1 if layer in "ab" else 2
        slots = block * spec.block_size + jnp.arange(spec.block_size, dtype=jnp.int32)
        rows = jnp.full((spec.block_size, spec.head_size), number, jnp.float32)
        pool = write_rows(pool, layer, slots, rows)
    for number, layer in enumerate(layers, start=1):
        got = read_rows(pool, layer, ids if layer in "ab" else ids + 1)
        assert (np.asarray(got) == number).all()
    pool = zero_new_blocks(pool, jnp.array([[1], [-1]], jnp.int32))
    assert not np.asarray(read_rows(pool, "b", ids)).any()
    assert (np.asarray(read_rows(pool, "x", ids + 1)) == 4).all()


def test_int8_rounds_and_saturates() -> None:
    got = quantize(jnp.array([2.6, -2.6, 500.0, -500.0]), "int8", 1.0)
    np.testing.assert_array_equal(got, [3, -3, 127, -128])


def operations(pool: KVPool, stacked: bool):
    """Name -> (function of the pool, argument): every public operation that writes."""
    ids = jnp.array([1, 2, -1], jnp.int32)
    tokens = jnp.ones((3, 2, 8)), jnp.ones((3, 2, 4))
    state = jnp.ones((3, 3, 2)), jnp.ones((3, 2, 2, 2), jnp.bfloat16)
    zero_ids = jnp.broadcast_to(ids, (2, 3))
    return {
        "write_tokens": lambda pool: write_tokens(pool, "kv.0", ids, *tokens),
        "write_state": lambda pool: write_state(pool, "state.1", ids, state),
        "zero_new_blocks": lambda pool: zero_new_blocks(
            pool, zero_ids, implementation=None if ON_GPU else "xla"
        ),
        "copy_blocks": lambda pool: copy_blocks(pool, zero_ids, zero_ids + 3, disjoint=True),
    }


@pytest.mark.parametrize("name", ["write_tokens", "write_state", "zero_new_blocks", "copy_blocks"])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_write_is_in_place_in_a_donating_jit(stacked, name) -> None:
    plan = overlay("bf16")
    many = plan_cache(
        {layer: spec for g in plan.groups for layer, spec in zip(g.layers, g.specs, strict=True)},
        2**26,
        max_model_len=12,
        num_blocks_override=50_000,
    )
    pool = make_pool(many, stacked=stacked)
    assert pool.num_bytes > 100 * 100_000
    pool = assert_in_place(operations(pool, stacked)[name], pool, max_temp_bytes=100_000)
    assert pool.layout == many.layout


def test_the_old_pool_stays_valid_without_donation() -> None:
    plan = overlay("bf16")
    pool = make_pool(plan)
    ids = jnp.array([5], jnp.int32)
    new = write_tokens(pool, "kv.0", ids, jnp.ones((1, 2, 8)), jnp.ones((1, 2, 4)))
    assert not np.asarray(pool.buffers[0]).any() and np.asarray(new.buffers[0]).any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: read_tokens(p, "kv.9", _ids(1)), ValueError, "layer='kv.9'"),
        (lambda p: read_tokens(p, "state.0", _ids(1)), TypeError, "keeps state"),
        (lambda p: read_state(p, "kv.0", _ids(1)), TypeError, "use read_tokens"),
        (lambda p: read_rows(p, "state.0", _ids(1)), TypeError, "use read_state"),
        (
            lambda p: write_tokens(p, "kv.0", _ids(2), jnp.ones((1, 2, 8)), jnp.ones((2, 2, 4))),
            ValueError,
            "keys has shape",
        ),
        (
            lambda p: write_tokens(p, "kv.0", _ids(2), jnp.ones((2, 2, 8)), jnp.ones((2, 2, 8))),
            ValueError,
            "values has shape",
        ),
        (
            lambda p: write_rows(p, "kv.0", _ids(2), jnp.ones((2, 3))),
            ValueError,
            "rows has shape",
        ),
        (lambda p: write_state(p, "state.0", _ids(1), ()), ValueError, "arrays have shapes"),
        (
            lambda p: zero_new_blocks(p, jnp.zeros((1, 2), jnp.int32)),
            ValueError,
            r"zero_ids has shape \(1, 2\)",
        ),
        (lambda p: read_rows(p, "kv.0", jnp.ones(2)), TypeError, "block_ids must be"),
        (lambda p: read_state(p, "state.0", jnp.ones(2)), TypeError, "block_ids must be"),
        (lambda p: zero_new_blocks(p, jnp.ones((2, 2))), TypeError, "zero_ids must be"),
        (
            lambda p: copy_blocks(p, jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 1), jnp.int32)),
            ValueError,
            "one shape: sources",
        ),
        (
            lambda p: write_tokens(
                p, "kv.0", jnp.ones(2), jnp.ones((2, 2, 8)), jnp.ones((2, 2, 4))
            ),
            TypeError,
            "slots must be",
        ),
        (lambda p: with_layer_view(p, "kv.0", jnp.ones(3)), ValueError, "view is float32"),
        (lambda p: layer_view(p, "kv.0", blocks_per_kv_block=3), ValueError, "does not divide"),
        (lambda p: quantize(jnp.ones(1), "uint8", 1.0), TypeError, "use write_rows"),
    ],
)
def test_bad_input_is_refused_by_name(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(make_pool(overlay("bf16")))


def _ids(count: int) -> jax.Array:
    return jnp.ones((count,), jnp.int32)


def test_a_padded_page_has_no_contiguous_view() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        layer_view(make_pool(overlay("bf16", pad=True)), "kv.0")


def test_what_is_allocated_again_compiles_nothing() -> None:
    plan = overlay("bf16")
    make_pool(plan)
    make_block_tables(plan, max_requests=4)
    with assert_no_recompilation():
        make_pool(plan)
        make_block_tables(plan, max_requests=4)
