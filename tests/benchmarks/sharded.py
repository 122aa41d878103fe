"""Several devices against one, with equally many bytes on each: kernels, and a whole step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import FullAttentionSpec
from jaxkv._src.uploads import StepShape
from pallas_kernels import RequestPages, copy_blocks, paged_attention, write_rows, zero_blocks
from tests.benchmarks import timing
from tests.benchmarks.attention import AttentionSpec, make_arrays
from tests.benchmarks.timing import Report, Times, by_size, measure
from tests.benchmarks.vllm_peer import VllmPeer

PAGE, ROW = 65536, 4096
SAME, PAGES = PartitionSpec(), PartitionSpec(None, "heads")
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)  # of each rank
# Of each rank: one of eight KV heads, as if a model were divided among eight GPUs.
DECODE = AttentionSpec("64 x 8k, a KV head each", (8192,) * 64, 4, 1, 128, 16)


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer
    buffers, _, ids = _sizes()
    decode = DECODE.shorter(by_size(full=1, small=32, smallest=128))
    requests = by_size(full=256, small=16, smallest=4)
    report.title("Sharded by KV head with shard_map: as many bytes on each device")
    passes = buffers * ids * PAGE
    fresh = functools.partial(copy_blocks, disjoint=True)
    _compare(report, "zeroing", functools.partial(time_pages, zero_blocks, 1), passes)
    _compare(report, "copies", functools.partial(time_pages, fresh, 2), 2 * passes)
    _compare(report, "writes of tokens", time_writes, 2 * _written() * ROW)
    name = f"attention, {decode.name}"
    _compare(report, name, functools.partial(time_attention, decode), decode.num_bytes)
    name = f"{requests} decodes, fresh blocks zeroed"
    _compare(report, name, functools.partial(time_step, requests), 0)


def _sizes() -> tuple[int, int, int]:
    """Returns buffers, blocks of each, and ids of a call."""
    return by_size(full=(32, 2048, 256), small=(4, 64, 8), smallest=(2, 8, 2))


def _written() -> int:
    """Returns the tokens of a call that writes."""
    return by_size(full=8192, small=64, smallest=8)


def _compare(report: Report, name: str, times_on: Callable[[Mesh], Times], num_bytes: int) -> None:
    alone = None
    counts = timing.device_counts()
    if timing.size == "smallest":
        counts = counts[-1:]
    for count in counts if timing.every_case else sorted({1, counts[-1]}):
        times = times_on(Mesh(np.array(jax.devices()[:count]), ("heads",)))
        # The profiler adds up the time of all devices; report one.
        if times.kernels is not None:
            times = Times(times.kernels / count, times.launches, times.synced, times.dispatched)
        case = f"{name} on {count}"
        times = report.add(case, "jaxkv", times, num_bytes=num_bytes, base=alone)
        alone = alone or times


def _made(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]) -> jax.Array:
    """Returns ones of uint8, made on the devices that hold them."""
    make = jax.jit(lambda: jnp.ones(shape, jnp.uint8), out_shardings=NamedSharding(mesh, spec))
    return make()


def _in_place(function: Callable[..., Any], state: Any, *rest: jax.Array) -> Times:
    """Times a function over the parts of each device; it returns its first argument, donated."""
    mesh, specs = rest[0].sharding.mesh, (PAGES, *(array.sharding.spec for array in rest))
    options = {"mesh": mesh, "in_specs": specs, "out_specs": PAGES, "check_vma": False}
    step = jax.jit(jax.shard_map(function, **options), donate_argnums=0)

    def call():
        nonlocal state
        state = step(state, *rest)
        return state

    return measure(call)


def time_pages(function: Callable[..., Any], num_lists: int, mesh: Mesh) -> Times:
    """Times work on whole pages by lists of ids, with equally many bytes on each device."""
    num_buffers, blocks, num_ids = _sizes()
    state = [_made(mesh, PAGES, (blocks, mesh.size * PAGE)) for _ in range(num_buffers)]
    ids = np.random.default_rng(0).permutation(np.arange(1, blocks, dtype=np.int32))
    lists = (ids[:num_ids], ids[-num_ids:])[:num_lists]
    listed = [jax.device_put(part, NamedSharding(mesh, SAME)) for part in lists]
    return _in_place(function, state, *listed)


def time_writes(mesh: Mesh) -> Times:
    """Times writes of tokens to shuffled slots; each device has one row of each token."""
    blocks, per_page = _sizes()[1], PAGE // ROW
    tokens = np.random.default_rng(0).permutation(blocks * per_page).astype(np.int32)[: _written()]
    same = NamedSharding(mesh, SAME)
    ids = jax.device_put(tokens // per_page, same)
    offsets = jax.device_put(tokens % per_page * ROW, same)
    pages = _made(mesh, PAGES, (blocks, mesh.size * PAGE))
    rows = _made(mesh, PAGES, (len(tokens), mesh.size * ROW))
    return _in_place(functools.partial(write_rows, align=ROW), pages, ids, offsets, rows)


def time_attention(spec: AttentionSpec, mesh: Mesh) -> Times:
    """Times decodes that are divided by heads: each device attends to its own KV head."""
    one, by_head = make_arrays(spec), PartitionSpec(None, None, "heads")

    def on_each(array: jax.Array, part: PartitionSpec) -> jax.Array:
        times = [mesh.size if axis == "heads" else 1 for axis in part]
        times += [1] * (array.ndim - len(times))
        shape = tuple(np.multiply(array.shape, times).tolist())
        return jax.make_array_from_callback(shape, NamedSharding(mesh, part), lambda _: array)

    parts = PAGES, by_head, SAME, SAME
    arrays = [on_each(array, part) for array, part in zip(one[:4], parts, strict=True)]
    options = {"mesh": mesh, "in_specs": parts, "out_specs": PAGES, "check_vma": False}

    def attend_on_rank(queries, pages, *lists):
        return paged_attention(queries, pages, RequestPages(*lists))

    attend = jax.jit(jax.shard_map(attend_on_rank, **options))
    return measure(lambda: attend(*arrays))


def time_step(requests: int, mesh: Mesh) -> Times:
    """Times the table work of a step, and the zeroing of its fresh blocks, on a sharded cache."""
    plan = plan_cache(
        {f"layers.{i}": ATTENTION for i in range(_sizes()[0])},
        2**50,
        max_model_len=1024,
        num_blocks_override=22 * requests + 64,
        zero_policy="always",
    )
    cache = jaxkv.make_cache(plan, max_requests=requests, mesh=mesh, axis="heads")
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
