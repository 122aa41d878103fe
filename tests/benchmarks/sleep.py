"""Sleep and wake: bytes to the host and back, what is released, what it takes besides."""

import time
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.block_tables import make_block_tables
from jaxkv.planning import Plan, plan_cache
from jaxkv.pool import make_pool, make_sharded_pool
from jaxkv.sleep import KVCache, sleep, wake_up
from jaxkv.specs import FullAttentionSpec
from tests.benchmarks import timing
from tests.benchmarks.timing import ON_GPU, Report
from tests.benchmarks.vllm_peer import VllmPeer

GIB = 2**30 if ON_GPU else 2**22
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
ROUNDS = 3


def plan_of(num_bytes: int, layers: int) -> Plan:
    """A pool of so many bytes, in pages of 64 KiB."""
    blocks = num_bytes // (layers * ATTENTION.page_bytes)
    return plan_cache(
        {f"layers.{i}": ATTENTION for i in range(layers)},
        num_bytes,
        max_model_len=ATTENTION.block_size,
        num_blocks_override=blocks,
    )


def one_device(num_bytes: int, layers: int, stacked: bool) -> KVCache:
    plan = plan_of(num_bytes, layers)
    pool = make_pool(plan, stacked=stacked)
    return KVCache(pool=pool, tables=make_block_tables(plan, max_requests=256))


def two_devices(num_bytes: int, layers: int) -> KVCache:
    """As many bytes, half of them on each device."""
    plan = plan_of(num_bytes // 2, layers)
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    tables = make_block_tables(plan, max_requests=256, device=NamedSharding(mesh, PartitionSpec()))
    return KVCache(pool=make_sharded_pool(plan, mesh, "heads"), tables=tables)


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # its sleep needs its memory allocator
    if ON_GPU and timing.clock == "host":  # once is enough, on the pass that prints
        return
    report.title("Sleep and wake, GB/s of the host's clock: the first time, and after it")
    cases: dict[str, Callable[[], KVCache]] = {
        "8 GiB in 32 buffers": lambda: one_device(8 * GIB, 32, False),
        "8 GiB stacked": lambda: one_device(8 * GIB, 32, True),
        "32 GiB in 64 buffers": lambda: one_device(32 * GIB, 64, False),
    }
    if len(jax.devices()) > 1:  # first, for peaks are of the whole process
        cases = {"8 GiB over 2 devices": lambda: two_devices(8 * GIB, 32), **cases}
    for name, make in cases.items():
        _time(report, name.replace("GiB", "GiB" if ON_GPU else "x 4 MiB"), make())


def _time(report: Report, name: str, cache: KVCache) -> None:
    devices = jax.block_until_ready(cache).pool.buffers[0].devices()
    held, before = cache.pool.num_bytes, _bytes("bytes_in_use", devices)
    out, back = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        sleeping = sleep(cache)
        out.append(held / (time.perf_counter() - started) / 1e9)
        released = before - _bytes("bytes_in_use", devices)
        started = time.perf_counter()
        cache = wake_up(sleeping)
        back.append(held / (time.perf_counter() - started) / 1e9)
    extra = _bytes("peak_bytes_in_use", devices) - before
    cycles = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        cache = wake_up(sleep(cache, level=2))
        cycles.append(time.perf_counter() - started)
    report.note(
        f"{name:<24} out {out[0]:.1f}, then {min(out[1:]):.1f}; back {back[0]:.1f}, then "
        f"{min(back[1:]):.1f}; level 2 there and back {1e3 * min(cycles):.1f} ms"
    )
    report.note(
        f"{'':<24} {released / held:.4f} of {held:,} bytes released; "
        f"at most {extra / 2**20:,.0f} MiB beside the cache"
    )
    sleep(cache, level=2)


def _bytes(which: str, devices: Iterable[jax.Device]) -> int:
    """What the allocators of these devices say; 0 where they say nothing."""
    return sum((device.memory_stats() or {}).get(which, 0) for device in devices)
