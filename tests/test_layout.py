"""Layouts: kernel block sizes against brute force, views against a walk through memory.

The model of an order is a cursor that visits the elements in physical order and skips the
padding; it knows no strides. NumPy reads memory through the strides under test.
"""

import dataclasses
import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from jaxkv._src.cache import make_cache
from jaxkv._src.layout import (
    ORDERS,
    AcceptedSizes,
    LayerExtents,
    LayerView,
    PagePlacement,
    PhysicalOrder,
    PoolBuffers,
    RowFormat,
    blocks_per_kv_block,
    plan_buffers,
    row_format,
    rows_per_block,
    select_kernel_block_size,
    select_kernel_block_sizes,
)
from jaxkv._src.planning import Group, PoolLayout, make_groups, make_layout, plan_cache
from jaxkv._src.pool._layer import _cut_to_layer
from jaxkv._src.specs import (
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    SharedKVSpec,
    StateSpec,
)
from tests.layer_examples import Layers, by_name, chunked, cross, full, mla, sliding, state

DTYPES = ["fp8", "bf16", "f32"]
ATTENTION = st.builds(
    FullAttentionSpec,
    block_size=st.sampled_from([1, 2, 4, 6]),
    num_kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 2),
    head_size_v=st.sampled_from([None, 1]),
    dtype=st.sampled_from(DTYPES),
    scale_bytes=st.sampled_from([0, 0, 4]),
)
LATENT = st.builds(
    lambda rows, ratio, **kwargs: MLASpec(block_size=rows * ratio, compress_ratio=ratio, **kwargs),
    rows=st.sampled_from([1, 2, 4, 6]),
    ratio=st.sampled_from([1, 2, 3, 4]),
    head_size=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    bytes_per_token=st.sampled_from([None, 5]),
)
STATE = st.builds(
    StateSpec,
    block_size=st.sampled_from([1, 4, 6]),
    shapes=st.just(((3,), (2, 2))),
    dtypes=st.sampled_from([("bf16", "f32"), ("fp8", "fp8")]),
)
SPECS = st.one_of(ATTENTION, LATENT, STATE)
SIZES = st.integers(1, 48)
ACCEPTED = st.one_of(
    st.builds(AcceptedSizes, multiples_of=st.integers(1, 16)),
    st.builds(
        AcceptedSizes,
        exact=st.lists(SIZES, min_size=1, max_size=4).map(tuple),
        multiples_of=st.sampled_from([None, None, 8, 16]),
    ),
)
BACKENDS = st.dictionaries(st.sampled_from("abc"), ACCEPTED, min_size=1)
ANY = {"any": AcceptedSizes(multiples_of=1)}
FLASH = {"flash": AcceptedSizes(exact=(16, 32, 64))}
QWEN = FullAttentionSpec(block_size=128, num_kv_heads=8, head_size=128)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def ratio_of(spec: LayerSpec) -> int:
    return spec.compress_ratio if isinstance(spec, MLASpec) else 1


def legal(spec: LayerSpec, size: int) -> bool:
    if isinstance(spec, StateSpec):
        return size == spec.block_size
    return spec.block_size % size == 0 and size % ratio_of(spec) == 0


def itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


# --- kernel block sizes -----------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 24), BACKENDS)
@example(1, 64, {"a": AcceptedSizes(exact=(16,), multiples_of=32), "b": AcceptedSizes((), 16)})
def test_the_size_is_the_largest_divisor_that_all_accept(ratio, rows, backends) -> None:
    block_size = ratio * rows
    fitting = [
        size
        for size in divisors(block_size)
        if size % ratio == 0 and all(sizes.accepts(size) for sizes in backends.values())
    ]
    if fitting:
        got = select_kernel_block_size(block_size, backends, compress_ratio=ratio)
        assert got == max(fitting)
        return
    with pytest.raises(ValueError, match=f"block_size={block_size}") as error:
        select_kernel_block_size(block_size, backends, compress_ratio=ratio)
    for name, sizes in backends.items():
        assert f"{name} accepts {sizes}" in str(error.value)


@given(BACKENDS, st.integers(1, 4), st.integers(1, 64))
def test_the_advice_names_block_sizes_that_work(backends, ratio, rows) -> None:
    try:
        select_kernel_block_size(ratio * rows, backends, compress_ratio=ratio)
    except ValueError as error:
        text = str(error)
    else:
        assume(False)
        return
    _, found, rest = text.partition("a block_size that is a multiple of ")
    if not found:
        steps = [sizes.multiples_of or 1 for sizes in backends.values()]
        for size in range(ratio, 2 * math.lcm(ratio, *steps, 48) + 1, ratio):
            assert not all(sizes.accepts(size) for sizes in backends.values())
        return
    for size in map(int, rest.partition(",")[0].split(" or ")):
        for times in (1, 3):
            select_kernel_block_size(size * times, backends, compress_ratio=ratio)


def test_groups_keep_their_index() -> None:
    recurrent = StateSpec(block_size=100, shapes=((3,),), dtypes=("f32",))
    latent = MLASpec(block_size=256, head_size=8, compress_ratio=4)
    groups = [EncoderOnlySpec(), QWEN, None, recurrent, SharedKVSpec("a"), latent]
    backends = [{}, FLASH, {}, {}, {}, {**ANY, "indexer": AcceptedSizes(exact=(2, 64, 6))}]
    assert select_kernel_block_sizes(groups, backends) == [None, 64, None, 100, None, 64]
    assert select_kernel_block_sizes([Group((), ())], [{}]) == [None]


def group_of_ratios(*ratios: int) -> Group:
    specs = [MLASpec(block_size=384, head_size=8, compress_ratio=ratio) for ratio in ratios]
    return Group(tuple(by_name(specs)), tuple(specs))


@pytest.mark.parametrize(
    ("ratios", "exact", "size"),
    [((4, 32, 1), (16, 32, 48), 32), ((4, 6), (6, 12), 12), ((4, 6), (24, 36), 24)],
)
def test_a_group_of_several_compressions_holds_whole_rows_of_all(ratios, exact, size) -> None:
    backends = {"picky": AcceptedSizes(exact=exact)}
    assert select_kernel_block_sizes([group_of_ratios(*ratios)], [backends]) == [size]


@pytest.mark.parametrize(("ratios", "exact", "rows"), [((4, 32), 16, 32), ((4, 6), 6, 12)])
def test_a_size_that_splits_a_row_of_one_layer_is_refused(ratios, exact, rows) -> None:
    backends = {"picky": AcceptedSizes(exact=(exact,))}
    with pytest.raises(ValueError, match=f"group 0: .*whole rows of {rows} tokens"):
        select_kernel_block_sizes([group_of_ratios(*ratios)], [backends])


@given(SPECS, SIZES)
def test_kernel_blocks_and_their_rows_make_up_a_block(spec, size) -> None:
    if not legal(spec, size):
        with pytest.raises(ValueError, match=f"kernel_block_size={size} "):
            blocks_per_kv_block(spec, size)
        return
    parts = blocks_per_kv_block(spec, size)
    assert parts * size == spec.block_size
    assert rows_per_block(spec) % parts == 0
    if isinstance(spec, StateSpec):
        assert rows_per_block(spec) == parts == 1
    else:
        assert rows_per_block(spec) * spec.token_bytes == spec.data_bytes


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (full(head_size_v=4), RowFormat(2, 12, "bfloat16", 8)),
        (full(dtype="fp8", scale_bytes=4), RowFormat(1, 2 * (8 + 4 + 8 + 4), "uint8", None)),
        (full(dtype="nvfp4", head_size=16), RowFormat(1, 2 * 2 * (8 + 1), "uint8", None)),
        (mla(), RowFormat(1, 576, "bfloat16", None)),
        (mla(bytes_per_token=656, dtype="fp8"), RowFormat(1, 656, "uint8", None)),
        (state(), RowFormat(1, 80, "uint8", None)),
    ],
)
def test_rows_are_elements_of_one_dtype_or_bytes(spec: LayerSpec, expected: RowFormat) -> None:
    assert row_format(spec) == expected


# --- views of one layer -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """Byte addresses int[L, B, H, N, C] of a buffer, found by walking through it."""

    addresses: np.ndarray
    size_bytes: int


def walk(order: str, sizes: dict[str, int], item: int, page_bytes: int) -> Memory:
    """Visits the elements in physical order; padding follows the last axis run of H, N, C."""
    first = max(order.index("L"), order.index("B")) + 1
    run_bytes = page_bytes
    for axis in order[:first]:
        run_bytes = run_bytes // sizes[axis] if axis == "H" else run_bytes
    addresses = np.zeros([sizes[axis] for axis in "LBHNC"], int)
    start = 0
    for outer in itertools.product(*(range(sizes[axis]) for axis in order[:first])):
        cursor = start
        for inner in itertools.product(*(range(sizes[axis]) for axis in order[first:])):
            at = dict(zip(order, (*outer, *inner), strict=True))
            addresses[tuple(at[axis] for axis in "LBHNC")] = cursor
            cursor += item
        assert cursor <= start + run_bytes
        start += run_bytes
    return Memory(addresses, start)


def read(buffer: np.ndarray, view: LayerView) -> np.ndarray:
    """The first byte of each element, as [B, H, N, C], through the view's strides alone."""
    seen = np.lib.stride_tricks.as_strided(
        buffer[view.offset_bytes :], view.shape, view.strides_bytes, writeable=False
    )
    return seen.transpose([view.axes.index(axis) for axis in "BHNC"])


@dataclasses.dataclass(frozen=True)
class Case:
    """An order of pages, and the same memory by a walk through the blocks, or the tiles."""

    order: PhysicalOrder
    spec: FullAttentionSpec | MLASpec | StateSpec
    num_layers: int
    num_blocks: int
    padding: int

    @property
    def tiles(self) -> int:
        tile = self.order.tile_tokens
        return 1 if tile is None else blocks_per_kv_block(self.spec, tile)

    @property
    def item(self) -> int:
        return itemsize(row_format(self.spec).dtype)

    def place(self, layer: int = 0) -> PagePlacement:
        page_bytes = self.spec.data_bytes + self.padding
        return PagePlacement(self.num_blocks, self.num_layers, layer, page_bytes)

    def memory(self) -> Memory:
        row = row_format(self.spec)
        sizes = {"L": self.num_layers, "B": self.num_blocks * self.tiles, "H": row.heads}
        sizes |= {"N": rows_per_block(self.spec) // self.tiles, "C": row.width}
        page_bytes = (self.spec.data_bytes + self.padding) // self.tiles
        return walk(self.order.order, sizes, self.item, page_bytes)

    def rows(self, layer: int) -> np.ndarray:
        """Addresses of one layer's elements, int[B, row, H, C] in whole blocks."""
        addresses = self.memory().addresses[layer].swapaxes(1, 2)
        return addresses.reshape(self.num_blocks, -1, *addresses.shape[2:])


@st.composite
def cases(draw, may_be_tiled=True):
    spec = draw(SPECS)
    sizes = [size for size in divisors(spec.block_size) if legal(spec, size)]
    tile = draw(st.sampled_from(sizes)) if may_be_tiled and draw(st.booleans()) else None
    order = PhysicalOrder(draw(st.sampled_from(ORDERS)), tile)
    case = Case(order, spec, draw(st.integers(1, 3)), draw(st.integers(2, 3)), 0)
    unit = case.tiles * row_format(spec).heads * case.item
    return dataclasses.replace(case, padding=unit * draw(st.sampled_from([0, 0, 1, 3])))


@given(cases(may_be_tiled=False))
def test_strides_lead_to_every_element(case) -> None:
    memory, view = case.memory(), case.order.view(case.spec, case.place())
    page_bytes = case.spec.data_bytes + case.padding
    assert memory.size_bytes == case.num_layers * case.num_blocks * page_bytes
    assert math.prod(view.shape) * case.item == case.num_blocks * case.spec.data_bytes
    assert view.shape[view.block_axis] == view.num_blocks == case.num_blocks
    assert view.axes[view.block_axis] == "B"
    assert (view.dtype, view.key_elements) == row_format(case.spec)[2:]
    number = np.arange(memory.addresses.size).reshape(memory.addresses.shape)
    for shift in (0, 8):  # two bytes tell the elements apart
        buffer = np.full(memory.size_bytes, 255, np.uint8)
        for address, value in zip(memory.addresses.flat, number.flat, strict=True):
            buffer[address] = value >> shift & 255
        for layer in range(case.num_layers):
            got = read(buffer, case.order.view(case.spec, case.place(layer)))
            np.testing.assert_array_equal(got, number[layer] >> shift & 255)


def evenly(steps: np.ndarray) -> bool:
    return len(set(steps.reshape(-1))) <= 1


@given(cases(), st.data())
def test_a_kernel_view_reads_the_same_bytes_or_is_refused(case, data) -> None:
    spec, order = case.spec, case.order
    sizes = [size for size in divisors(spec.block_size) if legal(spec, size)]
    size = data.draw(st.sampled_from(sizes))
    parts = blocks_per_kv_block(spec, size)
    # One row is at any stride: whether tiles of one row could be joined is not promised.
    assume(parts == case.tiles or rows_per_block(spec) > case.tiles)
    layer = data.draw(st.integers(0, case.num_layers - 1))
    place = case.place(layer)
    # Kernel blocks must lie evenly spaced, and the rows in them, too.
    split = case.rows(layer)
    split = split.reshape(case.num_blocks * parts, -1, *split.shape[2:]).swapaxes(1, 2)
    even = evenly(np.diff(split[:, 0, 0, 0])) and evenly(np.diff(split[:, 0, :, 0]))
    if parts != case.tiles and not even:
        with pytest.raises(ValueError, match=r"kernel_block_size: .* would lie between"):
            order.view(spec, place, kernel_block_size=size)
        return
    view = order.view(spec, place, kernel_block_size=size)
    memory = np.arange(case.memory().size_bytes)
    for shift in (0, 8, 16):
        buffer = (memory >> shift & 255).astype(np.uint8)
        np.testing.assert_array_equal(read(buffer, view), split >> shift & 255)
    assert view.blocks_per_kv_block == parts
    assert pickle.loads(pickle.dumps(view)) == view
    if case.tiles == 1:
        assert view.whole_blocks() == order.view(spec, place)


@given(cases(), st.data())
def test_whole_blocks_are_extents_of_bytes_in_every_order(case, data) -> None:
    layer = data.draw(st.integers(0, case.num_layers - 1))
    view = case.order.byte_view(case.spec, case.place(layer))
    assert view.dtype == "uint8" and view.blocks_per_kv_block == 1
    assert math.prod(view.shape) == case.num_blocks * case.spec.data_bytes
    assert view.strides_bytes[view.axes.index("C")] == 1
    buffer = np.arange(case.memory().size_bytes).astype(np.int32)  # an address is a "byte" here
    seen = np.lib.stride_tricks.as_strided(
        buffer[view.offset_bytes :], view.shape, [4 * stride for stride in view.strides_bytes]
    )
    seen = np.moveaxis(seen, view.block_axis, 0).reshape(case.num_blocks, -1)
    wanted = case.rows(layer)[..., None] + np.arange(case.item)
    for block, addresses in zip(seen, wanted.reshape(case.num_blocks, -1), strict=True):
        assert sorted(block) == sorted(addresses)
    if case.order.has_whole_pages:
        lookahead = data.draw(st.integers(0, 3)) * case.tiles * case.item  # of other layers
        whole = case.spec.data_bytes + case.padding + lookahead
        places = [
            case.place(layer)._replace(page_bytes=whole, page_offset_bytes=n)
            for n in (0, lookahead)
        ]
        first, behind = (case.order.byte_view(case.spec, place) for place in places)
        assert behind.strides_bytes == first.strides_bytes
        assert behind.offset_bytes == first.offset_bytes + lookahead // case.tiles


@given(cases(), st.data())
def test_extents_lead_to_every_row_of_a_head(case, data) -> None:
    layer = data.draw(st.integers(0, case.num_layers - 1))
    e = case.order.extents(case.spec, case.place(layer))
    rows = case.rows(layer).reshape(case.num_blocks * e.tiles, e.rows, e.heads, -1)
    assert e.cell_bytes == rows.shape[-1] * case.item
    tile, row, head = np.indices(rows.shape[:3])
    extent = e.first + tile * e.tile_step + head * e.head_step
    start = e.start_bytes + row * e.row_bytes + head * e.head_bytes
    np.testing.assert_array_equal(extent * e.extent_bytes + start, rows[..., 0])
    assert (start + e.cell_bytes <= e.extent_bytes).all()


@pytest.mark.parametrize("head_step", [0, 5])
def test_extents_cut_to_a_layer_lead_to_the_same_bytes(head_step) -> None:
    """They are cut if whole layers fill an extent, and int32 counts what they are cut into."""
    data = 12 if head_step else 24
    sizes = {"tiles": 2, "rows": 3, "heads": 2, "cell_bytes": 4, "row_bytes": 8, "head_bytes": 4}
    steps = {"first": 7, "tile_step": 3, "head_step": head_step}
    tile, row, head = np.indices((4, 3, 2))

    def addresses(e: LayerExtents) -> np.ndarray:
        extent = e.first + tile * e.tile_step + head * e.head_step
        start = e.start_bytes + row * e.row_bytes + head * e.head_bytes
        return extent * e.extent_bytes + start

    for width, start, count in itertools.product(
        (data, 2 * data, 3 * data, 3 * data + 4), (0, 4, data, data + 4), (9, 2**31 - 1, 2**31)
    ):
        e = LayerExtents(**sizes, **steps, extent_bytes=width, start_bytes=start)
        assert e.data_bytes == data
        cut = _cut_to_layer(e, count * data + data - 1)
        np.testing.assert_array_equal(addresses(cut), addresses(e))
        if width % data or start % data or count > 2**31 - 1:
            assert cut == e
        else:
            assert (cut.extent_bytes, cut.start_bytes, cut.data_bytes) == (data, 0, data)


def test_a_split_compressed_block_has_as_many_kernel_blocks_in_tensor_and_table() -> None:
    """vLLM's tables expanded such ids where its tensor had whole blocks only."""
    spec = MLASpec(block_size=512, head_size=8, compress_ratio=4)
    plan = plan_cache({"a": spec}, 2**20, max_model_len=512, num_blocks_override=3)
    layout = make_cache(plan, max_requests=1, kernel_block_sizes=[256]).layout
    view = layout.buffers.view("a", 256)
    assert dict(zip(view.axes, view.shape, strict=True)) == {"B": 6, "N": 64, "H": 1, "C": 8}
    assert layout.blocks_per_kv_block == (view.blocks_per_kv_block,) == (2,)


def test_orders_say_what_lies_together() -> None:
    facts = {order: PhysicalOrder(order) for order in ORDERS}
    whole_blocks = {order for order, physical in facts.items() if physical.has_whole_blocks}
    scattered = {order for order, physical in facts.items() if not physical.has_whole_pages}
    assert whole_blocks == {"BLNHC", "BLHNC", "BHLNC"}
    assert scattered == {"LHBNC", "BHLNC"}
    assert (PhysicalOrder("NHD").order, PhysicalOrder("HND").order) == ("LBNHC", "LBHNC")


# --- buffers of a pool ------------------------------------------------------------


def layout_of(layers: Layers, **options: Any) -> PoolLayout:
    return make_layout(make_groups(layers, **options))


def buffers_of(
    layout: PoolLayout,
    num_blocks: int = 5,
    *,
    order: str = "LBNHC",
    stacked: bool | None = None,
    kernel_block_sizes: Any = None,
    groups_to_zero: Sequence[bool] | None = None,
) -> PoolBuffers:
    return plan_buffers(
        layout,
        num_blocks,
        order=order,
        stacked=stacked,
        kernel_block_sizes=kernel_block_sizes,
        groups_to_zero=layout.groups_to_zero() if groups_to_zero is None else groups_to_zero,
    )


FOUR = {"block_size": 4}
MIXED = {"a": full(**FOUR), "b": full(num_kv_heads=1, **FOUR), "c": full(**FOUR)}
TWO_GROUPS = {"f0": full(**FOUR), "s0": sliding(**FOUR), "f1": full(**FOUR), "s1": sliding(**FOUR)}
PACKED = {"f0": full(**FOUR), "f1": full(num_kv_heads=1, **FOUR), "s0": sliding(**FOUR)}
HYBRID = {"kv": full(**FOUR), "state": state(block_size=4)}
POOLS = {
    "mixed": layout_of(MIXED),
    "two groups": layout_of(TWO_GROUPS),
    "packed": layout_of(PACKED, grouping="packed"),
    "hybrid": layout_of(HYBRID),
}


# Pages that are no whole number of elements for each of three heads, or of two tiles.
ODD_POOLS = {
    "odd": layout_of({"a": full(num_kv_heads=3, page_bytes_padded=1540)}),
    "odd tiles": layout_of({"a": full(page_bytes_padded=258, **FOUR)}),
}
ODD_POOLS |= {
    "narrow first": layout_of({"n": full(num_kv_heads=1, **FOUR)} | by_name([full(**FOUR)] * 2)),
    "rows of four": layout_of({f"m{n}": mla(block_size=4, compress_ratio=n) for n in (1, 4)}),
}
WHOLE_PAGES = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
ORDERS_OF = {
    "mixed": ("LBNHC", "LBHNC", "LHBNC"),  # one buffer holds pages of one size
    "two groups": ORDERS,
    "packed": WHOLE_PAGES,  # layers of unlike heads share a page
    "hybrid": WHOLE_PAGES,
}
FORMS = [
    (name, order, stacked)
    for name, orders in ORDERS_OF.items()
    for order in orders
    for stacked in (True, False)
    if stacked or order.startswith("L")
]


@pytest.mark.parametrize(("name", "order", "stacked"), FORMS)
@pytest.mark.parametrize("size", [None, 2])
def test_layers_of_a_group_fill_their_own_bytes_of_the_buffers(name, order, stacked, size) -> None:
    layout = POOLS[name]
    sizes = [4 if group.growth.stores == "state" else size for group in layout.groups]
    buffers = buffers_of(layout, order=order, stacked=stacked, kernel_block_sizes=sizes)
    assert sum(map(math.prod, buffers.shapes)) == 5 * layout.bytes_per_block
    assert sorted(sum(buffers.stacks, ())) == list(range(len(layout.tensors)))
    for group in layout.groups:
        taken = [np.zeros(math.prod(shape), int) for shape in buffers.shapes]
        for layer, spec in zip(group.layers, group.specs, strict=True):
            buffer, view = buffers.buffer_of(layer), buffers.byte_view(layer)
            assert layout.placement_of(layer).tensor in buffers.stacks[buffer]
            assert view.shape[view.block_axis] == 5
            assert math.prod(view.shape) == 5 * spec.data_bytes
            seen = np.lib.stride_tricks.as_strided(
                taken[buffer][view.offset_bytes :],
                view.shape,
                [taken[buffer].itemsize * stride for stride in view.strides_bytes],
            )
            seen += 1
        assert max(map(np.max, taken)) == 1  # a byte twice would be two layers'
        assert sum(map(np.sum, taken)) == 5 * sum(spec.data_bytes for spec in group.specs)


@pytest.mark.parametrize(
    ("order", "stacked", "shapes"),
    [
        ("LBNHC", True, [(2, 5, 256), (1, 5, 128)]),
        ("LBHNC", None, [(2, 5, 256), (1, 5, 128)]),
        ("LBNHC", False, [(5, 256), (5, 128), (5, 256)]),
        ("LHBNC", True, [(2, 2, 5, 128), (1, 1, 5, 128)]),
        ("LHBNC", False, [(2, 5, 128), (1, 5, 128), (2, 5, 128)]),
    ],
)
def test_tensors_of_one_page_size_and_one_number_of_heads_are_stacked(order, stacked, shapes):
    buffers = buffers_of(POOLS["mixed"], order=order, stacked=stacked)
    assert list(buffers.shapes) == shapes
    assert [shape[buffers.block_axis] for shape in buffers.shapes] == [5] * len(shapes)
    stacks = ((0,), (1,), (2,)) if stacked is False else ((0, 2), (1,))
    assert buffers.stacks == stacks
    for tensor, layer in enumerate("abc"):
        buffer, place = buffers.buffer_of(layer), buffers.page_placement(layer)
        assert stacks[buffer][place.layer] == tensor
        assert place.num_layers == len(stacks[buffer])
    again = pickle.loads(pickle.dumps(buffers))
    assert again == buffers and hash(again) == hash(buffers)


def test_a_pool_is_stacked_unless_the_slots_of_its_layers_pass_int32() -> None:
    layout = layout_of(by_name([full(), full()]))
    most = (2**31 - 1) // (2 * 16)
    assert buffers_of(layout, most).stacked and buffers_of(layout, most).stacks == ((0, 1),)
    assert not buffers_of(layout, most + 1).stacked
    assert buffers_of(layout, most + 1).stacks == ((0,), (1,))
    assert buffers_of(layout, most + 1, stacked=True).stacked  # ids, not slots, count through
    assert buffers_of(layout, most + 1, order="BLNHC").stacked
    narrow = full(num_kv_heads=1)
    for specs in ([narrow, full(), full()], [full(), full(), narrow]):  # the longer stack counts
        assert buffers_of(layout_of(by_name(specs)), most).stacked
        assert not buffers_of(layout_of(by_name(specs)), most + 1).stacked
    for spec in (sliding(), chunked(), cross()):
        assert buffers_of(layout_of(by_name([spec, spec])), most).stacked
        assert not buffers_of(layout_of(by_name([spec, spec])), most + 1).stacked
    wide = [sliding(block_size=8, num_kv_heads=4)] * 2  # the larger blocks count
    for specs in ([full(), full(), *wide], [*wide, full(), full()]):
        assert buffers_of(layout_of(by_name(specs)), most).stacked
        assert not buffers_of(layout_of(by_name(specs)), most + 1).stacked
    states = layout_of(by_name([state(), state()]))
    assert buffers_of(states, most + 1).stacked  # states have no slots
    assert buffers_of(layout_of({"a": state()}), 2**31 - 1).shapes == ((1, 2**31 - 1, 80),)
    with pytest.raises(ValueError, match="2,147,483,648 contiguous extents"):
        buffers_of(layout_of({"a": state()}), 2**31)


def test_blocks_are_stored_as_tiles_only_where_a_view_needs_them() -> None:
    layout = POOLS["two groups"]
    assert buffers_of(layout, kernel_block_sizes=[2, 2]).tiles == (None, None)
    assert buffers_of(layout, order="HND", kernel_block_sizes=[2, 2]).tiles == (2, 2)
    assert buffers_of(layout, order="HND", kernel_block_sizes=[4, 4]).tiles == (None, None)
    assert buffers_of(layout, order="BLNHC", kernel_block_sizes=[2, 2]).tiles == (2, 2)
    view = buffers_of(layout, order="HND", kernel_block_sizes=[2, 2]).view("f0", 2)
    assert view.shape == (10, 2, 2, 16) and view.blocks_per_kv_block == 2
    padded = full(**FOUR, page_bytes_padded=2 * full(**FOUR).page_bytes)
    for layers in ({"a": full(**FOUR), "b": padded}, {"b": padded, "a": full(**FOUR)}):
        assert buffers_of(layout_of(layers), kernel_block_sizes=[2]).tiles == (2,)


def test_groups_cut_shared_bytes_in_different_ways_only_if_the_plan_zeroes_them() -> None:
    two_groups = {"order": "LBHNC", "kernel_block_sizes": [2, 4]}
    assert buffers_of(POOLS["two groups"], groups_to_zero=(True, True), **two_groups).tiles
    with pytest.raises(ValueError, match=r"fresh blocks of groups \[0\] are not zeroed"):
        buffers_of(POOLS["two groups"], groups_to_zero=(False, True), **two_groups)
    plan = plan_cache(TWO_GROUPS, 2**20, max_model_len=16)
    always = dataclasses.replace(plan, zero_policy="always")
    assert make_cache(always, max_requests=1, **two_groups).layout.buffers.tiles
    with pytest.raises(ValueError, match=r"are not zeroed; .* zero_policy='always'"):
        make_cache(plan, max_requests=1, **two_groups)


def test_a_period_chooses_among_the_layers_of_one_spec_in_a_group() -> None:
    two_groups = buffers_of(POOLS["two groups"])
    assert two_groups.stacked_layers("f0") == two_groups.stacked_layers("f1") == ("f0", "f1")
    assert two_groups.stacked_layers("s1") == ("s0", "s1")
    mixed = buffers_of(POOLS["mixed"])
    assert mixed.stacked_layers("c") == ("a", "c") and mixed.stacked_layers("b") == ("b",)
    shared = make_layout(make_groups(MIXED), shared={"d": "c"})
    assert buffers_of(shared).stacked_layers("d") == ("a", "c")
    unlike = {"a": full(**FOUR), "b": full(dtype="f16", **FOUR)}  # in pages of one size
    assert buffers_of(layout_of(unlike)).stacked_layers("b") == ("b",)
    alone = {"a": full(**FOUR), "s": state(block_size=4)}
    assert buffers_of(layout_of(alone), stacked=False).stacked_layers("a") == ("a",)


@pytest.mark.parametrize(
    ("layout", "stacked", "message"),
    [
        (POOLS["two groups"], False, r"\['f0', 'f1'\], which lie in 2 buffers; .*stacked=True"),
        (
            layout_of({**PACKED, "f2": full(**FOUR)}, grouping="packed"),
            None,
            r"\['f0', 'f2'\], which share one page; .*grouping=\"rule\"",
        ),
    ],
)
def test_a_period_that_cannot_choose_is_refused(layout, stacked, message) -> None:
    with pytest.raises(ValueError, match=message):
        buffers_of(layout, stacked=stacked).stacked_layers("f0")


@pytest.mark.parametrize(
    ("layout", "options", "error", "message"),
    [
        (
            "two groups",
            {"order": "BLNHC", "stacked": False},
            ValueError,
            "stacked=False: order='BLNHC' .* leave stacked at None",
        ),
        ("mixed", {"order": "BLNHC"}, ValueError, r"one page size in bytes; .*\[128, 256\]"),
        ("packed", {"order": "BHLNC"}, ValueError, "layers that share tensor 0 differ in them"),
        ("hybrid", {"order": "LHBNC"}, ValueError, "layers that share tensor 0 differ in them"),
        ("odd", {"order": "LHBNC"}, ValueError, "layer='a' in order='LHBNC': page_bytes=1540 and"),
        ("odd tiles", {"kernel_block_sizes": [2]}, ValueError, "layer='a' .* for each of 2 contig"),
        ("mixed", {"kernel_block_sizes": [2, 2]}, ValueError, "has 2 entries; .* 1 groups"),
        ("mixed", {"kernel_block_sizes": [3]}, ValueError, r"kernel_block_sizes\[0\]: .*=3 does"),
        (
            "two groups",
            {"order": "LBHNC", "kernel_block_sizes": [2, 4]},
            ValueError,
            r"groups \[0, 1\] overlay each other and would cut a block into \[2, 1\] tiles",
        ),
        ("rows of four", {"kernel_block_sizes": [2]}, ValueError, r"sizes\[0\]: .* whole rows"),
        *(
            (
                name,
                {"num_blocks": 2**28, "order": "HND", "stacked": True, "kernel_block_sizes": sizes},
                ValueError,
                "contiguous extents of bytes in one buffer are more than int32 counts",
            )
            for name, sizes in (("two groups", [1, 1]), ("narrow first", [1]))
        ),
    ],
)
def test_buffers_that_cannot_be_are_refused_by_name(layout, options, error, message) -> None:
    with pytest.raises(error, match=message):
        buffers_of((POOLS | ODD_POOLS)[layout], **options)


# --- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: AcceptedSizes(), ValueError, "accepts nothing"),
        (
            lambda: select_kernel_block_size(6, ANY, compress_ratio=4),
            ValueError,
            "not a multiple of compress_ratio=4",
        ),
        (lambda: select_kernel_block_sizes([QWEN], []), ValueError, "has 0 entries for 1"),
        (
            lambda: select_kernel_block_sizes([None, QWEN], [{}, {"a": AcceptedSizes((3,))}]),
            ValueError,
            "group 1: no kernel block size",
        ),
        (lambda: blocks_per_kv_block(EncoderOnlySpec(), 4), TypeError, "keeps no cache"),
        (lambda: blocks_per_kv_block(QWEN, 48), ValueError, "does not divide block_size=128"),
        (
            lambda: blocks_per_kv_block(MLASpec(block_size=8, head_size=1, compress_ratio=4), 2),
            ValueError,
            "does not hold whole rows .* compress_ratio=4",
        ),
        (lambda: blocks_per_kv_block(state(), 8), ValueError, "would split a state"),
    ],
)
def test_bad_sizes_are_refused_by_name(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


TILED = {"tile_tokens": 64}


@pytest.mark.parametrize(
    ("order", "place", "size", "message"),
    [
        ({}, {"layer": 2, "num_layers": 2}, None, "layer=2 is not one of num_layers=2"),
        ({}, {"page_bytes": 64}, None, "page_bytes=64 cannot hold 524288 bytes"),
        (
            {},
            {"page_bytes": 2**19 + 9, "page_offset_bytes": 10},
            None,
            "page_bytes=524297 cannot hold 524288 .* page_offset_bytes=10; use at least 524298",
        ),
        ({}, {"page_bytes": 524289}, None, "page_bytes=524289 and .* multiples of 2 bytes"),
        ({}, {"page_bytes": 2**20, "page_offset_bytes": 3}, None, "page_offset_bytes=3 must be"),
        ({"order": "LHBNC"}, {"page_bytes": 524290}, None, "multiples of 16 bytes"),
        ({}, {"page_bytes": 2**20, "num_layers": 2}, 64, "because padding would lie between"),
        ({"order": "LBHNC"}, {}, 64, "the other of 8 heads would lie between"),
        ({"order": "BHLNC"}, {"num_layers": 2}, 64, "2 layers and the other of 8 heads"),
        ({"order": "HND"}, {}, 64, "make the cache with kernel_block_sizes of 64"),
        ({"tile_tokens": 48}, {}, None, "tile_tokens=48 does not divide block_size=128"),
        ({"order": "HND", **TILED}, {}, None, "HNC cannot be read as 1 kernel blocks of 128"),
        ({"order": "HND", **TILED}, {}, 32, "its tiles are of 64: use that"),
        (
            {"order": "HND", **TILED},
            {"page_bytes": 2**20, "page_offset_bytes": 1},
            64,
            "page_offset_bytes=1 must be whole elements .* multiples of 4 bytes",
        ),
    ],
)
def test_views_that_do_not_exist_are_refused_by_name(order, place, size, message) -> None:
    with pytest.raises(ValueError, match=message):
        physical = PhysicalOrder(**{"order": "LBNHC"} | order)
        physical.view(QWEN, PagePlacement(**{"num_blocks": 2} | place), kernel_block_size=size)
