"""Times a step of two processes, and what keeps its upload the same in both."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jaxkv
from tests.hosts import make_mesh


def costs(index: int) -> dict[str, float]:
    """Microseconds of a step of 256 decodes, and of what keeps its upload the same everywhere."""
    mesh, requests = make_mesh((2,), ("heads",)), 256
    plan = jaxkv.plan_cache(
        {"layer": jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64)},
        2**40,
        max_model_len=2048,
        num_blocks_override=2**15,
    )
    shape = jaxkv.StepShape.for_plan(plan, max_requests=requests, max_tokens=requests)
    manager = jaxkv.BlockManager(plan, max_requests=requests)
    cache = jaxkv.make_cache(plan, max_requests=requests, mesh=mesh, axis="heads")
    run = jax.jit(jaxkv.apply_step, donate_argnums=0)
    for name in range(requests):
        manager.start(name)
    work = dict.fromkeys(range(requests), 1)

    def step(share: Callable[[jaxkv.blocks.Upload], jaxkv.blocks.Upload | None]) -> None:
        nonlocal cache
        upload = share(manager.step(shape, work))
        cache, batch = run(cache, upload)
        jax.block_until_ready(batch)

    def compared(mesh: Mesh, upload: jaxkv.blocks.Upload) -> jaxkv.blocks.Upload:
        jaxkv.step.check_same_upload(upload, mesh)
        return upload

    def packed_by_one(mesh: Mesh, upload: jaxkv.blocks.Upload) -> jaxkv.blocks.Upload | None:
        return jaxkv.step.broadcast_upload(upload if index == 0 else None, [shape], mesh)

    def by_jax(upload: jaxkv.blocks.Upload) -> jaxkv.blocks.Upload:
        data = multihost_utils.broadcast_one_to_all(upload.data)
        return dataclasses.replace(upload, data=data)

    ways = {"a step alone": lambda upload: upload}
    meshes = {"": mesh}
    if jax.default_backend() != "cpu":
        meshes[" over CPUs"] = Mesh(np.array(jax.devices("cpu")), ("hosts",))
    for where, used in meshes.items():
        ways["with check_same_upload" + where] = functools.partial(compared, used)
        ways["with broadcast_upload" + where] = functools.partial(packed_by_one, used)
    ways["with multihost_utils.broadcast_one_to_all"] = by_jax
    figures = {"int32s of an upload": float(shape.format.size)}
    for name, share in ways.items():
        seconds = []
        for _ in range(110):
            started = time.perf_counter()
            step(share)
            seconds.append(time.perf_counter() - started)
        figures[name] = 1e6 * statistics.median(seconds[10:])
    jaxkv.check_errors(cache)
    return figures
