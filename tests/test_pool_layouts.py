"""Pools in every physical order, with tiles and without, against a walk through the bytes.

`ReferencePool` finds a byte by counting all that lies before it, in nested loops over the
axes; content must be what LBNHC has, and memory must be what the walk says.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxkv.block_tables import (
    append_block_ids,
    expand_blocks,
    gather_block_tables,
    make_block_tables,
    map_slots,
)
from jaxkv.blocks import TableEntry
from jaxkv.kernel_blocks import (
    LAYOUT_ORDERS,
    blocks_per_kv_block,
    describe_array,
    row_format,
    rows_per_block,
    rows_per_kernel_block,
)
from jaxkv.planning import Plan, plan_cache
from jaxkv.pool import (
    KVPool,
    copy_blocks,
    describe_bytes,
    describe_layer,
    layer_view,
    make_pool,
    make_sharded_pool,
    pool_shapes,
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
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv.step import pack_entries
from jaxkv.testing import ReferencePool, assert_in_place
from tests.helpers import ON_GPU, kernels_run, needs_mosaic, pointers

BLOCKS = 5
WHOLE_PAGES = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")


class Form(NamedTuple):
    """How a pool is made."""

    order: str
    stacked: bool
    kernel_block_sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.kernel_block_sizes or ()))
        return f"{self.order}{'-stacked' * self.stacked}{sizes and '-' + sizes}"


def forms(orders=LAYOUT_ORDERS, kernel_block_sizes=None) -> list[Form]:
    return [
        Form(order, stacked, kernel_block_sizes)
        for order in orders
        for stacked in (False, True)
        if stacked or order.startswith("L")
    ]


def planned(layers: dict[str, LayerSpec], num_blocks: int = BLOCKS) -> Plan:
    return plan_cache(layers, 2**30, max_model_len=4, num_blocks_override=num_blocks)


def pool_of(plan: Plan, form: Form, **options: Any) -> KVPool:
    sizes, stacked = form.kernel_block_sizes, form.stacked
    return make_pool(plan, order=form.order, stacked=stacked, kernel_block_sizes=sizes, **options)


@functools.cache
def empty(make_plan, form: Form) -> KVPool:
    return pool_of(make_plan(), form)


def reference_of(plan: Plan, form: Form) -> ReferencePool:
    sizes = form.kernel_block_sizes
    return ReferencePool(plan.layout, plan.num_blocks, order=form.order, kernel_block_sizes=sizes)


def memory_of(pool: KVPool) -> np.ndarray:
    return np.concatenate([np.asarray(buffer).reshape(-1) for buffer in pool.buffers])


def bytes_before(pool: KVPool, layer: str) -> int:
    """Bytes of the buffers before the one that holds a layer."""
    slot = 0 if pool.stacked else pool.layout.place_of(layer).slot
    return sum(buffer.size for buffer in pool.buffers[:slot])


def with_memory(pool: KVPool, memory: np.ndarray) -> KVPool:
    ends = np.cumsum([buffer.size for buffer in pool.buffers])[:-1]
    pairs = zip(np.split(memory, ends), pool.buffers, strict=True)
    buffers = tuple(jnp.asarray(part.reshape(buffer.shape)) for part, buffer in pairs)
    return KVPool(buffers=buffers, layout=pool.layout, order=pool.order, tiles=pool.tiles)


@functools.cache
def windows(num_blocks: int = BLOCKS, num_full: int = 2, num_windows: int = 2) -> Plan:
    """Two groups of attention on the same bytes."""
    common: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 4, "dtype": "bf16"}
    full = FullAttentionSpec(head_size_v=2, **common)
    window = SlidingWindowSpec(head_size_v=2, sliding_window=3, **common)
    layers: dict[str, LayerSpec] = {f"full.{i}": full for i in range(num_full)}
    return planned(layers | {f"window.{i}": window for i in range(num_windows)}, num_blocks)


@functools.cache
def hybrid(num_blocks: int = BLOCKS) -> Plan:
    """fp8 keys and values in padded pages, and states of two dtypes on the same bytes."""
    attention = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=4, dtype="fp8")
    state = StateSpec(block_size=4, shapes=((3, 8), (2, 3)), dtypes=("f32", "bf16"))
    layers = {"kv.0": attention, "kv.1": attention, "state.0": state, "state.1": state}
    return planned(layers, num_blocks)


@functools.cache
def latent(num_blocks: int = BLOCKS) -> Plan:
    """Latent rows of two tokens each."""
    spec = MLASpec(block_size=8, head_size=3, dtype="f32", compress_ratio=2)
    return planned({"mla.0": spec, "mla.1": spec}, num_blocks)


@functools.cache
def packed(num_blocks: int = BLOCKS) -> Plan:
    """Layers of several page sizes, one after the other in one slot."""
    common: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "dtype": "fp8"}
    narrow = FullAttentionSpec(head_size=2, **common)
    wide = SlidingWindowSpec(head_size=3, sliding_window=3, **common)
    layers: dict[str, LayerSpec] = {"a": narrow, "b": narrow, "wide": wide}
    return plan_cache(
        layers, 2**30, max_model_len=4, num_blocks_override=num_blocks, grouping="packed"
    )


def askew(num_blocks: int = BLOCKS) -> Plan:
    """A packed layer that starts at byte 24 and stores rows of 16."""
    common: dict[str, Any] = {"block_size": 2, "num_kv_heads": 1, "dtype": "fp8"}
    layers: dict[str, LayerSpec] = {
        "a": FullAttentionSpec(head_size=6, **common),
        "b": FullAttentionSpec(head_size=8, **common),
        "window": SlidingWindowSpec(head_size=3, sliding_window=3, **common),
    }
    plan = plan_cache(
        layers, 2**30, max_model_len=4, num_blocks_override=num_blocks, grouping="packed"
    )
    assert plan.layout.place_of("b").offset_bytes % 16
    return plan


# Where tiles move bytes; elsewhere rows run on from block to block (`test_kernel_blocks`).
CUT = ("LBHNC", "BLNHC", "BLHNC", "BHLNC")
CASES = [
    *[(windows, form) for form in [*forms(), *forms(CUT, (2, 2))]],
    *[(hybrid, form) for form in forms(WHOLE_PAGES)],
    *[(hybrid, Form(order, order[0] == "B", (2, 4))) for order in ("LBNHC", "LBHNC", "BLHNC")],
    *[(latent, Form(order, order != "LBHNC")) for order in ("LBHNC", "LHBNC", "BLNHC", "BHLNC")],
    *[(latent, form) for form in forms(("BLNHC", "BHLNC"), (4,))],
    *[(packed, Form(order, order[0] == "B", (2, 2))) for order in ("LBNHC", "BLHNC")],
    *[(askew, Form(order, order[0] == "B")) for order in ("LBNHC", "BLHNC")],
]
every_case = pytest.mark.parametrize(
    ("make_plan", "form"), CASES, ids=lambda value: getattr(value, "__name__", None) or str(value)
)
READ = jnp.array([1, 2, 0, BLOCKS - 1, -1, BLOCKS, 2**31 - 1], jnp.int32)
any_block = st.integers(-1, BLOCKS) | st.sampled_from([-(2**31), 2**31 - 1])
Arrays = dict[str, tuple[Any, ...]]


def slots_of(spec: LayerSpec) -> st.SearchStrategy:
    """Three slots in three rows, or what is no slot."""
    ratio = getattr(spec, "compress_ratio", 1)
    count = BLOCKS * spec.block_size // ratio
    rows = st.integers(-2, count - 1) | st.sampled_from([count, 2**31 // ratio - 1, -(2**31)])
    return st.lists(rows, min_size=3, max_size=3, unique=True).map(
        lambda rows: [max(row * ratio, -(2**31)) for row in rows]
    )


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-8, 8, shape).astype(np.float32)


def arrays_for(rng: np.random.Generator, spec: LayerSpec) -> list[np.ndarray]:
    """Three rows, or three states."""
    if isinstance(spec, StateSpec):
        return [numbers(rng, 3, *shape) for shape in spec.shapes]
    if isinstance(spec, MLASpec):
        return [numbers(rng, 3, spec.head_size)]
    assert isinstance(spec, FullAttentionSpec)
    return [numbers(rng, 3, spec.num_kv_heads, n) for n in (spec.head_size, spec.value_size)]


def written_layers(plan: Plan) -> list[str]:
    """One layer of each group, in the last slot and in the first."""
    return [group.layers[index - 1] for index, group in enumerate(plan.layout.groups)]


def draw_writes(data: st.DataObject, plan: Plan) -> Arrays:
    """Per layer what to write: where to, and the arrays."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    writes: Arrays = {}
    for layer in written_layers(plan):
        spec = plan.layout.place_of(layer).spec
        blocks = st.lists(any_block, min_size=3, max_size=3, unique=True)
        where = data.draw(blocks if isinstance(spec, StateSpec) else slots_of(spec))
        writes[layer] = (np.array(where, np.int32), *arrays_for(rng, spec))
    return writes


def write_one(pool: KVPool, layer: str, arrays: tuple[Any, ...], **options: Any) -> KVPool:
    spec = pool.layout.place_of(layer).spec
    if isinstance(spec, StateSpec):
        return write_state(pool, layer, arrays[0], arrays[1:], **options)
    write = write_rows if isinstance(spec, MLASpec) else write_tokens
    return write(pool, layer, *arrays, **options)


def read_one(pool: KVPool, layer: str, block_ids: jax.Array) -> tuple[jax.Array, ...]:
    spec = pool.layout.place_of(layer).spec
    if isinstance(spec, StateSpec):
        return read_state(pool, layer, block_ids)
    if isinstance(spec, MLASpec):
        return (read_rows(pool, layer, block_ids),)
    return read_tokens(pool, layer, block_ids)


@functools.partial(jax.jit, static_argnames="implementation")
def step(pool, zero_ids, sources, destinations, writes, implementation=None):
    """All that a pool does."""
    options = {"implementation": implementation}
    pool = zero_new_blocks(pool, zero_ids, **options)
    pool = copy_blocks(pool, sources, destinations, **options)
    for layer, arrays in writes.items():
        pool = write_one(pool, layer, arrays, **options)
    return pool, {layer: read_one(pool, layer, READ) for layer in writes}


def reference_step(expected: ReferencePool, zero_ids, sources, destinations, writes) -> None:
    expected.zero(zero_ids)
    expected.copy(sources, destinations)
    for layer, (where, *arrays) in writes.items():
        spec = expected.layout.place_of(layer).spec
        for i, place in enumerate(where.tolist()):
            if isinstance(spec, StateSpec):
                parts = [a[i].astype(dtype_of(d)) for a, d in zip(arrays, spec.dtypes, strict=True)]
                raw = np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)
                expected.write(layer, place, 0, raw)
                continue
            block_id, offset = divmod(place, spec.block_size)
            row = np.concatenate([array[i] for array in arrays], axis=-1)
            offset = offset // getattr(spec, "compress_ratio", 1) * spec.token_bytes
            expected.write(layer, block_id, offset, row.astype(dtype_of(spec.dtype)))


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def content_of(expected: ReferencePool, layer: str) -> tuple[np.ndarray, ...]:
    """What reading `READ` must give, from the bytes in memory."""
    spec = expected.layout.place_of(layer).spec
    pages = np.stack([expected.page(layer, int(block_id)) for block_id in READ])
    if isinstance(spec, StateSpec):
        ends = np.cumsum(spec.array_bytes)
        cut = np.split(pages, ends[:-1], axis=1)
        triples = zip(cut, spec.shapes, spec.dtypes, strict=True)
        return tuple(
            np.ascontiguousarray(part).view(dtype_of(d)).reshape(-1, *shape)
            for part, shape, d in triples
        )
    if isinstance(spec, MLASpec):
        return (pages.view(dtype_of(spec.dtype)).reshape(-1, spec.head_size),)
    assert isinstance(spec, FullAttentionSpec)
    rows = pages.view(dtype_of(spec.dtype)).astype(np.float32)
    rows = rows.reshape(-1, spec.num_kv_heads, spec.head_size + spec.value_size)
    return rows[..., : spec.head_size], rows[..., spec.head_size :]


def draw_ids(data: st.DataObject, plan: Plan) -> tuple[np.ndarray, ...]:
    lists = st.lists(any_block, min_size=2, max_size=2)
    groups = len(plan.groups)
    zero_ids, sources = (
        data.draw(st.lists(lists, min_size=groups, max_size=groups)) for _ in range(2)
    )
    targets = data.draw(st.permutations([*range(-1, BLOCKS + 1)]))  # one copy to each block
    targets = [targets[2 * i : 2 * i + 2] for i in range(groups)]
    return tuple(np.array(ids, np.int32) for ids in (zero_ids, sources, targets))


@every_case
@settings(max_examples=4)
@given(data=st.data())
def test_every_byte_lies_where_the_order_says(make_plan, form, data) -> None:
    plan = make_plan()
    ids, writes = draw_ids(data, plan), draw_writes(data, plan)
    expected = reference_of(plan, form)
    seed = data.draw(st.integers(0, 99))
    expected.memory[:] = np.random.default_rng(seed).integers(0, 60, expected.memory.size)
    pool = with_memory(empty(make_plan, form), expected.memory)
    assert pool.order == form.order and pool.stacked == form.stacked
    pool, got = step(pool, *ids, writes)
    reference_step(expected, *ids, writes)
    np.testing.assert_array_equal(memory_of(pool), expected.memory)
    for layer, arrays in got.items():
        for array, wanted in zip(arrays, content_of(expected, layer), strict=True):
            np.testing.assert_array_equal(np.asarray(array), wanted, layer)


@pytest.mark.parametrize(
    ("make_plan", "tiled", "orders"),
    [
        (windows, (2, 2), LAYOUT_ORDERS),
        (hybrid, (2, 4), WHOLE_PAGES),
        (latent, (4,), LAYOUT_ORDERS),
    ],
)
def test_what_is_written_reads_the_same_in_every_order(make_plan, tiled, orders) -> None:
    plan = make_plan()
    layer = written_layers(plan)[0]
    spec = plan.layout.place_of(layer).spec
    where = jnp.array([8, 13, 19], jnp.int32)
    arrays = (where, *arrays_for(np.random.default_rng(0), spec))

    @jax.jit
    def write_and_read(pool):
        pool = write_one(pool, layer, arrays)
        return read_one(pool, layer, READ)

    wanted = [np.asarray(array) for array in write_and_read(make_pool(plan))]
    assert all(array.any() for array in wanted)
    for form in [*forms(orders), *forms(set(CUT) & set(orders), tiled)]:
        if form.stacked and form.order.startswith("L"):
            continue  # as it is in a buffer per slot, further on
        for got, array in zip(write_and_read(empty(make_plan, form)), wanted, strict=True):
            np.testing.assert_array_equal(got, array)


@functools.partial(jax.jit, static_argnames=("layer", "parts"))
def view_of(pool, layer, parts):
    return layer_view(pool, layer, blocks_per_kv_block=parts)


def axes_of(pool: KVPool, layer: str) -> str:
    """The axes of `layer_view`, as its documentation says."""
    has_heads = not isinstance(pool.layout.place_of(layer).spec, MLASpec)
    axes = pool.order if pool.stacked else pool.order.replace("L", "")
    axes = axes if has_heads else axes.replace("H", "")
    return axes[1:] if axes.startswith("LB") else axes


def evenly(steps: np.ndarray) -> bool:
    return len(set(steps.reshape(-1))) <= 1


def out_of(pool: KVPool, layer: str, view: np.ndarray) -> tuple[np.ndarray, str, int]:
    """One layer of a view as a view with all axes but L, its axes, and where it begins."""
    axes, offset = axes_of(pool, layer), 0
    assert view.ndim == len(axes)
    if pool.stacked:
        if "L" not in axes:
            view = view.reshape(len(pool.layout.slots), -1, *view.shape[1:])
            axes = "L" + axes
        at, slot = axes.index("L"), pool.layout.place_of(layer).slot
        offset = slot * view.strides[at]
        view, axes = view[(slice(None),) * at + (slot,)], axes.replace("L", "")
    if "H" not in axes:
        axes = pool.order.replace("L", "")
        view = np.expand_dims(view, axes.index("H"))
    return view, axes, offset


@pytest.mark.parametrize("parts", [1, 2])
@every_case
def test_a_view_is_described_as_numpy_describes_the_same_bytes(make_plan, form, parts) -> None:
    """Whoever allocated such a buffer and cut the layer out of it sees the same memory."""
    plan, pool, reference = make_plan(), empty(make_plan, form), reference_of(make_plan(), form)
    reference.memory[:] = np.random.default_rng(0).integers(0, 60, pool.num_bytes)
    pool = with_memory(pool, reference.memory)
    for layer in plan.layout.groups[0].layers:
        place = plan.layout.place_of(layer)
        size = place.spec.block_size // parts
        heads = row_format(place.spec).heads
        first = reference.addresses(layer).reshape(BLOCKS, rows_per_block(place.spec), heads, -1)
        first = first[..., 0, 0].reshape(BLOCKS * parts, -1)
        if not (evenly(np.diff(first[:, 0])) and evenly(np.diff(first))):
            with pytest.raises(ValueError, match="would lie between"):
                describe_layer(pool, layer, kernel_block_size=size)
            with pytest.raises(ValueError, match=r"would lie between|not contiguous"):
                view_of(pool, layer, parts)
            continue
        described = describe_layer(pool, layer, kernel_block_size=size)
        if plan.layout.slots[place.slot].page_bytes != place.spec.data_bytes:
            with pytest.raises(ValueError, match="not contiguous"):
                view_of(pool, layer, parts)
            continue
        view, axes, offset = out_of(pool, layer, np.asarray(view_of(pool, layer, parts)))
        assert describe_array(view, axes, num_blocks=BLOCKS, offset_bytes=offset) == described
        rows = view.transpose([axes.index(axis) for axis in "BNHC"])
        for block_id in range(1, BLOCKS):
            raw = np.ascontiguousarray(rows[block_id * parts : (block_id + 1) * parts])
            raw = raw.view(np.uint8).reshape(-1)
            np.testing.assert_array_equal(raw, reference.page(layer, block_id))


@every_case
def test_whole_blocks_can_be_moved_as_bytes_from_any_pool(make_plan, form) -> None:
    plan, pool = make_plan(), empty(make_plan, form)
    reference = reference_of(plan, form)
    for group in plan.layout.groups:
        for layer in group.layers:
            moved = describe_bytes(pool, layer)
            base = bytes_before(pool, layer)
            assert moved.granularity == "manager" and moved.dtype == "uint8"
            addresses = np.arange(reference.memory.size, dtype=np.int32)[base:]
            seen = np.lib.stride_tricks.as_strided(
                addresses[moved.offset_bytes :],
                moved.shape,
                [4 * stride for stride in moved.strides_bytes],
            )
            seen = np.moveaxis(seen, moved.block_axis, 0).reshape(BLOCKS, -1)
            wanted = reference.addresses(layer)
            np.testing.assert_array_equal(np.sort(seen, axis=1), np.sort(wanted, axis=1))


@pytest.mark.parametrize("form", [*forms(), *forms(CUT, (2, 2))], ids=str)
def test_a_view_is_the_buffer_itself_and_goes_back(form) -> None:
    """Nothing but another shape and another dtype: XLA passes such bytes on, on a GPU."""
    plan = windows(4000 if ON_GPU else BLOCKS)
    parts = 2 if form.kernel_block_sizes else 1
    pool = pool_of(plan, form)
    run = functools.partial(layer_view, layer="full.1", blocks_per_kv_block=parts)
    steps = {eqn.primitive.name for eqn in jax.make_jaxpr(run)(pool).eqns}
    assert steps == {"reshape", "bitcast_convert_type"}

    def touch(pool: KVPool) -> KVPool:
        return with_layer_view(pool, "full.1", run(pool).at[1, 0].set(1.0))

    compiled = jax.jit(touch, donate_argnums=0).lower(pool).compile()
    if ON_GPU:
        assert compiled.memory_analysis().temp_size_in_bytes < 100_000
    where = pointers(pool)
    pool = compiled(pool)
    assert pointers(pool) == where
    view = np.asarray(run(pool)).astype(np.float32)
    assert view[1, 0].all() and view.sum() == view[1, 0].size


SPECS = st.one_of(
    st.builds(
        FullAttentionSpec,
        block_size=st.sampled_from([1, 2, 4, 6]),
        num_kv_heads=st.sampled_from([1, 3]),
        head_size=st.sampled_from([1, 2]),
        head_size_v=st.just(1),
        dtype=st.sampled_from(["fp8", "bf16", "f32"]),
        scale_bytes=st.sampled_from([0, 0, 4]),
    ),
    st.builds(
        lambda rows, ratio: MLASpec(block_size=rows * ratio, compress_ratio=ratio, head_size=2),
        st.sampled_from([1, 2, 4, 6]),
        st.sampled_from([1, 2, 3, 4]),
    ),
)
EXPANDED = jnp.arange(BLOCKS, dtype=jnp.int32)


@functools.cache
def sharing(spec: LayerSpec) -> Plan:
    return planned({"a": spec, "b": spec})


@settings(max_examples=120)
@given(SPECS, st.sampled_from(forms()), st.data())
def test_ids_of_tables_and_entries_of_tensors_are_the_same_kernel_blocks(spec, form, data) -> None:
    """Tables expand ids, tensors split blocks: both must come to one address for each row."""
    ratio = getattr(spec, "compress_ratio", 1)
    sizes = [n for n in range(ratio, spec.block_size + 1, ratio) if spec.block_size % n == 0]
    size = data.draw(st.sampled_from(sizes))
    plan, form = sharing(spec), form._replace(kernel_block_sizes=(size,))
    pool = jax.eval_shape(lambda: pool_of(plan, form))
    parts, rows = blocks_per_kv_block(spec, size), rows_per_kernel_block(spec, size)
    described = describe_layer(pool, "b", kernel_block_size=size)
    ids = np.asarray(expand_blocks(EXPANDED, parts))
    strides = dict(zip(described.axes, described.strides_bytes, strict=True))
    shape = dict(zip(described.axes, described.shape, strict=True))
    assert shape["B"] == len(ids) == BLOCKS * parts and shape["N"] == rows
    reference = reference_of(plan, form)
    first = reference.addresses("b").reshape(BLOCKS, rows_per_block(spec), shape["H"], -1)[..., 0]
    base = described.offset_bytes + bytes_before(pool, "b")
    for block_id in range(BLOCKS):
        for row in range(rows_per_block(spec)):
            entry = ids[block_id * parts + row // rows]
            for head in range(shape["H"]):
                address = base + entry * strides["B"] + row % rows * strides["N"]
                assert address + head * strides["H"] == first[block_id, row, head]


@pytest.mark.parametrize(
    ("form", "heads", "latents"),
    [
        *[(form, 2, False) for form in forms(kernel_block_sizes=(2,))],
        *[(Form(order, True, (2,)), 1, True) for order in ("LBNHC", "LHBNC", "BLHNC")],
    ],
    ids=str,
)
def test_gathered_kernel_ids_find_what_was_written(form, heads, latents) -> None:
    spec: LayerSpec = FullAttentionSpec(block_size=4, num_kv_heads=heads, head_size=2)
    if latents:
        spec = MLASpec(block_size=4, head_size=4, compress_ratio=2)
    layers = {"a": spec, "b": spec}
    plan = plan_cache(layers, 2**20, max_model_len=12, num_blocks_override=8)
    sizes = list(form.kernel_block_sizes or ())
    tables = make_block_tables(plan, max_requests=2, kernel_block_sizes=sizes)
    held = [5, 2, 7]
    entries = pack_entries([TableEntry(1, [held])], num_groups=1, max_entries=1, max_block_ids=3)
    tables = append_block_ids(tables, entries)
    tables, (ids,) = gather_block_tables(
        tables, jnp.array([1], jnp.int32), jnp.array([10], jnp.int32), widths=(3,)
    )
    positions = jnp.arange(0, 12, 2 if latents else 1, dtype=jnp.int32)
    tables, (slots,) = map_slots(tables, jnp.full_like(positions, 1), positions)
    rows = jnp.arange(positions.size * heads * 4, dtype=jnp.bfloat16)
    rows = rows.reshape(-1, *([4] if latents else [heads, 4]))
    pool = write_rows(pool_of(plan, form), "b", slots, rows)
    view, axes, _ = out_of(pool, "b", np.asarray(view_of(pool, "b", 2)))
    got = np.take(view, np.asarray(ids[0]), axes.index("B"))
    got = got.transpose([axes.index(axis) for axis in "BNHC"])
    np.testing.assert_array_equal(got.reshape(rows.shape), rows)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_blocks_of_128_serve_kernels_of_64(order) -> None:
    """Connectors and kernels were given one shape or the other; each has its own here."""
    spec = FullAttentionSpec(block_size=128, num_kv_heads=8, head_size=16)
    plan = plan_cache({"a": spec}, 2**22, max_model_len=256, num_blocks_override=10)
    sizes = [64]
    tables = make_block_tables(plan, max_requests=1, kernel_block_sizes=sizes)
    pool = make_pool(plan, order=order, kernel_block_sizes=sizes)
    parts = tables.groups[0].blocks_per_kv_block
    view = jax.eval_shape(lambda p: layer_view(p, "a", blocks_per_kv_block=parts), pool)
    kernel = describe_layer(pool, "a", kernel_block_size=64)
    assert kernel.shape == view.shape
    assert kernel.shape == ((20, 64, 8, 32) if order == "NHD" else (20, 8, 64, 32))
    assert (kernel.granularity, kernel.num_blocks) == ("kernel", 10)
    moved = describe_bytes(pool, "a")
    assert (moved.shape[0], moved.strides_bytes[0]) == (10, spec.page_bytes)
    if order == "NHD":
        assert pool.tiles == (None,), "rows run on: there is nothing to cut"
        assert kernel.as_manager() == describe_layer(pool, "a")
        return
    for call in kernel.as_manager, lambda: describe_layer(pool, "a"):
        with pytest.raises(ValueError, match="lie between"):
            call()


def operations(name: str, layer: str):
    """A function of the pool: one public operation that writes."""
    ids = jnp.array([1, 2, -1], jnp.int32)

    def run(pool: KVPool, **options: Any) -> KVPool:
        per_group = jnp.broadcast_to(ids, (len(pool.layout.groups), 3))
        spec = pool.layout.place_of(layer).spec
        if name == "zero":
            return zero_new_blocks(pool, per_group, **options)
        if name == "copy":
            return copy_blocks(pool, per_group, per_group + 3, disjoint=True, **options)
        if isinstance(spec, StateSpec):
            return write_state(
                pool, layer, ids, [jnp.ones((3, *s)) for s in spec.shapes], **options
            )
        row = jnp.ones((3, spec.token_bytes), jnp.uint8)
        return write_rows(pool, layer, ids, row, **options)

    return run


IN_PLACE = [
    *[(windows, form, "full.1") for form in [*forms(), *forms(("LBHNC", "BHLNC"), (2, 2))]],
    *[(hybrid, Form(order, True, (2, 4)), "state.1") for order in ("LBHNC", "BLHNC")],
]


@pytest.mark.parametrize("name", ["write", "zero", "copy"])
@pytest.mark.parametrize(
    ("make_plan", "form", "layer"),
    IN_PLACE,
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_every_write_is_in_place_in_every_order(make_plan, form, layer, name) -> None:
    pool = pool_of(make_plan(40_000), form)
    assert pool.num_bytes > 50 * 100_000
    assert_in_place(operations(name, layer), pool, max_temp_bytes=100_000)


@needs_mosaic
@pytest.mark.parametrize("name", ["write", "zero", "copy"])
@pytest.mark.parametrize("form", [*forms(), *forms(CUT, (2, 2))], ids=str)
def test_the_cuda_lowering_is_one_aliased_kernel_in_every_order(form, name) -> None:
    pool = jax.eval_shape(lambda: pool_of(windows(), form))
    run = functools.partial(operations(name, "full.1"), implementation="mosaic_gpu")
    text = jax.jit(run, donate_argnums=0).trace(pool).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("tf.aliasing_output") == len(pool.buffers)
    touched = 1 if name == "write" else len(pool.buffers)
    assert text.count("stablehlo.output_operand_alias<") == touched


@needs_mosaic
@pytest.mark.parametrize(
    "form",
    [Form("LBHNC", False, (2, 2)), Form("LHBNC", True), Form("BHLNC", True, (2, 2))],
    ids=str,
)
def test_the_kernels_write_what_xla_writes(form) -> None:
    plan, rng = windows(), np.random.default_rng(0)
    slots = np.array([9, 3, 14], np.int32)
    writes = {"full.1": (slots, numbers(rng, 3, 2, 4), numbers(rng, 3, 2, 2))}
    ids = [np.array(ids, np.int32) for ids in ([[1, -1], [4, 0]], [[2, 3], [4, 9]])]
    ids.append(np.array([[3, 2], [1, 0]], np.int32))  # 3 is a source and a destination
    pool = pool_of(plan, form)
    memory = rng.integers(0, 60, pool.num_bytes).astype(np.uint8)
    done = []
    for implementation in ("xla", "mosaic_gpu"):
        with kernels_run():
            run = jax.jit(functools.partial(step.__wrapped__, implementation=implementation))
            done.append(memory_of(run(with_memory(pool, memory), *ids, writes)[0]))
    np.testing.assert_array_equal(*done)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "form",
    [
        *[Form(order, order[0] == "B") for order in LAYOUT_ORDERS],
        Form("LBHNC", True, (2,)),
    ],
    ids=str,
)
def test_two_ranks_hold_their_heads_in_any_order(form) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    common: dict[str, Any] = {"block_size": 4, "head_size": 2, "dtype": "f32"}
    whole, half = (
        planned({"a": spec, "b": spec})
        for spec in (FullAttentionSpec(num_kv_heads=n, **common) for n in (4, 2))
    )
    pool = make_sharded_pool(
        half,
        mesh,
        "heads",
        order=form.order,
        stacked=form.stacked,
        kernel_block_sizes=form.kernel_block_sizes,
    )
    assert pool.num_bytes == whole.num_blocks * whole.bytes_per_block[0]
    pages, heads = pool.buffers[0].sharding.spec, PartitionSpec(None, "heads")
    slots = jnp.array([5, 19, -1, 2], jnp.int32)
    keys = jnp.asarray(numbers(np.random.default_rng(0), 4, 4, 2))

    def write(pool, keys):
        pool = write_tokens(pool, "b", slots, keys, -keys)
        pool = copy_blocks(pool, jnp.array([[1]], jnp.int32), jnp.array([[3]], jnp.int32))
        return zero_new_blocks(pool, jnp.array([[4]], jnp.int32)), read_tokens(pool, "b", READ)

    run = jax.jit(
        jax.shard_map(
            write, mesh=mesh, in_specs=(pages, heads), out_specs=(pages, heads), check_vma=False
        )
    )
    sharded, got = run(pool, keys)
    alone, wanted = jax.jit(write)(pool_of(whole, form), keys)
    if "H" in pool.form.axes:  # heads come first: the same bytes as those of one device
        np.testing.assert_array_equal(memory_of(sharded), memory_of(alone))
    for array, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(array, other)
    assert memory_of(sharded).sum() == memory_of(alone).sum() > 0
    with pytest.raises(ValueError, match="a sharded pool is used under shard_map"):
        layer_view(sharded, "b")


def test_blocks_that_are_one_run_go_whole() -> None:
    """A block belongs to one group at a time, so its other slots hold nothing of anyone."""
    plan = windows(BLOCKS, 4, 3)
    assert plan.layout.slots_of(1) < plan.layout.slots_of(0)
    pool = make_pool(plan, order="BLHNC")
    pool = with_memory(pool, np.full(pool.num_bytes, 7, np.uint8))
    pool = zero_new_blocks(pool, jnp.array([[-1, 0], [2, 9]], jnp.int32))
    buffer = np.asarray(pool.buffers[0])
    assert not buffer[2].any() and (buffer[[0, 1, 3, 4]] == 7).all()
    pool = copy_blocks(pool, jnp.array([[9], [2]], jnp.int32), jnp.array([[1], [3]], jnp.int32))
    assert [bool(block.any()) for block in np.asarray(pool.buffers[0])] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@settings(max_examples=4)
@given(data=st.data())
def test_only_the_slots_of_a_group_are_zeroed_and_copied(order, stacked, data) -> None:
    plan, form = windows(BLOCKS, 4, 3), Form(order, stacked)
    assert plan.layout.slots_of(1) < plan.layout.slots_of(0)
    ids, expected = draw_ids(data, plan), reference_of(plan, form)
    expected.memory[:] = np.random.default_rng(0).integers(1, 60, expected.memory.size)
    pool, _ = step(with_memory(pool_of(plan, form), expected.memory), *ids, {})
    reference_step(expected, *ids, {})
    np.testing.assert_array_equal(memory_of(pool), expected.memory)


@pytest.mark.parametrize("order", ["NHD", "HND", *LAYOUT_ORDERS])
def test_the_pool_has_exactly_the_bytes_that_were_planned(order) -> None:
    plan = windows()
    pool = make_pool(plan, order=order)
    assert pool.num_bytes == plan.num_blocks * plan.bytes_per_block[0]
    assert pool.num_blocks == BLOCKS and pool.order in LAYOUT_ORDERS
    assert pool.order in repr(pool)
    shapes = pool_shapes(plan.layout, plan.num_blocks, order=order)
    assert [shape.shape for shape in shapes] == [buffer.shape for buffer in pool.buffers]


def test_a_pool_of_no_layers_can_be_made_in_any_order() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
    plan = plan_cache([{"a": spec}, {}], [2**16, 2**16], max_model_len=4)
    for order in LAYOUT_ORDERS:
        pool = make_pool(plan, worker=1, order=order, kernel_block_sizes=[2])
        none = jnp.array([[1]], jnp.int32)
        assert zero_new_blocks(pool, none).buffers == () and pool.num_blocks == 0


def mixed_heads() -> Plan:
    common: dict[str, Any] = {"block_size": 4, "dtype": "bf16"}
    wide = FullAttentionSpec(num_kv_heads=4, head_size=2, **common)
    tall = SlidingWindowSpec(num_kv_heads=2, head_size=4, sliding_window=3, **common)
    return planned({"wide": wide, "tall": tall})


def uneven() -> Plan:
    return planned(
        {
            "wide": MLASpec(block_size=4, head_size=8),
            "narrow": MLASpec(block_size=4, head_size=3, dtype="uint8"),
        }
    )


def slots_of_unlike_heads() -> Plan:
    common: dict[str, Any] = {"block_size": 4, "dtype": "bf16"}
    return planned(
        {
            "wide": FullAttentionSpec(num_kv_heads=4, head_size=2, **common),
            "tall": FullAttentionSpec(num_kv_heads=2, head_size=4, **common),
        }
    )


def odd_padding() -> Plan:
    spec = FullAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=2, dtype="bf16", page_bytes_padded=66
    )
    return planned({"a": spec})


@pytest.mark.parametrize(
    ("make_plan", "options", "message"),
    [
        (windows, {"order": "LBNCH"}, "order='LBNCH' is not a cache layout; use one of LBNHC"),
        (windows, {"order": "BLNHC", "stacked": False}, "stacked=False: order='BLNHC' lays all"),
        (windows, {"order": "BHLNC", "stacked": False}, "leave stacked out"),
        (hybrid, {"order": "LHBNC"}, r"slot 0 differ in them: \{'kv.0': 3, 'state.0': 1\}"),
        (hybrid, {"order": "BHLNC"}, "use LBNHC, LBHNC, BLNHC or BLHNC"),
        (mixed_heads, {"order": "LHBNC"}, r"\{'wide': 4, 'tall': 2\}"),
        (uneven, {"order": "BLNHC"}, r"order='BLNHC' needs slots of one page size in bytes"),
        (uneven, {"stacked": True}, r"stacked=True needs slots of one page size .*\[12, 64\]"),
        (
            slots_of_unlike_heads,
            {"order": "LHBNC", "stacked": True},
            r"stacked=True needs slots of one number of KV heads; this layout has \[2, 4\]",
        ),
        (slots_of_unlike_heads, {"order": "BHLNC"}, "order='BHLNC' needs slots of one number"),
        (packed, {"order": "LHBNC"}, "layer='b' in order='LHBNC': page_offset_bytes=32"),
        (odd_padding, {"order": "LHBNC"}, "layer='a' in order='LHBNC': .*multiples of 4 bytes"),
        (
            windows,
            {"kernel_block_sizes": [2]},
            "kernel_block_sizes has 1 entries; the layout",
        ),
        (windows, {"kernel_block_sizes": [2, 3]}, r"kernel_block_sizes\[1\]: .*does not divide"),
        (hybrid, {"kernel_block_sizes": [2, 2]}, r"kernel_block_sizes\[1\]: .*split a state"),
        (latent, {"kernel_block_sizes": [1]}, r"kernel_block_sizes\[0\]: .*no whole rows"),
        (
            odd_padding,
            {"order": "HND", "kernel_block_sizes": [2]},
            "layer='a' in order='LBHNC': .*multiples of 4 bytes",
        ),
        (
            windows,
            {"order": "HND", "kernel_block_sizes": [2, 4]},
            r"groups \[0, 1\] overlay each other and would cut a block into \[2, 1\] tiles",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused_by_name(make_plan, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(make_plan(), **options)


def test_more_runs_than_int32_counts_are_refused() -> None:
    spec = FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=1, dtype="fp8")

    def shapes_of(num_blocks: int):
        plan = plan_cache({"a": spec}, 2**50, max_model_len=64, num_blocks_override=num_blocks)
        make = functools.partial(make_pool, plan, order="BHLNC", kernel_block_sizes=[2])
        return jax.eval_shape(make)  # 2 GiB that are not allocated

    assert shapes_of(2**23 - 1).num_blocks == 2**23 - 1
    with pytest.raises(ValueError, match="runs of bytes in one buffer are more than int32 counts"):
        shapes_of(2**23)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: layer_view(pool, "full.0"), "its tiles are of 2: use that"),
        (lambda pool: layer_view(pool, "full.0", blocks_per_kv_block=4), "cannot be read as 4"),
        (lambda pool: layer_view(pool, "full.0", blocks_per_kv_block=3), "does not divide 4 rows"),
        (lambda pool: describe_layer(pool, "full.0"), "byte_view for whole blocks"),
        (lambda pool: describe_layer(pool, "full.9"), "layer='full.9' has no cache here"),
        (lambda pool: describe_bytes(pool, "full.9"), "layer='full.9' has no cache here"),
        (lambda pool: with_layer_view(pool, "full.0", jnp.ones(3)), "view is float32.* elements"),
    ],
)
def test_views_that_do_not_exist_are_refused_by_name(call, message) -> None:
    pool = make_pool(windows(), order="HND", kernel_block_sizes=[2, 2])
    with pytest.raises(ValueError, match=message):
        call(pool)
