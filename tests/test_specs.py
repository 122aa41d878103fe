"""Layer specs: bytes by hand, and the blocks of a growing request against a walk over tokens.

`visible` is the definition of each kind of attention. Everything that `Growth` says about
columns is compared with what follows from it, for every step that a small request can take.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv._src.specs import (
    Growth,
    GrowthTable,
    LayerSpec,
    RingSpec,
    SlidingWindowMLASpec,
    StateSpec,
    canonical_dtype,
    first_visible_token,
    gated_delta_net_state,
    heads_per_rank,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)
from tests.layer_examples import chunked, cross, full, mla, sliding, state

INT32_MAX = 2**31 - 1  # no window, no chunks
sliding_mla = functools.partial(
    SlidingWindowMLASpec, block_size=64, head_size=8, sliding_window=128
)

# --- bytes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        (full(), 16 * 2 * (8 + 8) * 2),
        (full(head_size_v=4, dtype="f32"), 16 * 2 * (8 + 4) * 4),
        (full(dtype="fp8_e5m2", page_bytes_padded=1000), 1000),
        (full(dtype="int8", scale_bytes=4), 16 * 2 * (8 + 4 + 8 + 4)),
        (full(dtype="nvfp4", head_size=128), 16 * 2 * 2 * (64 + 8)),
        (full(dtype="int8_per_token_head", num_kv_heads=8, head_size=128), 16 * 8 * 264),
        (full(dtype="int4_per_token_head", num_kv_heads=8, head_size=128), 16 * 8 * 136),
        # 2 * (8 + 4 + 4) + 16 bytes of scales are 48, rounded up to 64
        (sliding(dtype="fp8_per_token_head", head_size_v=4), 16 * 64),
        (full(page_alignment_bytes=1000), 2000),
        (sliding(dtype="fp8"), 16 * 2 * (8 + 8) * 1),
        (chunked(dtype="int8", num_kv_heads=1), 16 * 1 * (8 + 8) * 1),
        (cross(dtype="float16"), 16 * 2 * (8 + 8) * 2),
        (mla(), 64 * 576 * 2),
        (mla(bytes_per_token=656, dtype="fp8"), 64 * 656),
        (mla(compress_ratio=4, bytes_per_token=584), 16 * 584),
        # 2 rows of 584 bytes are 1168, rounded up to 3 * 576
        (
            mla(block_size=256, compress_ratio=128, bytes_per_token=584, page_alignment_bytes=576),
            1728,
        ),
        (sliding_mla(head_size=512), 64 * 512 * 2),
        (state(), 3 * 8 * 2 + 2 * 4 * 4),
        (state(block_size=999), 3 * 8 * 2 + 2 * 4 * 4),
        (state(page_bytes_padded=4096), 4096),
    ],
)
def test_a_page_has_the_bytes_counted_by_hand(spec: LayerSpec, page_bytes: int) -> None:
    assert spec.page_bytes == page_bytes


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
        ("nvfp4", "nvfp4"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (np.float32, "float32"),
        (np.dtype("int8"), "int8"),
    ],
)
def test_a_dtype_is_a_name_an_alias_or_a_dtype_object(dtype: Any, name: str) -> None:
    assert canonical_dtype(dtype) == name
    assert mla(dtype=dtype).dtype == full(dtype=dtype, head_size=16).dtype == name
    if name != "nvfp4":  # packs keys and values only
        assert state(dtypes=(dtype, "f32")).dtypes == (name, "float32")


def test_the_value_of_a_latent_row_is_a_prefix_of_it() -> None:
    assert mla().value_size is None
    assert mla(value_size=512).value_size == 512 and mla(value_size=576).value_size == 576
    assert mla(value_size=512).page_bytes == mla().page_bytes
    with pytest.raises(ValueError, match="value_size=577 is more than head_size=576"):
        mla(value_size=577)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "page_bytes"),
    [
        (
            gated_delta_net_state(
                num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, conv_kernel=4
            ),
            ("bf16", "bf16"),
            1_097_728,  # Qwen3-Next
        ),
        (
            mamba1_state(inner_size=8192, state_size=16, conv_kernel=4),
            ("bf16", "bf16"),
            311_296,  # Jamba
        ),
        (
            mamba2_state(num_heads=24, head_size=128, state_size=256, num_groups=1, conv_kernel=4),
            ("bf16", "bf16"),
            1_594_368,  # Falcon-H1-7B
        ),
        (kda_state(num_heads=32, head_size=128, conv_kernel=4), ("bf16", "f32"), 2_170_880),
        (linear_attention_state(num_heads=64, head_size=128), ("f32",), 4_194_304),  # MiniMax
    ],
)
def test_state_pages_of_known_models(shapes: Any, dtypes: Any, page_bytes: int) -> None:
    assert StateSpec(block_size=16, shapes=shapes, dtypes=dtypes).page_bytes == page_bytes


def test_states_have_a_row_for_each_token_of_a_convolution_and_matrices_of_values_by_keys() -> None:
    two = {"conv_kernel": 4, "tensor_parallel": 2}
    heads = {"num_key_heads": 2, "num_value_heads": 6, "key_size": 3, "value_size": 5}
    conv = (2 * 2 * 3 + 6 * 5) // 2  # queries, keys and values of one rank
    assert gated_delta_net_state(**heads, **two) == ((3, conv), (3, 5, 3))
    assert mamba1_state(inner_size=10, state_size=3, **two) == ((3, 5), (5, 3))
    drafted = kda_state(num_heads=6, head_size=5, speculative_tokens=2, **two)
    assert drafted == ((3 + 2, 3 * 3 * 5), (3, 5, 5))
    assert linear_attention_state(num_heads=6, head_size=5, tensor_parallel=2) == ((3, 5, 5),)


@pytest.mark.parametrize(("heads", "ranks", "each"), [(8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 1, 1)])
def test_heads_are_divided_or_replicated(heads: int, ranks: int, each: int) -> None:
    assert heads_per_rank(heads, ranks) == each


def test_states_are_divided_among_ranks_and_scarce_groups_repeated() -> None:
    sizes = {"num_heads": 8, "head_size": 4, "state_size": 6, "num_groups": 1, "conv_kernel": 4}
    assert mamba2_state(**sizes) == ((3, 32 + 12), (8, 4, 6))
    assert mamba2_state(**sizes, tensor_parallel=2) == ((3, (32 + 24) // 2), (4, 4, 6))
    for groups in (3, 6):
        with pytest.raises(ValueError, match=f"num_groups={groups} does not divide"):
            mamba2_state(**sizes | {"num_groups": groups}, tensor_parallel=4)
    with pytest.raises(ValueError, match="num_heads=9 does not divide"):
        kda_state(num_heads=9, head_size=4, conv_kernel=4, tensor_parallel=2)
    with pytest.raises(ValueError, match="num_kv_heads=6 does not divide"):
        heads_per_rank(6, 4)


@pytest.mark.parametrize("ranks", [None, 1, 2, 4])
def test_shapes_of_states_follow_from_their_heads_on_a_rank(ranks: int | None) -> None:
    """Without a number of ranks, those of one; and without drafts, those of the kernel alone."""
    given, r = ({}, 1) if ranks is None else ({"tensor_parallel": ranks}, ranks)
    heads = {"num_heads": 8, "head_size": 5, **given}
    assert linear_attention_state(**heads) == ((8 // r, 5, 5),)
    mamba1 = mamba1_state(inner_size=12, state_size=5, conv_kernel=4, **given)
    assert mamba1 == ((3, 12 // r), (12 // r, 5))
    for drafts in (None, 0, 2):
        rows = 3 + (drafts or 0)
        conv = {"conv_kernel": 4} | ({} if drafts is None else {"speculative_tokens": drafts})
        assert kda_state(**heads, **conv) == ((rows, 3 * 40 // r), (8 // r, 5, 5))
        mamba2 = mamba2_state(**heads, state_size=6, num_groups=4, **conv)
        assert mamba2 == ((rows, (40 + 2 * 4 * 6) // r), (8 // r, 5, 6))
        of_heads = {"num_key_heads": 4, "num_value_heads": 8, "key_size": 5, "value_size": 6}
        delta = gated_delta_net_state(**of_heads, **conv, **given)
        assert delta == ((rows, (2 * 4 * 5 + 8 * 6) // r), (8 // r, 6, 5))


# --- growth -----------------------------------------------------------------------

LENGTH, IN_FLIGHT, ENCODER = 21, 6, 7
STATE = {"shapes": ((1,),), "dtypes": ("f32",)}
GROWTHS: dict[str, list[LayerSpec]] = {
    "full": [full(block_size=b, sink_tokens=sinks) for b in (1, 4) for sinks in (0, 5)],
    "latent": [mla(block_size=4)],
    "sliding": [sliding(w, block_size=b) for b in (1, 3, 4) for w in (1, 2, 4, 5, 9, 30)],
    "chunked": [chunked(c, block_size=b) for b in (1, 3, 4) for c in (1, 2, 4, 5, 8, 30)],
    "cross": [cross(block_size=b) for b in (1, 4)],
    "ring": [RingSpec(block_size=b, group_size=g, head_size=4) for b, g in ((1, 1), (4, 3))],
    **{
        mode: [
            StateSpec(block_size=b, cache_mode=mode, speculative_blocks=drafts, **STATE)
            for b in (1, 3, 4)
            for drafts in (0, 2)
        ]
        for mode in ("none", "align", "all")
    },
}
each_kind = pytest.mark.parametrize("kind", GROWTHS)


def every_step(kind: str) -> Iterator[tuple[Growth, int, int]]:
    """Every step of a request: any chunk, from any token, whatever was rejected before."""
    for spec, n in itertools.product(GROWTHS[kind], range(LENGTH)):
        for stop in range(n + 1, min(n + IN_FLIGHT, LENGTH) + 1):
            yield spec.growth, n, stop


def visible(growth: Growth, position: int) -> set[int]:
    """The positions that a token attends to."""
    match growth.kind:
        case "sliding":
            return {p for p in range(position + 1) if position - p < growth.window}
        case "chunked":
            return {p for p in range(position + 1) if p // growth.chunk == position // growth.chunk}
    return set(range(position + 1))


def listed(growth: Growth, num_computed: int, num_tokens: int) -> set[int]:
    """The columns that a step reads and writes, but for the state that it resumes from."""
    b, new = growth.block_size, range(num_computed, num_tokens)
    if growth.stores == "encoder":
        return {p // b for p in range(ENCODER)}
    if growth.stores == "ring":
        return {0}
    if growth.stores == "tokens":
        return {p // b for token in new for p in visible(growth, token)}
    newest = 0 if growth.cache_mode == "none" else new[-1] // b
    states = {newest + draft for draft in range(1 + growth.speculative_blocks)}
    return states | {p // b for p in new} if growth.cache_mode == "all" else states


def kept(growth: Growth, num_computed: int) -> set[int]:
    """The columns of states that must outlive a step, among them the one that it resumes from."""
    if growth.stores != "state" or not num_computed:
        return set()
    newest = (num_computed - 1) // growth.block_size
    return {"none": {0}, "align": {newest}, "all": set(range(newest + 1))}[growth.cache_mode]


@each_kind
def test_allocated_blocks_are_enough_up_to_the_number_of_tokens_that_the_table_says(
    kind: str,
) -> None:
    """Until then no step frees a block or needs another; the next token does, or begins a chunk."""
    most = 2 * LENGTH + IN_FLIGHT
    for growth, n, stop in every_step(kind):
        if stop not in (n + 1, n + IN_FLIGHT):
            continue
        held = growth.live_range(n, stop, ENCODER)
        columns = np.array(held).reshape(3, 1, 1)
        until = GrowthTable([growth]).needs_no_change_until(np.array([n]), columns)[0]

        def changes(total: int, growth: Growth = growth, n: int = n, held: Any = held) -> bool:
            after = growth.live_range(total - 1, total, ENCODER)
            resumed = growth.cache_mode == "align" and held.source < held.first <= after.source
            begins = growth.kind == "chunked" and (total - 1) // growth.chunk > n // growth.chunk
            return begins or resumed or after.end > held.end or after.first > held.first

        wanted = next((total - 1 for total in range(stop + 1, most) if changes(total)), most)
        assert min(max(until, stop), most) == wanted, (growth, n, stop)


@each_kind
def test_a_step_needs_the_blocks_that_it_reads_and_writes(kind: str) -> None:
    for growth, n, stop in every_step(kind):
        columns = kept(growth, n)
        live = growth.live_blocks(n, stop, encoder_tokens=ENCODER)
        assert list(live) == sorted(columns | listed(growth, n, stop)), (growth, n, stop)
        source = growth.live_range(n, stop, ENCODER).source
        assert source == max(columns, default=-1), (growth, n, stop)


@each_kind
def test_admission_bounds_every_step_and_charges_one_block_too_many_at_most(kind: str) -> None:
    held: dict[tuple[Growth, int], int] = {}
    for growth, n, stop in every_step(kind):
        blocks = len(growth.live_blocks(n, stop, encoder_tokens=ENCODER))
        for length in range(stop, LENGTH + 1):
            held[growth, length] = max(held.get((growth, length), 0), blocks)
    for (growth, length), blocks in held.items():
        charged = growth.max_blocks(length, IN_FLIGHT, ENCODER)
        spare = growth.kind not in ("full", "cross")
        assert charged - spare <= blocks <= charged, (growth, length)


@each_kind
def test_a_row_has_just_the_blocks_that_a_request_ever_needs(kind: str) -> None:
    last: dict[Growth, int] = {}
    for growth, n, stop in every_step(kind):
        live = growth.live_blocks(n, stop, encoder_tokens=ENCODER)
        last[growth] = max(last.get(growth, 0), *live)
    for growth, column in last.items():
        assert growth.row_blocks(LENGTH, ENCODER) == column + 1, growth


@functools.cache
def most_pieces(requests: int, tokens: int, query: int, size: int) -> int:
    """The most pieces that tokens of requests, ``query`` at most of each, are cut into."""
    if not requests:
        return 0
    each = range(min(tokens, query) + 1)
    return max(-(-n // size) + most_pieces(requests - 1, tokens - n, query, size) for n in each)


@each_kind
def test_a_step_takes_at_most_the_blocks_of_its_worst_division_among_requests(kind: str) -> None:
    sizes = range(1, 5), range(1, 9), (1, 2, 3, 4, 5, 8), (1, 2)
    growths = dict.fromkeys(spec.growth for spec in GROWTHS[kind])
    for growth, (batch, tokens, query, ranks) in itertools.product(
        growths, itertools.product(*sizes)
    ):
        wanted = batch * growth.speculative_blocks
        if growth.stores == "encoder":
            wanted = batch * -(-ENCODER // growth.block_size)
        elif growth.stores == "ring" or (growth.stores == "state" and growth.cache_mode != "all"):
            wanted += batch
        else:
            wanted += most_pieces(batch, tokens, query, growth.block_size * ranks)
        found = growth.most_new_blocks(batch, tokens, query, ENCODER, ranks)
        assert found == wanted, (growth, batch, tokens, query, ranks)


@each_kind
def test_the_table_of_a_step_lists_what_it_reads_and_writes_in_the_planned_blocks(
    kind: str,
) -> None:
    for growth, n, stop in every_step(kind):
        columns = range(int(growth.step_start(n, stop)), growth.live_range(n, stop, ENCODER).end)
        assert set(columns) == listed(growth, n, stop), (growth, n, stop)
        source = growth.stores == "state"  # stands in front of the others
        for query_len, seq_len in itertools.product(range(stop - n, IN_FLIGHT + 1), (stop, LENGTH)):
            planned = growth.step_blocks(query_len, seq_len, ENCODER)
            assert source + len(columns) <= planned, (growth, n, stop, query_len, seq_len)


@pytest.mark.parametrize("kind", ["none", "align", "all"])
def test_the_table_of_a_step_has_no_entry_for_states_that_no_step_lists(kind: str) -> None:
    widest: dict[tuple[Growth, int, int], int] = {}
    for growth, n, stop in every_step(kind):
        count = 1 + len(listed(growth, n, stop))  # the first entry is the source
        for sizes in itertools.product(range(stop - n, IN_FLIGHT + 1), range(stop, LENGTH)):
            widest[growth, *sizes] = max(widest.get((growth, *sizes), 0), count)
    for (growth, *sizes), count in widest.items():
        assert growth.step_blocks(*sizes, ENCODER) == count, (growth, *sizes)


@each_kind
@pytest.mark.parametrize("xp", [np, jnp])
def test_arrays_give_what_ints_give(kind: str, xp: Any) -> None:
    steps: dict[Growth, list[tuple[int, int]]] = {}
    for growth, n, stop in every_step(kind):
        steps.setdefault(growth, []).append((n, stop))
    for growth, pairs in steps.items():
        computed, total = xp.asarray(np.array(pairs, np.int32).T)
        encoder = xp.full(len(pairs), ENCODER, np.int32)
        got = [
            *growth.live_range(computed, total, encoder, xp),
            growth.step_start(computed, total, xp),
            growth.first_visible(computed, xp),
        ]
        wanted = [
            [*growth.live_range(n, s, ENCODER), growth.step_start(n, s), growth.first_visible(n)]
            for n, s in pairs
        ]
        assert all(np.asarray(part).dtype == np.int32 for part in got if np.ndim(part))
        table = np.stack([np.broadcast_to(np.asarray(part), len(pairs)) for part in got])
        np.testing.assert_array_equal(table.T, wanted)


@each_kind
def test_a_row_of_padding_starts_at_the_first_block(kind: str) -> None:
    for spec in GROWTHS[kind]:
        assert spec.growth.step_start(0, 0) == 0
        assert max(spec.growth.live_blocks(0, 0), default=0) <= spec.growth.speculative_blocks


def test_windows_and_chunks_have_an_oldest_visible_token() -> None:
    positions = np.arange(40, dtype=np.int32)
    for window, chunk in itertools.product((1, 5, 16, INT32_MAX), (1, 6, 16, INT32_MAX)):
        wanted = [
            next(p for p in range(q + 1) if q - p < window and p // chunk == q // chunk)
            for q in range(40)
        ]
        assert [int(first_visible_token(q, window, chunk)) for q in range(40)] == wanted
        for xp in (np, jnp):
            got = first_visible_token(xp.asarray(positions), window, chunk, xp)
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("spec", "num_tokens", "blocks"),
    [
        (full(), 1, 1),
        (full(), 33, 3),
        (mla(), 129, 3),
        (sliding(window=7), 1000, 2),  # ceil(min(6 + 10, 1000) / 16) + 1
        (sliding(window=8), 1000, 3),
        (sliding(window=6), 16, 1),  # never more than ceil(16 / 16)
        (sliding(window=64), 1000, 6),  # ceil(73 / 16) + 1
        (chunked(chunk=6), 1000, 2),  # ceil(16 / 16) + 1: chunks start inside blocks
        (chunked(chunk=32), 1000, 3),  # ceil(42 / 16): they never do
        (chunked(chunk=32), 20, 2),
        (cross(), 1, 2),  # ceil(20 / 16) of the encoder's tokens, at any length
        (cross(), 1000, 2),
        (state(), 1000, 1),
        (state(speculative_blocks=3), 1, 4),
        (state(cache_mode="align", speculative_blocks=3), 1000, 5),
        (state(cache_mode="all", speculative_blocks=3), 33, 6),
    ],
)
def test_admission_charges_the_blocks_counted_by_hand(
    spec: LayerSpec, num_tokens: int, blocks: int
) -> None:
    assert spec.growth.max_blocks(num_tokens, 10, 20) == blocks


def test_layers_that_need_the_same_blocks_have_equal_growth_whatever_they_store() -> None:
    latent = sliding_mla(block_size=16, sliding_window=6)
    assert sliding().growth == sliding(num_kv_heads=9, dtype="fp8").growth == latent.growth
    assert full().growth == mla(block_size=16).growth != full(sink_tokens=1).growth
    assert state().growth == state(dtypes=("f32", "f32")).growth != full().growth


# --- bad input --------------------------------------------------------------------

BAD_SPECS: list[tuple[str, Callable[[], object]]] = [
    ("block_size", lambda: full(block_size=0)),
    ("block_size", lambda: state(block_size=16.0)),
    ("block_size", lambda: mla(block_size=6, compress_ratio=4)),
    *(
        ("block_size", functools.partial(make, block_size=size))
        for make in (full, sliding, chunked, cross, mla, sliding_mla, state)
        for size in (0, -1, "16", 16.0, True, None)
    ),
    ("page_alignment_bytes", lambda: full(page_alignment_bytes=0)),
    ("head_size", lambda: full(dtype="nvfp4", head_size=24).page_bytes),
    ("head_size", lambda: full(dtype="int4_per_token_head", head_size=7)),
    ("scale_bytes", lambda: full(dtype="int8_per_token_head", scale_bytes=4)),
    ("dtype", lambda: mla(dtype="int8_per_token_head")),
    ("dtype", lambda: state(dtypes=("bf16", "int4_per_token_head"))),
    ("dtype", lambda: full(dtype="float64")),
    ("dtype", lambda: full(dtype=np.float64)),
    *(
        ("page_bytes_padded", functools.partial(make, page_bytes_padded=padded))
        for make in (full, sliding, chunked, cross, mla, sliding_mla, state)
        for padded in (63, 0, "9999", 9999.0)
    ),
    ("shapes", lambda: state(shapes=((3, 8),))),
    ("shapes", lambda: state(shapes=(), dtypes=())),
    ("shapes", lambda: state(shapes=((3, 0), (2, 4)))),
    ("shapes", lambda: state(shapes=(3, 4))),
    ("dtypes", lambda: state(dtypes=("bf16", "f64"))),
    ("dtypes", lambda: state(dtypes=("bf16", "nvfp4"))),
    ("dtypes", lambda: state(shapes=((3, 8),), dtypes="f32")),
]


@pytest.mark.parametrize(
    ("argument", "call"), BAD_SPECS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD_SPECS)]
)
def test_bad_input_is_refused_by_the_name_of_the_argument(
    argument: str, call: Callable[[], object]
) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b"):
        call()


def test_a_page_with_a_ring_has_a_checkpoint_and_what_tokens_have_added() -> None:
    shapes = gated_delta_net_state(
        num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, conv_kernel=4
    )
    state = StateSpec(block_size=16, shapes=shapes, dtypes=("bf16", "f32"))
    ring = dataclasses.replace(state, replay=8)
    assert ring.data_bytes - state.data_bytes == 4 * (8 * (16 + 32) * 128 + 32 * 16)
    halved = dataclasses.replace(ring, dtypes=("bf16", "bf16"), replay=16)
    assert halved.array_bytes[2:] == (2 * 16 * 16 * 128, 2 * 32 * 16 * 128, 2 * 32 * 3 * 16)
    assert ring.interpretation != state.interpretation
    drafted = dataclasses.replace(halved, speculative_tokens=2)  # another number for each row
    assert drafted.array_bytes[4] == 2 * 32 * 4 * 16 and drafted.growth.max_drafts == 2
    assert drafted.interpretation != halved.interpretation
    alone = StateSpec(block_size=4, shapes=((2, 4, 4),), dtypes=("f32",), replay=3)
    assert alone.arrays[1:3] == (((2, 3, 4), "float32"), ((2, 3, 4), "float32"))
    mode = {"block_size": 12, "cache_mode": "all"}
    for wrong, text in (
        ({"dtypes": ("bf16", "fp8")}, "replay=8 needs states of heads x values x keys in float32"),
        ({"shapes": ((3, 8191), shapes[1])}, "replay=8 needs states"),
        ({"shapes": (shapes[0], (32, 128))}, "replay=8 needs states"),
        ({"speculative_blocks": 2}, "replay=8 and speculative_blocks=2"),
        (mode, "replay=8 does not divide block_size=12"),
        ({"speculative_tokens": 4}, "speculative_tokens=4 needs replay=10 or more, got 8"),
        ({"speculative_tokens": 1, "replay": 0}, "speculative_tokens=1 needs replay;"),
        ({"speculative_tokens": 1, "cache_mode": "align"}, 'needs cache_mode="none", got'),
        ({"speculative_tokens": 3}, r"shapes\[0\]=\(3, 8192\) has 3 inputs of a convolution"),
    ):
        with pytest.raises(ValueError, match=text):
            dataclasses.replace(ring, **wrong)
