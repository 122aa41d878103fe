"""Each picture draws all that it was given, its title says the main fact, its texts can be read."""

import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import jaxkv
from jaxkv import plotting
from jaxkv._src.hf_config import encoder_len
from jaxkv._src.internal.html import group_colour, text_colour
from jaxkv._src.layout import PhysicalOrder
from jaxkv._src.plotting import Holder
from tests.helpers import hybrid_plan

ROOT = pathlib.Path(__file__).parents[1]
MODELS = (
    "gemma-4-e2b",
    "qwen3-next-80b-a3b",
    "deepseek-v4-flash",
    "whisper-large-v3",
)


def plan_model(name: str) -> jaxkv.Plan:
    config = jaxkv.load_config(name)
    return jaxkv.plan_cache(
        jaxkv.layers_from_config(config),
        40 * 2**30,
        limits=jaxkv.Limits(max_encoder_tokens=encoder_len(config)),
        max_model_len=jaxkv.hf_config.model_len(config),
        fit_max_model_len=True,
    )


PLANS = {name: plan_model(name) for name in MODELS}
SMALL = hybrid_plan()  # five groups
LOW = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)


def title_of(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def colour_of(bar) -> str:
    return matplotlib.colors.to_hex(bar.get_facecolor()).upper()


@functools.cache
def served() -> tuple[jaxkv.BlockManager, jaxkv.KVCache, jaxkv.StepBatch, list, list]:
    """Three requests over a few steps, of which one ends: what was allocated at each."""
    manager = jaxkv.BlockManager(SMALL, max_requests=6)
    cache = jaxkv.make_cache(SMALL, max_requests=6)
    shape = jaxkv.StepShape.for_plan(SMALL, max_requests=6, max_tokens=24)
    snapshots, uses = [], []
    for request in "abc":
        manager.start(request)
    for step in range(1, 8):
        if step == 5:
            manager.finish("b")
            manager.start("d")
        work = {request: 3 for request in manager.requests}
        cache, batch = jax.jit(jaxkv.apply_step)(cache, manager.step(shape, work))
        snapshots.append(plotting.snapshot_blocks(manager))
        uses.append(manager.block_use)
    return manager, cache, batch, snapshots, uses


def written(ax) -> dict[tuple[float, float], str]:
    """The texts in bars, by the middle of their bar."""
    boxes = [(text.xycoords.get_bbox(), text.get_text()) for text in ax.texts]
    return {((box.x0 + box.x1) / 2, round((box.y0 + box.y1) / 2, 9)): text for box, text in boxes}


FIGURES: dict[str, Callable[[], Figure]] = {
    "pool": lambda: plotting.plot_pool_over_time(SMALL, served()[3]),
    "use": lambda: plotting.plot_block_use(served()[4], preemptions=[2, 4]),
    "tables": lambda: plotting.plot_block_tables(served()[1], batch=served()[2]),
    "lengths": lambda: plotting.plot_length_against_requests(PLANS),
    "page": lambda: plotting.plot_page(LOW, kernel_block_size=4, block_id=3),
    "state": lambda: plotting.plot_page(PLANS["qwen3-next-80b-a3b"].groups[0].specs[0]),
    "orders": plotting.plot_orders,
    **{f"layout {n}": functools.partial(plotting.plot_layout, p.layout) for n, p in PLANS.items()},
    **{f"memory {n}": functools.partial(plotting.plot_memory, p) for n, p in PLANS.items()},
    **{f"short {n}": functools.partial(plotting.plot_memory, p, 100) for n, p in PLANS.items()},
}


def is_drawn(text: Text, figure: Figure) -> bool:
    """Ticks beyond the limits of their axis exist and are not drawn."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if text in (tick.label1, tick.label2):
                    return low - 1e-6 <= tick.get_loc() <= high + 1e-6
    return True


@pytest.mark.parametrize("name", FIGURES)
def test_texts_lie_within_the_figure_and_overlap_nowhere(name: str) -> None:
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    shown = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    texts = [text for text in shown if is_drawn(text, figure)]
    assert all(ax.get_title(loc="left") for ax in figure.axes)
    # A little smaller, because letters seldom fill their box.
    boxes = np.array([Text.get_window_extent(text).padded(-1.5).extents for text in texts])
    low, high = boxes[:, :2], boxes[:, 2:]
    page = figure.bbox.padded(2)
    for text, is_within in zip(texts, (low >= page.min) & (high <= page.max), strict=True):
        assert is_within.all(), text.get_text()
    overlap = ((low[:, None] <= high) & (low <= high[:, None])).all(axis=-1)
    for one, other in np.argwhere(np.triu(overlap, 1)):
        pytest.fail(f"{texts[one].get_text()!r} overlaps {texts[other].get_text()!r}")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_figures_show_themselves_without_pyplot_or_jax() -> None:
    done = run("""if True:
        import sys
        from jaxkv import FullAttentionSpec, plotting
        spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
        assert plotting.plot_page(spec)._repr_png_()[0].startswith(b"\\x89PNG")
        print("matplotlib.pyplot" in sys.modules, "jax" in sys.modules)
    """)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_without_matplotlib_the_error_names_the_extra() -> None:
    done = run("""if True:
        import sys
        sys.modules["matplotlib"] = None
        from jaxkv import plotting
        plotting.plot_orders()
    """)
    assert 'plotting draws with matplotlib: pip install "jaxkv[plot]"' in done.stderr


def test_groups_have_colours_that_differ_also_in_print_and_text_on_them_does() -> None:
    def grey(colour: str) -> float:
        return float(np.dot(matplotlib.colors.to_rgb(colour), (0.299, 0.587, 0.114)))

    colours = [group_colour(group) for group in range(16)]
    assert len({*colours}) == 16
    assert all(abs(grey(a) - grey(b)) > 0.12 for a, b in itertools.pairwise(colours[:6]))
    assert all(abs(grey(text_colour(colour)) - grey(colour)) > 0.4 for colour in colours)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_drawn_on_its_own_bytes(name: str) -> None:
    layout = PLANS[name].layout
    figure = plotting.plot_layout(layout)
    (ax,) = figure.axes
    size = {"MiB": 2**20, "KiB": 2**10, "bytes": 1}[ax.get_xlabel().split()[0]]
    drawn = {
        (round(bar.get_x() * size), round(bar.get_width() * size), colour_of(bar))
        for bar in ax.patches
        if not bar.get_hatch()
    }
    starts = np.cumsum([0, *(tensor.page_bytes for tensor in layout.tensors)])
    wanted = set()
    for group, layer in ((g, layer) for g in layout.groups for layer in g.layers):
        place = layout.placement_of(layer)
        if place.tensor < 12:
            at = int(starts[place.tensor]) + place.offset_bytes
            wanted.add((at, place.spec.data_bytes, group_colour(layout.groups.index(group))))
    assert drawn == wanted
    assert title_of(figure).startswith(f"A block is {layout.bytes_per_block:,} bytes in ")
    assert ("first 12 drawn" in title_of(figure)) == (len(layout.tensors) > 12)
    shared = {text.get_text() for text in ax.get_yticklabels() if "share" in text.get_text()}
    assert bool(shared) == bool(layout.shared)


def test_a_curve_goes_through_what_its_plan_counts_to_its_longest_request() -> None:
    figure = plotting.plot_length_against_requests(PLANS)
    (ax,) = figure.axes
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == len(PLANS)
    for line in ax.lines:
        name, text = line.get_label().split(": ")
        lengths, counts = (axis.tolist() for axis in line.get_data())
        assert counts == [PLANS[name].requests_that_fit(length) for length in lengths]
        assert lengths[-1] == PLANS[name].max_model_len and len(lengths) > 30
        assert text == f"{counts[-1]:,} x {lengths[-1]:,}"
    assert title_of(figure).endswith(" in 40.00 GiB")


def test_the_pool_shows_the_group_of_each_block_at_each_step() -> None:
    *_, snapshots, _ = served()
    figure = plotting.plot_pool_over_time(SMALL, snapshots)
    drawn = {}
    for bar in figure.axes[0].patches:
        (x0, y0), (x1, y1) = (bar.get_bbox().get_points() + 0.5).round().astype(int).tolist()
        cells = itertools.product(range(x0, x1), range(y0, y1))
        drawn |= dict.fromkeys(cells, colour_of(bar))
    assert drawn == {
        (step, block): group_colour(holder.group)
        for step, snapshot in enumerate(snapshots)
        for block, holder in snapshot.items()
    }
    steps = [{1: Holder(0, ("a",))}, {1: Holder(1, ("b",)), 2: Holder(1, ("b",))}, {}]
    title = title_of(plotting.plot_pool_over_time(SMALL, steps))
    assert title == "3 blocks allocated, 1 of them after another group"


def test_tables_show_the_ids_of_each_request_dark_where_the_step_reads_them() -> None:
    manager, cache, batch, *_ = served()
    (ax,) = plotting.plot_block_tables(cache, batch=batch).axes
    tables = jaxkv.testing.ReferenceTables(SMALL, max_requests=6)
    lengths = [np.asarray(x).tolist() for x in (batch.num_computed_tokens, batch.seq_lens)]
    steps = dict(
        zip(np.asarray(batch.request_rows).tolist(), zip(*lengths, strict=True), strict=True)
    )
    bars = {tuple(bar.get_bbox().p0): bar for bar in ax.patches if bar.get_alpha() is None}
    unused = [bar for bar in ax.patches if bar.get_alpha() == 0.5]
    starts = [bar.get_x() for bar in unused if bar.get_y() == -0.5]
    texts = written(ax)
    for request, row in manager.requests.items():
        for group, (start, ids) in enumerate(zip(starts, manager.block_ids(request), strict=True)):
            read = tables.logical_blocks(group, *steps[row], 0)
            for column, block_id in enumerate(ids):
                if block_id:
                    bar = bars[start + column, row - 0.5]
                    assert texts[start + column + 0.5, row] == str(block_id)
                    is_dark = colour_of(bar) == group_colour(group)
                    assert is_dark == (column in read)
    assert title_of(ax.figure).startswith(
        f"{np.asarray(cache.row_lengths).sum()} block ids in 4 of 6 rows"
    )
    empty = jaxkv.make_cache(SMALL, max_requests=100)
    assert "0 block ids in 0 of 100 rows, 0 drawn" in title_of(plotting.plot_block_tables(empty))


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plotting.plot_memory(SMALL, 25), ValueError, "num_tokens=25; the plan admits 24"),
        (lambda: plotting.plot_memory(SMALL, worker=1), ValueError, "worker=1: the plan has 1"),
        (lambda: plotting.plot_pool_over_time(SMALL, []), ValueError, "snapshots is empty"),
        (
            lambda: plotting.plot_pool_over_time(SMALL, [{}, {40: Holder(0, ())}]),
            ValueError,
            re.escape("snapshots[1] has block 40 of group 0; the plan has 40 blocks"),
        ),
        (
            lambda: plotting.plot_block_tables(
                jaxkv.make_cache(SMALL, max_requests=6, tables_only=True), batch=served()[2]
            ),
            ValueError,
            "batch belongs to another cache",
        ),
        (
            lambda: plotting.plot_orders([PhysicalOrder("NHD", tile_tokens=3)]),
            ValueError,
            "tile_tokens=3 does not divide the 4 tokens of a block",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(draw, error, message) -> None:
    with pytest.raises(error, match=message):
        draw()
