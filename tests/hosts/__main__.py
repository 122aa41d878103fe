"""One process of a scene: ``python -m tests.hosts SCENE INDEX COUNT PORT FOLDER``."""

import functools
import os
import pathlib
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxkv
from tests.hosts import HEARTBEAT_S, WRONG, make_mesh
from tests.hosts.demo import broadcasting, checked, demo_engine, receive, serve_demo
from tests.hosts.small import TOKENS, generate, serve_small, small_plan


def serve(index: int) -> dict[str, Any]:
    """Replicas of two processes, each with a block manager of its own.

    Then each process of the first has a scheduler, and of the last the first process alone.
    """
    count, replica = jax.process_count(), index // 2
    replicas = make_mesh((count // 2, 2), ("data", "heads")).devices
    mesh = Mesh(replicas[replica], ("heads",), axis_types=(AxisType.Explicit,))
    result: dict[str, Any] = {"small": serve_small(mesh, replica, nap=replica == 0)}
    result["refused"] = refusals(Mesh(np.delete(replicas, index), ("heads",)))
    if replica == 0:
        result["engine"] = generate(mesh)
        context, result["planted"] = make_mesh((2,), ("context",)), []
        compared = functools.partial(checked, context, index == WRONG, result["planted"])
        result["compared"] = serve_demo(demo_engine(context, "context"), 0, compared)
    if replica == count // 2 - 1:
        result |= serve_by_one(Mesh(replicas[replica], ("heads",)), index)
    return result


def serve_by_one(mesh: Mesh, index: int) -> dict[str, Any]:
    """The first process of a mesh packs for all of its processes."""
    engine = demo_engine(mesh, "heads")
    decode, mixed = shapes = engine.shapes
    turned = Mesh(mesh.devices[::-1], mesh.axis_names)  # the other process is its first
    sent = jaxkv.step.broadcast_upload(mixed.idle() if index % 2 else None, shapes, turned)
    assert sent is not None and sent.shape == mixed
    engine.shapes = (mixed, mixed)  # of which one program is enough
    if index % 2 == 0:
        broadcast = functools.partial(broadcasting, shapes, mesh)
        result: dict[str, Any] = {"broadcast": serve_demo(engine, 1, broadcast)}
        jaxkv.step.broadcast_upload(decode.idle(), shapes, mesh)
        assert jaxkv.step.broadcast_upload(None, shapes, mesh) is None
        return result
    try:
        jaxkv.step.broadcast_upload(mixed.idle(), shapes, mesh)
    except ValueError as error:
        result = {"refused upload": str(error)}
    result["broadcast"] = receive(engine, shapes, mesh)
    assert result["broadcast"]["others"] == [decode]
    return result


def refusals(mesh: Mesh) -> list[str]:
    """Messages to a process that has no device of a mesh."""
    said, plan = [], small_plan(2)
    upload = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=TOKENS).idle()
    for call in (
        lambda: jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads"),
        lambda: jaxkv.step.check_same_upload(upload, mesh),
        lambda: jaxkv.step.broadcast_upload(None, [upload.shape], mesh),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def death(index: int, victim: int, save: Callable[[Any], None]) -> None:
    """One of two processes is killed; the other tries everything, and waits for its own end."""
    mesh = make_mesh((2,), ("heads",))
    plan = small_plan(2)
    cache = jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=TOKENS)
    manager = jaxkv.BlockManager(plan, max_requests=4)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        keys, _ = jaxkv.read_tokens(cache, "full", batch)
        return cache, keys.sum()  # over all heads, which the processes add up

    manager.start("a")
    for _ in range(2):
        cache, out = run(cache, manager.step(shape, {"a": 3}))
        np.asarray(out)
    upload = manager.step(shape, {"a": 3})
    jaxkv.step.check_same_upload(upload, mesh)
    if index == victim:
        print("killed at", time.strftime("%H:%M:%S"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    seen: dict[str, tuple[float, str]] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            call()
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seen[name] = time.monotonic() - started, said
        save(seen)

    def step() -> None:
        nonlocal cache
        cache, out = run(cache, upload)
        np.asarray(out)

    attempt("check_same_upload", lambda: jaxkv.step.check_same_upload(upload, mesh))
    attempt("step", step)
    attempt("check_errors", lambda: jaxkv.check_errors(cache))
    attempt("sleep", lambda: jaxkv.sleep(cache))
    time.sleep(300)  # jax ends the process before


def play(scene: str, index: int, count: int, port: int, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        index,
        heartbeat_timeout_seconds=HEARTBEAT_S if scene == "death" else 100,
        cluster_detection_method="deactivate",
    )

    def save(result: Any) -> None:
        (pathlib.Path(folder) / f"{index}.pickle").write_bytes(pickle.dumps(result))

    if scene == "death":
        death(index, count - 1, save)
    save(serve(index))


if __name__ == "__main__":
    play(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
