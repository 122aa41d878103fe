"""Pictures show what they are given, their texts can be read, and reprs are small."""

import functools
import html.parser
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import jax
import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.figure import Figure
from matplotlib.text import Text

from jaxkv import plotting
from jaxkv.block_tables import (
    append_block_ids,
    check_overflow,
    gather_block_tables,
    make_block_tables,
)
from jaxkv.blocks import BlockManager, BlockPool, OutOfBlocksError, TableEntry
from jaxkv.flex_attention import MetadataSizes, build_page_csr, build_page_lists
from jaxkv.kernel_blocks import LAYOUT_ORDERS, CacheLayout
from jaxkv.models import encoder_len, layers_from_config, load_config, model_len
from jaxkv.planning import Plan, plan_cache
from jaxkv.plotting import Holder
from jaxkv.plotting._style import readable_bytes, spread
from jaxkv.rich_repr import GROUP_COLOURS, html_table, text_colour
from jaxkv.specs import FullAttentionSpec, Limits, MLASpec, StateSpec
from jaxkv.step import StepShape, apply_step, pack_entries, pack_step
from tests.helpers import as_ids, hybrid_layers, hybrid_plan

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


def plan_model(name: str, memory_bytes: int = 40 * 2**30, **options) -> Plan:
    config = load_config(name)
    limits = Limits(max_encoder_tokens=encoder_len(config))
    options = {"max_model_len": model_len(config), "fit_max_model_len": True} | options
    return plan_cache(layers_from_config(config), memory_bytes, limits=limits, **options)


PLANS = {name: plan_model(name) for name in MODELS}
SMALL = hybrid_plan()


def new_axes():
    return Figure(figsize=(9, 5), layout="constrained").subplots()


def title_of(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def serve(plan: Plan, steps: int = 40, seed: int = 0):
    """A manager after random traffic, what it held at every step, and the preemptions."""
    rng = np.random.default_rng(seed)
    manager, running, snapshots, held, preempted = (
        BlockManager(plan, max_requests=6),
        {},
        [],
        [],
        [],
    )
    for step in range(steps):
        if len(running) < 6 and rng.random() < 0.5:
            manager.start(step)
            running[step] = (0, int(rng.integers(4, plan.max_model_len + 1)))
        for name, (computed, total) in list(running.items()):
            target = min(computed + int(rng.integers(1, 9)), total)
            running[name] = (target, total)
            try:
                manager.grow(name, computed, target)
            except OutOfBlocksError:
                preempted.append(step)
                target = total
            if target == total:
                manager.finish(name)
                del running[name]
        snapshots.append(plotting.snapshot_blocks(manager))
        held.append(manager.held_blocks())
    return manager, snapshots, held, preempted


def filled_tables(max_requests: int = 6, rows: int = 4):
    manager, tables = BlockManager(SMALL, max_requests=max_requests), None
    tables = make_block_tables(SMALL, max_requests=max_requests)
    for request in range(rows):
        manager.start(request)
        manager.grow(request, 0, 2 * request + 1)
    entries = pack_entries(
        manager.take_update().entries, num_groups=5, max_entries=8, max_block_ids=64
    )
    return manager, append_block_ids(tables, entries)


def figures() -> dict[str, Callable[[], Figure]]:
    """Pictures by name, drawn when they are asked for."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)
    padded = MLASpec(block_size=64, head_size=576, page_bytes_padded=80_000)
    hybrid = PLANS["qwen3-next-80b-a3b"]
    state, attention = hybrid.groups[0].specs[0], hybrid.groups[3].specs[0]

    def occupancy() -> Figure:
        _, _, held, preempted = serve(SMALL)
        return plotting.plot_occupancy(SMALL, held, preemptions=preempted)

    def narrow() -> Figure:
        return plotting.plot_block_tables(filled_tables()[1], widths=(1, 1, 1, 1, 0))

    drawn = {
        "pool": lambda: plotting.plot_pool_over_time(SMALL, serve(SMALL)[1]),
        "occupancy": occupancy,
        "tables": lambda: plotting.plot_block_tables(filled_tables()[1]),
        "narrow": narrow,
        "lengths": lambda: plotting.plot_length_against_requests(PLANS),
        "one length": lambda: plotting.plot_length_against_requests(SMALL),
        "page": lambda: plotting.plot_page(spec, kernel_block_size=4, block_id=3),
        "padded page": lambda: plotting.plot_page(padded),
        "state": lambda: plotting.plot_page(state),
        "long page": lambda: plotting.plot_page(attention),
        "many kernel blocks": lambda: plotting.plot_page(attention, kernel_block_size=4),
        "orders": plotting.plot_orders,
        "tiles": lambda: plotting.plot_order(CacheLayout("LBHNC", tile_tokens=2)),
    }
    for name, plan in PLANS.items():
        drawn[f"layout {name}"] = functools.partial(plotting.plot_layout, plan.layout)
        drawn[f"memory {name}"] = functools.partial(plotting.plot_memory, plan)
        drawn[f"short {name}"] = functools.partial(plotting.plot_memory, plan, 100)
    return drawn


FIGURES = figures()


# What a demanding reader would check first.


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
    # A point or so less: letters seldom fill their box.
    boxes = [Text.get_window_extent(text).padded(-1.5) for text in texts]  # without arrows
    page = figure.bbox.padded(2)
    for i, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        assert page.x0 <= box.x0 and box.x1 <= page.x1, text.get_text()
        assert page.y0 <= box.y0 and box.y1 <= page.y1, text.get_text()
        for other, other_box in zip(texts[:i], boxes[:i], strict=True):
            assert not box.overlaps(other_box), (text.get_text(), other.get_text())


def test_figures_show_themselves_without_pyplot_and_change_no_setting() -> None:
    code = """if True:
        import sys, matplotlib
        def settings():  # to ask for the backend is to choose one
            kept = matplotlib.rcParams
            return {key: kept[key] for key in kept if key != "backend"}
        before = settings()
        from jaxkv import plotting
        assert plotting.plot_orders()._repr_png_().startswith(b"\\x89PNG")
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


# What is drawn is what was given.


@given(
    st.sampled_from(MODELS),
    st.integers(3 * 2**30, 300 * 2**30),
    st.floats(0.001, 1),
)
@settings(max_examples=15)
def test_the_parts_of_the_memory_bar_are_all_of_the_memory(name, memory, share) -> None:
    plan = plan_model(name, memory)
    length = max(1, int(share * plan.max_model_len))
    ax = plotting.plot_memory(plan, length).axes[0]
    size = {"GiB": 2**30, "MiB": 2**20}[ax.get_xlabel().split()[-1]]
    bars = sorted((bar.get_x() * size, bar.get_width() * size) for bar in ax.patches)
    end = 0.0
    for start, width in bars:
        assert start == pytest.approx(end, abs=2)
        end = start + width
    assert end == pytest.approx(memory, abs=2)
    held = sum(
        bar.get_width() * size
        for bar in ax.patches
        if round(bar.get_y() + bar.get_height() / 2) < len(plan.groups)
    )
    block = plan.layout.bytes_per_block
    steady = plan.requests_that_fit(length) * plan.steady_blocks(length) * block
    drawn = sum(label.get_text().startswith("group") for label in ax.get_yticklabels())
    if drawn == len(plan.groups):  # none was left out for holding nothing
        assert held == pytest.approx(steady, abs=2)
    assert title_of(ax.figure).startswith(f"{plan.requests_that_fit(length):,} request")


def test_the_memory_of_each_worker_is_drawn() -> None:
    layers = hybrid_layers()
    stages = [dict(list(layers.items())[:5]), dict(list(layers.items())[5:])]
    plan = plan_cache(stages, [2**20, 2**19], max_model_len=24)
    for worker in range(2):
        title = title_of(plotting.plot_memory(plan, worker=worker))
        assert f"{plan.bytes_per_block[worker]:,} bytes" in title
        assert readable_bytes(plan.memory_bytes[worker]) in title
        assert plotting.plot_layout(plan.layouts[worker]).axes


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_drawn_on_its_own_bytes(name: str) -> None:
    layout = PLANS[name].layout
    ax = plotting.plot_layout(layout, max_slots=len(layout.slots)).axes[0]
    unit = ax.get_xlabel().split(",")[1].split()[0]
    size = {"MiB": 2**20, "KiB": 2**10, "bytes": 1}[unit]
    drawn = {
        (round(bar.get_x() * size), round(bar.get_width() * size), round(bar.get_y() + 0.4))
        for bar in ax.patches
    }
    starts = np.cumsum([0, *(slot.page_bytes for slot in layout.slots)])
    for group in layout.groups:
        for layer in group.layers:
            place = layout.place_of(layer)
            start = int(starts[place.slot]) + place.offset_bytes
            assert (start, place.spec.data_bytes, place.group) in drawn


def test_a_layout_of_many_slots_says_how_many_it_draws() -> None:
    layout = PLANS["llama-3.1-8b"].layout
    assert "32 slots (first 12 drawn)" in title_of(plotting.plot_layout(layout))
    assert "first 12 slots drawn" in layout._repr_html_()


@given(
    st.sampled_from(LAYOUT_ORDERS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
@settings(max_examples=25)
def test_orders_count_runs_as_a_transposed_array_does(
    order, layers, blocks, heads, parts, tile_tokens, data
) -> None:
    """The reference lays addresses out by NumPy, tiles as blocks of their own."""
    block_id = data.draw(st.integers(0, blocks - 1))
    sizes = {"L": layers, "B": blocks * parts, "H": heads, "N": tile_tokens}
    letters = order.replace("C", "")
    addresses = np.arange(np.prod(list(sizes.values())))
    addresses = addresses.reshape([sizes[letter] for letter in letters])
    addresses = addresses.transpose([letters.index(letter) for letter in "LBHN"])
    own = addresses[:, block_id * parts : (block_id + 1) * parts]

    def runs(found: np.ndarray) -> int:
        return 1 + int((np.diff(np.sort(found.reshape(-1))) > 1).sum())

    figure = plotting.plot_order(
        CacheLayout(order, tile_tokens=tile_tokens if parts > 1 else None),
        num_layers=layers,
        num_blocks=blocks,
        num_heads=heads,
        block_size=tile_tokens * parts,
        block_id=block_id,
    )
    one, every = runs(own[0]), runs(own)
    assert f"layer 0 is {one} run" in title_of(figure)
    assert f"all layers {every} run" in title_of(figure)
    marked = [bar for bar in figure.axes[0].patches if round(bar.get_height(), 2) == 0.5]
    cells = sum(round(bar.get_width() + 0.16) for bar in marked)
    assert cells == own.size


@given(st.integers(0, 20))
@settings(max_examples=5)
def test_the_pool_map_fills_the_cells_that_are_held(seed: int) -> None:
    _, snapshots, _, _ = serve(SMALL, steps=25, seed=seed)
    ax = plotting.plot_pool_over_time(SMALL, snapshots).axes[0]
    areas = {}
    for collection in ax.collections:
        if label := collection.get_label():
            boxes = [path.get_extents() for path in collection.get_paths()]
            areas[label] = sum(box.width * box.height for box in boxes)
    for group in range(len(SMALL.groups)):
        cells = sum(holder.group == group for step in snapshots for holder in step.values())
        assert areas.get(f"group {group}: {SMALL.groups[group]}", 0) == pytest.approx(cells)
    assert title_of(
        ax.figure
    ) == "{:,} blocks handed out, {:,} of them from one group to another".format(
        *hand_overs(snapshots)
    )


def hand_overs(snapshots) -> tuple[int, int]:
    """By the definition: a block is handed out when its holder is not who had it before."""
    handed = changed = 0
    last: dict[int, int] = {}
    before: dict[int, Holder] = {}
    for snapshot in snapshots:
        for block_id, holder in snapshot.items():
            if before.get(block_id) != holder:
                handed += 1
                changed += last.get(block_id, holder.group) != holder.group
            last[block_id] = holder.group
        before = snapshot
    return handed, changed


def test_a_shared_block_belongs_to_all_who_hold_it_and_is_not_handed_out_again() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, sink_tokens=4)
    plan = plan_cache({"layer": spec}, 2**20, max_model_len=16, num_blocks_override=8)
    manager = BlockManager(plan, max_requests=2)
    manager.start("a")
    manager.grow("a", 0, 4)
    snapshots = [plotting.snapshot_blocks(manager)]
    (shared,) = manager.block_ids("a")
    manager.start("b", shared_block_ids=[shared])
    snapshots.append(plotting.snapshot_blocks(manager))
    (sink,) = manager.sink_block_ids[0]
    assert snapshots[-1] == {shared[0]: Holder(0, ("a", "b")), sink: Holder(0, ())}
    assert title_of(plotting.plot_pool_over_time(plan, snapshots)).startswith("2 blocks handed")


def test_occupancy_stacks_what_each_group_holds() -> None:
    _, _, held, preempted = serve(SMALL)
    figure = plotting.plot_occupancy(SMALL, held, preemptions=preempted)
    steps = [patch.get_data() for patch in figure.axes[0].patches]
    assert len(steps) == len(SMALL.groups)
    for group, step in enumerate(steps):
        counts = np.array(held)[:, group]
        np.testing.assert_array_equal(step.values - np.asarray(step.baseline), counts)


def test_tables_show_ids_and_mark_null_entries_and_rows_that_are_too_long() -> None:
    manager, tables = filled_tables()
    new = [TableEntry(4, [[0, 7], [], [], [], []])]
    entries = pack_entries(new, num_groups=5, max_entries=8, max_block_ids=64)
    tables = append_block_ids(tables, entries)
    widths = (1, 1, 1, 1, 1)
    tables, _ = gather_block_tables(tables, as_ids([3]), as_ids([6]), widths=widths)
    ax = plotting.plot_block_tables(tables, widths=widths).axes[0]
    shown = sorted(int(text.get_text()) for text in ax.texts if text.get_text().isdigit())
    held = [i for r in manager.requests for ids in manager.block_ids(r) for i in ids]
    assert shown == sorted([*held, 7])
    null = [bar for bar in ax.patches if bar.get_hatch()]
    assert [(bar.get_x(), bar.get_y()) for bar in null] == [(0, 4)]
    used = np.asarray(tables.num_blocks)
    frames = [bar for bar in ax.patches if not bar.get_fill()]
    assert len(frames) == (used > 1).sum() == sum(" > 1" in text.get_text() for text in ax.texts)
    title = title_of(ax.figure)
    assert f"{used.sum()} block ids in 5 of 6 rows" in title
    assert "a gathered width smaller than a row's blocks" in title


def test_of_many_rows_those_that_hold_blocks_are_drawn() -> None:
    _, tables = filled_tables(max_requests=100)
    figure = plotting.plot_block_tables(tables)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["0", "1", "2", "3"]
    assert "4 of 100 rows, 4 drawn" in title_of(figure)
    assert plotting.plot_block_tables(tables, rows=[99]).axes  # empty, and still a picture


@pytest.mark.parametrize("name", MODELS)
def test_a_curve_goes_through_what_the_plan_counts(name: str) -> None:
    plan, lengths = PLANS[name], [100, 64, 300]
    ax = plotting.plot_length_against_requests({name: plan}, lengths).axes[0]
    points = dict(zip(*ax.lines[0].get_data(), strict=True))
    assert points == {n: plan.requests_that_fit(n) for n in [*lengths, plan.max_model_len]}


def test_given_axes_are_drawn_on_and_their_figure_returned() -> None:
    _, snapshots, held, _ = serve(SMALL, steps=5)
    _, tables = filled_tables()
    for draw in (
        lambda ax: plotting.plot_layout(SMALL.layout, ax=ax),
        lambda ax: plotting.plot_memory(SMALL, ax=ax),
        lambda ax: plotting.plot_length_against_requests(SMALL, ax=ax),
        lambda ax: plotting.plot_pool_over_time(SMALL, snapshots, ax=ax),
        lambda ax: plotting.plot_occupancy(SMALL, held, ax=ax),
        lambda ax: plotting.plot_block_tables(tables, ax=ax),
        lambda ax: plotting.plot_page(SMALL.groups[0].spec, ax=ax),
        lambda ax: plotting.plot_page(SMALL.groups[3].spec, ax=ax),
        lambda ax: plotting.plot_order("HND", ax=ax),
    ):
        ax = new_axes()
        assert draw(ax) is ax.figure and ax.get_title(loc="left")


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plotting.plot_layout(SMALL), TypeError, "layout must be a PoolLayout, got Plan"),
        (lambda: plotting.plot_layout(SMALL.layout, max_slots=0), ValueError, "max_slots"),
        (lambda: plotting.plot_memory(SMALL.layout), TypeError, "plan must be a Plan"),
        (lambda: plotting.plot_memory(SMALL, 25), ValueError, "num_tokens=25; the plan admits 24"),
        (lambda: plotting.plot_memory(SMALL, 0), ValueError, "num_tokens must be at least 1"),
        (lambda: plotting.plot_memory(SMALL, worker=1), ValueError, "worker=1: the plan has 1"),
        (lambda: plotting.plot_length_against_requests({}), ValueError, "plans is empty"),
        (lambda: plotting.plot_length_against_requests([SMALL]), TypeError, "plans must be"),
        (lambda: plotting.plot_length_against_requests({"a": 1}), TypeError, r"plans\['a'\]"),
        (lambda: plotting.plot_length_against_requests(SMALL, [0]), ValueError, r"lengths\[0\]"),
        (lambda: plotting.plot_pool_over_time(SMALL, []), ValueError, "snapshots is empty"),
        (lambda: plotting.plot_pool_over_time(SMALL, [[1]]), TypeError, r"snapshots\[0\]"),
        (
            lambda: plotting.plot_pool_over_time(SMALL, [{40: Holder(0, ())}]),
            ValueError,
            "block 40 of group 0; the plan has 40 blocks",
        ),
        (lambda: plotting.snapshot_blocks(SMALL), TypeError, "manager must be a BlockManager"),
        (lambda: plotting.plot_occupancy(SMALL, []), ValueError, "held_blocks has steps"),
        (lambda: plotting.plot_occupancy(SMALL, [(1, 2)]), ValueError, "the 5 groups"),
        (lambda: plotting.plot_block_tables(filled_tables()[1], rows=[6]), ValueError, "rows"),
        (lambda: plotting.plot_block_tables(filled_tables()[1], widths=[1]), ValueError, "widths"),
        (lambda: plotting.plot_block_tables(SMALL), TypeError, "tables must be a BlockTables"),
        (lambda: plotting.plot_page("full"), TypeError, "spec must be a LayerSpec"),
        (
            lambda: plotting.plot_page(SMALL.groups[0].spec, kernel_block_size=3),
            ValueError,
            "kernel_block_size=3 does not divide",
        ),
        (lambda: plotting.plot_page(SMALL.groups[0].spec, block_id=-1), ValueError, "block_id"),
        (lambda: plotting.plot_order("LBH"), ValueError, "order='LBH' is not a cache layout"),
        (lambda: plotting.plot_order("NHD", block_id=3), ValueError, "block_id=3 is not one of"),
        (lambda: plotting.plot_orders([]), ValueError, r"orders=\[\] must be"),
        (lambda: plotting.plot_orders("NHD"), ValueError, "orders='NHD' must be a sequence"),
        (lambda: plotting.plot_length_against_requests(SMALL, 512), TypeError, "lengths=512 must"),
    ],
)
def test_what_makes_no_picture_is_refused_by_name(draw, error, message) -> None:
    with pytest.raises(error, match=message):
        draw()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0.01, 2))
def test_spread_positions_are_apart_in_order_and_stay_where_they_can(positions, gap) -> None:
    moved = spread(positions, gap)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    distances = np.diff([moved[i] for i in order])
    assert (distances >= gap - 1e-9).all()
    if (np.diff(np.sort(positions)) >= gap).all():
        np.testing.assert_allclose(moved, positions, atol=1e-9)
    assert np.mean(moved) == pytest.approx(np.mean(positions), abs=1e-9)


# Reprs.


def public_objects() -> dict[str, object]:
    plan = PLANS["qwen3-next-80b-a3b"]
    manager, tables = filled_tables()
    manager.grow(0, 1, 8)
    update = manager.take_update()
    entries = pack_entries(update.entries, num_groups=5, max_entries=8, max_block_ids=64)
    shape = StepShape(entries=8, block_ids=64, zero_ids=8, batch=4, widths=tables.widths, tokens=32)
    upload = pack_step(shape, update=update, rows=[0], first_positions=[1], lengths=[7])
    _, _, batch = apply_step(tables, None, upload, shape=shape)
    sizes = MetadataSizes(
        max_num_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=24,
        page_size=4,
        q_block_tokens=16,
        num_blocks=40,
    )
    where = batch.block_tables[0], batch.token_ends, batch.first_positions
    return {
        "plan": plan,
        "layout": plan.layout,
        "group": plan.groups[0],
        "slot": plan.layout.slots[0],
        "packed slot": PLANS["deepseek-v4-flash"].layout.slots[0],
        "manager": manager,
        "pool": BlockPool(100_000),
        "entry": update.entries[0],
        "long entry": update.entries[0]._replace(block_ids=[range(10_000), (), (), (), ()]),
        "update": update,
        "entries": entries,
        "tables": tables,
        "shape": shape,
        "batch": batch,
        "sizes": sizes,
        "lists": build_page_lists(*where, sizes=sizes),
        "csr": build_page_csr(*where, sizes=sizes),
    }


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, object]]:
    yield public_objects()


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


@pytest.mark.parametrize("name", ["plan", "layout", "manager", "tables"])
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
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    names = ["<script>alert(1)</script>", "a&b"]
    plan = plan_cache(dict.fromkeys(names, spec), 2**20, max_model_len=8)
    manager = BlockManager(plan, max_requests=2)
    manager.start(names[0])
    for shown in (plan, plan.layout, manager):
        assert "<script" not in shown._repr_html_()
    assert names[0] in " ".join(Checker(manager._repr_html_()).seen)
    assert names[0] in " ".join(Checker(plan.layout._repr_html_()).seen)
    assert html_table([["<b>"]], caption="<i>", header=["<u>"]).count("&lt;") == 3


def test_tables_show_their_first_rows_and_nothing_that_cannot_be_read() -> None:
    manager, tables = filled_tables()
    seen = Checker(tables._repr_html_()).seen
    for group, ids in enumerate(manager.block_ids(3)):
        assert ", ".join(map(str, ids)) in seen, group
    inside: list[str | None] = []
    step = jax.jit(
        lambda tables: (inside.append(tables._repr_html_()), tables)[1], donate_argnums=0
    )
    kept = step(tables)
    assert inside == [None]
    assert tables._repr_html_() is None and repr(tables) == repr(kept)  # donated, and gone
    check_overflow(kept)


def test_a_manager_of_many_requests_shows_the_first() -> None:
    manager = BlockManager(SMALL, max_requests=20)
    for request in range(12):
        manager.start(request)
    seen = Checker(manager._repr_html_()).seen
    assert "8 of them shown" in seen[1] or "8 of them shown" in " ".join(seen)
    assert "7" in seen and "11" not in seen


def test_a_worker_without_layers_of_a_group_has_reprs_and_pictures() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    state = StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",))
    plan = plan_cache([{"a": spec, "s": state}, {"b": spec}], [2**16] * 2, max_model_len=8)
    layout = plan.layouts[1]
    assert "group 0: 0 layers" in " ".join(Checker(layout._repr_html_()).seen)
    assert repr(layout.groups[0]) == "Group(0 layers, 0 bytes per block)"
    assert plotting.plot_layout(layout).axes and plotting.plot_memory(plan, worker=1).axes
    assert "workers" in plan._repr_html_()
