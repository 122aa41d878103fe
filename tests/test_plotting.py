"""Pictures show what they are given, their texts can be read, and reprs are small."""

import dataclasses
import functools
import html.parser
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import hypothesis.strategies as st
import jax
import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.figure import Figure
from matplotlib.text import Text

import jaxkv
from jaxkv import plotting
from jaxkv._src.block_tables import append_block_ids, pack_entries
from jaxkv._src.blocks import BlockPool, BlockUse
from jaxkv._src.hf_config import encoder_len
from jaxkv._src.internal.html import GROUP_COLOURS, group_colour, html_table, text_colour
from jaxkv._src.internal.text import describe_unused, readable, shown
from jaxkv._src.layout import ORDERS, PhysicalOrder, row_format
from jaxkv._src.plotting import Holder
from jaxkv._src.plotting._spans import short_names
from jaxkv._src.plotting._style import PALE, group_style, spread, tick_cells
from tests.helpers import hybrid_layers, hybrid_plan, ids_of_group
from tests.layer_examples import STATES, TOKEN_SPECS

ROOT = pathlib.Path(__file__).parents[1]
MODELS = (
    "llama-3.1-8b",
    "gemma-3-27b",
    "gemma-4-e2b",
    "qwen3-next-80b-a3b",
    "deepseek-v4-flash",
    "kimi-linear-48b-a3b",
    "whisper-large-v3",
)


def plan_model(name: str, memory_bytes: int = 40 * 2**30, **options) -> jaxkv.Plan:
    config = jaxkv.load_config(name)
    limits = jaxkv.Limits(max_encoder_tokens=encoder_len(config))
    options = {
        "max_model_len": jaxkv.hf_config.model_len(config),
        "fit_max_model_len": True,
    } | options
    return jaxkv.plan_cache(
        jaxkv.layers_from_config(config), memory_bytes, limits=limits, **options
    )


PLANS = {name: plan_model(name) for name in MODELS}
SMALL = hybrid_plan()


def new_axes():
    return Figure(figsize=(9, 5), layout="constrained").subplots()


def title_of(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def serve(plan: jaxkv.Plan, steps: int = 40, seed: int = 0):
    """Random traffic: what was held at every step, as snapshots and as counts; preemptions."""
    rng = np.random.default_rng(seed)
    manager = jaxkv.BlockManager(plan, max_requests=6)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=6, max_tokens=48)
    lengths: dict[int, int] = {}
    snapshots, held, preempted = [], [], []
    for step in range(steps):
        if len(lengths) < 6 and rng.random() < 0.5:
            manager.start(step)
            lengths[step] = int(rng.integers(4, plan.max_model_len + 1))
        work = {
            name: min(int(rng.integers(1, 9)), total - manager.num_computed_tokens(name))
            for name, total in lengths.items()
        }
        while work:
            try:
                manager.step(shape, work)
                break
            except jaxkv.OutOfBlocksError:
                preempted.append(step)
                name, _ = work.popitem()
                manager.finish(name)
                del lengths[name]
        for name in [n for n in lengths if manager.num_computed_tokens(n) == lengths[n]]:
            manager.finish(name)
            del lengths[name]
        snapshots.append(plotting.snapshot_blocks(manager))
        held.append(manager.held_blocks())
    return snapshots, held, preempted


def filled_cache(
    max_requests: int = 6, rows: int = 3, steps: int = 4, plan: jaxkv.Plan = SMALL, **options
):
    """A manager, a cache and the batch of the last of a few steps."""
    manager = jaxkv.BlockManager(plan, max_requests=max_requests)
    cache = jaxkv.make_cache(plan, max_requests=max_requests, **options)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=max_requests, max_tokens=24, batch_size=6)
    for request in range(rows):
        manager.start(request, encoder_tokens=request * plan.limits.max_encoder_tokens // 2)
    for step in range(1, steps + 1):
        work = {request: request + step for request in range(rows)}
        cache, batch = jax.jit(jaxkv.apply_step)(cache, manager.step(shape, work))
    return manager, cache, batch


@functools.cache
def shared_cache():
    return filled_cache()


def figures() -> dict[str, Callable[[], Figure]]:
    """Pictures by name, drawn when they are asked for."""
    spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)
    padded = jaxkv.MLASpec(block_size=64, head_size=576, page_bytes_padded=80_000)
    hybrid = PLANS["qwen3-next-80b-a3b"]
    state, attention = hybrid.groups[0].specs[0], hybrid.groups[3].specs[0]

    def occupancy() -> Figure:
        _, held, preempted = serve(SMALL)
        return plotting.plot_occupancy(SMALL, held, preemptions=preempted)

    def tables() -> Figure:
        _, cache, batch = shared_cache()
        return plotting.plot_block_tables(cache, batch=batch)

    drawn = {
        "pool": lambda: plotting.plot_pool_over_time(SMALL, serve(SMALL)[0]),
        "occupancy": occupancy,
        "tables": tables,
        "lengths": lambda: plotting.plot_length_against_requests(PLANS),
        "one length": lambda: plotting.plot_length_against_requests(SMALL),
        "page": lambda: plotting.plot_page(spec, kernel_block_size=4, block_id=3),
        "padded page": lambda: plotting.plot_page(padded),
        "state": lambda: plotting.plot_page(state),
        "long page": lambda: plotting.plot_page(attention),
        "many kernel blocks": lambda: plotting.plot_page(attention, kernel_block_size=4),
        "orders": plotting.plot_orders,
        "tiles": lambda: plotting.plot_order(PhysicalOrder("LBHNC", tile_tokens=2)),
    }
    for name, plan in PLANS.items():
        drawn[f"layout {name}"] = functools.partial(plotting.plot_layout, plan.layout)
        drawn[f"memory {name}"] = functools.partial(plotting.plot_memory, plan)
        drawn[f"short {name}"] = functools.partial(plotting.plot_memory, plan, 100)
    return drawn


FIGURES = figures()


# Every text can be read.


def visible_texts(figure: Figure) -> list[Text]:
    """Titles, labels, ticks, annotations and legends that show something."""
    return [
        text
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text.get_window_extent().width > 0
    ]


def hidden_ticks(figure: Figure) -> set[int]:
    """Ticks beyond the limits of their axis exist and are not drawn."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-6 * (high - low)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - slack <= tick.get_loc() <= high + slack:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


@pytest.mark.parametrize("name", FIGURES)
def test_texts_lie_within_the_figure_and_overlap_nowhere(name: str) -> None:
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    hidden = hidden_ticks(figure)
    texts = [text for text in visible_texts(figure) if id(text) not in hidden]
    assert texts
    # A little smaller, because letters seldom fill their box; without arrows.
    boxes = np.array([Text.get_window_extent(text).padded(-1.5).extents for text in texts])
    low, high = boxes[:, :2], boxes[:, 2:]
    page = figure.bbox.padded(2)
    for text, is_within in zip(texts, (low >= page.min) & (high <= page.max), strict=True):
        assert is_within.all(), text.get_text()
    overlap = ((low[:, None] <= high) & (low <= high[:, None])).all(axis=-1)
    for one, other in np.argwhere(np.triu(overlap, 1)):
        pytest.fail(f"{texts[one].get_text()!r} overlaps {texts[other].get_text()!r}")


def test_figures_show_themselves_without_pyplot_and_change_no_setting() -> None:
    code = """if True:
        import sys, matplotlib
        def settings():  # to ask for the backend is to choose one
            kept = matplotlib.rcParams
            return {key: kept[key] for key in kept if key != "backend"}
        before = settings()
        from jaxkv import FullAttentionSpec, plotting
        spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
        assert plotting.plot_page(spec)._repr_png_().startswith(b"\\x89PNG")
        assert settings() == before
        print("matplotlib.pyplot" in sys.modules, "jax" in sys.modules)
    """
    done = run(code)
    assert done.stdout.split() == ["False", "False"], done.stderr


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_without_matplotlib_the_error_names_the_extra() -> None:
    done = run("""if True:
        import sys
        sys.modules["matplotlib"] = None
        from jaxkv import plotting
        plotting.plot_order("NHD")
    """)
    assert 'ImportError: jaxkv.plotting draws with matplotlib: pip install "jaxkv[plot]"' in (
        done.stderr
    )


def grey(colour: str) -> float:
    red, green, blue = matplotlib.colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_colours_of_neighbouring_groups_differ_in_print_and_text_on_them_does() -> None:
    greys = [grey(colour) for colour in GROUP_COLOURS]
    assert len(set(GROUP_COLOURS)) == 8
    assert all(abs(a - b) > 0.12 for a, b in itertools.pairwise(greys[:6]))
    for colour, shade in zip(GROUP_COLOURS, greys, strict=True):
        assert abs(grey(text_colour(colour)) - shade) > 0.4


# A picture shows what it was given.


@given(
    st.sampled_from(MODELS),
    st.integers(3 * 2**30, 300 * 2**30),
    st.floats(0.001, 1),
)
@settings(max_examples=15)
def test_the_parts_of_the_memory_bar_are_all_of_the_memory(name, memory, share) -> None:
    plan = plan_model(name, memory)
    length = max(1, int(share * plan.max_model_len))
    check_memory(plan, length)


def check_memory(plan: jaxkv.Plan, length: int, worker: int = 0) -> None:
    """Compares the lines of the bar, and what they say, with the figures of the plan."""

    def blocks(count: int) -> str:
        return f"{count:,} block{'s' * (count != 1)}"

    memory, block = plan.memory_bytes[worker], plan.bytes_per_block[worker]
    fit, steady = plan.requests_that_fit(length), plan.steady_blocks_per_group(length)
    rest = plan.usable_blocks - fit * sum(steady)
    prefill = min(plan.admission_blocks(length) - sum(steady), plan.usable_blocks)
    rows = []  # name, bytes, those of them that carry data, text
    for i, (held, group) in enumerate(zip(steady, plan.layouts[worker].groups, strict=True)):
        data = fit * held * sum(spec.data_bytes for spec in group.specs)
        each = f", {fit:,} x " if fit > 1 else ", "
        rows.append((f"group {i}: {group}", fit * held * block, data, each + blocks(held)))
    for name, count in {
        "more while one prefills": prefill,
        "free, too few for one more": rest - prefill,
        "null block and reserved": plan.reserved_blocks,
    }.items():
        rows.append((name, count * block, count * block, f", {blocks(count)}"))
    over = max(memory - plan.num_blocks * block, 0)
    rows = [row for row in [*rows, ("less than a block", over, over, "")] if row[1]]
    ax = plotting.plot_memory(plan, length, worker=worker).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [row[0] for row in rows]
    size = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}[ax.get_xlabel().split()[-1]]
    bars: dict[bool, dict[int, tuple[float, float]]] = {False: {}, True: {}}
    for bar in ax.patches:
        line = round(bar.get_y() + bar.get_height() / 2)
        bars[bool(bar.get_hatch())][line] = bar.get_x() * size, bar.get_width() * size
    start = 0
    for line, (_, num_bytes, used, text) in enumerate(rows):
        assert bars[False][line] == pytest.approx((start, used), abs=2)
        if num_bytes > used:
            assert bars[True].pop(line) == pytest.approx((start + used, num_bytes - used), abs=2)
            text += f", {100 * (num_bytes - used) / num_bytes:.0f} % unused"
        assert (ax.texts[line].get_text(), ax.texts[line].xy[1]) == (
            readable(num_bytes) + text,
            line,
        )
        start += num_bytes
    assert start == max(memory, plan.num_blocks * block) and not bars[True]
    assert ax.get_xlim() == pytest.approx((0, start / size))
    assert ax.lines[0].get_xdata()[0] == pytest.approx(memory / size)
    for bar, (name, *_) in zip((b for b in ax.patches if not b.get_hatch()), rows, strict=True):
        group = re.match(r"group (\d+)", name)
        assert colour_of(bar) == (group_colour(int(group[1])) if group else PALE.upper())
    assert title_of(ax.figure) == (
        f"{fit:,} request{'s' * (fit != 1)} of {length:,} tokens at once in {readable(memory)}: "
        f"{plan.num_blocks:,} blocks of {block:,} bytes"
    )


def test_the_memory_of_each_worker_is_drawn() -> None:
    """Of workers with blocks of other sizes, and one without layers of some groups."""
    layers = hybrid_layers()
    first = {name: layers.pop(name) for name in ("full.0", "sliding.0", "chunked.0")}
    plan = jaxkv.plan_cache([first, layers], [2**19, 2**20 + 99], max_model_len=24)
    assert len(set(plan.bytes_per_block)) == 2
    for worker, length in itertools.product(range(2), (1, 24)):
        check_memory(plan, length, worker)
        assert plotting.plot_layout(plan.layouts[worker]).axes
    beyond = {"num_blocks_override": plan.num_blocks * 8, "override_beyond_memory": True}
    check_memory(jaxkv.plan_cache([first, layers], [2**20] * 2, max_model_len=24, **beyond), 24)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_drawn_on_its_own_bytes(name: str) -> None:
    layout = PLANS[name].layout
    ax = plotting.plot_layout(layout, max_tensors=len(layout.tensors)).axes[0]
    unit = ax.get_xlabel().split()[0]
    size = {"MiB": 2**20, "KiB": 2**10, "bytes": 1}[unit]
    drawn = {
        (round(bar.get_x() * size), round(bar.get_width() * size), round(bar.get_y() + 0.4))
        for bar in ax.patches
    }
    starts = np.cumsum([0, *(tensor.page_bytes for tensor in layout.tensors)])
    wanted = {(0, layout.bytes_per_block, row) for row in range(len(layout.groups))}
    owners = {}
    for group in layout.groups:
        for layer in group.layers:
            place = layout.place_of(layer)
            start = int(starts[place.tensor]) + place.offset_bytes
            wanted |= {(start, place.spec.data_bytes, place.group)}
            wanted |= {(start, place.spec.page_bytes, place.group)}  # the same, or its padding
            owners[place.group, round(start + place.spec.data_bytes / 2)] = layer
    assert drawn == wanted
    for text in ax.texts:
        layer = owners[text.get_position()[1], round(text.get_position()[0] * size)]
        assert text.get_text() and {*text.get_text().split(".")} <= {*layer.split(".")}
    unused = [layout.bytes_per_block - sum(s.data_bytes for s in g.specs) for g in layout.groups]
    assert title_of(ax.figure).endswith(f"; {describe_unused(unused)}")


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_a_layout_counts_the_layers_that_read_its_group(name: str) -> None:
    layers = jaxkv.layers_from_config(jaxkv.load_config(name))
    shared = [spec.layer for spec in layers.values() if isinstance(spec, jaxkv.SharedKVSpec)]
    labels = plotting.plot_layout(PLANS[name].layout).axes[0].get_yticklabels()
    for i, (label, group) in enumerate(zip(labels, PLANS[name].groups, strict=True)):
        readers = sum(owner in group.layers for owner in shared)
        more = [f"+ {readers} layers that share"] if readers else []
        assert label.get_text().splitlines() == [f"group {i}: {group}", *more]


@pytest.mark.parametrize(("count", "options"), [(12, {}), (1, {"max_tensors": 1})])
def test_of_many_tensors_the_first_are_drawn_and_counted(count: int, options) -> None:
    layout = PLANS["llama-3.1-8b"].layout
    (ax,) = plotting.plot_layout(layout, **options).axes
    assert f"32 tensors (first {count} drawn)" in title_of(ax.figure)
    edges = [line.get_xdata()[0] for line in ax.lines]
    assert len(edges) == count + 1 and ax.get_xlim() == (0, edges[-1])
    drawn = sorted(bar.get_x() for bar in ax.patches if not bar.get_hatch())
    assert drawn == edges[:-1]  # a layer in each


@given(
    st.sampled_from(ORDERS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
@settings(max_examples=15)
def test_orders_count_extents_as_a_transposed_array_does(
    order, layers, blocks, heads, tiles, tile_tokens, data
) -> None:
    """The reference lays addresses out by NumPy, tiles as blocks of their own."""
    block_id = data.draw(st.integers(0, blocks - 1))
    sizes = {"L": layers, "B": blocks * tiles, "H": heads, "N": tile_tokens}
    letters = order.replace("C", "")
    addresses = np.arange(np.prod(list(sizes.values())))
    addresses = addresses.reshape([sizes[letter] for letter in letters])
    addresses = addresses.transpose([letters.index(letter) for letter in "LBHN"])
    own = addresses[:, block_id * tiles : (block_id + 1) * tiles]

    def extents(found: np.ndarray) -> int:
        return 1 + int((np.diff(np.sort(found.reshape(-1))) > 1).sum())

    figure = plotting.plot_order(
        PhysicalOrder(order, tile_tokens=tile_tokens if tiles > 1 else None),
        num_layers=layers,
        num_blocks=blocks,
        num_heads=heads,
        block_size=tile_tokens * tiles,
        block_id=block_id,
    )
    one, every = extents(own[0]), extents(own)
    assert f"layer 0 is {one} extent" in title_of(figure)
    assert f"all layers {every} extent" in title_of(figure)
    marks: dict[str, set[int]] = {"#000000": set(), "#999999": set()}
    texts = {text.get_position(): int(text.get_text()) for text in figure.axes[0].texts}
    owners = dict(zip("LBHN", np.indices(addresses.shape).reshape(4, -1), strict=True))
    owners["B"], tile = np.divmod(owners["B"], tiles)
    owners["N"] = owners["N"] + tile * tile_tokens
    at = np.argsort(addresses.reshape(-1))
    cells = np.stack([owners[letter][at] for letter in letters])  # [axis, address]
    for bar in figure.axes[0].patches:
        start, stop = round(bar.get_x() - 0.08), round(bar.get_x() + bar.get_width() + 0.08)
        line = int(bar.get_y())
        if line == len(letters):
            marks[matplotlib.colors.to_hex(bar.get_facecolor())] |= {*range(start, stop)}
        else:
            assert {*cells[line, start:stop]} == {texts[(start + stop) / 2, line + 0.5]}
    assert marks == {"#000000": {*own[0].flat}, "#999999": {*own[1:].flat}}


def share(plan: jaxkv.Plan, steps: int, seed: int) -> list[dict[int, Holder]]:
    """Draws holders who join and leave, and are followed by others at once or later."""
    rng = np.random.default_rng(seed)
    snapshots: list[dict[int, Holder]] = [{}]
    for _ in range(steps):
        held = {block: holder for block, holder in snapshots[-1].items() if rng.random() < 0.9}
        for block in rng.integers(0, plan.num_blocks, 8).tolist():
            requests = sorted({*rng.integers(0, 3, 2).tolist()})
            held[block] = Holder(int(rng.integers(2)), tuple(requests))
        snapshots.append(held)
    return snapshots


@pytest.mark.parametrize("is_shared", [False, True])
@given(seed=st.integers(0, 20))
@settings(max_examples=3)
def test_the_pool_map_fills_the_cells_that_are_held(is_shared: bool, seed: int) -> None:
    snapshots = share(SMALL, 25, seed) if is_shared else serve(SMALL, steps=25, seed=seed)[0]
    ax = plotting.plot_pool_over_time(SMALL, snapshots).axes[0]
    groups = {f"group {i}: {group}": i for i, group in enumerate(SMALL.groups)}
    *filled, borders = ax.collections
    drawn = {
        (int(step), int(block)): groups[collection.get_label()]
        for collection in filled
        for box in (path.get_extents() for path in collection.get_paths())
        for step, block in itertools.product(np.arange(box.x0, box.x1), np.arange(box.y0, box.y1))
    }
    held = {
        (step, block_id): holder
        for step, snapshot in enumerate(snapshots)
        for block_id, holder in snapshot.items()
    }
    assert drawn == {cell: holder.group for cell, holder in held.items()}
    for collection in filled:
        assert colour_of(collection) == group_colour(groups[collection.get_label()])
    lines = {tuple(map(tuple, segment.astype(int).tolist())) for segment in borders.get_segments()}
    wanted = set()
    for step, block in itertools.product(range(len(snapshots) + 1), range(SMALL.num_blocks + 1)):
        holder = held.get((step, block))
        if held.get((step, block - 1)) != holder:
            wanted.add(((step, block), (step + 1, block)))
        if held.get((step - 1, block)) != holder:
            wanted.add(((step, block), (step, block + 1)))
    assert lines == wanted
    for text in ax.texts:
        x, y = text.get_position()
        holder = held[int(x), int(y)]
        assert text.get_text() == ", ".join(map(str, holder.requests))
        assert colour_of(text.get_bbox_patch()) == group_colour(holder.group)
    assert [*ax.get_yticks()] == [int(text.get_text()) + 0.5 for text in ax.get_yticklabels()]
    assert title_of(
        ax.figure
    ) == "{:,} blocks handed out, {:,} of them from one group to another".format(
        *hand_overs(snapshots)
    )


def hand_overs(snapshots) -> tuple[int, int]:
    """By the definition: a block is handed out when none of its holders had it before."""
    handed = changed = 0
    last: dict[int, int] = {}
    before: dict[int, Holder] = {}
    for snapshot in snapshots:
        for block_id, holder in snapshot.items():
            group, requests = before.get(block_id, Holder(holder.group, ()))
            if group != holder.group or not {*requests} & {*holder.requests}:
                handed += 1
                changed += last.get(block_id, holder.group) != holder.group
            last[block_id] = holder.group
        before = snapshot
    return handed, changed


def test_a_name_stands_in_the_largest_patch_of_its_holder() -> None:
    holder = Holder(1, ("name",))
    steps = [{1: holder}] * 4 + [{}] + [dict.fromkeys(range(9, 19), holder)] * 15
    (text,) = plotting.plot_pool_over_time(SMALL, steps).axes[0].texts
    assert (text.get_text(), text.get_position()) == ("name", (12.5, 14))


def test_a_name_that_does_not_fit_its_largest_patch_stands_nowhere() -> None:
    blocks_of = {
        "too flat": range(1, 3),
        "fits": range(9, 49),
        "a name that is too long": range(49, 349),
    }
    steps = [{b: Holder(0, (name,)) for name, found in blocks_of.items() for b in found}] * 15
    steps[1:] = [{b: h for b, h in step.items() if b < 49} for step in steps[1:]]
    texts = plotting.plot_pool_over_time(hybrid_plan(400), steps).axes[0].texts
    assert [text.get_text() for text in texts] == ["fits"]


def test_a_shared_block_belongs_to_all_who_hold_it_and_is_not_handed_out_again() -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, sink_tokens=4)
    plan = jaxkv.plan_cache({"layer": spec}, 2**20, max_model_len=16, num_blocks_override=8)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    manager.start("a")
    manager.step(jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=4), {"a": 4})
    snapshots = [plotting.snapshot_blocks(manager)]
    ((shared,),) = manager.block_ids("a")
    manager.fork("a", ["b"])
    snapshots.append(plotting.snapshot_blocks(manager))
    (sink,) = manager.sink_block_ids[0]
    assert snapshots[-1] == {shared: Holder(0, ("a", "b")), sink: Holder(0, ())}
    assert title_of(plotting.plot_pool_over_time(plan, snapshots)).startswith("2 blocks handed")


def test_occupancy_stacks_what_each_group_holds() -> None:
    _, held, preempted = serve(SMALL)
    assert preempted
    figure = plotting.plot_occupancy(SMALL, held, preemptions=preempted)
    check_stack(figure, [f"group {i}: {g}" for i, g in enumerate(SMALL.groups)], held, preempted)
    peak = max(map(sum, held)) / SMALL.usable_blocks
    assert title_of(figure).startswith(
        f"Up to {100 * peak:.0f} % of {SMALL.usable_blocks:,} usable"
    )
    assert {*figure.axes[0].lines[0].get_ydata()} == {SMALL.usable_blocks}


def check_stack(figure: Figure, names, steps, preempted) -> None:
    """Compares what is stacked, from the bottom, and the steps that are marked."""
    (ax,) = figure.axes
    bottom = np.zeros(len(steps))
    for name, patch, counts in zip(names, ax.patches, zip(*steps, strict=True), strict=True):
        drawn = patch.get_data()
        assert patch.get_label() == name and drawn.edges.tolist() == [*range(len(steps) + 1)]
        np.testing.assert_array_equal(drawn.baseline, bottom)
        bottom = bottom + counts
        np.testing.assert_array_equal(drawn.values, bottom)
    assert len({colour_of(patch) for patch in ax.patches}) == len(ax.patches)
    assert max(bottom) < ax.get_ylim()[1] and ax.get_xlim() == (0, len(steps))
    assert [*ax.get_xticks()] == [int(text.get_text()) + 0.5 for text in ax.get_xticklabels()]
    assert ax.lines[-1].get_xdata().tolist() == preempted
    assert ax.lines[-1].get_label() == f"{len(preempted)} preemption{'s' * (len(preempted) != 1)}"


def test_block_use_stacks_what_blocks_are_used_for_and_counts_those_that_several_hold() -> None:
    uses = [BlockUse(own=3, shared=0, warm=0, cold=5), BlockUse(own=1, shared=1, warm=2, cold=4)]
    figure = plotting.plot_block_use(uses, preemptions=[1])
    assert title_of(figure).startswith("Up to 50 % of the blocks")
    names = ["one holder", "shared by several", "warm: free, and kept", "cold: free"]
    check_stack(figure, names, uses, [1])


def colour_of(artist) -> str:
    return matplotlib.colors.to_hex(np.atleast_2d(artist.get_facecolor())[0]).upper()


def extent(bar) -> tuple[float, float]:
    return bar.get_x(), bar.get_width()


PAGES = {
    "heads": TOKEN_SPECS,
    "rows of several tokens": st.builds(
        jaxkv.MLASpec,
        block_size=st.just(8),
        head_size=st.just(16),
        compress_ratio=st.sampled_from([2, 4]),
    ),
    "states": STATES
    | st.just(jaxkv.StateSpec(block_size=4, shapes=((8,), (8,)), dtypes=("f32", "f32"))),
}


def check_names(spec: jaxkv.specs.LayerSpec, ax, starts: list[float]) -> None:
    """Compares what stands in the parts of a row, where it fits, and in the padding."""
    row = row_format(spec)
    names = [f"{name} {head}" for head in range(row.heads) for name in "KV"]
    names = [f"{row.width} x {row.dtype}"] if row.key_elements is None else names
    for text in ax.texts:
        part = names[int(np.searchsorted(starts, text.get_position()[0])) - 1]
        padding = f"{spec.page_bytes - spec.data_bytes:,} bytes of padding"
        assert text.get_text() in (part, padding)
    heads = f"(K and V of {row.heads} heads)"
    assert ax.get_title(loc="left").endswith(heads if row.heads > 1 else " bytes")


@pytest.mark.parametrize("kind", PAGES)
@given(st.data())
@settings(max_examples=12)
def test_a_page_is_divided_and_numbered_by_the_definition(kind, data) -> None:
    """A slot counts the tokens of the blocks before it, and a kernel block those of its size."""
    spec, block_id = data.draw(PAGES[kind]), data.draw(st.integers(0, 9))
    times, padding = data.draw(st.sampled_from([1, 4, 30])), data.draw(st.sampled_from([0, 64]))
    padded_bytes = spec.page_bytes * times + padding
    spec = dataclasses.replace(
        spec, block_size=spec.block_size * times, page_bytes_padded=padded_bytes
    )
    is_state = isinstance(spec, jaxkv.StateSpec)
    each = getattr(spec, "compress_ratio", 1)
    sizes = [n for n in range(each, spec.block_size + 1, each) if spec.block_size % n == 0]
    size = spec.block_size if is_state else data.draw(st.sampled_from(sizes))
    figure = plotting.plot_page(spec, block_id=block_id, kernel_block_size=size)
    (ax,) = figure.axes
    bars = [bar for bar in ax.patches if not bar.get_hatch()]
    unit = 2**10 if ax.get_xlabel().startswith("KiB") else 1
    starts, widths = ([unit * x for x in of] for of in zip(*map(extent, bars), strict=True))
    padded = [bar for bar in ax.patches if bar.get_hatch()]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(padded) == (spec.page_bytes > spec.data_bytes)
    assert starts == [0, *itertools.accumulate(widths[:-1])]
    if is_state:
        assert widths == list(spec.array_bytes)
        names = [f"{d}{list(s)}" for d, s in zip(spec.dtypes, spec.shapes, strict=True)]
        assert labels == names + ["padding"] * len(padded)
        assert all(unit * bar.get_x() == spec.data_bytes for bar in padded)
        sizes = [*spec.array_bytes, *(spec.page_bytes - spec.data_bytes for _ in padded)]
        assert [text.get_text() for text in ax.texts] == [f"{size:,} bytes" for size in sizes]
        assert title_of(figure).endswith(f"one state of {spec.data_bytes:,} bytes")
        return
    rows = spec.block_size // each
    if isinstance(spec, jaxkv.FullAttentionSpec):
        pair = np.array([spec.head_size, spec.head_size_v or spec.head_size])
        item = spec.token_bytes // (spec.num_kv_heads * pair.sum())
        assert widths == (pair * item).tolist() * spec.num_kv_heads
    else:
        assert widths == [spec.data_bytes // rows]
    check_names(spec, ax, starts)
    lines = [line[0][1] for line in ax.collections[-1].get_segments()] if size < rows * each else []
    assert lines == [*range(size // each, rows, size // each)]  # between kernel blocks
    picked = [int(tick) for tick in ax.get_yticks()]
    slots = [block_id * spec.block_size + row * each for row in picked]
    assert labels == [f"slot {slot:,}" for slot in slots] and picked[0] == 0
    assert len(picked) == rows or rows > 16
    right, parts = ax.child_axes[0], spec.block_size // size
    name = "kernel block" if parts > 1 else "block"
    numbers = [(block_id * rows + int(y)) // (size // each) for y in right.get_yticks()]
    assert [text.get_text() for text in right.get_yticklabels()] == [
        f"{name} {n:,}" for n in numbers
    ]
    stored = f"{rows:,} {'token' if each == 1 else f'row of {each} tokens'}{'s' * (rows != 1)}"
    assert f": {stored} x {spec.data_bytes // rows:,} bytes = {spec.data_bytes:,} bytes" in (
        title_of(figure)
    )


def test_tables_show_ids_null_entries_and_the_errors_that_the_device_found() -> None:
    manager, cache, _ = shared_cache()
    new = [jaxkv.TableEntry(4, [[0, 7], [], [], [], []]), jaxkv.TableEntry(5, [[99]] + [[]] * 4)]
    entries = pack_entries(new, num_groups=5, max_requests=6, max_block_ids=3, max_rows=2)
    cache = append_block_ids(cache, entries)
    ax = plotting.plot_block_tables(cache).axes[0]
    shown = {int(text.get_text()) for text in ax.texts}
    held = {i for r in manager.requests for ids in manager.block_ids(r) for i in ids if i}
    assert shown >= held | {7}
    null = [bar for bar in ax.patches if bar.get_hatch()]
    assert {(bar.get_x(), bar.get_y()) for bar in null} == {(0, 4), (0, 5)}
    used = np.asarray(cache.row_lengths).sum()
    assert f"{used} block ids in 5 of 6 rows" in title_of(ax.figure)
    assert "a block id outside the pool" in title_of(ax.figure)


def plan_of_states() -> jaxkv.Plan:
    """With states, which a step may read from an earlier column, and keys of an encoder."""
    sizes = {"block_size": 4, "shapes": ((2, 16),), "dtypes": ("f32",)}
    layers = {
        "all": jaxkv.StateSpec(**sizes, cache_mode="all"),
        "align": jaxkv.StateSpec(**sizes, cache_mode="align", speculative_blocks=1),
        "cross": jaxkv.CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=4),
    }
    limits = jaxkv.Limits(max_in_flight_tokens=8, max_encoder_tokens=9)
    return jaxkv.plan_cache(layers, 2**30, max_model_len=24, num_blocks_override=60, limits=limits)


def plan_of_a_rank() -> jaxkv.Plan:
    layers = {"full": hybrid_layers()["full.0"]}
    return jaxkv.plan_cache(
        layers, 2**30, max_model_len=24, num_blocks_override=40, context_parallel=2
    )


def check_columns(ax, cache: jaxkv.KVCache, rows: list[int] | None) -> None:
    """Two columns more than the rows use are drawn, if there are so many."""
    lengths = np.asarray(cache.row_lengths)
    assert title_of(ax.figure).startswith(f"{lengths.sum():,} block ids in 3 of 6 rows")
    used = lengths[slice(None) if rows is None else rows].max(axis=0)
    widths, labels = cache.layout.row_blocks, list[str]()
    drawn = [min(width, most + 2) for width, most in zip(widths, used.tolist(), strict=True)]
    groups = zip(drawn, widths, cache.layout.growths, strict=True)
    for i, (count, width, growth) in enumerate(groups):
        shown = f"{width} per row" if count == width else f"{count} of {width} shown"
        labels.append(f"group {i}\n{growth.kind} @ {growth.block_size}\n{shown}")
    assert [bar.get_width() for bar in ax.patches if bar.get_alpha() == 0.5] == drawn
    assert [text.get_text() for text in ax.get_xticklabels()] == labels
    ids = {text.get_position(): text for text in ax.texts}.values()
    for mesh in ax.collections:
        assert mesh.get_clim() == (0, cache.num_blocks - 1)
        for text in ids:  # can be read on the colour of its id
            colour = mesh.cmap(mesh.norm(int(text.get_text())))
            assert abs(grey(colour) - grey(text.get_color())) > 0.35


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (SMALL, {}),
        (plan_of_states(), {}),
        (plan_of_states(), {"steps": 2}),  # of a state in the first column
        (plan_of_a_rank(), {"rank": 1}),
    ],
    ids=["windows", "states", "second states", "a rank"],
)
def test_frames_are_around_the_columns_that_the_step_reads(plan, options) -> None:
    """In whatever rows are drawn, in whatever order, and one of them twice."""
    manager, cache, batch = filled_cache(plan=plan, **options)
    tables = jaxkv.testing.ReferenceTables(plan, max_requests=6)
    steps = zip(batch.num_computed_tokens, batch.seq_lens, batch.encoder_lens, strict=True)
    steps = dict(zip(np.asarray(batch.request_rows).tolist(), steps, strict=True))
    requests = {row: request for request, row in manager.requests.items()}
    for rows in (None, [5, 0], [2, 0, 1, 2]):
        ax = plotting.plot_block_tables(cache, batch=batch, rows=rows).axes[0]
        starts = [bar.get_x() for bar in ax.patches if bar.get_alpha() == 0.5]  # of the groups
        assert len(starts) == len(plan.groups)
        frames = [bar.get_bbox() for bar in ax.patches if not bar.get_fill()]
        found = [
            (round((box.y0 + box.y1) / 2 - 0.5), column)
            for box in frames
            for column in range(round(box.x0), round(box.x1))
        ]
        ids = {text.get_position(): int(text.get_text()) for text in ax.texts}
        wanted = set()
        for line, row in enumerate(rows or range(6)):
            if row not in requests:
                continue
            for group, start in enumerate(starts):
                read = tables.columns(group, *map(int, steps[row]))
                wanted |= {(line, start + column) for column in read if column is not None}
                held = manager.block_ids(requests[row])[group]
                shown = [ids.get((start + i + 0.5, line + 0.5)) for i in range(len(held))]
                assert [i for i, of in zip(shown, held, strict=True) if of] == [
                    i for i in held if i
                ]
        assert len(set(found)) == len(found) and set(found) == wanted
        check_columns(ax, cache, rows)
        labels = [label.get_text() for label in ax.get_yticklabels()]
        assert labels == [str(row) for row in rows or range(6)]


def test_of_many_rows_those_that_hold_blocks_are_drawn() -> None:
    """Blocks of whatever group, and of the rows as many as fit."""
    _, cache, _ = filled_cache(max_requests=100)
    figure = plotting.plot_block_tables(cache)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["0", "1", "2"]
    assert "3 of 100 rows, 3 drawn" in title_of(figure)
    later = range(60, 100)  # each of them holds blocks of one group alone
    new = [jaxkv.TableEntry(row, ids_of_group(5, row % 5, [1])) for row in later]
    entries = pack_entries(new, num_groups=5, max_requests=100, max_block_ids=40, max_rows=40)
    figure = plotting.plot_block_tables(append_block_ids(cache, entries))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [str(row) for row in [0, 1, 2, *later][:32]]
    assert "43 of 100 rows, 32 drawn" in title_of(figure)
    assert plotting.plot_block_tables(cache, rows=[99]).axes  # empty, and still a picture
    for max_requests, lines in ((32, 32), (33, 0)):  # none of which holds blocks
        cache = jaxkv.make_cache(SMALL, max_requests=max_requests)
        labels = plotting.plot_block_tables(cache).axes[0].get_yticklabels()
        assert [label.get_text() for label in labels] == [str(row) for row in range(lines)]
    for lines, step in ((32, 1), (33, 2)):  # of more, every second is named
        rows = [row % 33 for row in range(lines)]
        labels = plotting.plot_block_tables(cache, rows=rows).axes[0].get_yticklabels()
        assert [label.get_text() for label in labels] == [str(row) for row in rows[::step]]


@pytest.mark.parametrize("name", MODELS)
def test_a_curve_goes_through_what_the_plan_counts(name: str) -> None:
    plan, lengths = PLANS[name], [100, 64, 300]
    ax = plotting.plot_length_against_requests({name: plan}, lengths).axes[0]
    points = dict(zip(*ax.lines[0].get_data(), strict=True))
    assert points == {n: plan.requests_that_fit(n) for n in [*lengths, plan.max_model_len]}
    assert (
        ax.lines[0].get_drawstyle() == "steps-pre"
    )  # between two lengths, as many as of the longer


@pytest.mark.parametrize("longest", [1, 7, 8])
def test_plans_of_short_requests_have_curves(longest: int) -> None:
    spec = jaxkv.FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype="f32")
    plan = jaxkv.plan_cache({"layer": spec}, 2**20, max_model_len=longest)
    ax = plotting.plot_length_against_requests(plan).axes[0]
    points = dict(zip(*ax.lines[0].get_data(), strict=True))
    assert points == {n: plan.requests_that_fit(n) for n in range(1, longest + 1)}
    assert ax.get_xlim() == (1, max(longest, 2))


def test_lengths_are_told_in_units_from_one_of_each_on() -> None:
    ax = plotting.plot_length_against_requests(SMALL).axes[0]
    told = {1: "1", 1023: "1023", 1024: "1k", 2048: "2k", 2**20: "1M", 1536 * 2**10: "1.5M"}
    assert {tokens: ax.xaxis.get_major_formatter()(tokens) for tokens in told} == told


def test_each_of_several_curves_has_its_name_and_its_last_point() -> None:
    figure = plotting.plot_length_against_requests(PLANS)
    (ax,) = figure.axes
    curves = zip(PLANS.items(), ax.lines[::2], ax.lines[1::2], ax.texts, strict=True)
    for (name, plan), curve, end, text in curves:
        lengths, counts = (axis.tolist() for axis in curve.get_data())
        assert counts == [plan.requests_that_fit(length) for length in lengths]
        assert lengths[0] == 128 and lengths[-1] == plan.max_model_len
        assert all(b - a <= (2 ** (1 / 8) - 1) * a + 1 for a, b in itertools.pairwise(lengths))
        assert [*map(float, text.xy)] == [float(*axis) for axis in end.get_data()]
        assert text.xy == (lengths[-1], counts[-1])
        assert text.get_text() == f"{name}: {counts[-1]:,} x {lengths[-1]:,}"
        assert curve.get_color() == end.get_color()
    assert title_of(figure).endswith(" in 40.00 GiB")
    both = jaxkv.plan_cache([hybrid_layers()] * 2, [2**20, 2**21], max_model_len=24)
    assert title_of(plotting.plot_length_against_requests(both)).endswith(" in 3.00 MiB")
    figure = plotting.plot_length_against_requests({"a": both, "b": SMALL})
    assert title_of(figure).endswith("at once")


def test_given_axes_are_drawn_on_and_their_figure_returned() -> None:
    snapshots, held, _ = serve(SMALL, steps=5)
    _, cache, _ = shared_cache()
    for draw in (
        lambda ax: plotting.plot_layout(SMALL.layout, ax=ax),
        lambda ax: plotting.plot_memory(SMALL, ax=ax),
        lambda ax: plotting.plot_length_against_requests(SMALL, ax=ax),
        lambda ax: plotting.plot_pool_over_time(SMALL, snapshots, ax=ax),
        lambda ax: plotting.plot_occupancy(SMALL, held, ax=ax),
        lambda ax: plotting.plot_block_tables(cache, ax=ax),
        lambda ax: plotting.plot_page(SMALL.groups[0].specs[0], ax=ax),
        lambda ax: plotting.plot_page(SMALL.groups[3].specs[0], ax=ax),
        lambda ax: plotting.plot_order("HND", ax=ax),
    ):
        ax = new_axes()
        assert draw(ax) is ax.figure and ax.get_title(loc="left")


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plotting.plot_layout(SMALL), TypeError, "layout must be a PoolLayout, got Plan"),
        (lambda: plotting.plot_layout(SMALL.layout, max_tensors=0), ValueError, "max_tensors"),
        (lambda: plotting.plot_memory(SMALL.layout), TypeError, "plan must be a Plan"),
        (lambda: plotting.plot_memory(SMALL, 25), ValueError, "num_tokens=25; the plan admits 24"),
        (lambda: plotting.plot_memory(SMALL, 0), ValueError, "num_tokens must be at least 1"),
        (lambda: plotting.plot_memory(SMALL, worker=1), ValueError, "worker=1: the plan has 1"),
        (lambda: plotting.plot_length_against_requests({}), ValueError, "plans is empty"),
        (lambda: plotting.plot_length_against_requests([SMALL]), TypeError, "plans must be"),
        (lambda: plotting.plot_length_against_requests({"a": 1}), TypeError, r"plans\['a'\]"),
        (lambda: plotting.plot_length_against_requests(SMALL, [0]), ValueError, r"lengths\[0\]"),
        (
            lambda: plotting.plot_length_against_requests(dataclasses.replace(SMALL, num_blocks=2)),
            ValueError,
            "lengths: none of .* fits into any plan; give shorter ones",
        ),
        (lambda: plotting.plot_pool_over_time(SMALL, []), ValueError, "snapshots is empty"),
        (lambda: plotting.plot_pool_over_time(SMALL, [[1]]), TypeError, r"snapshots\[0\]"),
        (
            lambda: plotting.plot_pool_over_time(SMALL, [{40: Holder(0, ())}]),
            ValueError,
            "block 40 of group 0; the plan has 40 blocks",
        ),
        *(
            (
                functools.partial(plotting.plot_pool_over_time, SMALL, [{}, {block: holder}]),
                ValueError,
                rf"snapshots\[1\] has block {block} of group {holder.group}; the plan",
            )
            for block, holder in ((-1, Holder(0, ())), (1, Holder(5, ())), (1, Holder(-1, ())))
        ),
        (lambda: plotting.snapshot_blocks(SMALL), TypeError, "manager must be a BlockManager"),
        (lambda: plotting.plot_occupancy(SMALL, []), ValueError, "held_blocks has steps"),
        (lambda: plotting.plot_occupancy(SMALL, [(1, 2)]), ValueError, "the 5 groups"),
        *(
            (
                functools.partial(
                    lambda row: plotting.plot_block_tables(shared_cache()[1], rows=row), [0, row]
                ),
                ValueError,
                rf"rows: \[{row}\] are not in 0..5",
            )
            for row in (-1, 6)
        ),
        (lambda: plotting.plot_block_tables(SMALL), TypeError, "cache must be a KVCache"),
        (
            lambda: plotting.plot_block_tables(shared_cache()[1], batch=SMALL),
            TypeError,
            "batch must be a StepBatch",
        ),
        (
            lambda: plotting.plot_block_tables(
                jaxkv.make_cache(SMALL, max_requests=6, tables_only=True), batch=shared_cache()[2]
            ),
            ValueError,
            "batch belongs to another cache",
        ),
        (lambda: plotting.plot_page("full"), TypeError, "spec must be a LayerSpec"),
        (
            lambda: plotting.plot_page(SMALL.groups[0].specs[0], kernel_block_size=3),
            ValueError,
            "kernel_block_size=3 does not divide",
        ),
        (lambda: plotting.plot_page(SMALL.groups[0].specs[0], block_id=-1), ValueError, "block_id"),
        (lambda: plotting.plot_order("LBH"), ValueError, "order='LBH'; use one of"),
        (lambda: plotting.plot_order("NHD", block_id=3), ValueError, "block_id=3 is not one of"),
        (
            lambda: plotting.plot_block_use(None),
            TypeError,
            "uses must be a list, each entry what BlockManager.block_use was; got None",
        ),
        (lambda: plotting.plot_order("NHD", ax=3), TypeError, "ax must be matplotlib Axes or None"),
        (lambda: plotting.plot_block_use([]), ValueError, "uses has no steps"),
        (lambda: plotting.plot_orders([]), ValueError, r"orders=\[\] must be"),
        (lambda: plotting.plot_orders("NHD"), ValueError, "orders='NHD' must be a sequence"),
        (
            lambda: plotting.plot_length_against_requests(SMALL, 512),
            TypeError,
            "lengths must be a list, .* got 512",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(draw, error, message) -> None:
    with pytest.raises(error, match=message):
        draw()


def test_axes_that_were_removed_are_refused() -> None:
    ax = new_axes()
    ax.remove()
    for draw in (
        functools.partial(plotting.plot_layout, SMALL.layout),
        functools.partial(plotting.plot_memory, SMALL),
        functools.partial(plotting.plot_order, "NHD"),
    ):
        with pytest.raises(ValueError, match="ax belongs to no figure any more"):
            draw(ax=ax)


@pytest.mark.parametrize("axis", "xy")
def test_cells_are_numbered_in_steps_of_1_2_5_10_where_14_numbers_are_too_few(axis: str) -> None:
    steps = {1: 1, 14: 1, 15: 2, 28: 2, 29: 5, 70: 5, 71: 10, 140: 10, 141: 20, 14_001: 2000}
    for count, step in steps.items():
        tick_cells(ax := new_axes(), axis, count)
        wanted = {f"{i:,}": i + 0.5 for i in range(0, count, step)}
        labels = [text.get_text() for text in getattr(ax, f"get_{axis}ticklabels")()]
        assert dict(zip(labels, getattr(ax, f"get_{axis}ticks")(), strict=True)) == wanted


def test_groups_beyond_the_palette_differ_in_their_hatches() -> None:
    styles = {(style["facecolor"], style["hatch"]) for style in map(group_style, range(24))}
    assert len(styles) == 24


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["layers.0.attention"], ["layers.0.attention"]),
        (["layers.0.k", "layers.1.k", "layers.2.k"], ["0", "1", "2"]),
        (["layers.0.k", "layers.0.v", "layers.1.k"], ["0.k", "0.v", "1.k"]),
        (["layers.0", "layers.1.k"], ["layers.0", "layers.1.k"]),
    ],
)
def test_short_names_leave_out_what_all_have_in_common(names: list[str], short) -> None:
    assert short_names(names) == short


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0.01, 2))
def test_spread_positions_are_apart_in_order_and_stay_where_they_can(positions, gap) -> None:
    moved = spread(positions, gap)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    distances = np.diff([moved[i] for i in order])
    assert (distances >= gap - 1e-9).all()
    if (np.diff(np.sort(positions)) >= gap).all():
        np.testing.assert_allclose(moved, positions, atol=1e-9)
    assert np.mean(moved) == pytest.approx(np.mean(positions), abs=1e-9)


# Text.


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1536, "1,536 B"),
        (10 * 2**10 - 1, "10,239 B"),
        (10 * 2**10, "10.00 KiB"),
        (2**20 - 2**10, "1023.00 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**19, "1.50 MiB"),
        (2**30 - 2**20, "1,023.00 MiB"),
        (2**30, "1.00 GiB"),
        (2**40, "1,024.00 GiB"),
    ],
)
def test_bytes_are_readable(num_bytes: int, text: str) -> None:
    assert readable(num_bytes) == text


def test_what_was_given_is_shown_on_one_line_of_80_characters_at_most() -> None:
    for length in (2, 79, 80, 81, 200):
        text = repr("x" * (length - 2))
        assert shown("x" * (length - 2)) == (text if length <= 80 else f"{text[:80]}...")
    assert shown(np.eye(2)) == "array([[1., 0.], [0., 1.]])"


def test_unused_bytes_are_described_over_all_groups() -> None:
    assert describe_unused([0, 0]) == "all used"
    assert describe_unused([64, 64]) == "64 unused"
    assert describe_unused([0, 2048]) == "0 to 2,048 unused, by group"


def public_objects() -> dict[str, object]:
    plan = PLANS["qwen3-next-80b-a3b"]
    manager, cache, batch = shared_cache()
    entry = jaxkv.TableEntry(0, [[1, 2], [3]], starts=(4, 0))
    return {
        "plan": plan,
        "layout": plan.layout,
        "group": plan.groups[0],
        "tensor": plan.layout.tensors[0],
        "packed tensor": PLANS["deepseek-v4-flash"].layout.tensors[0],
        "manager": manager,
        "pool": BlockPool(100_000),
        "entry": entry,
        "long entry": entry._replace(block_ids=[range(10_000), ()]),
        "upload": batch.shape.idle(),
        "cache": cache,
        "shape": batch.shape,
        "batch": batch,
    }


@pytest.fixture(scope="module")
def objects() -> dict[str, object]:
    return public_objects()


def test_reprs_are_one_short_line_without_array_elements(objects) -> None:
    for thing in objects.values():
        text = repr(thing)
        assert text.startswith(type(thing).__name__ + "("), text
        assert len(text) < 250 and "\n" not in text, text
        assert "rray(" not in text and "dtype" not in text, text


class Checker(html.parser.HTMLParser):
    """Tags that are open, and all text."""

    def __init__(self, markup: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen.append(data.strip())


@pytest.mark.parametrize("name", ["plan", "manager", "cache"])
def test_rich_reprs_are_small_whole_html_that_loads_nothing(objects, name: str) -> None:
    markup = objects[name]._repr_html_()
    checker = Checker(markup)
    assert not checker.open and not checker.links and "<script" not in markup
    assert len(markup) < 25_000


def test_a_plan_shows_its_three_figures_apart() -> None:
    plan = PLANS["gemma-3-27b"]
    seen = Checker(plan._repr_html_()).seen
    length, block = plan.max_model_len, plan.layout.bytes_per_block
    for name, blocks in {
        "admission charges": plan.admission_blocks(length),
        "held while it decodes": plan.steady_blocks(length),
    }.items():
        text = seen[seen.index(name) + 1]
        assert text == f"{blocks:,} blocks, {blocks * block / 2**30:.2f} GiB"
    assert seen[seen.index("run at once") + 1] == f"{plan.requests_that_fit(length):,} requests"


def test_names_are_escaped() -> None:
    manager = jaxkv.BlockManager(SMALL, max_requests=2)
    name = "<script>alert(1)</script>"
    manager.start(name)
    markup = manager._repr_html_()
    assert "<script" not in markup and name in " ".join(Checker(markup).seen)
    assert html_table([["<b>"]], caption="<i>", header=["<u>"]).count("&lt;") == 3


def test_a_cache_shows_its_first_rows_and_nothing_that_cannot_be_read() -> None:
    manager, cache, _ = filled_cache()
    seen = Checker(cache._repr_html_()).seen
    full = manager.block_ids(2)[0]
    assert ", ".join(map(str, full)) in seen
    inside: list[str | None] = []
    step = jax.jit(lambda cache: (inside.append(cache._repr_html_()), cache)[1], donate_argnums=0)
    kept = step(cache)
    assert inside == [None]
    assert cache._repr_html_() is None and repr(cache) == repr(kept)  # donated, and gone
    jaxkv.check_errors(kept)


def test_a_manager_of_many_requests_shows_the_first() -> None:
    manager = jaxkv.BlockManager(SMALL, max_requests=20)
    for request in range(12):
        manager.start(request)
    seen = Checker(manager._repr_html_()).seen
    assert "8 of them shown" in " ".join(seen)
    assert "7" in seen and "11" not in seen


def test_a_worker_without_layers_of_a_group_has_reprs_and_pictures() -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    state = jaxkv.StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",))
    stages = [{"a": spec, "s": state}, {"b": spec}]
    plan = jaxkv.plan_cache(stages, [2**16] * 2, max_model_len=8)
    layout = plan.layouts[1]
    assert repr(layout.groups[0]) == "Group(0 layers, 0 bytes per block)"
    labels = [text.get_text() for text in plotting.plot_layout(layout).axes[0].get_yticklabels()]
    assert labels[0] == "group 0: 0 layers"
    assert plotting.plot_memory(plan, worker=1).axes
    assert "workers" in plan._repr_html_()
