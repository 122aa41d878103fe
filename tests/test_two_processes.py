"""Processes and caches that step asynchronously side by side see their own ids only.

Each stream of steps hands out ids of its own, dispatches without ever waiting, and reads all
that came back at the end. A host buffer that is used again too early shows up as an id of
another step or another stream.
"""

import os
import subprocess
import sys

import jax
import numpy as np

import jaxkv

REQUESTS, STEPS, STREAMS, BLOCK = 4, 200, 3, 16


def run_streams(process: int) -> None:
    """Interleaves the streams of one process; raises where one saw another's id.

    The first stream packs every upload into a fresh array, the others into a ring.
    """
    spec = jaxkv.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8)
    plan = jaxkv.plan_cache({"layer": spec}, 2**30, max_model_len=BLOCK, num_blocks_override=2**20)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=REQUESTS)
    caches = [
        jaxkv.make_cache(plan, max_requests=REQUESTS, tables_only=True) for _ in range(STREAMS)
    ]
    rings = [None, *(jaxkv.UploadRing(depth=depth) for depth in range(2, STREAMS + 1))]
    step = jax.jit(ids_and_slots, donate_argnums=0)
    seen = []
    for number in range(STEPS):
        for stream, ring in enumerate(rings):
            upload = packed(shape, own_ids(process, stream, number))
            if ring is not None:
                ring.buffer(shape)[:] = upload.data
                upload = jaxkv.blocks.Upload(data=ring.flush(), shape=shape)
            caches[stream], *arrays = step(caches[stream], upload)
            seen.append((own_ids(process, stream, number), *arrays))
    for expected, ids, slots in seen:
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(slots, expected * BLOCK)
    for cache in caches:
        jaxkv.check_errors(cache)


def ids_and_slots(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    return cache, batch.kernel_block_tables("layer")[:, 0], batch.slot_mapping("layer")


def packed(shape: jaxkv.StepShape, ids: np.ndarray) -> jaxkv.blocks.Upload:
    """An upload that replaces the only block of every request."""
    return jaxkv.pack_step(
        shape,
        entries=[jaxkv.TableEntry(row, [[block_id]]) for row, block_id in enumerate(ids)],
        rows=range(REQUESTS),
        num_computed_tokens=[0] * REQUESTS,
        num_new_tokens=[1] * REQUESTS,
    )


def own_ids(process: int, stream: int, step: int) -> np.ndarray:
    """Ids that no other process, stream or step hands out."""
    first = ((process * STREAMS + stream) * STEPS + step) * REQUESTS
    return 1 + first + np.arange(REQUESTS)


def test_processes_and_streams_never_see_each_other_s_ids() -> None:
    environment = {**os.environ, "XLA_CLIENT_MEM_FRACTION": "0.1"}
    command = [sys.executable, "-m", "tests.test_two_processes"]
    workers = [subprocess.Popen([*command, str(process)], env=environment) for process in range(2)]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]


if __name__ == "__main__":
    run_streams(int(sys.argv[1]))
