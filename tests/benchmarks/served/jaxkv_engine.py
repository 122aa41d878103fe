"""`jaxkv.Engine` over the workloads, in a process of its own.

    python -m tests.benchmarks.served.jaxkv_engine CONFIG.json RESULTS.json WORKLOADS DTYPE GROUPS \
        DEVICES

DTYPE is the dtype of keys and values, or "", GROUPS ``shared_prefixes``, or "" for the default, and
DEVICES their number.
The weights are random. The results are a mapping from names of workloads to figures.
"""

import collections
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxkv
from tests.benchmarks.served import profiling, workloads
from tests.benchmarks.served.decoders import AXIS, Decoder
from tests.benchmarks.served.workloads import Decode, Prefill, Request, Trace

ROOM = 4 * 2**30  # beside weights and pool
MAX_LEN = 16_640


class Server:
    """An engine with a model, driven one step at a time.

    max_tokens: of a step.
    devices: over which the heads are divided.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        max_requests: int,
        max_tokens: int,
        kv_dtype: str | None = None,
        memory_bytes: int | None = None,
        max_model_len: int = MAX_LEN,
        host_memory: jaxkv.HostMemory | None = None,
        shared_prefixes: int | None = None,
        devices: int = 1,
    ):
        mesh = mesh_of(devices)
        self.decoder = Decoder.from_config(config, kv_dtype=kv_dtype, mesh=mesh)
        self.vocab = self.decoder.vocab
        params = self.decoder.init_params(jax.random.key(0), config["torch_dtype"])
        self.params = jax.block_until_ready(params)
        self.weights_bytes = sum(map(_bytes_of_one, jax.tree.leaves(params)))
        self.embedding_bytes = _bytes_of_one(params["embed"])
        if memory_bytes is None:
            limit = jax.devices()[0].memory_stats()["bytes_limit"]
            memory_bytes = limit - self.weights_bytes - ROOM
        plan = jaxkv.plan_cache(self.decoder.layers, memory_bytes, max_model_len=max_model_len)
        self.pool_bytes = sum(jaxkv.planning.pool_bytes(plan))
        self.engine = jaxkv.Engine(
            *(self.decoder.hidden_states, params, plan),
            head=self.decoder.head,
            cache=jaxkv.make_cache(plan, max_requests=max_requests, mesh=mesh, axis=mesh and AXIS),
            max_requests=max_requests,
            max_tokens=max_tokens,
            host_memory=host_memory,
            shared_prefixes=shared_prefixes,
        )
        self._count = 0

    def add(
        self, prompt: np.ndarray, tokens: int, samples: int = 1, prompt_logprobs: bool = False
    ) -> int:
        """Queues a request for samples of these numbers of tokens; a single one is greedy."""
        self._count += 1
        self.engine.add(self._count, prompt, sampling(tokens, samples, prompt_logprobs))
        return self._count

    def step(self) -> dict[int, int]:
        """Runs a step. Returns the number of new tokens of each request."""
        made: collections.Counter[int] = collections.Counter()
        for output in self.engine.step():
            made[output.request] += len(output.tokens)
        return made

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Answers requests that come at once. Returns the tokens of each sample."""
        each = [sampling(request.answer_tokens, request.samples) for request in requests]
        outputs = self.engine.generate([request.prompt for request in requests], each)
        return [output.tokens for output in sorted(outputs, key=lambda o: (o.request, o.sample))]

    @property
    def has_work(self) -> bool:
        return self.engine.has_work


def mesh_of(devices: int) -> Mesh | None:
    """Returns a mesh for a `Decoder`; None for one device."""
    auto, first = (AxisType.Auto,), jax.devices()[:devices]
    return jax.make_mesh((devices,), (AXIS,), auto, devices=first) if devices > 1 else None


def _bytes_of_one(array: jax.Array) -> int:
    """Returns the bytes of an array on each of its devices."""
    return array.addressable_shards[0].data.nbytes


def sampling(tokens: int, samples: int, prompt_logprobs: bool = False) -> jaxkv.Sampling:
    """Returns the sampling of a request: greedy, or samples at temperature 1 with logprobs."""
    has_many = samples > 1
    asked = {"logprobs": has_many, "prompt_logprobs": prompt_logprobs}
    return jaxkv.Sampling(max_tokens=tokens, n=samples, temperature=float(has_many), **asked)


def main(config: str, results: str, chosen: str, kv_dtype: str, groups: str, devices: str) -> None:
    """Serves the workloads, and writes the figures after each."""
    started = time.perf_counter()
    to_run = workloads.load(chosen)
    server = Server(
        json.loads(pathlib.Path(config).read_text()),
        max_requests=256,
        max_tokens=8192,
        kv_dtype=kv_dtype or None,
        shared_prefixes=int(groups) if groups else None,
        devices=int(devices),
    )
    most = max([w.samples for w in to_run if isinstance(w, Trace)], default=1)
    asks = any(isinstance(w, Prefill) and w.prompt_logprobs for w in to_run)
    server.engine.warm_up(sampling(1, most, prompt_logprobs=asks))
    workloads.run(server, Prefill(1, 64, repeats=1))
    found: dict[str, Any] = {"start": {"seconds": time.perf_counter() - started}}
    for workload in [None, *to_run]:
        if workload is not None:
            found[workloads.name_of(workload)] = workloads.run(server, workload)._asdict()
        pathlib.Path(results).write_text(json.dumps(found))
        print(*list(found.items())[-1], flush=True)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", 0)
    found["memory"] = {"beyond": peak - server.weights_bytes - server.pool_bytes}
    print("memory beyond weights and pool:", found["memory"], server.engine.stats, flush=True)
    for workload in to_run:  # last, because a profiled process is slower
        if isinstance(workload, Decode):
            name = f"profile of {workloads.name_of(workload)}"
            found[name] = profiling.run(server, workload)
            print(name, found[name], flush=True)
        pathlib.Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
