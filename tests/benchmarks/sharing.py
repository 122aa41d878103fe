"""Decodes of requests that begin with the same pages: read once for a group, or by each.

Also the host's part: finding the groups of a step.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from pallas_kernels import RequestPages, SharedPrefixes, default_implementation, paged_attention
from tests.benchmarks.attention import FP8, AttentionSpec, make_arrays
from tests.benchmarks.timing import Report, Times, by_size, measure
from tests.benchmarks.vllm_peer import VllmPeer

ROOM = 8  # groups that fit into an upload, at least


class SharingSpec(NamedTuple):
    """Groups of requests: tokens that a group shares, and that each request has by itself."""

    name: str
    groups: int
    size: int
    shared: int
    own: int
    page_tokens: int = 16
    pages: str = "bfloat16"
    listed: bool = True  # False: the lists are empty

    @property
    def attention(self) -> AttentionSpec:
        lens = (self.shared + self.own,) * (self.groups * self.size)
        return AttentionSpec(self.name, lens, 32, 8, 128, self.page_tokens, self.pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, those that a group shares counted once."""
        tokens = self.groups * (self.shared + self.size * self.own)
        return tokens * self.attention.row_bytes * self.attention.kv_heads

    def shorter(self, times: int) -> "SharingSpec":
        """Returns the same with shorter requests in fewer and smaller groups."""
        page = self.page_tokens
        shared, own = (-(-tokens // times // page) * page for tokens in (self.shared, self.own))
        return self._replace(groups=min(self.groups, 2), size=2, shared=shared, own=own)


SPECS = (
    SharingSpec("8 x 8, 8k shared + 512", 8, 8, 8192, 512),
    SharingSpec("64 of one prompt, 8k shared + 512", 1, 64, 8192, 512),
    SharingSpec("32 x 8, 1k shared + 320", 32, 8, 1024, 320),
    SharingSpec("fp8, 8 x 8, 8k shared + 512", 8, 8, 8192, 512, 64, FP8),
    SharingSpec("fp8, 64 of one prompt, 8k + 512", 1, 64, 8192, 512, 64, FP8),
    SharingSpec("64 x 8k, nothing shared", 8, 8, 0, 8192, listed=False),
    SharingSpec("64 x 8k, 64 tokens shared", 1, 64, 64, 8128),
)


def run(report: Report, _: VllmPeer | None) -> None:
    report.title("Attention of decodes that begin alike, 32/8 heads of 128: GPU time of one call")
    for spec in by_size(full=SPECS, small=SPECS[:2], smallest=SPECS[:1]):
        spec = by_size(full=spec, small=spec.shorter(32), smallest=spec.shorter(64))
        ours = report.add(spec.name, "read once", _time(spec, once=True), num_bytes=spec.num_bytes)
        report.add(spec.name, "read by each", _time(spec, once=False), base=ours)
    report.note(f"by {default_implementation('decode')}")
    _time_host(report)


def _time(spec: SharingSpec, *, once: bool) -> Times:
    queries, pages, tables, lens, _ = make_arrays(spec.attention)
    arrays = queries, pages, _shared_tables(spec, np.asarray(tables)), lens
    lists = _lists(spec) if once else None

    @jax.jit
    def attend(lists, queries, pages, tables, lens):
        return paged_attention(queries, pages, RequestPages(tables, lens, shared_prefixes=lists))

    return measure(lambda: attend(lists, *arrays))


def _shared_tables(spec: SharingSpec, tables: np.ndarray) -> jax.Array:
    tables = tables.copy()
    for first in range(0, len(tables), spec.size):
        tables[first : first + spec.size, : spec.shared // spec.page_tokens] = tables[
            first, : spec.shared // spec.page_tokens
        ]
    return jnp.asarray(tables)


def _lists(spec: SharingSpec) -> SharedPrefixes:
    count, groups = spec.groups * spec.size, np.arange(max(ROOM, spec.groups)) + 1
    members = np.arange(count) if spec.listed else np.full(count, -1)
    ends = np.minimum(groups, spec.groups) * spec.size * spec.listed
    lens = np.where(groups <= spec.groups, spec.shared, 0) * spec.listed
    return SharedPrefixes(*(jnp.asarray(array, jnp.int32) for array in (members, ends, lens)))


def _time_host(report: Report) -> None:
    """Times steps of forks with lists and without, in turns."""
    groups, size, length = by_size(full=(32, 8, 8192), small=(32, 8, 8192), smallest=(2, 2, 320))
    steps = by_size(full=200, small=200, smallest=6)
    spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    plan = jaxkv.plan_cache(
        {"layer": spec},
        2**50,
        max_model_len=2 * length,
        num_blocks_override=groups * (length // 16 + size * (steps // 4 + 2)) + 2,
        limits=jaxkv.Limits(max_in_flight_tokens=length),
    )
    count = groups * size
    manager = jaxkv.BlockManager(plan, max_requests=count)
    options = {"max_requests": count, "forks": count, "cached_tokens": count * length}
    prefill = jaxkv.StepShape.for_plan(plan, max_tokens=length, **options)
    decode = [
        jaxkv.StepShape.for_plan(
            plan, max_tokens=count, max_query_len=1, shared_prefixes=room, **options
        )
        for room in (0, groups)
    ]
    for group in range(groups):
        manager.start((group, 0))
        manager.step(prefill, {(group, 0): length})
        manager.fork((group, 0), [(group, sample) for sample in range(1, size)])
    work, taken = dict.fromkeys(manager.requests, 1), ([], [])
    for step in range(steps):
        started = time.thread_time()
        manager.step(decode[step % 2], work)
        taken[step % 2].append(1e6 * (time.thread_time() - started))
    without, with_lists = (float(np.median(times[1:])) for times in taken)
    report.note(
        f"host, a decode step of {count:,} forks: {with_lists:.1f} us with lists, {without:.1f} "
        f"without; the first one, which finds the groups, {taken[1][0]:.0f}",
        with_lists=with_lists,
        without=without,
    )
