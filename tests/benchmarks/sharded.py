"""Work on several devices against one, with as many bytes on each: kernels, and a whole step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv.blocks import StepShape
from jaxkv.planning import plan_cache
from jaxkv.specs import FullAttentionSpec
from pallas_kernels import copy_blocks, zero_blocks
from tests.benchmarks.timing import Report, Times, by_size, measure
from tests.benchmarks.vllm_peer import VllmPeer

PAGE = 65536
PAGES = PartitionSpec(None, "heads")
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)  # of each rank


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer
    buffers, _, ids = _sizes()
    report.title("Sharded by KV head with shard_map: as many bytes on each device")
    for name, function, passes in (
        ("zeroing", _zero, 1),
        ("copies", functools.partial(copy_blocks, disjoint=True), 2),
    ):
        times_on = functools.partial(time_kernel, function)
        _compare(report, name, times_on, passes * buffers * ids * PAGE)
    requests = by_size(full=256, small=16, smallest=4)
    name = f"{requests} decodes, fresh blocks zeroed"
    _compare(report, name, functools.partial(time_step, requests), 0)


def _sizes() -> tuple[int, int, int]:
    """Returns buffers, blocks of each, and ids of a call."""
    return by_size(full=(32, 2048, 256), small=(4, 64, 8), smallest=(2, 8, 2))


def _compare(report: Report, name: str, times_on, num_bytes: int) -> None:
    alone = None
    counts = by_size(full=(1, 2, 4, 8), small=(1, 2, 4, 8), smallest=(1, 2))
    for count in [n for n in counts if n <= len(jax.devices())]:
        times = times_on(count)
        # The profiler sees all devices: what one of them was busy for is a share of it.
        if times.kernels is not None:
            times = Times(times.kernels / count, times.launches, times.synced, times.dispatched)
        case = f"{name} on {count}"
        times = report.add(case, "jaxkv", times, num_bytes=num_bytes, base=alone)
        alone = alone or times


def _zero(buffers, ids, _):
    return zero_blocks(buffers, ids)


def _mesh(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("heads",))


def time_kernel(function, count: int) -> Times:
    """Times a kernel on buffers of which each device has as many bytes."""
    mesh, (num_buffers, blocks, num_ids) = _mesh(count), _sizes()
    sharded, replicated = NamedSharding(mesh, PAGES), PartitionSpec()
    make = jax.jit(
        lambda: [jnp.ones((blocks, count * PAGE), jnp.uint8) for _ in range(num_buffers)],
        out_shardings=sharded,
    )
    step = jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PAGES, replicated, replicated),
            out_specs=PAGES,
            check_vma=False,
        ),
        donate_argnums=0,
    )
    ids = np.random.default_rng(0).permutation(np.arange(1, blocks, dtype=np.int32))
    halves = (ids[:num_ids], ids[-num_ids:])
    listed = [jax.device_put(part, NamedSharding(mesh, replicated)) for part in halves]
    buffers = make()

    def call():
        nonlocal buffers
        buffers = step(buffers, *listed)
        return buffers

    return measure(call)


def time_step(requests: int, count: int) -> Times:
    """Times the table work of a step, and the zeroing of its fresh blocks, on a sharded cache."""
    plan = plan_cache(
        {f"layers.{i}": ATTENTION for i in range(_sizes()[0])},
        2**50,
        max_model_len=1024,
        num_blocks_override=22 * requests + 64,
        zero_policy="always",
    )
    cache = jaxkv.make_cache(plan, max_requests=requests, mesh=_mesh(count), axis="heads")
    manager = jaxkv.BlockManager(plan, max_requests=requests)
    shape = StepShape.for_plan(plan, max_requests=requests, max_tokens=requests)
    step = jax.jit(jaxkv.apply_step, donate_argnums=0)
    first = StepShape.for_plan(plan, max_requests=requests, batch_size=1, max_tokens=16)
    for name in range(requests):
        manager.start(name)
        if name % 16:  # so that a sixteenth of them begins a block in each step
            cache, _ = step(cache, manager.step(first, {name: name % 16}))
    work = dict.fromkeys(range(requests), 1)

    def call():
        nonlocal cache
        cache, batch = step(cache, manager.step(shape, work))
        return batch

    times = measure(call)
    jaxkv.check_errors(cache)
    return times
