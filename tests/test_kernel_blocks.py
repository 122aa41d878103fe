"""Kernel blocks: chosen sizes against brute force, views against a walk through memory.

The model of a layout is a cursor that visits the elements in physical order and skips
the padding; it knows no strides. NumPy reads memory through the strides under test.
"""

import dataclasses
import itertools
import math
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv.block_tables import make_block_tables
from jaxkv.groups import Group
from jaxkv.kernel_blocks import (
    JAX_BACKENDS,
    LAYOUT_ORDERS,
    AcceptedSizes,
    CacheLayout,
    ViewDescription,
    blocks_per_kv_block,
    describe,
    describe_array,
    rows_per_block,
    rows_per_kernel_block,
    select_kernel_block_size,
    select_kernel_block_sizes,
)
from jaxkv.planning import plan_cache
from jaxkv.pool import layer_view, make_pool
from jaxkv.specs import EncoderOnlySpec, FullAttentionSpec, MLASpec, SharedKVSpec, StateSpec

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


def ratio_of(spec) -> int:
    return spec.compress_ratio if isinstance(spec, MLASpec) else 1


def legal(spec, size: int) -> bool:
    if isinstance(spec, StateSpec):
        return size == spec.block_size
    return spec.block_size % size == 0 and size % ratio_of(spec) == 0


@given(st.integers(1, 6), st.integers(1, 24), BACKENDS)
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
    state = StateSpec(block_size=100, shapes=((3,),), dtypes=("f32",))
    latent = MLASpec(block_size=256, head_size=8, compress_ratio=4)
    groups = [EncoderOnlySpec(), QWEN, None, state, SharedKVSpec("a"), latent]
    backends = [{}, FLASH, {}, {}, {}, {**ANY, "indexer": AcceptedSizes(exact=(2, 64, 6))}]
    assert select_kernel_block_sizes(groups, backends) == [None, 64, None, 100, None, 64]


def test_a_group_of_several_compressions_holds_whole_rows_of_all() -> None:
    specs = [MLASpec(block_size=128, head_size=8, compress_ratio=ratio) for ratio in (4, 32, 1)]
    group = Group(("a", "b", "c"), tuple(specs))
    picky = {"picky": AcceptedSizes(exact=(16, 32, 48))}
    assert select_kernel_block_sizes([group], [picky]) == [32]
    with pytest.raises(ValueError, match=r"group 0: .*whole rows of 32 tokens"):
        select_kernel_block_sizes([group], [{"picky": AcceptedSizes(exact=(16,))}])
    assert select_kernel_block_sizes([Group((), ())], [{}]) == [None]


@pytest.mark.parametrize("block_size", [16, 48, 128, 1024])
def test_the_listed_backends_find_a_common_size(block_size) -> None:
    size = select_kernel_block_size(block_size, JAX_BACKENDS)
    assert block_size % size == 0 and size in (16, 128, 256)


@given(SPECS, SIZES)
def test_kernel_blocks_and_their_rows_make_up_a_block(spec, size) -> None:
    if not legal(spec, size):
        for function in blocks_per_kv_block, rows_per_kernel_block:
            with pytest.raises(ValueError, match=f"kernel_block_size={size} "):
                function(spec, size)
        return
    parts, rows = blocks_per_kv_block(spec, size), rows_per_kernel_block(spec, size)
    assert rows >= 1 and parts >= 1
    assert parts * rows == rows_per_block(spec)
    assert parts * size == spec.block_size
    if not isinstance(spec, StateSpec):
        assert rows_per_block(spec) * spec.token_bytes == spec.data_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Byte addresses int[L, B, H, N, C] of a buffer, found by walking through it."""

    addresses: np.ndarray
    size_bytes: int


def walk(order: str, sizes: dict[str, int], itemsize: int, page_bytes: int) -> Memory:
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
            cursor += itemsize
        assert cursor <= start + run_bytes
        start += run_bytes
    return Memory(addresses, start)


def read(buffer: np.ndarray, view) -> np.ndarray:
    """The first byte of each element, as [B, H, N, C], through the view's strides alone."""
    seen = np.lib.stride_tricks.as_strided(
        buffer[view.offset_bytes :], view.shape, view.strides_bytes, writeable=False
    )
    return seen.transpose([view.axes.index(axis) for axis in "BHNC"])


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout of pages, and the same memory by a walk through the blocks, or the tiles."""

    layout: CacheLayout
    spec: FullAttentionSpec | MLASpec | StateSpec
    num_layers: int
    num_blocks: int
    padding: int

    @property
    def tiles(self) -> int:
        tile = self.layout.tile_tokens
        return 1 if tile is None else blocks_per_kv_block(self.spec, tile)

    @property
    def where(self) -> dict[str, int]:
        page_bytes = self.spec.data_bytes + self.padding
        return {
            "num_blocks": self.num_blocks,
            "num_layers": self.num_layers,
            "page_bytes": page_bytes,
        }

    def memory(self) -> Memory:
        probe = CacheLayout("LBNHC").view(self.spec, num_blocks=1)
        sizes = dict(zip("BNHC", probe.shape, strict=True)) | {"L": self.num_layers}
        sizes |= {"B": self.num_blocks * self.tiles, "N": sizes["N"] // self.tiles}
        page_bytes = self.where["page_bytes"] // self.tiles
        return walk(self.layout.order, sizes, probe.itemsize_bytes, page_bytes)

    def rows(self, layer: int) -> np.ndarray:
        """Addresses of one layer's elements, int[B, row, H, C] in whole blocks."""
        addresses = self.memory().addresses[layer].swapaxes(1, 2)
        return addresses.reshape(self.num_blocks, -1, *addresses.shape[2:])


@st.composite
def layouts(draw, may_be_tiled=True):
    spec = draw(SPECS)
    order = draw(st.sampled_from(LAYOUT_ORDERS))
    sizes = [size for size in divisors(spec.block_size) if legal(spec, size)]
    layout = CacheLayout(
        order, draw(st.sampled_from(sizes)) if may_be_tiled and draw(st.booleans()) else None
    )
    probe = CacheLayout("LBNHC").view(spec, num_blocks=1)
    case = Case(layout, spec, draw(st.integers(1, 3)), draw(st.integers(2, 3)), 0)
    unit = case.tiles * probe.shape[2] * probe.itemsize_bytes
    return dataclasses.replace(case, padding=unit * draw(st.sampled_from([0, 0, 1, 3])))


@given(layouts(may_be_tiled=False))
def test_strides_lead_to_every_element(case) -> None:
    memory, view = case.memory(), case.layout.view(case.spec, **case.where)
    named = dict(zip(view.axes, view.shape, strict=True))
    page_bytes = case.where["page_bytes"]
    assert memory.size_bytes == case.num_layers * case.num_blocks * page_bytes
    assert math.prod(view.shape) * view.itemsize_bytes == case.num_blocks * case.spec.data_bytes
    assert named["B"] == case.num_blocks and view.axes[view.block_axis] == "B"
    number = np.arange(memory.addresses.size).reshape(memory.addresses.shape)
    for shift in (0, 8):  # two bytes tell the elements apart
        buffer = np.full(memory.size_bytes, 255, np.uint8)
        for address, value in zip(memory.addresses.flat, number.flat, strict=True):
            buffer[address] = value >> shift & 255
        for layer in range(case.num_layers):
            got = read(buffer, case.layout.view(case.spec, layer=layer, **case.where))
            np.testing.assert_array_equal(got, number[layer] >> shift & 255)


def evenly(steps: np.ndarray) -> bool:
    return len(set(steps.reshape(-1))) <= 1


@given(layouts(), st.data())
def test_a_kernel_view_reads_the_same_bytes_or_is_refused(case, data) -> None:
    spec, layout = case.spec, case.layout
    sizes = [size for size in divisors(spec.block_size) if legal(spec, size)]
    size = data.draw(st.sampled_from(sizes))
    parts, rows = blocks_per_kv_block(spec, size), rows_per_kernel_block(spec, size)
    # One row is at any stride: whether tiles of one row could be joined is not promised.
    assume(parts == case.tiles or rows_per_block(spec) > case.tiles)
    layer = data.draw(st.integers(0, case.num_layers - 1))
    where = case.where | {"layer": layer}
    # Kernel blocks must lie evenly spaced, and the rows in them, too.
    split = case.rows(layer)
    split = split.reshape(case.num_blocks * parts, rows, *split.shape[2:]).swapaxes(1, 2)
    even = evenly(np.diff(split[:, 0, 0, 0])) and evenly(np.diff(split[:, 0, :, 0]))
    if parts != case.tiles and not even:
        with pytest.raises(ValueError, match=r"kernel_block_size: .* would lie between"):
            layout.view(spec, kernel_block_size=size, **where)
        if case.tiles == 1:
            with pytest.raises(ValueError, match="no common stride"):
                describe(layout.view(spec, **where)).as_kernel(parts)
        return
    view = layout.view(spec, kernel_block_size=size, **where)
    memory = np.arange(case.memory().size_bytes)
    for shift in (0, 8, 16):
        buffer = (memory >> shift & 255).astype(np.uint8)
        np.testing.assert_array_equal(read(buffer, view), split >> shift & 255)
    assert describe(view).as_kernel(parts) == describe(view)
    assert describe(view).blocks_per_kv_block == parts
    assert describe(view).granularity == ("kernel" if parts > 1 else "manager")
    assert pickle.loads(pickle.dumps(describe(view))) == describe(view)
    if case.tiles == 1:
        whole = layout.view(spec, **where)
        assert describe(view).as_manager() == describe(whole)
        assert describe(whole).as_kernel(parts) == describe(view)


@given(layouts(), st.data())
def test_whole_blocks_are_runs_of_bytes_in_every_layout(case, data) -> None:
    layer = data.draw(st.integers(0, case.num_layers - 1))
    view = case.layout.byte_view(case.spec, layer=layer, **case.where)
    assert view.dtype == "uint8" and describe(view).granularity == "manager"
    assert math.prod(view.shape) == case.num_blocks * case.spec.data_bytes
    assert view.strides[view.axes.index("C")] == 1
    buffer = np.arange(case.memory().size_bytes).astype(np.int32)  # an address is a "byte" here
    seen = np.lib.stride_tricks.as_strided(
        buffer[view.offset :], view.shape, [4 * stride for stride in view.strides]
    )
    seen = np.moveaxis(seen, view.block_axis, 0).reshape(case.num_blocks, -1)
    itemsize = CacheLayout("LBNHC").view(case.spec, num_blocks=1).itemsize_bytes
    wanted = case.rows(layer)[..., None] + np.arange(itemsize)
    for block, addresses in zip(seen, wanted.reshape(case.num_blocks, -1), strict=True):
        assert sorted(block) == sorted(addresses)


def test_tiles_give_kernels_with_heads_first_their_view() -> None:
    """Blocks of 1,040 tokens, as hybrid models have, and kernels of 16 that want HND."""
    spec = FullAttentionSpec(block_size=1040, num_kv_heads=4, head_size=64)
    tiled = CacheLayout("HND", tile_tokens=16)
    view = tiled.view(spec, num_blocks=3, kernel_block_size=16)
    assert view.axes == "BHNC" and view.shape == (3 * 65, 4, 16, 128)
    assert view.strides == (4 * 16 * 128, 16 * 128, 128, 1)
    with pytest.raises(ValueError, match=r"HNC cannot be read as 1 kernel .*byte_view"):
        tiled.view(spec, num_blocks=3)
    moved = tiled.byte_view(spec, num_blocks=3)
    assert (moved.shape, moved.strides_bytes[0]) == ((3, 1, 65, 4 * 16 * 256), spec.page_bytes)


@pytest.mark.parametrize("order", LAYOUT_ORDERS)
def test_tiles_move_nothing_where_rows_run_on_anyway(order) -> None:
    spec = MLASpec(block_size=8, head_size=4)
    common = {"num_blocks": 3, "kernel_block_size": 4}
    tiled, plain = CacheLayout(order, tile_tokens=4), CacheLayout(order)
    assert describe(tiled.view(spec, **common)) == describe(plain.view(spec, **common))
    wholes = [describe(layout.view(spec, num_blocks=3)) for layout in (tiled, plain)]
    assert wholes[0] == wholes[1]


@pytest.mark.parametrize("order", ["LBNHC", "LHBNC", "NHD"])
def test_connectors_see_one_shape_whatever_the_kernels_want(order) -> None:
    """Blocks of 128 and kernels of 64: connectors were given one shape or the other."""
    size = select_kernel_block_size(128, FLASH)
    assert (size, blocks_per_kv_block(QWEN, size), rows_per_kernel_block(QWEN, size)) == (64, 2, 64)
    layout = CacheLayout(order)
    for num_layers in (1, 36):
        kernel = layout.view(
            QWEN, num_blocks=10, num_layers=num_layers, layer=0, kernel_block_size=size
        )
        whole = layout.view(QWEN, num_blocks=10, num_layers=num_layers, layer=0)
        assert kernel.shape[kernel.block_axis] == 20
        assert describe(kernel).granularity == "kernel"
        assert describe(kernel).as_manager() == describe(whole)
        assert describe(whole).num_blocks == describe(kernel).num_blocks == 10


def test_arrays_shaped_either_way_are_described_alike() -> None:
    as_kernel = np.zeros((20, 64, 8, 256), np.float16)
    as_manager = np.zeros((10, 128, 8, 256), np.float16)
    got = [describe_array(a, "BNHC", num_blocks=10) for a in (as_kernel, as_manager)]
    assert got[0].as_manager() == got[1]
    assert got[1].as_kernel(2) == got[0]
    view = CacheLayout("NHD").view(
        dataclasses.replace(QWEN, dtype="f16"), num_blocks=10, kernel_block_size=64
    )
    assert describe(view) == got[0]


def test_a_split_compressed_block_has_as_many_kernel_blocks_in_tensor_and_table() -> None:
    """vLLM's tables expanded such ids where its tensor had whole blocks only."""
    spec = MLASpec(block_size=512, head_size=8, compress_ratio=4)
    view = CacheLayout("LBNHC").view(spec, num_blocks=3, kernel_block_size=256)
    assert view.shape == (6, 64, 1, 8)
    plan = plan_cache({"a": spec}, 2**20, max_model_len=512, num_blocks_override=3)
    tables = make_block_tables(plan, max_requests=1, kernel_block_sizes=[256])
    assert tables.groups[0].blocks_per_kv_block == blocks_per_kv_block(spec, 256) == 2


@pytest.mark.parametrize("size", [4, 8])
def test_a_view_is_the_one_that_the_pool_gives(size) -> None:
    layers = {
        "a": FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=4, dtype="fp8"),
        "b": MLASpec(block_size=8, head_size=8, compress_ratio=2, dtype="bf16"),
        "c": FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=4, scale_bytes=4),
    }
    for layer, spec in layers.items():
        plan = plan_cache({layer: spec}, 2**20, max_model_len=8, num_blocks_override=3)
        parts = blocks_per_kv_block(spec, size)
        pool = make_pool(plan)
        array = jax.eval_shape(
            lambda p, n=layer, k=parts: layer_view(p, n, blocks_per_kv_block=k), pool
        )
        view = CacheLayout("LBNHC").view(spec, num_blocks=3, kernel_block_size=size)
        if view.shape[2] == 1:  # the pool shows no axis for one head
            assert (view.shape[0], view.shape[1], view.shape[3]) == array.shape
            assert view.dtype == array.dtype.name
        else:
            assert describe_array(array, "BNHC", num_blocks=3) == describe(view)
            assert describe_array(jnp.zeros(array.shape, array.dtype), "BNHC", num_blocks=3) == (
                describe(view)
            )


def test_a_padded_page_is_the_stride_of_its_blocks() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, page_bytes_padded=384)
    view = CacheLayout("LBNHC").view(spec, num_blocks=5, num_layers=3, layer=2)
    assert view.strides_bytes[view.block_axis] == 384
    assert view.offset_bytes == 2 * 5 * 384
    assert (view.fuses_keys_and_values, view.key_elements) == (True, 8)
    packed = CacheLayout("BLNHC").view(spec, num_blocks=5, num_layers=3, layer=2)
    assert packed.strides_bytes[packed.block_axis] == 3 * 384
    assert packed.offset_bytes == 2 * 384
    # In a group of mixed pages a layer starts somewhere inside the page of its slot.
    shared = CacheLayout("LBNHC").view(spec, num_blocks=5, page_bytes=1024, page_offset_bytes=384)
    assert (shared.strides_bytes[0], shared.offset_bytes) == (1024, 384)


def test_layouts_say_what_lies_together() -> None:
    facts = {order: CacheLayout(order) for order in LAYOUT_ORDERS}
    whole_blocks = {order for order, layout in facts.items() if layout.has_whole_blocks}
    scattered = {order for order, layout in facts.items() if not layout.has_whole_pages}
    assert whole_blocks == {"BLNHC", "BLHNC", "BHLNC"}
    assert scattered == {"LHBNC", "BHLNC"}
    assert (CacheLayout("NHD").order, CacheLayout("HND").order) == ("LBNHC", "LBHNC")
    assert (
        not CacheLayout("NHD")
        .view(MLASpec(block_size=2, head_size=4), num_blocks=1)
        .fuses_keys_and_values
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (100, FLASH),
            r"block_size=100 .*flash accepts 16 or 32 or 64.*multiple of 16 or 32 or 64",
        ),
        ((64, {}), "backends is empty"),
        ((64, {"a": AcceptedSizes((32,)), "b": AcceptedSizes((16,))}), "change a backend"),
        ((0, FLASH), "block_size must be at least 1"),
    ],
)
def test_no_common_size_is_refused_by_name(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        select_kernel_block_size(*arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: AcceptedSizes(), ValueError, "accepts nothing"),
        (lambda: AcceptedSizes(exact=64), TypeError, "exact must be a tuple"),
        (lambda: AcceptedSizes(exact=(0,)), ValueError, r"exact\[0\] must be at least 1"),
        (lambda: AcceptedSizes(multiples_of=1.5), TypeError, "multiples_of must be an int"),
        (lambda: select_kernel_block_size(64, [64]), TypeError, "backends must map"),
        (lambda: select_kernel_block_size(64, {"a": 64}), TypeError, r"backends\['a'\]"),
        (
            lambda: select_kernel_block_size(6, ANY, compress_ratio=4),
            ValueError,
            "not a multiple of compress_ratio=4",
        ),
        (lambda: select_kernel_block_sizes([QWEN], []), ValueError, "has 0 entries for 1"),
        (lambda: select_kernel_block_sizes([3], [ANY]), TypeError, r"groups_or_specs\[0\]=3"),
        (
            lambda: select_kernel_block_sizes([None, QWEN], [{}, {"a": AcceptedSizes((3,))}]),
            ValueError,
            "group 1: no kernel block size",
        ),
        (lambda: blocks_per_kv_block(EncoderOnlySpec(), 4), TypeError, "keeps no cache"),
        (lambda: blocks_per_kv_block(QWEN, 64.0), TypeError, "kernel_block_size must be an int"),
        (lambda: blocks_per_kv_block(QWEN, 48), ValueError, "does not divide block_size=128"),
        (
            lambda: rows_per_kernel_block(MLASpec(block_size=8, head_size=1, compress_ratio=4), 2),
            ValueError,
            "holds no whole rows .* compress_ratio=4",
        ),
    ],
)
def test_bad_sizes_are_refused_by_name(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("order", "changes", "message"),
    [
        ("LBNCH", {}, "order='LBNCH' is not a cache layout; use one of LBNHC"),
        ("LBNHC", {"layer": 2, "num_layers": 2}, "layer=2 is not one of num_layers=2"),
        ("LBNHC", {"num_blocks": 0}, "num_blocks must be at least 1"),
        ("LBNHC", {"page_bytes": 64}, "page_bytes=64 cannot hold 524288 bytes"),
        ("LBNHC", {"page_bytes": 524289}, "multiples of 2 bytes"),
        ("LHBNC", {"page_bytes": 524290}, "multiples of 16 bytes"),
        ("LHBNC", {"page_bytes": 2**20, "page_offset_bytes": 2}, "deals a page out"),
        ("LBNHC", {"page_bytes": 2**20, "kernel_block_size": 64}, "padding would lie between"),
        ("LBHNC", {"kernel_block_size": 64}, "the other of 8 heads would lie between"),
        ("BHLNC", {"kernel_block_size": 64, "num_layers": 2}, "2 layers and the other of 8 heads"),
        ("HND", {"kernel_block_size": 64}, "give the layout tile_tokens=64"),
        ({"tile_tokens": 0}, {}, "tile_tokens must be at least 1"),
        ({"tile_tokens": 48}, {}, "tile_tokens=48 does not divide block_size=128"),
        ({"tile_tokens": 64}, {}, "HNC cannot be read as 1 kernel blocks of 128 tokens"),
        ({"tile_tokens": 64}, {"kernel_block_size": 32}, "its tiles are of 64: use that"),
        ({"tile_tokens": 64}, {"page_bytes": 524290}, "each of 2 contiguous .* of 4 bytes"),
        (
            {"order": "BHLNC", "tile_tokens": 64},
            {"page_bytes": 524296, "kernel_block_size": 64},
            "multiples of 32 bytes",
        ),
    ],
)
def test_views_that_do_not_exist_are_refused_by_name(order, changes, message) -> None:
    made = {"order": "HND"} | order if isinstance(order, dict) else {"order": order}
    with pytest.raises(ValueError, match=message):
        CacheLayout(**made).view(QWEN, **{"num_blocks": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": "BNN"}, "axes='BNN' must name B and N"),
        ({"axes": "BHC"}, "axes='BHC' must name B and N"),
        ({"strides_bytes": (8, 2)}, "one entry per axis"),
        ({"shape": (5, 4, 1)}, "counts 5 blocks on axis 0, no multiple of num_blocks=2"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
    ],
)
def test_descriptions_that_cannot_be_are_refused_by_name(changes, message) -> None:
    good = ViewDescription(
        axes="BNC", shape=(4, 4, 1), strides_bytes=(8, 2, 2), dtype="bfloat16", num_blocks=2
    )
    with pytest.raises(ValueError, match="blocks_per_kv_block=3 does not divide the 8 rows"):
        good.as_kernel(3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **changes)


def test_it_runs_without_jax() -> None:
    code = "import sys, jaxkv.kernel_blocks; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
