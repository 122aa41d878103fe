"""One cache over several processes: what each holds and serves, and how they find out drift.

`tests.hosts` is the program that they run, with one device each: GPUs where there are enough.
"""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxkv._src.step import broadcast_upload, check_same_upload
from jaxkv._src.step._processes import _describe, _Exchange, _summary
from jaxkv._src.uploads import StepShape
from jaxkv.testing import assert_no_recompilation
from tests.hosts import HEARTBEAT_S, WRONG, make_mesh
from tests.hosts.demo import demo_engine, serve_demo, tokens_of
from tests.hosts.engine import Engine, Report
from tests.hosts.processes import ROOT, TIMEOUT_S, Scene, num_gpus
from tests.hosts.small import generate, serve_small, small_plan

two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="compares with two devices of one")


@pytest.fixture(scope="module", autouse=True)
def killed(tmp_path_factory) -> Iterator[Scene]:
    """Started first, because it mostly waits."""
    scene = Scene.start("death", 2, tmp_path_factory.mktemp("death"))
    yield scene
    scene.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> list[Any]:
    """Four processes, or two where there are GPUs for no more; every two serve together."""
    count = 2 if num_gpus() in (2, 3) else 4
    return Scene.start("serve", count, tmp_path_factory.mktemp("serve")).results()


@functools.cache
def one_engine() -> Engine:
    return demo_engine(make_mesh((1,), ("context",)), "context")


def by_one_device(seed: int) -> dict[str, Any]:
    engine = one_engine()
    engine.report = Report()
    return serve_demo(engine, seed, lambda step: step)


# --- the same as one device -----------------------------------------------------------


@pytest.mark.parametrize(("how", "seed", "count"), [("compared", 0, 2), ("broadcast", 1, 1)])
def test_processes_serve_the_tokens_of_one_device(how, seed, count, served) -> None:
    """By position with a scheduler in each, and by head with one that packs for both."""
    expected = by_one_device(seed)
    results = [result[how] for result in served if "logits" in result.get(how, ())]
    assert len(results) == count and len(expected["logits"]) == 6
    for result in results:
        assert tokens_of(result) == tokens_of(expected)
        for name, rows in result["logits"].items():
            np.testing.assert_allclose(rows, expected["logits"][name], rtol=0, atol=1e-4)


def test_an_engine_in_each_of_two_processes_draws_the_tokens_of_one_device(served) -> None:
    wanted = generate(make_mesh((1,), ("heads",)))
    assert [result["engine"] for result in served[:2]] == [wanted] * 2


@two_devices
def test_each_process_holds_its_own_parts_of_the_cache_and_no_others(served) -> None:
    """After forks, copies, zeroed blocks and naps, under explicit axes.

    Every two processes are a replica, with a block manager and steps of its own.
    """
    for replica in range(len(served) // 2):
        assert_parts([result["small"] for result in served[2 * replica :][:2]], replica)


def assert_parts(results: list[dict[str, Any]], replica: int) -> None:
    """Process i holds the i-th part of what one process holds, bit by bit.

    Attention is as close as sums in float32 are; the processes may be on other devices.
    """
    mesh = make_mesh((2,), ("heads",), AxisType.Explicit)
    whole = serve_small(mesh, replica, nap=replica == 0)
    for kind in ("outs", "cache"):
        for index, result in enumerate(results):
            assert len(result[kind]) == len(whole[kind]) > 3
            for own, parts in zip(result[kind], whole[kind], strict=True):
                assert list(own) == [index], "a part of another process"
                atol = 1e-5 if kind == "outs" else 0
                np.testing.assert_allclose(own[index], parts[index], rtol=0, atol=atol)


def test_nothing_compiles_after_warm_up_in_any_process(served) -> None:
    ways = [result[how] for result in served for how in ("compared", "broadcast") if how in result]
    assert len(ways) == 4
    for way in ways:
        assert way["compiled"] == [] and way["steps"] > 10
    assert [result["small"]["programs"] for result in served] == [1] * len(served)


# --- drift ----------------------------------------------------------------------------


def test_uploads_that_differ_are_found_in_their_step_by_all_processes(served) -> None:
    """Content in step 4 and shape in step 7, in one process; the next check finds no fault."""
    for result in served[:2]:
        (fourth, content), (seventh, shape) = result["planted"]
        assert (fourth, seventh) == (4, 7)
        assert content.startswith("the uploads of this step differ: process 0 has number 4;")
        assert f"process {WRONG} has number 4, of other content" in content
        assert f"process {WRONG} has one without a number, of another shape" in shape
        assert content.count("content") == shape.count("another shape") == 1


def test_shapes_of_one_size_are_told_apart() -> None:
    shape = small_shape(8)
    other = dataclasses.replace(shape, max_seq_len=shape.max_seq_len - 1)
    one, two = (_summary(each.idle()).tolist() for each in (shape, other))
    assert shape.format.size == other.format.size
    assert _describe(two, one) == "one without a number, of another shape"
    assert _describe(one, one) == "one without a number"


def test_the_same_calls_give_the_same_uploads_whatever_strings_hash_to() -> None:
    """To the byte: forks, drafts, preemption, windows and states, with names that are strings."""
    command = [sys.executable, "-m", "tests.upload_trace"]
    both = [
        subprocess.Popen(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, cwd=ROOT, stdout=subprocess.PIPE
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=TIMEOUT_S)[0] for process in both)
    assert one == other and len(set(one.splitlines())) == 5


def test_a_process_without_a_device_of_the_mesh_is_refused(served) -> None:
    for index, result in enumerate(served):
        assert len(result["refused"]) == 3
        told = f"no device of the mesh belongs to process {index}"
        assert all(message.startswith(told) for message in result["refused"])


def test_only_the_first_process_of_a_mesh_may_broadcast(served) -> None:
    other, first = len(served) - 1, len(served) - 2
    told = f"process {other} passed an upload, but process {first} packs for this mesh; pass None"
    assert served[other]["refused upload"] == f"{told} here"


def test_a_mesh_of_one_process_exchanges_nothing() -> None:
    mesh, shape, other = make_mesh((1,), ("heads",)), small_shape(8), small_shape(4)
    upload = shape.idle()
    with assert_no_recompilation():
        check_same_upload(upload, mesh)
        for sent in (upload, other.idle()):  # also one that is smaller than the message
            received = broadcast_upload(sent, [other, shape], mesh)
            assert received is not None and received.shape == sent.shape
            np.testing.assert_array_equal(received.data, sent.data)
        assert broadcast_upload(None, [shape], mesh) is None
    with pytest.raises(ValueError, match=r"shape StepShape\(.*\), which is not one of shapes=\["):
        broadcast_upload(upload, [other], mesh)
    with pytest.raises(ValueError, match="shapes is empty; pass every shape that an upload may"):
        broadcast_upload(upload, [], mesh)
    for call, told in (
        (lambda: check_same_upload(None, mesh), "upload must be what BlockManager.step returned"),
        (lambda: check_same_upload(upload, None), "mesh must be a jax.sharding.Mesh, got NoneType"),
        (lambda: broadcast_upload(3, [shape], mesh), "upload must be what BlockManager.step"),
        (lambda: broadcast_upload(upload, [shape, 8], mesh), r"shapes\[1\] must be a StepShape"),
        (lambda: broadcast_upload(upload, [shape], None), "mesh must be a jax.sharding.Mesh"),
    ):
        with pytest.raises(TypeError, match=told):
            call()


@two_devices
def test_a_process_exchanges_by_its_own_device_of_the_mesh() -> None:
    exchange = _Exchange(Mesh(np.array(jax.devices()[1:2]), ("heads",)))
    row = np.arange(3, dtype=np.int32)
    np.testing.assert_array_equal(exchange.gather(row), row[None])
    np.testing.assert_array_equal(exchange.sum(row), row)


def small_shape(max_tokens: int) -> StepShape:
    return StepShape.for_plan(small_plan(2), max_requests=4, max_tokens=max_tokens)


# --- death ----------------------------------------------------------------------------


def test_when_a_process_is_killed_the_others_say_so_and_end(killed) -> None:
    """A compare or a step fails at once on a CPU; all ends once heartbeats are missed."""
    survivor, victim = killed.end()
    assert victim == -signal.SIGKILL
    assert survivor not in (0, -signal.SIGKILL)
    log = (killed.folder / "0.log").read_text()
    assert "another task died" in log
    if num_gpus() >= 2:  # the collectives of GPUs wait until jax ends the process
        return
    seen = killed.result(0)
    for name in ("check_same_upload", "step", "check_errors", "sleep"):
        seconds, said = seen[name]
        assert said and seconds < HEARTBEAT_S, name
    assert seen["check_same_upload"][1].startswith(
        "RuntimeError: processes [0, 1] could not exchange an upload; if one of them has ended"
    )
