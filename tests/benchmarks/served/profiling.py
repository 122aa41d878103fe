"""Decode steps by the GPU's record of its kernels: where their time goes."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jaxkv
from tests.benchmarks import timing
from tests.benchmarks.served import workloads
from tests.benchmarks.served.workloads import Decode
from tests.benchmarks.timing import KernelEvent

STEPS = 16
# Kind of work -> parts of the names of its kernels; the first kind that fits is counted.
KINDS = {
    "collectives": ("nccl", "all_reduce", "all-reduce", "all_gather", "all-gather"),
    "combine": ("_combine",),
    "attention": ("paged_attention",),
    "recurrent": ("recurrent_", "causal_conv1d"),
    "writes": ("write_", "copy_blocks", "zero_blocks"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "copies": ("memcpy", "memset"),
}


def run(server: Any, workload: Decode) -> dict[str, float]:
    """Returns the microseconds of a decode step by kind of work, and the bytes that it reads.

    Of one device if there are several. "host" is what the host computes before it waits.
    """
    workload = workload._replace(steps=max(workload.steps, 2 * STEPS))
    for prompt in workloads.prompts(workload, server.vocab):
        server.add(prompt, workload.steps)
    while sum(server.step().values()) < workload.requests:
        pass
    for _ in range(workload.steps // 2 - STEPS // 2):  # to the length that the workload names
        server.step()
    host = [_host_seconds(server) for _ in range(STEPS)]
    events = timing.gpu_events(server.step, lambda last: None, STEPS, device="0")
    while server.has_work:
        server.step()
    layers = server.decoder.layers
    num_attention = sum(not isinstance(spec, jaxkv.StateSpec) for spec in layers.values())
    found = by_kind(events, num_attention)
    found |= {"host": 1e6 * statistics.median(host)}
    return found | {"MB read": bytes_read(server, workload) / 1e6}


def _host_seconds(server: Any) -> float:
    """Runs a step, and returns the seconds until the host waits for the one before it."""
    calls, started = server.engine._calls, time.perf_counter()
    waited: list[float] = []
    collect = calls._collect
    calls._collect = lambda num_left: waited.append(time.perf_counter()) or collect(num_left)
    try:
        server.step()
    finally:
        del calls._collect
    return waited[0] - started


def by_kind(events: Sequence[KernelEvent], num_attention: int) -> dict[str, float]:
    """Returns the microseconds of a step by kind of work; "gaps" are those without a kernel.

    Args:
      events: of some decode steps, in order.
      num_attention: attention layers; each runs one decode kernel in a step.
    """
    steps = sum("attention" in name and "_decode" in name for name, _, _ in events) / num_attention
    if not steps:
        return {}
    found: dict[str, float] = dict.fromkeys([*KINDS, "rest of the model", "gaps"], 0.0)
    end = events[0].start_ns
    for name, start, duration in events:
        found[_kind(name)] += duration
        found["gaps"] += max(0.0, start - end)
        end = max(end, start + duration)
    return {kind: time / steps / 1e3 for kind, time in found.items()}


def bytes_read(server: Any, workload: Decode) -> int:
    """Returns the bytes of weights and cache that a decode step reads, and of states it writes."""
    decoder = server.decoder
    embedding = 0 if decoder.tied else server.embedding_bytes  # one row for each token
    found = server.weights_bytes - embedding
    for spec in decoder.layers.values():
        if isinstance(spec, jaxkv.StateSpec):
            found += 2 * spec.data_bytes * workload.requests
        else:
            first = int(spec.growth.first_visible(workload.length - 1))
            found += spec.token_bytes * (workload.length - first) * workload.requests
    return found


def _kind(name: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in name.lower() for part in parts):
            return kind
    return "rest of the model"
