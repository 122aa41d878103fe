"""`attend` over latent vectors that are packed into bytes with their scales."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from pallas_kernels import PackedRow
from tests.helpers import needs_mosaic

PACKING = "fp8_ds_mla"
ROW = PackedRow(latent=512, rotary=64)
LATENT: dict[str, Any] = {"block_size": 16, "head_size": 576, "value_size": 512}
LAYERS = {
    "packed": jaxkv.MLASpec(**LATENT, dtype="uint8", bytes_per_token=656),
    "plain": jaxkv.MLASpec(**LATENT, dtype="bfloat16"),
    "sparse": jaxkv.MLASpec(**LATENT, dtype="uint8", bytes_per_token=656, compress_ratio=4),
    "full": jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64),
}
TOKENS, USED = 24, 21


@functools.cache
def one_step() -> tuple[jaxkv.KVCache, jaxkv.StepBatch]:
    """Returns a cache and the first step of two requests, of 20 tokens and of one."""
    plan = jaxkv.plan_cache(LAYERS, 2**24, max_model_len=64)
    manager = jaxkv.BlockManager(plan, max_requests=3)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=3, max_tokens=TOKENS)
    manager.start("a")
    manager.start("b")
    upload = manager.step(shape, {"a": USED - 1, "b": 1})
    cache = jaxkv.make_cache(plan, max_requests=3, scales=(0.5, 0.5))
    return jax.jit(jaxkv.apply_step)(cache, upload)


attend = jax.jit(
    jaxkv.attend, static_argnums=1, static_argnames=("row_packing", "implementation", "scale")
)


def queries_and_rows() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(TOKENS, 4, 576)), jnp.bfloat16)
    return queries, jnp.asarray(rng.normal(size=(TOKENS, 576)) * 3, jnp.float32)


def test_packed_rows_are_attended_to_as_the_rows_that_they_hold() -> None:
    """The K scale of the layer is not used."""
    cache, batch = one_step()
    queries, rows = queries_and_rows()
    held = jax.jit(lambda rows: ROW.unpack(ROW.pack(rows)).astype(jnp.bfloat16))(rows)
    _, out = attend(cache, "packed", batch, queries, rows, row_packing=PACKING)
    _, wanted = attend(cache, "plain", batch, queries, held)
    held, out, wanted = map(np.asarray, (held, out, wanted))
    assert out.shape == (TOKENS, 4, 512) and out[:USED].all() and not out[USED:].any()
    rounding = 4 * 2.0**-8 * float(abs(held).max())  # of weights and outputs, on both sides
    np.testing.assert_allclose(out.astype(float), wanted.astype(float), rtol=0, atol=rounding)


def test_a_row_is_rounded_though_one_program_packs_and_unpacks_it() -> None:
    """On a CPU it is always; XLA for GPUs needs to be told."""
    _, rows = queries_and_rows()
    step = jax.jit(lambda rows: ROW.unpack(ROW.pack(rows)))
    apart = jax.jit(ROW.unpack)(jax.jit(ROW.pack)(rows))
    np.testing.assert_array_equal(step(rows), apart)
    assert "optimization_barrier" in step.lower(rows).as_text()


def test_rows_that_your_own_code_packed_are_read_without_keys() -> None:
    cache, batch = one_step()
    queries, rows = queries_and_rows()
    _, wanted = attend(cache, "packed", batch, queries, rows, row_packing=PACKING)
    packed = jax.jit(ROW.pack)(rows)
    cache = jax.jit(jaxkv.write_rows, static_argnums=1)(cache, "packed", batch, packed)
    _, out = attend(cache, "packed", batch, queries, row_packing=PACKING)
    np.testing.assert_array_equal(out, wanted)


@needs_mosaic
def test_the_kernel_for_packed_rows_lowers_for_cuda() -> None:
    cache, batch = one_step()
    options = {"row_packing": PACKING, "implementation": "mosaic_gpu"}
    traced = attend.trace(cache, "packed", batch, *queries_and_rows(), **options)
    assert "mla_decode" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("layer", "packing", "keys", "error", "message"),
    [
        (
            "packed",
            None,
            None,
            TypeError,
            "bytes_per_token=656, .*pass row_packing='fp8_ds_mla' if",
        ),
        ("packed", "nvfp4", None, ValueError, "row_packing='nvfp4'; use one of 'fp8_ds_mla'"),
        ("plain", "nvfp4", None, ValueError, "row_packing='nvfp4'; use one of 'fp8_ds_mla'"),
        ("plain", PACKING, None, ValueError, "into 656 bytes; the layer has bytes_per_token=None"),
        (
            "sparse",
            PACKING,
            None,
            ValueError,
            "bytes_per_token=656 and compress_ratio=4; wants 656",
        ),
        ("full", PACKING, None, ValueError, "layer='full' stores no latent vectors"),
        ("packed", PACKING, jnp.ones((24, 512)), ValueError, r"wants latent vectors, \(24, 576\)"),
    ],
)
def test_what_does_not_go_with_packed_rows_is_named(layer, packing, keys, error, message) -> None:
    cache, batch = one_step()
    with pytest.raises(error, match=message):
        jaxkv.attend(cache, layer, batch, queries_and_rows()[0], keys, row_packing=packing)
