"""`Engine` with host memory: the same tokens, from blocks that went there and came back."""

import functools
import os
from collections import Counter
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from jaxkv import HostMemory, Sampling
from jaxkv._src.offload import host_blocks as _host_blocks
from jaxkv._src.prefixes import _beginnings
from jaxkv.pool import TransferError
from jaxkv.testing import count_compilations
from tests.engine_models import forward, make_params, make_plan
from tests.helpers import needs_devices
from tests.test_engine import assert_right, random_requests, without_limits

LAYERS, OF_HEADS = ("full", "state"), ("full",)
TIGHT = 17  # blocks: requests are preempted
IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"


@functools.cache
def make_engine(decode_steps: int, devices: int = 1) -> jaxkv.Engine:
    plan = make_plan(LAYERS if devices == 1 else OF_HEADS, TIGHT, ranks=devices)
    memory = HostMemory(num_bytes=200 * plan.layouts[0].bytes_per_block, min_tokens=1)
    mesh = jax.make_mesh((devices,), ("heads",), devices=jax.devices()[:devices])
    place: dict[str, Any] = {"mesh": mesh, "axis": "heads"} if devices > 1 else {}
    params = jax.device_put(make_params(), NamedSharding(mesh, PartitionSpec()))
    return jaxkv.Engine(
        *(forward, params, plan),
        cache=jaxkv.make_cache(plan, max_requests=4, **place),
        decode_steps=decode_steps,
        host_memory=memory,
        shared_prefixes=devices - 1,
        max_requests=4,
        max_tokens=8,
    )


def requests_of(seed: int, count: int) -> list[tuple[list[int], Sampling]]:
    return without_limits(random_requests(seed, count))


def served(engine: jaxkv.Engine, requests) -> list[jaxkv.Output]:
    prompts, samplings = zip(*requests, strict=True)
    return list(engine.generate(prompts, samplings))


# Each engine compiles for ten seconds.
@pytest.mark.parametrize(
    ("decode_steps", "devices"),
    [*([(1, 1), (3, 1)] if IS_LONG else [(1, 1)]), pytest.param(1, 2, marks=needs_devices(2))],
)
def test_tokens_are_right_when_blocks_went_to_the_host_and_back(
    decode_steps: int, devices: int, monkeypatch
) -> None:
    """On two devices samples that begin alike read together, too."""
    monkeypatch.setattr(_beginnings, "LEAST_TOKENS", 4)
    engine, requests = make_engine(decode_steps, devices), requests_of(3, 9)
    layers = LAYERS if devices == 1 else OF_HEADS
    for _ in range(2):  # the prompts come again
        assert_right(served(engine, requests), requests, layers)
    stats = engine.manager.offload_stats()
    assert stats is not None and stats.stored_blocks and stats.loaded_blocks, stats
    assert engine.manager.prefix_stats().host_tokens
    assert engine.stats.preemptions and stats.swapped_in_requests
    assert 0 < engine._device.host_blocks.num_bytes <= stats.num_bytes
    jax.block_until_ready(engine._device.host_blocks._chunks)
    assert engine.bytes_in_flight == 0
    for level in (1, 2) if decode_steps == 1 else ():
        engine.sleep(level)
        engine.wake_up()
        assert_right(served(engine, requests), requests, layers)


@needs_devices(2)
def test_weights_that_a_trainer_shards_otherwise_are_moved_and_nothing_compiles() -> None:
    engine, requests = make_engine(1, 2), requests_of(3, 4)
    old = served(engine, requests)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    rows = {matrix: PartitionSpec("rows") for matrix in ("embed", "head")}
    sharded = {
        name: jax.device_put(new, NamedSharding(mesh, rows.get(name, PartitionSpec())))
        for name, new in make_params(1).items()
    }
    with jax.transfer_guard_device_to_host("disallow"):
        engine.update(sharded)
    new = served(engine, requests)
    assert [o.tokens for o in new] != [o.tokens for o in old]
    with count_compilations() as compilations:
        engine.update(make_params())  # of one device
        outputs = served(engine, requests)
    assert not compilations
    assert_right(outputs, requests, OF_HEADS)
    with pytest.raises(
        ValueError, match=r"params\['embed'\] is on .*, and the cache on [^,]*: for"
    ):
        jaxkv.Engine(forward, sharded, make_plan(OF_HEADS), max_requests=1, max_tokens=1)


def test_an_engine_goes_on_after_a_failed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = make_engine(1), requests_of(3, 9)[:6]
    served(engine, requests)
    real, calls, donated = jax.device_put, iter(range(10_000)), iter(range(10_000))

    def device_put(values, place):
        if isinstance(values, tuple):
            # Amid a move that has written blocks already, there is a cache to go on from.
            is_amid = engine._device.was_taken and next(donated) == 0
            if next(calls) in (20, 21) or is_amid:
                raise RuntimeError("RESOURCE_EXHAUSTED")
        return real(values, place)

    monkeypatch.setattr(_host_blocks.jax, "device_put", device_put)
    for number, (prompt, sampling) in enumerate(requests):
        engine.add(number, prompt, sampling)
    tokens, failures = Counter[tuple[int, int]](), 0
    while engine.has_work:
        try:
            for out in engine.step():
                tokens[out.request, out.sample] += len(out.tokens)
        except TransferError:
            failures += 1
    assert failures == 3 and next(donated)
    assert sum(tokens.values()) == sum(s.n * s.max_tokens for _, s in requests)
    monkeypatch.undo()
    assert_right(served(engine, requests), requests, LAYERS)


def test_an_engine_compiles_its_copies_before_it_serves() -> None:
    engine, requests = make_engine(1), requests_of(4, 6)
    engine._device.cache = engine._device.host_blocks.warm_up(engine._device.cache, 2**20)
    counts = [f._cache_size() for f in (_host_blocks.take, _host_blocks.put)]
    for _ in range(2):  # a prefix may not fit, although its request does
        assert_right(served(engine, requests), requests, LAYERS)
    assert [f._cache_size() for f in (_host_blocks.take, _host_blocks.put)] == counts
