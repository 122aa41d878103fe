"""Tokens of requests of a trace, each served alone and among the others, in float32.

    python -m tests.benchmarks.served.alone CONFIG.json RESULTS.json WORKLOADS

In a process of its own, like both engines; WORKLOADS are traces.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tests.benchmarks.served import workloads
from tests.benchmarks.served.jaxkv_engine import Server
from tests.benchmarks.served.workloads import Request, Trace

DTYPE = {"torch_dtype": "float32"}
SAMPLE = 6  # requests that are served alone
POOL = 20 * 2**30  # what the trace fills, because attention in float32 takes memory beside it
TRACE = Trace(60, (256, 768), (128, 384))


def run(config: Mapping[str, Any], trace: Trace, **sizes: Any) -> dict[str, int]:
    """Returns how many requests were served alone, their tokens, and how many tokens were equal.

    Args:
      trace: served at once.
      sizes: as for `Server`.
    """
    server = Server({**config, **DTYPE}, **sizes)
    requests = workloads.requests(trace, server.vocab)
    among = _answers(server, requests)
    found = {"requests": 0, "tokens": 0, "equal": 0}
    for number in range(0, len(requests), max(len(requests) // SAMPLE, 1)):
        (alone,) = _answers(server, [requests[number]])
        found["requests"] += 1
        found["tokens"] += len(alone)
        found["equal"] += sum(map(int.__eq__, alone, among[number]))
    return found


def _answers(server: Server, requests: Sequence[Request]) -> list[list[int]]:
    server.engine.update(server.params)  # no prefix of an earlier call is found
    return server.generate(requests)


def main(config: str, results: str, chosen: str) -> None:
    """Serves the traces, and writes what was equal."""
    jax.config.update("jax_default_matmul_precision", "highest")
    read = json.loads(pathlib.Path(config).read_text())
    found = {
        f"alone, {workloads.name_of(trace)}": run(
            read, trace, max_requests=60, max_tokens=2048, memory_bytes=POOL
        )
        for trace in workloads.load(chosen)
        if isinstance(trace, Trace)
    }
    pathlib.Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
