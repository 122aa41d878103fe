"""Groups and layouts: block sizes next to states, group rules, the bytes of a block, zeroing."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from jaxkv._src.planning import (
    Group,
    Plan,
    PoolLayout,
    hybrid_block_size,
    make_groups,
    make_layout,
    plan_cache,
    unify_pages,
)
from jaxkv._src.planning._pages import unifiable
from jaxkv._src.specs import (
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    RingSpec,
    SlidingWindowMLASpec,
    StateSpec,
)
from tests.layer_examples import (
    MODELS,
    SPECS,
    STATES,
    TOKEN_SPECS,
    Layers,
    by_name,
    chunked,
    cross,
    full,
    mla,
    sliding,
    state,
)

# --- blocks that hold a state -----------------------------------------------------


def block_that_holds(spec: LayerSpec, state_page_bytes: int) -> int:
    """The smallest block by trying all: whole blocks asked for, of MLA also whole 128 tokens."""
    step = 128 if isinstance(spec, MLASpec) else 1
    sizes = (n for n in itertools.count(spec.block_size, spec.block_size) if n % step == 0)
    plain = dataclasses.replace(spec, page_bytes_padded=None)
    return next(
        n for n in sizes if dataclasses.replace(plain, block_size=n).data_bytes >= state_page_bytes
    )


def held(layers: Layers) -> Layers:
    """Layers as they are to be where attention shares a pool with states."""
    states = {name: spec for name, spec in layers.items() if isinstance(spec, StateSpec | RingSpec)}
    largest = max((spec.page_bytes for spec in states.values()), default=0)
    grown, followed = dict(layers), dict.fromkeys(layers.values(), 0)
    for name, spec in layers.items():
        if name in states or spec.page_bytes_padded or spec.page_bytes >= largest:
            continue
        size = block_that_holds(spec, largest)
        grown[name] = dataclasses.replace(spec, block_size=size)
        for other in states.values():
            if other.block_size == spec.block_size:
                followed[other] = max(followed[other], size)
    for name, spec in states.items():
        if followed[spec] and isinstance(spec, StateSpec):
            grown[name] = dataclasses.replace(spec, block_size=followed[spec])
    return grown


def placed(groups: tuple[Group, ...]) -> Layers:
    """The layers as groups have them."""
    return {n: s for group in groups for n, s in zip(group.layers, group.specs, strict=True)}


PADDED = TOKEN_SPECS.map(lambda spec: dataclasses.replace(spec, page_bytes_padded=spec.page_bytes))
LARGER = STATES.map(lambda spec: dataclasses.replace(spec, page_bytes_padded=3 * spec.page_bytes))


@given(
    st.lists(TOKEN_SPECS | PADDED, min_size=1, max_size=3),
    st.lists(STATES | LARGER, min_size=1, max_size=2),
)
def test_attention_blocks_grow_until_their_page_holds_a_state(attention, states) -> None:
    layers = by_name([*attention, *states])
    # Packed groups keep the pages that they are given.
    assert placed(make_groups(layers, grouping="packed")) == held(layers)


@pytest.mark.parametrize(
    ("spec", "state_page_bytes", "block_size"),
    [
        (full(block_size=3), 1, 3),
        (full(), 1024, 16),
        (full(), 1025, 32),
        (full(page_bytes_padded=10**6), 1025, 32),  # its padding would not hold tokens
        (full(page_alignment_bytes=1536), 4700, 80),  # nor that of several pages
        (mla(), 1, 128),
        (mla(), 128 * 1152 + 1, 256),
        (mla(block_size=192), 1, 384),  # the least common multiple with 128
        (mla(block_size=96), 384 * 1152 + 1, 768),
    ],
)
def test_the_hybrid_block_is_the_smallest_multiple_that_holds_a_state(
    spec: FullAttentionSpec | MLASpec, state_page_bytes: int, block_size: int
) -> None:
    assert hybrid_block_size(spec, state_page_bytes) == block_size
    assert block_that_holds(spec, state_page_bytes) == block_size


# --- pages of one size ------------------------------------------------------------


@st.composite
def aligned(draw) -> LayerSpec:
    """A layer whose page is rounded up, to no more or to more bytes."""
    spec = draw(TOKEN_SPECS)
    unit = draw(st.sampled_from([2, 3, 1]).map(lambda n: -(-spec.data_bytes // n)))
    return dataclasses.replace(spec, page_alignment_bytes=unit + draw(st.integers(0, 2)))


@given(st.dictionaries(st.text("abc", max_size=2), SPECS | aligned(), min_size=1, max_size=6))
@example({"a": full(page_alignment_bytes=1536), "b": full(block_size=48)})  # rounded up by a half
def test_unified_pages_have_one_size_or_an_mla_page_is_refused(layers: Layers) -> None:
    ready = held(layers)
    largest = max(spec.page_bytes for spec in ready.values())
    grows = {spec: not largest % spec.page_bytes and whole(spec) for spec in ready.values()}
    refused = any(
        isinstance(spec, MLASpec) and not grows[spec] and spec.page_bytes != largest
        for spec in grows
    )
    assert unifiable(ready) != refused
    if refused:
        with pytest.raises(ValueError, match="MLA"):
            unify_pages(layers)
        return
    unified = unify_pages(layers)
    assert list(unified) == list(layers)
    for old, new in zip(ready.values(), unified.values(), strict=True):
        assert new.page_bytes == largest
        change: dict[str, int] = {"page_bytes_padded": largest}
        if grows[old]:
            change = {"block_size": old.block_size * largest // old.page_bytes}
        assert new == (old if old.page_bytes == largest else dataclasses.replace(old, **change))


def whole(spec: LayerSpec) -> bool:
    """Whether a page is full of tokens, so that pages of a multiple of its bytes hold more."""
    return not isinstance(spec, StateSpec | RingSpec) and spec.page_bytes == spec.data_bytes


# --- groups -----------------------------------------------------------------------


@pytest.mark.parametrize("grouping", ["auto", "rule", "least_waste", "packed"])
@example(by_name([full(), full(), sliding(6), sliding(12), chunked(6), chunked(12)]))
@given(layers=MODELS)
def test_groups_are_a_partition_into_equal_growth(grouping, layers: Layers) -> None:
    groups = make_groups(layers, grouping=grouping)
    assert sorted(name for g in groups for name in g.layers) == sorted(layers)
    for group in groups:
        assert len(group.layers) == len(group.specs) > 0
        assert {spec.growth for spec in group.specs} == {group.growth}
        assert {spec.block_size for spec in group.specs} == {group.block_size}
    if len(groups) > 1 and grouping in ("auto", "rule"):
        assert len({spec.page_bytes for g in groups for spec in g.specs}) == 1


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "sizes"),
    [
        (1, 3, [1, 1, 1, 1]),
        (2, 3, [2, 2, 1]),  # 3 is not less than 1.5 * 2: the smallest bucket counts
        (4, 5, [4, 5]),  # 5 is less than 1.5 * 4: the largest one does
        (20, 30, [20, 15, 15]),
        (3, 0, [3]),
    ],
)
def test_group_sizes_follow_the_smallest_bucket_or_a_close_largest(
    num_full: int, num_sliding: int, sizes: list[int]
) -> None:
    groups = make_groups(by_name([full()] * num_full + [sliding()] * num_sliding))
    assert [len(group.layers) for group in groups] == sizes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (full(), sliding()),
        (full(), cross()),
        (mla(), chunked(num_kv_heads=18, head_size=64)),
        (sliding(window=6), sliding(window=7)),
        (chunked(chunk=6), chunked(chunk=7)),
        (state(cache_mode="none"), state(cache_mode="align")),
        (state(cache_mode="align"), state(cache_mode="all")),
        (state(), state(speculative_blocks=1)),
    ],
)
def test_layers_that_need_different_blocks_never_share_a_group(
    one: LayerSpec, other: LayerSpec
) -> None:
    groups = make_groups({"a": one, "b": other, "c": one})
    assert {frozenset(group.layers) for group in groups} >= {frozenset("b")}


def test_layers_of_a_bucket_go_to_its_groups_in_turn() -> None:
    layers: Layers = {"full": full()} | {f"s{i}": sliding() for i in range(3)}
    layers["full.1"] = full()
    assert [g.layers for g in make_groups(layers)] == [("full", "full.1"), ("s0", "s2"), ("s1",)]


def test_equal_growth_of_different_widths_is_one_group_of_mixed_pages() -> None:
    layers: Layers = {"a": full(), "b": full(num_kv_heads=1), "c": full(dtype="fp8")}
    (group,) = make_groups(layers)
    assert [tensor.page_bytes for tensor in make_layout([group]).tensors] == [1024, 512, 512]


def test_a_group_reserves_the_sinks_of_any_of_its_layers() -> None:
    (group,) = make_groups({"a": sliding(), "b": sliding(sink_tokens=5), "c": sliding()})
    assert group.reserved_blocks == 1
    assert plan_of({"a": sliding(), "b": sliding(sink_tokens=17)}).reserved_blocks == 1 + 2


HEADS = st.integers(1, 5)
WIDE = {"block_size": 32}  # of another growth, which keeps all tokens, too


@given(
    full_heads=st.lists(HEADS, min_size=1, max_size=2),
    wide_heads=st.lists(HEADS, max_size=2),
    window_heads=st.lists(HEADS, min_size=3, max_size=8),
)
def test_packed_windows_are_in_the_fewest_groups_no_wider_than_what_keeps_all_tokens(
    full_heads, wide_heads, window_heads
) -> None:
    layers = by_name([full(num_kv_heads=heads) for heads in full_heads])
    wide = {f"f{i}": full(num_kv_heads=heads, **WIDE) for i, heads in enumerate(wide_heads)}
    windows = {f"w{i}": sliding(num_kv_heads=heads) for i, heads in enumerate(window_heads)}
    groups = make_groups(layers | wide | windows, grouping="packed")
    whole, others = groups[: 1 + bool(wide)], groups[1 + bool(wide) :]
    assert [group.layers for group in whole] == [tuple(kept) for kept in (layers, wide) if kept]
    pages = [spec.page_bytes for spec in windows.values()]
    limit = max(*(group.page_bytes for group in whole), *pages)
    assert all(group.page_bytes <= limit for group in others)
    fewer = len(others) - 1
    assert not fewer or max(sum(pages[i::fewer]) for i in range(fewer)) > limit


@given(st.lists(HEADS, min_size=1, max_size=3), st.lists(HEADS, min_size=1, max_size=5))
def test_among_equals_least_waste_takes_the_fewest_groups(full_heads, window_heads) -> None:
    layers: Layers = {f"f{i}": full(num_kv_heads=heads) for i, heads in enumerate(full_heads)}
    layers |= {f"w{i}": sliding(num_kv_heads=heads) for i, heads in enumerate(window_heads)}
    # Their pages cannot be unified, so that groupings are packed ones alone.
    layers |= {"latent": mla(head_size=577), "index": mla(head_size=576)}
    tried: list[tuple[Group, ...]] = []
    best = make_groups(
        layers, grouping="least_waste", cost=lambda groups: tried.append(groups) or 0
    )
    counts = [len(groups) for groups in tried]
    assert counts == sorted(counts) and counts[0] == 3 and best == tried[0]


@given(MODELS)
def test_least_waste_tries_every_group_size_and_takes_the_cheapest(layers: Layers) -> None:
    """From that of the largest bucket, which the rule may take, to one layer in each group."""
    tried: list[tuple[Group, ...]] = []
    make_groups(layers, grouping="least_waste", cost=lambda groups: tried.append(groups) or 0)
    assume(tried)  # layers of one growth are in one group, whatever it costs
    counts = [Counter(group.specs[0] for group in groups) for groups in tried]
    buckets = Counter(unify_pages(layers).values())
    for size in range(1, max(buckets.values()) + 1):
        assert {spec: -(-count // size) for spec, count in buckets.items()} in counts
    costs = [len(groups) * max(group.page_bytes for group in groups) for groups in tried]
    assert make_groups(layers, grouping="least_waste") == tried[costs.index(min(costs))]


def plan_of(layers: Layers, **options: object) -> Plan:
    return plan_cache(layers, 2**24, max_model_len=40, **options)


def deepseek_v4_flash() -> Layers:
    """43 layers: 21 compressed by 4 (with an indexer), 20 by 128, each with a window."""
    aligned = {"page_alignment_bytes": 576, "dtype": "uint8"}
    row = {"head_size": 512, "bytes_per_token": 584, **aligned}
    compressor = {"dtype": "f32", "page_alignment_bytes": 576}
    layers: Layers = {}
    for i in range(43):
        window = SlidingWindowMLASpec(block_size=64, sliding_window=128, **row)
        layers[f"layers.{i}.window"] = window
        if i < 2:
            continue
        ratio = 4 if i % 2 == 0 else 128
        layers[f"layers.{i}.main"] = MLASpec(block_size=256, compress_ratio=ratio, **row)
        if ratio == 4:
            layers[f"layers.{i}.indexer"] = MLASpec(
                block_size=256, head_size=132, compress_ratio=4, **aligned
            )
        states = {"main": 2048, "index": 512} if ratio == 4 else {"main": 1024}
        block, length = (4, 8) if ratio == 4 else (8, 128)
        for name, width in states.items():
            layers[f"layers.{i}.{name}_state"] = SlidingWindowMLASpec(
                block_size=block, sliding_window=length, head_size=width, **compressor
            )
    return layers


def test_deepseek_v4_packs_five_groups_of_mixed_pages() -> None:
    layers = deepseek_v4_flash()
    plan = plan_cache(layers, 40 * 2**30, max_model_len=65536)
    assert len(plan.groups) == 5
    assert plan.bytes_per_block == (1_002_240,)
    assert len(plan.layout.tensors) == 1
    assert plan.groups_to_zero == (True,) * 5
    assert not any(plan.layout.placement_of(name).offset_bytes % 576 for name in layers)
    # Windows and compressors drop nearly all of their blocks once a request decodes.
    assert plan.admission_blocks(65536) == 3610 and plan.steady_blocks(65536) == 282
    with pytest.raises(ValueError, match='grouping="packed"'):
        make_groups(layers, grouping="rule")


# --- layouts ----------------------------------------------------------------------


@pytest.mark.parametrize("grouping", ["auto", "least_waste", "packed"])
@given(layers=MODELS, data=st.data())
def test_layers_of_a_group_never_overlap_and_pages_hold_them(grouping, layers, data) -> None:
    here = data.draw(st.lists(st.sampled_from(list(layers)), unique=True))
    groups = make_groups(layers, grouping=grouping)
    layout = make_layout(groups, here)
    assert set(itertools.chain(*(tensor.layers for tensor in layout.tensors))) == set(here)
    assert layout.bytes_per_block == sum(tensor.page_bytes for tensor in layout.tensors)
    used: Counter[tuple[int, int, int]] = Counter()
    for name in here:
        place = layout.placement_of(name)
        assert name in groups[place.group].layers and name in layout.tensors[place.tensor].layers
        assert place.spec == placed(groups)[name]
        end = place.offset_bytes + place.spec.page_bytes
        assert end <= layout.tensors[place.tensor].page_bytes
        used.update((place.group, place.tensor, byte) for byte in range(place.offset_bytes, end))
    assert set(used.values()) <= {1}
    for index, group in enumerate(layout.groups):
        assert set(group.layers) == set(groups[index].layers) & set(here)
        tensors = {layout.placement_of(n).tensor for n in group.layers}
        assert layout.tensors_of(index) == tensors == set(range(len(tensors)))  # the first ones
        assert layout.group_bytes(index) == sum(layout.tensors[i].page_bytes for i in tensors)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("layers is empty", lambda: unify_pages({})),
        (r"layers\['a'\]: its", lambda: unify_pages({"a": mla(), "b": full(num_kv_heads=999)})),
        ("state_page_bytes", lambda: hybrid_block_size(full(), 0)),
        (r"layers \['b'\] are in none", lambda: layout_of({"a": full()}, ["b"])),
        (r"layers \['b'\] are in none", lambda: layout_of({"a": full()}, ["a", "b"])),
        (r"layers\['b'\] shares the cache of 'c'", lambda: layout_of({"a": full()}, shared="bc")),
        (
            r"layers\['c'\] shares the cache of 'b', which is not on its worker",
            lambda: layout_of({"a": full(), "b": full()}, ["a"], shared="cb"),
        ),
        (
            r"layers\['a'\] both owns",
            lambda: layout_of(by_name([full()]) | {"a": full()}, shared="aa"),
        ),
    ],
)
def test_bad_layouts_are_refused_by_name(message: str, call: Callable) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def layout_of(
    layers: Layers, here: list[str] | None = None, shared: str | None = None
) -> PoolLayout:
    pairs = {shared[0]: shared[1]} if shared else None
    return make_layout(make_groups(layers), here, shared=pairs)


# --- zeroing ----------------------------------------------------------------------


ARRAYS = {"shapes": ((8, 16), (192,))}
MEANINGS: list[list[LayerSpec]] = [  # whose bytes mean the same, in pages of one size
    [full(), full(head_size_v=8), sliding(), sliding(head_size_v=8), chunked(), cross()],
    [full(dtype="f16"), sliding(dtype="f16")],
    [full(dtype="f32", num_kv_heads=1), chunked(dtype="f32", num_kv_heads=1)],
    [full(num_kv_heads=4, head_size=4), sliding(num_kv_heads=4, head_size=4)],
    [full(head_size=12, head_size_v=4), chunked(head_size=12, head_size_v=4)],
    [full(head_size=4, head_size_v=12), chunked(head_size=4, head_size_v=12)],
    [full(head_size=6, scale_bytes=4), cross(head_size=6, scale_bytes=4)],
    [
        MLASpec(block_size=16, head_size=32),
        MLASpec(block_size=16, head_size=32, value_size=16),
        MLASpec(block_size=16, head_size=32, bytes_per_token=64),
        SlidingWindowMLASpec(block_size=16, head_size=32, sliding_window=6),
    ],
    [SlidingWindowMLASpec(block_size=16, head_size=32, dtype="f16", sliding_window=6)],
    [
        MLASpec(block_size=16, head_size=24, bytes_per_token=64),
        SlidingWindowMLASpec(block_size=16, head_size=24, bytes_per_token=64, sliding_window=6),
    ],
    [
        state(**ARRAYS, dtypes=("bf16", "f32"), cache_mode=mode, speculative_blocks=drafts)
        for mode, drafts in (("none", 0), ("none", 1), ("align", 0), ("all", 0))
    ],
    [
        state(**ARRAYS, dtypes=("f16", "f32")),
        state(**ARRAYS, dtypes=("f16", "f32"), cache_mode="all"),
    ],
    [state(shapes=((16, 8), (192,)), dtypes=("bf16", "f32"))],
    [state(shapes=((192,), (8, 16)), dtypes=("f32", "bf16"))],
]


@pytest.mark.parametrize("specs", MEANINGS)
def test_groups_are_zeroed_unless_their_bytes_mean_the_same(specs: list[LayerSpec]) -> None:
    for first, others in itertools.product(specs, MEANINGS):
        for second in others:
            layout = make_layout(make_groups({"a": first, "b": second}))
            count = len(layout.groups)
            assert first.page_bytes == second.page_bytes and len(layout.tensors) == 3 - count
            unlike = count == 2 and others is not specs
            assert list(layout.groups_to_zero()) == [unlike] * count


# Layers of four growths, alike but for the size of their pages: 16 or 32 bytes, or 24 padded ones.
ALIKE = [
    make(num_kv_heads=1, head_size=2, block_size=block_size)
    for make in (full, sliding)
    for block_size in (2, 4)
]
PADDED_ALIKE = dataclasses.replace(ALIKE[0], page_bytes_padded=24)
OTHER = dataclasses.replace(ALIKE[0], dtype="float16")


@given(
    st.lists(st.sampled_from(ALIKE), min_size=2, max_size=6)
    | st.lists(st.sampled_from([*ALIKE, PADDED_ALIKE, OTHER]), min_size=2, max_size=6)
)
def test_packed_layers_are_zeroed_where_a_byte_has_two_meanings(specs: list[LayerSpec]) -> None:
    """A meaning is the rule by which a layer reads its page, and the place in the page."""
    layout = make_layout(make_groups(by_name(specs), grouping="packed"))
    meanings: dict[object, dict[int, object]] = {}  # byte -> group -> meaning
    for name in by_name(specs):
        place = layout.placement_of(name)
        for i in range(place.spec.page_bytes):
            of_groups = meanings.setdefault((place.tensor, place.offset_bytes + i), {})
            of_groups[place.group] = place.spec.interpretation, i
    unlike = [of_groups for of_groups in meanings.values() if len(set(of_groups.values())) > 1]
    flags = [any(i in of_groups for of_groups in unlike) for i in range(len(layout.groups))]
    assert list(layout.groups_to_zero()) == flags


def test_packed_neighbours_share_no_bytes() -> None:
    """Layers agree offset by offset, and each ends where another one's neighbour begins."""
    narrow, wide = {"num_kv_heads": 1}, {"num_kv_heads": 3}
    layers = {"f0": full(**narrow), "f1": full(**wide), "f2": full(**narrow)}
    layers |= {"s0": sliding(**narrow), "s1": sliding(**wide)}
    groups = make_groups(layers, grouping="packed")
    layout = make_layout(groups)
    assert [group.layers for group in groups] == [("f0", "f1", "f2"), ("s0", "s1")]
    assert len(layout.tensors) == 1
    assert layout.groups_to_zero() == (False, False)


def test_a_group_that_overlays_nothing_on_its_worker_is_not_zeroed_there() -> None:
    groups = make_groups({"kv": full(), "state": state()})
    assert make_layout(groups, ["kv"]).groups_to_zero() == (False, False)
    plan = plan_cache([{"kv": full()}, {"state": state()}], [2**20] * 2, max_model_len=8)
    assert plan.groups_to_zero == (False, False)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_group_is_zeroed_if_any_worker_overlays_its_bytes(at: int) -> None:
    workers: list[Layers] = [{"kv.1": full()}, {}]
    workers.insert(at, {"kv.0": full(), "state": state()})
    plan = plan_cache(workers, [2**20] * 3, max_model_len=8)
    flags = {
        group.layers: zeroed for group, zeroed in zip(plan.groups, plan.groups_to_zero, strict=True)
    }
    assert flags == {("kv.0",): True, ("kv.1",): False, ("state",): True}
    alone = [layout.groups_to_zero() for layout in plan.layouts]
    assert alone.pop(at) == plan.groups_to_zero and alone == [(False, False, False)] * 2
