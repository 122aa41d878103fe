"""Sleep and wake: speed to the host and back, memory released, and memory needed meanwhile."""

import functools
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv._src.cache import KVCache, make_cache
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.sleeping import sleep, wake_up
from jaxkv._src.specs import FullAttentionSpec
from tests.benchmarks.timing import Report, by_size, device_counts
from tests.benchmarks.vllm_peer import VllmPeer

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
ROUNDS = 3


def plan_of(num_bytes: int, layers: int) -> Plan:
    """Returns a plan of a pool of ``num_bytes``, in pages of 64 KiB."""
    blocks = num_bytes // (layers * ATTENTION.page_bytes)
    return plan_cache(
        {f"layers.{i}": ATTENTION for i in range(layers)},
        num_bytes,
        max_model_len=ATTENTION.block_size,
        num_blocks_override=blocks,
    )


def one_device(num_bytes: int, layers: int, stacked: bool) -> KVCache:
    return make_cache(plan_of(num_bytes, layers), max_requests=256, stacked=stacked)


def on_each_of(devices: int, num_bytes: int, layers: int) -> KVCache:
    """Returns a cache with ``num_bytes`` on each of some devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("heads",))
    plan = plan_of(num_bytes, layers)
    return make_cache(plan, max_requests=256, stacked=False, mesh=mesh, axis="heads")


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # its sleep needs its memory allocator
    report.title("Sleep and wake, GB/s of the host's clock: the first time, and after it")
    unit = by_size(full=2**30, small=2**22, smallest=2**21)
    cases: dict[str, Callable[[], KVCache]] = {
        "8 units in 32 buffers": lambda: one_device(8 * unit, 32, False),
        "8 units stacked": lambda: one_device(8 * unit, 32, True),
        "32 units in 64 buffers": lambda: one_device(32 * unit, 64, False),
    }
    counts = reversed(device_counts())
    cases = {  # small ones first, because peaks are of the whole process
        f"2 units on each of {n}": functools.partial(on_each_of, n, 2 * unit, 32) for n in counts
    } | cases
    for name, make in cases.items():
        _time(report, name.replace("units", f"x {unit / 2**20:g} MiB"), make())


def _time(report: Report, name: str, cache: KVCache) -> None:
    devices = jax.block_until_ready(cache).buffers[0].devices()
    held, before = sum(buffer.nbytes for buffer in cache.buffers), _bytes("bytes_in_use", devices)
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
        f"at most {extra / 2**20:,.0f} MiB next to the cache"
    )
    sleep(cache, level=2)


def _bytes(which: str, devices: Iterable[jax.Device]) -> int:
    """Returns a statistic of the allocators of these devices, added up; 0 where there is none."""
    return sum((device.memory_stats() or {}).get(which, 0) for device in devices)
