"""A pool sharded by KV head over all devices: the same bytes on each, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import copy_blocks, zero_blocks
from tests.benchmarks.timing import ON_GPU, Report, Times, measure
from tests.benchmarks.vllm_peer import VllmPeer

BUFFERS, BLOCKS, PAGE, IDS = (32, 2048, 65536, 256) if ON_GPU else (4, 64, 65536, 8)
PAGES = PartitionSpec(None, "heads")


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer
    report.title("Sharded by KV head with shard_map: as many bytes on each device")
    for name, function, passes in (
        ("zeroing", _zero, 1),
        ("copies", functools.partial(copy_blocks, disjoint=True), 2),
    ):
        num_bytes = passes * BUFFERS * IDS * PAGE
        alone = None
        for count in [n for n in (1, 2, 4, 8) if n <= len(jax.devices())]:
            times = time_on(count, function)
            # The profiler sees all devices: what one of them was busy for is a share of it.
            if times.kernels is not None:
                times = Times(times.kernels / count, times.launches, times.synced, times.dispatched)
            times = report.add(
                f"{name} on {count}", "jaxkv", times, num_bytes=num_bytes, base=alone
            )
            alone = alone or times


def _zero(buffers, ids, _):
    return zero_blocks(buffers, ids)


def time_on(count: int, function) -> Times:
    mesh = Mesh(np.array(jax.devices()[:count]), ("heads",))
    sharded, replicated = NamedSharding(mesh, PAGES), PartitionSpec()
    make = jax.jit(
        lambda: [jnp.ones((BLOCKS, count * PAGE), jnp.uint8) for _ in range(BUFFERS)],
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
    ids = np.random.default_rng(0).permutation(np.arange(1, BLOCKS, dtype=np.int32))
    listed = [
        jax.device_put(part, NamedSharding(mesh, replicated)) for part in (ids[:IDS], ids[-IDS:])
    ]
    buffers = make()

    def call():
        nonlocal buffers
        buffers = step(buffers, *listed)
        return buffers

    return measure(call)
