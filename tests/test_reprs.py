"""Reprs are small and safe to show, and bytes and values as text can be read."""

import html.parser

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.blocks import BlockPool
from jaxkv._src.internal.html import html_table
from jaxkv._src.internal.text import describe_unused, readable, shown
from tests.helpers import hybrid_plan

SMALL = hybrid_plan()


def plan_model(name: str) -> jaxkv.Plan:
    config = jaxkv.load_config(name)
    layers, length = jaxkv.layers_from_config(config), jaxkv.hf_config.model_len(config)
    return jaxkv.plan_cache(layers, 40 * 2**30, max_model_len=length, fit_max_model_len=True)


def served_cache() -> tuple[jaxkv.BlockManager, jaxkv.KVCache, jaxkv.StepBatch]:
    """A manager, a cache and the batch of the last of a few steps."""
    manager = jaxkv.BlockManager(SMALL, max_requests=6)
    cache = jaxkv.make_cache(SMALL, max_requests=6)
    shape = jaxkv.StepShape.for_plan(SMALL, max_requests=6, max_tokens=24)
    for request in range(3):
        manager.start(request)
    for step in range(1, 5):
        work = {request: request + step for request in range(3)}
        cache, batch = jax.jit(jaxkv.apply_step)(cache, manager.step(shape, work))
    return manager, cache, batch


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
    plan = plan_model("qwen3-next-80b-a3b")
    manager, cache, batch = served_cache()
    entry = jaxkv.TableEntry(0, [[1, 2], [3]], starts=(4, 0))
    return {
        "plan": plan,
        "layout": plan.layout,
        "group": plan.groups[0],
        "tensor": plan.layout.tensors[0],
        "packed tensor": plan_model("deepseek-v4-flash").layout.tensors[0],
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
    plan = plan_model("gemma-3-27b")
    seen = Checker(plan._repr_html_()).seen
    length, block = plan.max_model_len, plan.layout.bytes_per_block
    for name, blocks in {
        "admission charges": plan.admission_blocks(length),
        "while it decodes": plan.steady_blocks(length),
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
    manager, cache, _ = served_cache()
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


def test_a_worker_without_layers_of_a_group_has_reprs() -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    state = jaxkv.StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",))
    stages = [{"a": spec, "s": state}, {"b": spec}]
    plan = jaxkv.plan_cache(stages, [2**16] * 2, max_model_len=8)
    layout = plan.layouts[1]
    assert repr(layout.groups[0]) == "Group(0 layers, 0 bytes per block)"
    assert str(layout.groups[0]) == "0 layers"
    assert "workers" in plan._repr_html_()
