"""Attention to latent rows, whose value is a prefix of their key, against its definition.

On a machine without a GPU the Mosaic kernels run in interpret mode, and are lowered for CUDA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PackedRow, _capability
from tests.helpers import HAS_LATE_BARRIERS, ON_GPU, needs_mosaic
from tests.kernels import calls
from tests.kernels.test_paged_attention import (
    PACKED,
    Case,
    attend,
    check,
    lower,
    make,
    poison_outputs,
    quietly,
    some_batches,
    unpack,
)

MLA = Case(heads=128, kv_heads=1, key=576, value=512, latent=True)
MOSAIC_CASES = {
    "decode": MLA._replace(page_tokens=64, width=4),
    "16 heads, speculation": MLA._replace(heads=16, tokens=12, width=20, sinks=True),
    "pages of 8 in float16": MLA._replace(
        page_tokens=8, width=20, queries="float16", pages="float16"
    ),
    "holes and a cap": MLA._replace(heads=64, holes=True, tokens=9, page_tokens=32, cap=30.0),
    "speculation with scales": MLA._replace(tokens=9, width=20, scaled=True),
    "window": MLA._replace(heads=32, window=70, page_tokens=48, width=6, tokens=30),
    "chunk": MLA._replace(heads=32, chunk=48, width=20, tokens=30),
    "many steps": MLA._replace(heads=16, batch=2, width=600, sinks=True),
    "interleaved": MLA._replace(heads=64, ranks=2, tokens=9, page_tokens=32),
    "encoder": MLA._replace(heads=64, causal=False, tokens=9, page_tokens=32),
    "among other layers": MLA._replace(heads=64, place="heads apart"),
    "narrow rows": MLA._replace(heads=80, key=192, value=128, width=20),
    "fp8_e4m3": MLA._replace(page_tokens=64, width=4, pages="float8_e4m3fn", scaled=True),
    "fp8_e4m3, speculation": MLA._replace(tokens=9, width=20, pages="float8_e4m3fn", holes=True),
    "fp8_e4m3, many steps": MLA._replace(heads=16, batch=2, width=600, pages="float8_e4m3fn"),
    "fp8_e5m2, window": MLA._replace(heads=32, window=70, tokens=30, pages="float8_e5m2"),
    "int8, among other layers": MLA._replace(
        heads=64, pages="int8", scaled=True, place="heads apart"
    ),
    "packed": MLA._replace(page_tokens=64, width=4, pages=PACKED),
    "packed, speculation": MLA._replace(tokens=9, width=20, pages=PACKED, holes=True, sinks=True),
    "packed, many steps": MLA._replace(heads=16, batch=2, width=600, pages=PACKED),
    "packed, window": MLA._replace(heads=32, window=70, tokens=30, page_tokens=48, pages=PACKED),
    "reproducible": MLA._replace(tokens=9, width=300, reproducible=True, sinks=True),
    "reproducible, window": MLA._replace(tokens=9, width=300, reproducible=True, window=3000),
    "packed, among other layers": MLA._replace(
        heads=64, page_tokens=8, width=20, pages=PACKED, place="heads apart"
    ),
}
# Small enough for interpret mode, which takes seconds for each.
NARROW = MLA._replace(heads=8, key=192, value=128, page_tokens=32, width=5, sinks=True)
# Two tiles of a request with a hole in its second step, one of a request with one in its first, and
# one whose first query sees no key of the rank.
SPECULATION = NARROW._replace(
    heads=15, cap=9.0, batch=3, tokens=10, width=4, holes=True, scaled=True, sinks=False
)
SPECULATION = SPECULATION._replace(ranks=2, place="NHD", pages="float8_e4m3fn")
ONE = NARROW._replace(batch=1, width=3)
# The second thread block has heads of the second token, which alone sees the last key.
PAIRS = NARROW._replace(heads=40, batch=1, tokens=2, page_tokens=16)
# Three segments, which are added up in two rounds; the first one begins in its middle, and the
# second one has a hole.
REPRODUCIBLE = ONE._replace(width=13, batch=3, window=200, reproducible=True, holes=True)
INTERPRETED = {
    "speculation in fp8, interleaved, holes": (SPECULATION, [150, 100, 5], [0, 5, 6, 8], 345),
    "two thread blocks that load together": (PAIRS, [65], [0, 2], 0),
    "packed": (
        ONE._replace(pages=PACKED, key=576, value=512, tokens=4, window=20),
        *([70], [0, 1], 0),
    ),
    "reproducible": (REPRODUCIBLE, [410, 30, 90], None, 0),
}
# Barriers of two thread blocks, or ones at which nobody waits for the last arrival.
WITH_LATE_BARRIERS = ("two thread blocks that load together", "reproducible")


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in interpret mode; on a GPU")
@needs_mosaic
@pytest.mark.parametrize("name", MOSAIC_CASES)
def test_mosaic_attends_to_latents_by_the_definition(name: str) -> None:
    case = MOSAIC_CASES[name]
    for lens, loc, seed in some_batches(case):
        check(case, make(case, lens, loc, seed), "mosaic_gpu")


@quietly
@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
@pytest.mark.parametrize("name", INTERPRETED)
def test_mosaic_attends_to_latents_in_interpret_mode(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels import _mosaic
    from pallas_kernels._paged_attention import rounds, tasks

    if name in WITH_LATE_BARRIERS and not HAS_LATE_BARRIERS:
        pytest.skip("interpret mode of jax 0.11 refuses such barriers")
    poison_outputs(monkeypatch)
    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    # Of few steps each where nobody may miss the last arrival at a barrier.
    thread_blocks = 2 if HAS_LATE_BARRIERS else 8
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: thread_blocks)
    monkeypatch.setattr(tasks, "LATENT_SPLIT", 2)  # of reproducible attention
    monkeypatch.setattr(rounds, "WORKSPACE", 300_000)  # two tiles at a time
    case, lens, loc, seed = INTERPRETED[name]
    check(case, make(case, lens, loc, seed), "mosaic_gpu")


def structs(case: Case, tokens: int, batch: int) -> list[Any]:
    struct, ids = jax.ShapeDtypeStruct, jnp.int32
    loc = [struct((batch + 1,), ids)] if tokens != batch else []
    packed = case.pages == PACKED
    return [
        struct((tokens, case.heads, case.key), case.queries),
        struct((999, case.page_tokens, 1, case.row), "uint8" if packed else case.pages),
        struct((batch, 64), ids),
        struct((batch,), ids),
        *loc,
    ]


@needs_mosaic
@pytest.mark.parametrize(
    ("heads", "tokens", "page_tokens", "pages"),
    [(16, 32, 16, "bfloat16"), (128, 32, 64, "float8_e4m3fn"), (128, 8, 64, PACKED)],
)
def test_the_shapes_of_models_lower_for_cuda(
    heads: int, tokens: int, page_tokens: int, pages: str
) -> None:
    case = MLA._replace(heads=heads, page_tokens=page_tokens, pages=pages)
    call = functools.partial(
        calls.attend,
        value_width=512,
        row_packing=PACKED if pages == PACKED else None,
        implementation="mosaic_gpu",
    )
    text = lower(call, structs(case, tokens, batch=8))
    assert text.count("custom_call @mosaic_gpu") == 2
    # The pages go straight to the kernel: nothing else has as many elements.
    shape = f"tensor<999x{page_tokens}x1x{case.row}x"
    users = [line for line in text.splitlines() if shape in line and "func" not in line]
    assert users and all("reshape" in line or "call" in line for line in users)


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (MLA._replace(pages="float16"), "pages are float16 and queries bfloat16"),
        (
            MLA._replace(pages=PACKED, queries="float16"),
            "queries are float16, and the kernel of packed rows takes bfloat16",
        ),
        (
            MLA._replace(pages=PACKED, value=384),
            "packed rows are 576 wide and their values 384, and the kernel takes 576 and 512",
        ),
        (
            MLA._replace(pages=PACKED, key=192, value=128),
            "packed rows are 192 wide and their values 128, and the kernel takes 576 and 512",
        ),
        (MLA._replace(heads=256, kv_heads=2), "latent rows have 2 KV heads"),
        (MLA._replace(key=544), "latent rows are 544 wide and their values 512"),
        (MLA._replace(key=640), "latent rows are 640 wide and their values 512"),
        (MLA._replace(key=192, value=64), "latent rows are 192 wide and their values 64"),
        (MLA._replace(heads=136), "136 query heads, and the kernel takes at most 128"),
        (MLA._replace(page_tokens=12), "pages have 12 tokens, and the kernels take multiples of 8"),
    ],
)
def test_latents_that_mosaic_does_not_take_are_named(case: Case, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f'implementation="mosaic_gpu": .*{reason}'):
        attend(make(case, [3, 2, 1], None), case, "mosaic_gpu")


def test_packed_rows_hold_what_float8_can() -> None:
    """To 3 bits of mantissa, or the least step of float8 times the scale of the group."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9, 320)) * np.logspace(-9, 9, 9)[:, None]
    rows = np.where(rng.random(rows.shape) < 0.1, 0, rows).astype(np.float32)
    rows[3, :128] = 0
    row = PackedRow(latent=256, rotary=64)
    packed = np.asarray(jax.jit(row.pack)(rows))
    assert packed.dtype == np.uint8 and packed.shape == (9, row.row_bytes) == (9, 392)
    case = Case(key=320, value=256, pages=PACKED, queries="float32")
    held = unpack(case, packed).astype(float)
    np.testing.assert_array_equal(held, jax.jit(row.unpack)(packed))
    highest = abs(rows[:, :256]).reshape(9, 2, 128).max(axis=2).repeat(128, axis=1)
    bound = np.maximum(abs(rows[:, :256]) * 2.0**-4, highest / 448 * 2.0**-10) * (1 + 2.0**-20)
    assert (abs(held - rows)[:, :256] <= bound).all()
    np.testing.assert_array_equal(held[:, 256:], rows[:, 256:].astype(jnp.bfloat16).astype(float))
