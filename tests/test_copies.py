"""Copies and pickles: of descriptions they are equal, of what owns memory they are refused."""

import copy
import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from tests.test_engine_recovery import small_engine, small_plan

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


@functools.cache
def things() -> dict[str, tuple[Any, str | None]]:
    """Returns objects, and what the refusal of a copy says; None: the copy is equal."""
    plan = small_plan()
    manager = jaxkv.BlockManager(plan, max_requests=2)
    cache = jaxkv.make_cache(plan, max_requests=2)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=4)
    asleep = jaxkv.sleep(jaxkv.make_cache(plan, max_requests=2))
    state = jaxkv.StateSpec(block_size=4, shapes=((1, 4, 1),), dtypes=("f32",))
    return {
        "plan": (plan, None),
        "spec": (plan.groups[0].specs[0], None),
        "state spec": (state, None),
        "sampling": (jaxkv.Sampling(max_tokens=3, stop_token_ids=[1]), None),
        "step shape": (shape, None),
        "layout": (cache.layout, None),
        "manager": (manager, "from the plan"),
        "scheduler": (jaxkv.Scheduler(manager, max_tokens=4), "add the requests again"),
        "engine": (small_engine(), "make another"),
        "host blocks": (jaxkv.HostBlocks(), "make another"),
        "sleeping cache": (asleep, "wake_up"),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", things())
def test_a_copy_is_equal_or_refused(name: str, way: str) -> None:
    thing, refusal = things()[name]
    if refusal is None:
        made = WAYS[way](thing)
        assert made == thing and hash(made) == hash(thing)
    else:
        with pytest.raises(TypeError, match=f"cannot be copied or pickled: .*{refusal}"):
            WAYS[way](thing)


def test_a_cache_is_copied_and_not_pickled() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    for options in ({}, {"mesh": mesh, "axis": "x"}):
        cache: Any = jaxkv.make_cache(small_plan(), max_requests=2, **options)
        assert copy.copy(cache).rows is cache.rows
        deep = copy.deepcopy(cache)
        jax.tree.map(lambda array: array.delete(), cache)
        assert deep.layout == cache.layout and not np.asarray(deep.rows).any()
        with pytest.raises(TypeError, match="make_cache in the other process"):
            pickle.dumps(deep)


def test_an_upload_is_a_pytree_before_anything_else_of_this_library_needs_jax() -> None:
    script = """
import jaxkv, sys
assert "jax" not in sys.modules
spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
plan = jaxkv.plan_cache({"a": spec}, 2**20, max_model_len=16)
shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=4)
manager = jaxkv.BlockManager(plan, max_requests=2)
manager.start("r")
manager.step(shape, {"r": 1})
assert "jax" not in sys.modules
import jax
upload = jax.jit(lambda upload: upload)(manager.step(shape, {"r": 1}))
assert upload.shape == shape and "jaxkv._src.cache" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
