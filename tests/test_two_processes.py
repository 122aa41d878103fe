"""Processes and caches that step asynchronously side by side see their own ids only.

Each stream of steps hands out ids of its own kind, dispatches without ever waiting, and
reads all that came back at the end. A host buffer that is used again too early shows up
as an id of another step or another stream.
"""

import os
import subprocess
import sys

import numpy as np

from jaxkv.block_tables import check_overflow, make_block_tables
from jaxkv.blocks import TableUpdate
from jaxkv.planning import Plan, plan_cache
from jaxkv.specs import FullAttentionSpec
from jaxkv.step import StepShape, apply_step_donating, pack_step

ROWS, STEPS, STREAMS = 4, 200, 3


def make_plan() -> Plan:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)
    return plan_cache({"layer": spec}, 2**30, max_model_len=64, num_blocks_override=2**20)


def run_streams(process: int) -> None:
    """Interleaves the streams of one process; raises where one saw a foreign id."""
    plan = make_plan()
    tables = [make_block_tables(plan, max_requests=ROWS) for _ in range(STREAMS)]
    shape = StepShape(
        entries=ROWS, block_ids=ROWS, zero_ids=0, batch=ROWS, tokens=ROWS, widths=(1,)
    )
    seen = []
    for step in range(STEPS):
        for stream in range(STREAMS):
            ids = own_ids(process, stream, step)
            entries = [(row, ([int(block_id)],), True) for row, block_id in enumerate(ids)]
            upload = pack_step(
                shape,
                update=TableUpdate(entries, ((),)),
                rows=range(ROWS),
                first_positions=[0] * ROWS,
                lengths=[1] * ROWS,
            )
            tables[stream], _, batch = apply_step_donating(
                tables[stream], None, upload, shape=shape
            )
            seen.append((process, stream, step, batch))
    for process, stream, step, batch in seen:
        expected = own_ids(process, stream, step)
        np.testing.assert_array_equal(batch.block_tables[0][:, 0], expected)
        np.testing.assert_array_equal(batch.slots[0], expected * 16)
    for state in tables:
        check_overflow(state)


def own_ids(process: int, stream: int, step: int) -> np.ndarray:
    """Ids that no other process, stream or step hands out."""
    return 1 + ((process * STREAMS + stream) * STEPS + step) * ROWS + np.arange(ROWS)


def test_processes_and_streams_never_see_each_other_s_ids() -> None:
    environment = {**os.environ, "XLA_CLIENT_MEM_FRACTION": "0.1"}
    command = [sys.executable, "-m", "tests.test_two_processes"]
    workers = [subprocess.Popen([*command, str(process)], env=environment) for process in range(2)]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]


if __name__ == "__main__":
    run_streams(int(sys.argv[1]))
