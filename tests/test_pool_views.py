"""Views of a layer: the bytes that kernels and connectors see, as tables and slots count them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.layout import row_format, rows_per_block
from jaxkv._src.pool import describe_bytes, describe_layer
from jaxkv._src.specs import StateSpec
from tests import pool_cases as cases
from tests.helpers import ON_GPU, pointers
from tests.pool_cases import BLOCKS, CASES, REQUESTS, TOKENS, WINDOWS, Case, hybrid, latent, windows

view_of = jax.jit(jaxkv.layer_view, static_argnames="layer")
read_rows = jax.jit(jaxkv.read_rows, static_argnames="layer")


def filled(case: Case):
    """A cache of random bytes, and the walk through them."""
    reference = case.reference()
    return cases.with_memory(cases.empty(case), reference.memory), reference


def all_axes(cache, layer: str) -> np.ndarray:
    """A layer's view with all five axes, LBNHC, as its documentation says: nothing is copied."""
    view, buffers = np.asarray(view_of(cache, layer)), cache.layout.buffers
    order, place = buffers.order, buffers.page_placement(layer)
    if buffers.stacked and order.startswith("LB"):  # which the view counts on one axis
        view = view.reshape(place.num_layers, -1, *view.shape[1:])
    missing = {
        "L": not buffers.stacked,
        "H": row_format(cache.layout.placement_of(layer).spec).key_elements is None,
    }
    view = np.expand_dims(view, [order.index(axis) for axis in missing if missing[axis]])
    return view.transpose([order.index(axis) for axis in "LBNHC"])


def places(shape, strides, start: int = 0) -> np.ndarray:
    """Returns the first byte of each element of a strided array."""
    return sum((np.indices(shape)[i] * stride for i, stride in enumerate(strides)), np.array(start))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_is_described_as_it_lies_in_its_buffer(case: Case) -> None:
    """By the walk through the bytes, and by the strides of NumPy in `layer_view`."""
    cache, reference = filled(case)
    for layer in cases.layers_of(case.plan):
        place, buffers = case.plan.layout.placement_of(layer), cache.layout.buffers
        spec, heads = place.spec, row_format(place.spec).heads
        before = sum(buffer.size for buffer in cache.buffers[: buffers.buffer_of(layer)])
        walked = reference.addresses(layer) - before
        for ids in ("manager", "kernel"):
            parts = 1 if ids == "manager" else cache.layout.blocks_per_kv_block[place.group]
            rows = walked.reshape(BLOCKS * parts, rows_per_block(spec) // parts, heads, -1)
            steps = [np.diff(rows[:, 0], axis=0), np.diff(rows, axis=1)]
            if any(len(set(step.reshape(-1).tolist())) > 1 for step in steps):
                with pytest.raises(ValueError, match="would lie between"):
                    describe_layer(cache, layer, ids=ids)
                continue
            seen = describe_layer(cache, layer, ids=ids)
            assert seen.blocks_per_kv_block == parts
            axes = [seen.axes.index(axis) for axis in "BNHC"]
            got = places(seen.shape, seen.strides_bytes, seen.offset_bytes).transpose(axes)
            first = 0 if ids == "manager" else cache.layout.id_offset(layer) * parts
            got = got[first : first + BLOCKS * parts]
            itemsize = rows.shape[-1] // got.shape[-1]
            np.testing.assert_array_equal(got, rows[..., ::itemsize])
        moved = describe_bytes(cache, layer)
        got = places(moved.shape, moved.strides_bytes, moved.offset_bytes)
        got = np.moveaxis(got, moved.block_axis, 0).reshape(BLOCKS, -1)
        np.testing.assert_array_equal(np.sort(got), np.sort(walked))
        if isinstance(spec, StateSpec):
            continue
        if case.plan.layout.tensors[place.tensor].page_bytes != spec.data_bytes:
            with pytest.raises(ValueError, match="its blocks are not contiguous; use read_tokens"):
                view_of(cache, layer)
            continue
        view, at = all_axes(cache, layer), buffers.page_placement(layer).layer
        seen = describe_layer(cache, layer)
        got = places(view.shape, view.strides)
        got = got.reshape(-1, *got.shape[2:]) if buffers.counts_through else got[at]
        axes = [seen.axes.index(axis) for axis in "BNHC"]
        wanted = places(seen.shape, seen.strides_bytes, seen.offset_bytes).transpose(axes)
        np.testing.assert_array_equal(got, wanted)
        assert view.dtype.name == seen.dtype


HAVE_VIEWS = [case for case in CASES if case.make_plan in (windows, latent)]


@pytest.mark.parametrize("case", [*HAVE_VIEWS, Case(windows, kernel_block_sizes=(2, 1))], ids=str)
def test_tables_index_the_view_of_their_layer(case: Case) -> None:
    """As they are, with kernel blocks and with the layers before them in a stack."""
    cache, _ = filled(case)
    batch = cases.fixed_step(case.plan).batch(cache, case.plan)
    for layer in cases.layers_of(case.plan):
        view, buffers = all_axes(cache, layer), cache.layout.buffers
        ids = np.asarray(batch.kernel_block_tables(layer))
        assert not ids[2, -1] and ids[0].all(), "a hole stays null, whatever lies before"
        at = buffers.page_placement(layer).layer
        blocks = view.reshape(-1, *view.shape[2:]) if buffers.counts_through else view[at]
        wanted = np.asarray(read_rows(cache, layer, batch))
        got = blocks[ids].reshape(wanted.shape)
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))
        if not buffers.stacked:
            continue
        names = buffers.stacked_layers(layer)
        for name in names:
            layer_index = jnp.int32(names.index(layer))
            np.testing.assert_array_equal(
                batch.kernel_block_tables(name, layer_index=layer_index), ids
            )
            slots = batch.slot_mapping(name, layer_index=layer_index)
            np.testing.assert_array_equal(slots, batch.slot_mapping(layer))


@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize(
    "case", [Case(windows), Case(windows, kernel_block_sizes=(2, 1)), Case(latent)], ids=str
)
def test_slots_index_the_view_of_their_layer(case: Case, rectangular: bool) -> None:
    cache, step = cases.empty(case), cases.fixed_step(case.plan, rectangular)
    batch = step.batch(cache, case.plan)
    for layer in cases.layers_of(case.plan):
        spec: Any = case.plan.layout.placement_of(layer).spec
        ratio = getattr(spec, "compress_ratio", 1)
        rows = np.random.default_rng(0).integers(1, 99, (TOKENS, spec.token_bytes), np.uint8)
        write = functools.partial(jaxkv.write_rows, mask=batch.positions % ratio == 0)
        shaped = jnp.asarray(rows.reshape(*step.token_shape, -1))
        view = np.asarray(view_of(write(cache, layer, batch, shaped), layer))
        slots = np.asarray(batch.slot_mapping(layer)).reshape(-1)
        assert (slots < 0).sum() == (slots == -1).sum() == TOKENS - sum(step.new)
        for _, index, position in step.tokens():
            got = view.reshape(-1, *view.shape[2:])[slots[index] // ratio]
            assert position % ratio or got.tobytes() == rows[index].tobytes()


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_view_is_the_buffer_itself_and_goes_back(case: Case) -> None:
    """Nothing but another shape and another dtype: XLA passes such bytes on, on a GPU."""
    cache = case.cache(40_000 if ON_GPU else BLOCKS)
    traced = jax.make_jaxpr(functools.partial(jaxkv.layer_view, layer="full.1"))(cache)
    assert {step.primitive.name for step in traced.eqns} == {"reshape", "bitcast_convert_type"}

    def touch(cache):
        view = jaxkv.layer_view(cache, "full.1")
        return jaxkv.with_layer_view(cache, "full.1", view.at[1, 0].set(1.0))

    compiled = jax.jit(touch, donate_argnums=0).lower(cache).compile()
    if ON_GPU:  # XLA's CPU backend copies, which `layer_view` says
        assert compiled.memory_analysis().temp_size_in_bytes < 100_000
    where = pointers(cache)
    cache = compiled(cache)
    assert pointers(cache) == where
    view = np.asarray(view_of(cache, "full.1")).astype(np.float32)
    assert view[1, 0].all() and view.sum() == view[1, 0].size


ONES = jnp.ones((26, 4, 2, 6), jnp.bfloat16)


@pytest.mark.parametrize(
    ("case", "call", "error", "message"),
    [
        (Case(windows), lambda c: describe_layer(c, "x"), ValueError, "layer='x' has no cache"),
        (Case(windows), lambda c: describe_bytes(c, "x"), ValueError, "layer='x' has no cache"),
        (Case(windows), lambda c: jaxkv.layer_view(c, "x"), ValueError, "layer='x' has no cache"),
        (Case(hybrid), lambda c: jaxkv.layer_view(c, "state.0"), TypeError, "or read_state"),
        (Case(hybrid), lambda c: jaxkv.layer_view(c, "kv.0"), ValueError,
         "layer='kv.0' has 96 of 120 bytes of each page, so its blocks are not contiguous"),
        (Case(windows, "HND", None, (2, 2)),
         lambda c: describe_layer(c, "full.0", ids="manager"), ValueError,
         "its tiles are of 2: use that as kernel_block_size, or byte_view"),
        (Case(windows), lambda c: jaxkv.with_layer_view(c, "full.0", ONES.astype(jnp.float32)),
         ValueError, r"view is float32\[26, 4, 2, 6\]; layer 'full.0' wants bfloat16\[26, 4, 2, 6"),
        (Case(windows), lambda c: jaxkv.with_layer_view(c, "full.0", ONES[:13]), ValueError,
         r"view is bfloat16\[13, 4, 2, 6\]; layer 'full.0' wants"),
    ],
)  # fmt: skip
def test_views_that_do_not_exist_are_refused_by_name(case, call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(cases.empty(case))


def test_ids_that_int32_does_not_count_are_refused_and_do_not_wrap() -> None:
    spec = cases.attention(2**10, num_kv_heads=1, head_size=1, dtype="fp8")
    plan = cases.planned({f"layer.{i}": spec for i in range(64)}, 2**20)
    make = functools.partial(jaxkv.make_cache, plan, max_requests=REQUESTS, kernel_block_sizes=[2])
    layouts = [jax.eval_shape(functools.partial(make, stacked=s)).layout for s in (True, False)]
    batch = cases.fixed_step(windows()).batch(cases.empty(Case(windows)), windows())
    stacked, apart = (dataclasses.replace(batch, layout=layout) for layout in layouts)
    for name, fitting, end in (
        ("slot_mapping", 1, "68,719,476,736 slots"),
        ("kernel_block_tables", 3, "34,359,738,368 kernel blocks"),
    ):
        getattr(stacked, name)(f"layer.{fitting - 1}")
        getattr(apart, name)("layer.63")
        with pytest.raises(
            ValueError, match="is more than int32 counts; make the cache with stacked"
        ):
            getattr(stacked, name)(f"layer.{fitting}")
        for layer_index in (jnp.int32(0), 63):
            with pytest.raises(ValueError, match=rf"'layer\.63' ends after {end} of"):
                getattr(stacked, name)("layer.0", layer_index=layer_index)
    cache = jax.eval_shape(functools.partial(make, stacked=True))
    with pytest.raises(ValueError, match=r"'layer\.63' ends after 34,359,738,368 kernel bl"):
        jaxkv.attention.block_mask_indices(
            cache, "layer.0", stacked, q_block_tokens=1, layer_index=jnp.int32(0)
        )
