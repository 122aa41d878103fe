"""`import jaxkv`: the names it gives, what they load, and a newcomer's first example."""

import ast
import dataclasses
import inspect
import json
import pathlib
import pydoc
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing import assert_no_recompilation
from tests.pool_cases import planned

ROOT = pathlib.Path(__file__).parents[1]
WANTED = {
    *("plan_cache", "layers_from_config", "load_config", "Limits", "Plan"),
    *("FullAttentionSpec", "SlidingWindowSpec", "ChunkedAttentionSpec", "CrossAttentionSpec"),
    *(
        "MLASpec",
        "SlidingWindowMLASpec",
        "RingSpec",
        "StateSpec",
        "SharedKVSpec",
        "EncoderOnlySpec",
    ),
    *("make_cache", "KVCache", "BlockManager", "OutOfBlocksError", "StepShape", "UploadRing"),
    *("apply_step", "attend", "write_tokens", "read_tokens", "read_state", "write_state"),
    *("layer_view", "check_errors", "sleep", "wake_up", "append_block_ids", "expand_blocks"),
    "Scheduler",
}
NAMES = [
    name
    for name in dir(jaxkv)
    if name[0] != "_" and not isinstance(getattr(jaxkv, name), types.ModuleType)
]
EXAMPLE = """
import jax
import jax.numpy as jnp
import jaxkv

layers = {"layer.0": jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)}
plan = jaxkv.plan_cache(layers, 2**20, max_model_len=512)
cache = jaxkv.make_cache(plan, max_requests=8)
manager = jaxkv.BlockManager(plan, max_requests=8)
shape = jaxkv.StepShape.for_plan(plan, max_requests=8, max_tokens=64)


@jax.jit
def step(cache, upload, queries, keys, values):
    cache, batch = jaxkv.apply_step(cache, upload)
    return jaxkv.attend(cache, "layer.0", batch, queries, keys, values)


manager.start("a")
rows = jnp.ones((64, 2, 64))
cache, out = step(cache, manager.step(shape, {"a": 1}), rows, rows, rows)
"""


# --- names ----------------------------------------------------------------------------


def test_the_names_that_a_serving_stack_needs_are_there_and_few_more() -> None:
    assert set(NAMES) >= WANTED
    assert 45 <= len(NAMES) <= 60
    assert all(getattr(jaxkv, name) is not None for name in dir(jaxkv))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_it_is_where_it_is_used(name: str) -> None:
    """By a verb or a noun phrase, not by a question word."""
    doc = inspect.getdoc(getattr(jaxkv, name)) or ""
    first = doc.split()[0] if doc else ""
    assert re.match(r"[A-Z`]", first), f"{name} has the docstring {doc[:60]!r}"
    assert first not in {"What", "Which", "Who", "Whose", "Where", "How", "When"}, doc
    assert not doc.startswith(f"{name}("), "that is the signature, not a docstring"


def test_help_is_one_page_with_every_name_under_a_task() -> None:
    text = pydoc.plain(pydoc.render_doc(jaxkv))
    assert len(text.splitlines()) <= 100
    tasks = text.partition("Names, by task:\n")[2].partition("Modules with more")[0]
    listed = re.findall(r"^ {8}.*", tasks, re.M)
    assert sorted(re.findall(r"\w+", " ".join(listed))) == sorted(NAMES)
    assert len(re.findall(r"^ {4}[A-Z]", tasks, re.M)) >= 8


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'jaxkv' has no attribute 'make_pool'"):
        jaxkv.make_pool  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'make_pool' from 'jaxkv'"):
        from jaxkv import make_pool  # noqa: F401
    with pytest.raises(AttributeError, match=r"did you mean jaxkv\.plan_cache\?"):
        getattr(jaxkv, "plan_cahe")  # noqa: B009
    with pytest.raises(AttributeError, match=r"did you mean jaxkv\.pool\.describe_blocks\?"):
        getattr(jaxkv, "describe_block")  # noqa: B009


MODULES = [name for name in dir(jaxkv) if isinstance(getattr(jaxkv, name), types.ModuleType)]
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in [getattr(jaxkv, name) for name in MODULES if name != "interop"]
    + [jaxkv.interop.vllm]
    for name in module.__all__
}


def test_modules_list_what_is_public_beside_the_front_door() -> None:
    assert {"layout", "attention", "planning", "testing"} <= set(MODULES)
    assert len(PUBLIC) + len(NAMES) <= 170
    assert not {name.rpartition(".")[2] for name in PUBLIC} & set(NAMES), "one place for each name"


EVERY = {f"jaxkv.{name}": getattr(jaxkv, name) for name in NAMES} | PUBLIC
GUIDES = [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/*.md"), ROOT / "README.md"]
GUIDE = "\n".join([path.read_text() for path in GUIDES] + [str(jaxkv.__doc__)])


def docstrings(name: str) -> str:
    """Returns the docstrings of a public name, or module, and of its methods."""
    value = EVERY.get(name) or sys.modules[name]
    methods = vars(value).values() if inspect.isclass(value) else ()
    is_own = inspect.ismodule(value) or isinstance(value, type) or inspect.isroutine(value)
    return "\n".join(inspect.getdoc(part) or "" for part in (value, *methods) if is_own)


DOCSTRINGS = {name: docstrings(name) for name in (*EVERY, *{n.rpartition(".")[0] for n in PUBLIC})}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_purpose_in_a_guide_or_in_the_docstring_of_another(name: str) -> None:
    value, word = PUBLIC[name], re.compile(rf"\b{name.rpartition('.')[2]}\b")
    if isinstance(value, type | types.FunctionType):
        assert (value.__doc__ or "").strip(), "no docstring"
    others = (text for other, text in DOCSTRINGS.items() if other != name)
    assert word.search(GUIDE) or any(map(word.search, others)), "make it private, or say what for"


@pytest.mark.parametrize("name", EVERY)
def test_errors_reprs_and_pickles_show_where_a_name_is_public(name: str) -> None:
    value = EVERY[name]
    if isinstance(value, type | types.FunctionType):
        assert value.__module__ == name.rpartition(".")[0]


# The signatures of these packages say `Any` in some places.
PLACES = jaxkv._public_modules()
WITH_ANY = {"specs"}


@pytest.mark.parametrize("name", EVERY)
def test_no_signature_says_any(name: str) -> None:
    value = EVERY[name]
    if not isinstance(value, type | types.FunctionType):
        return
    package = next(module for n, module, public in PLACES if name == f"{public}.{n}").split(".")[2]
    if package in WITH_ANY:
        return
    parts = {"": value}
    if inspect.isclass(value):
        parts = {n: inspect.getattr_static(value, n) for n in vars(value) if n[0] != "_"}
        parts = {
            n: getattr(part, "fget", getattr(part, "__func__", part)) for n, part in parts.items()
        }
        parts["__init__"] = value.__init__
    for part, function in parts.items():
        if isinstance(function, types.FunctionType):
            signature = inspect.signature(function)
            texts = [p.annotation for p in signature.parameters.values()]
            for text in (*texts, signature.return_annotation):
                said = str(text).replace("type[typing.Any]", "")  # of jax's DTypeLike
                said = said.replace("Processor[typing.Any, typing.Any]", "")  # each has its types
                assert text is not Any and "typing.Any" not in said, f"{name}.{part}: {text}"


def defaults() -> Iterator[tuple[str, str]]:
    """Yields each argument of what is public that may be left out, and what it is then."""
    for name, value in EVERY.items():
        parts = {"": value}
        if inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isroutine)
            parts |= {f".{n}": part for n, part in methods if n[0] != "_" and n in vars(value)}
        for part, function in parts.items():
            try:
                parameters = inspect.signature(function).parameters.values()
            except (TypeError, ValueError):  # of an alias of types
                continue
            for parameter in parameters:
                if parameter.default not in (inspect.Parameter.empty, None):
                    default = re.sub(r" at 0x\w+", "", repr(parameter.default))
                    yield f"{name}{part}({parameter.name})", default


def test_what_may_be_left_out_is_what_it_was() -> None:
    """Other values change what users get who say nothing; change both where that is meant."""
    recorded = ROOT / "tests" / "golden" / "defaults.json"
    assert dict(defaults()) == json.loads(recorded.read_text())


@pytest.mark.parametrize("name", ["append_block_ids", "expand_blocks"])
def test_functions_that_are_jitted_can_be_lowered_and_traced(name: str) -> None:
    function = getattr(jaxkv, name)
    assert callable(function.lower) and callable(function.trace)
    if name == "expand_blocks":
        ids = jax.ShapeDtypeStruct((3,), jnp.int32)
        assert function.lower(ids, blocks_per_kv_block=2).compile().out_info.shape == (6,)
        assert function.trace(ids, blocks_per_kv_block=2).jaxpr.out_avals[0].shape == (6,)


# --- what is loaded -------------------------------------------------------------------


def run(code: str) -> list[str]:
    """The words that code prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_import_loads_nothing_and_planning_loads_no_jax() -> None:
    code = """if True:
        import sys
        def loaded():
            names = ("jax", "jaxlib", "numpy", "matplotlib", "hypothesis", "chex", "tqdm")
            print("-".join(name for name in names if name in sys.modules) or "nothing")
        import jaxkv
        rooms = [name for name in sys.modules if name.startswith("jaxkv.")]
        dir(jaxkv), loaded()
        spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)
        plan = jaxkv.plan_cache({"a": spec}, 2**20, max_model_len=64)
        shape = jaxkv.StepShape.for_plan(plan, max_requests=1, max_tokens=8)
        manager = jaxkv.BlockManager(plan, max_requests=1)
        manager.start("r")
        manager.step(shape, {"r": 8})
        jaxkv.Scheduler, loaded()
        jaxkv.attend, loaded()
        print(len(rooms))
    """
    at_import, without_jax, with_jax, rooms = run(code)
    assert (at_import, without_jax, rooms) == ("nothing", "numpy", "0")
    assert with_jax == "jax-jaxlib-numpy"


# --- the first example ----------------------------------------------------------------


def test_one_token_is_served_in_few_lines_calls_and_arguments() -> None:
    tree = ast.parse(EXAMPLE)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert sum(bool(line.strip()) for line in EXAMPLE.splitlines()) <= 18
    assert len(calls) <= 13
    assert sum(len(call.args) + len(call.keywords) for call in calls) <= 30
    served: dict[str, Any] = {}
    exec(EXAMPLE, served)
    jaxkv.check_errors(served["cache"])
    assert_means_of_ones(served["out"], 1)


def test_an_idle_upload_compiles_what_serving_runs() -> None:
    served: dict[str, Any] = {}
    exec(EXAMPLE.partition("manager.start")[0], served)
    rows, manager, shape = jnp.ones((64, 2, 64)), served["manager"], served["shape"]
    cache, out = served["step"](served["cache"], shape.idle(), rows, rows, rows)
    assert_means_of_ones(out, 0)
    manager.start("a")
    uploads = {count: manager.step(shape, {"a": count}) for count in (40, 1, 7)}
    with assert_no_recompilation():
        outs = {}
        for count, upload in uploads.items():
            cache, outs[count] = served["step"](cache, upload, rows, rows, rows)
    for count, out in outs.items():
        assert_means_of_ones(out, count)


def assert_means_of_ones(out: jax.Array, count: int) -> None:
    """The first rows are sums of up to 64 equal weights over their sum; the rest is padding."""
    np.testing.assert_allclose(out[:count], 1, rtol=2 * 64 * 2.0**-24)
    assert not np.asarray(out)[count:].any()


# --- a fresh state is zero ------------------------------------------------------------

KV = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)


@pytest.mark.parametrize("cache_mode", ["none", "align", "all"])
@pytest.mark.parametrize("others", [{}, {"kv": KV}], ids=["states only", "hybrid"])
def test_a_fresh_state_is_zero_whatever_its_block_held(others, cache_mode) -> None:
    """Nothing is zeroed here: it holds by the read alone, from the first request on."""
    spec = jaxkv.StateSpec(block_size=4, shapes=((2, 3),), dtypes=("f32",), cache_mode=cache_mode)
    plan = planned({"state": spec, **others}, zero_policy="never")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=8)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    cache = jaxkv.make_cache(plan, max_requests=2)
    poisoned = tuple(jnp.full_like(buffer, 0xFF) for buffer in cache.buffers)
    cache = dataclasses.replace(cache, buffers=poisoned)

    @jax.jit
    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        (state,) = jaxkv.read_state(cache, "state", batch)
        return jaxkv.write_state(cache, "state", batch, [state + 1]), state

    for life in range(8):  # blocks come round
        manager.start(life)
        for turn in range(3):
            cache, state = step(cache, manager.step(shape, {life: 2}))
            assert np.unique(np.asarray(state)[0]).tolist() == [turn], (life, turn)
            assert not np.asarray(state)[1:].any(), "padding"
        manager.finish(life)
    jaxkv.check_errors(cache)
