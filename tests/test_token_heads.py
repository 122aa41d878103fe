"""Keys and values in 8 and 4 bits with a scale for each token and head: the rule of their rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxkv
from jaxkv.attention import hadamard
from pallas_kernels import TokenHeadRow
from tests.engine_models import SPECS, VOCAB, forward, make_params
from tests.reference_token_heads import BY_HEADS, pack_by_heads, unpack_by_heads

HEADS, KEY, VALUE = 3, 6, 4
pack = jax.jit(TokenHeadRow.pack, static_argnums=0)
unpack = jax.jit(TokenHeadRow.unpack, static_argnums=0)

# Ties, signed zeros, what is too small to divide by, and what no number divides.
NUMBERS = (0.5, 1.5, -2.5, 3.5, 7.0, 127.0, 448.0, 0.0, -0.0, 2.0**-100, 1e-30, 1e-38, 3e38)
NO_NUMBERS = (np.inf, -np.inf, np.nan)
elements = st.floats(width=32, allow_subnormal=False) | st.sampled_from([*NUMBERS, *NO_NUMBERS])


@pytest.mark.parametrize("dtype", BY_HEADS)
@settings(max_examples=40)
@given(
    tokens=hnp.arrays(
        np.float32, (4, HEADS, KEY + VALUE), elements=elements | st.floats(-4, 4, width=32)
    )
)
def test_tokens_are_quantised_bit_by_bit_as_defined(dtype: Any, tokens: np.ndarray) -> None:
    row = TokenHeadRow(dtype, HEADS, KEY, VALUE)
    keys, values = tokens[..., :KEY], tokens[..., KEY:]
    rows, wanted = np.asarray(pack(row, keys, values)), pack_by_heads(dtype, keys, values)
    np.testing.assert_array_equal(rows, wanted)
    read = unpack(row, rows), np.concatenate(unpack_by_heads(dtype, wanted, HEADS, KEY, VALUE), -1)
    np.testing.assert_array_equal(*read)


@pytest.mark.parametrize("dtype", BY_HEADS)
@pytest.mark.parametrize(("heads", "key", "value"), [(1, 2, 2), (1, 128, 128), (8, 128, 64)])
def test_a_row_is_off_by_half_a_step_and_has_the_bytes_of_its_spec(
    dtype: Any, heads: int, key: int, value: int
) -> None:
    row = TokenHeadRow(dtype, heads, key, value)
    spec = jaxkv.FullAttentionSpec(
        block_size=1, num_kv_heads=heads, head_size=key, head_size_v=value, dtype=dtype
    )
    assert spec.token_bytes == row.row_bytes
    rng = np.random.default_rng(0)
    keys, values = [rng.normal(size=(5, heads, n)).astype(np.float32) for n in (key, value)]
    read = np.asarray(unpack(row, pack(row, keys, values)))
    for given_, found in ((keys, read[..., :key]), (values, read[..., key:])):
        largest = abs(given_).max(axis=-1, keepdims=True)
        if dtype == "fp8_per_token_head":  # 3 bits after the first one
            bound = np.maximum(abs(given_) * 2.0**-4, largest / 448 * 2.0**-10)
        else:
            bound = largest / {"int8_per_token_head": 127, "int4_per_token_head": 7}[dtype] / 2
        assert (abs(found - given_) <= bound * (1 + 2.0**-20)).all()


@functools.cache
def one_step(dtype: str) -> tuple[jaxkv.KVCache, jaxkv.StepBatch]:
    """Returns a cache of one head and one token a block, all NaN, and a step of one token."""
    spec = jaxkv.FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=2, dtype=dtype)
    plan = jaxkv.plan_cache({"layer": spec}, 2**20, max_model_len=4, num_blocks_override=9)
    manager = jaxkv.BlockManager(plan, max_requests=1)
    manager.start("a")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=1, max_tokens=1)
    cache = jaxkv.make_cache(plan, max_requests=1, scales=(0.5, 0.25))
    return jax.jit(jaxkv.apply_step)(cache, manager.step(shape, {"a": 1}))


@pytest.mark.parametrize("dtype", BY_HEADS)
def test_sizes_of_one_and_the_scales_of_a_layer_that_has_its_own(dtype: str) -> None:
    """Scales that a cache is given for a layer are of other dtypes, and are not used."""
    cache, batch = one_step(dtype)
    keys, values = jnp.array([[[2.0, -2.0]]]), jnp.array([[[0.0, 4.0]]])
    cache, out = jaxkv.attend(cache, "layer", batch, keys, keys, values)
    read = [np.asarray(array)[0, 0] for array in jaxkv.read_tokens(cache, "layer", batch)]
    np.testing.assert_allclose(read, [keys[0], values[0]], rtol=2.0**-22)
    np.testing.assert_allclose(out, values, rtol=2.0**-22)


ENGINE_LAYERS = {
    "full": dataclasses.replace(SPECS["full"], dtype="int8_per_token_head"),
    "window": dataclasses.replace(SPECS["window"], dtype="int4_per_token_head"),
}


def make_engine(num_blocks: int, **options: Any) -> jaxkv.Engine:
    sizes: dict[str, Any] = {"max_model_len": 48, "num_blocks_override": num_blocks}
    limits = jaxkv.Limits(max_in_flight_tokens=16)
    plan = jaxkv.plan_cache(ENGINE_LAYERS, 2**30, limits=limits, **sizes)
    memory = {"host_memory": jaxkv.HostMemory(num_bytes=2**20, min_tokens=1)} if options else {}
    return jaxkv.Engine(forward, make_params(), plan, max_requests=4, max_tokens=8, **memory)


def test_tokens_and_their_scales_stay_together_wherever_blocks_go() -> None:
    """Prefixes, copies for samples, preemption, host memory, and sleep: all move whole rows."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, VOCAB, 13).tolist()
    prompts = [start + rng.integers(0, VOCAB, n).tolist() for n in (2, 9, 14, 1, 7, 11)]
    sampling = jaxkv.Sampling(max_tokens=12, n=2, temperature=1.0, seed=0, logprobs=True)

    def served(engine: jaxkv.Engine) -> list[jaxkv.Output]:
        return sorted(engine.generate(prompts, sampling), key=lambda o: (o.request, o.sample))

    engine, wanted = make_engine(17, host=True), served(make_engine(200))
    for turn in range(2):
        outputs = served(engine)
        assert [o.tokens for o in outputs] == [o.tokens for o in wanted]
        for got, expected in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=0.05)
        if not turn:
            engine.sleep(1)
            engine.wake_up()
    offloaded = engine.manager.offload_stats()
    assert offloaded is not None and offloaded.stored_blocks and offloaded.loaded_blocks
    assert engine.stats.preemptions and engine.stats.cached_tokens


@pytest.mark.parametrize("width", [1, 2, 64])
def test_a_rotation_keeps_products_and_undoes_itself(width: int) -> None:
    queries, keys = np.random.default_rng(0).normal(size=(2, 5, width)).astype(np.float32)
    rotated = [np.asarray(hadamard(jnp.asarray(array)), float) for array in (queries, keys)]
    np.testing.assert_allclose((rotated[0] * rotated[1]).sum(1), (queries * keys).sum(1), atol=1e-4)
    np.testing.assert_allclose(hadamard(hadamard(jnp.asarray(keys))), keys, atol=1e-5)
    large = hadamard(jnp.zeros(width, jnp.bfloat16).at[width - 1].set(8))
    assert large.dtype == jnp.bfloat16 and abs(large).max() == 8 / width**0.5
    with pytest.raises(ValueError, match="the last axis must be a power of two"):
        hadamard(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="heads has dtype int32; wants floats"):
        hadamard(jnp.ones((2, 4), jnp.int32))


def test_a_dtype_of_rows_is_no_dtype_of_numbers() -> None:
    cache, batch = one_step(BY_HEADS[0])
    with pytest.raises(TypeError, match="dtype=int4_per_token_head is of rows with a scale"):
        jaxkv.read_tokens(cache, "layer", batch, dtype="int4_per_token_head")
    with pytest.raises(TypeError, match=r"use pallas_kernels\.TokenHeadRow"):
        jaxkv.pool.quantize(jnp.ones(2), "int8_per_token_head", 1.0)
