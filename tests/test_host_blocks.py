"""Blocks of a cache in page-locked host memory: the copies, on the CPU's memory of that kind."""

import dataclasses
import itertools
import os
import random
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv import HostBlocks, KVCache, Plan, make_cache
from jaxkv._src.offload import host_blocks as _host_blocks
from jaxkv._src.offload._chunk_copies import put, take
from jaxkv.blocks import Chunk, Transfers, Upload
from jaxkv.pool import TransferError
from tests.helpers import needs_devices
from tests.layer_examples import plan_of
from tests.simulation.device import Device
from tests.simulation.of_offload import OffloadSimulation
from tests.test_offload import FULL, STATE, WINDOW

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"
# Of pages of 18 bytes, which are no words.
ODD, ODD_WINDOW = (
    dataclasses.replace(spec, block_size=3, head_size=3, dtype="int8") for spec in (FULL, WINDOW)
)
WIDE = dataclasses.replace(FULL, head_size=8)
PLANS = {
    "full": {"a": FULL, "b": FULL},
    "hybrid": {"a": FULL, "b": FULL, "s": STATE},
    "windows": {name: FULL for name in "abc"} | {name: WINDOW for name in "vw"},
    "two sizes": {"a": FULL, "b": WIDE, "c": FULL, "d": WIDE},
    "odd bytes": {name: ODD for name in "abc"} | {"w": ODD_WINDOW, "v": ODD_WINDOW},
}
LONGEST = 48
apply_step = jax.jit(jaxkv.apply_step, donate_argnums=0)


def plan_named(name: str) -> Plan:
    needed = plan_of(PLANS[name], 1000, LONGEST).admission_blocks(LONGEST)
    return plan_of(PLANS[name], needed + 4, LONGEST)


class RealDevice(Device):
    """A device of dictionaries next to a cache, whose bytes must be those that they stand for.

    A block's bytes are drawn from its contents; those that nobody owns are NaN.
    """

    def __init__(self, plan: Plan, max_requests: int):
        super().__init__(plan, max_requests)
        self.cache, self.memory = make_cache(plan, max_requests=max_requests), HostBlocks()
        self.written: dict[int, dict[int, int]] = {}
        self.checked = Counter[str]()

    def transfer(self, transfers: Transfers) -> None:
        self.write()
        super().transfer(transfers)
        self.cache = self.memory.transfer(self.cache, transfers)
        self.check()
        assert set(self.memory._chunks) == set(self.host)
        for number, (group, contents) in self.host.items():
            for i, content in enumerate(contents):
                parts = [np.asarray(array)[i] for array in self.memory._chunks[number]]
                found = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
                if content and -1 not in content.values():  # or its other tokens are spoilt
                    assert (found == self.bytes_of(content, group)).all(), "a host block"
                    self.checked["host blocks"] += 1

    def apply(self, upload: Upload) -> dict[str, np.ndarray]:
        self.write()
        parts = super().apply(upload)
        self.cache, batch = apply_step(self.cache, upload)
        assert not int(batch.status[0])
        self.check()
        return parts

    def write(self) -> None:
        """Writes what the last step wrote, and spoils what nobody owns."""
        buffers = [np.array(buffer) for buffer in self.cache.buffers]
        for block, content in self.blocks.items():
            if content == self.written.get(block) or not content:
                continue
            if -1 in content.values():
                for buffer in buffers:
                    buffer[:, block] = 0xFF
            else:
                self.place(buffers, block, content)
        arrays = tuple(map(jnp.array, buffers))
        self.cache = dataclasses.replace(self.cache, buffers=arrays)

    def check(self) -> None:
        """Compares all blocks whose contents are known."""
        buffers = [np.asarray(buffer) for buffer in self.cache.buffers]
        for block, content in self.blocks.items():
            if content and -1 not in content.values():
                wanted = [np.zeros_like(buffer[:, :1]) for buffer in buffers]
                places = self.place(wanted, 0, content)
                for buffer, want, tensors in zip(buffers, wanted, places, strict=True):
                    found = buffer[tensors, block]
                    assert (found == want[tensors, 0]).all(), f"WRONG BYTES in block {block}"
                    self.checked["blocks"] += 1
        self.written = {block: dict(content) for block, content in self.blocks.items()}

    def place(self, buffers: list[np.ndarray], block: int, content: dict[int, int]):
        """Writes the bytes of contents; returns, per buffer, the tensors of their group."""
        layout = self.cache.layout.buffers
        group = next(iter(content.values())) % len(self.groups)
        mine = layout.layout.tensors_of(group)
        places = [[i for i, t in enumerate(stack) if t in mine] for stack in layout.stacks]
        data, at = self.bytes_of(content, group), 0
        for buffer, tensors in zip(buffers, places, strict=True):
            for tensor in tensors:
                size = buffer.shape[-1]
                buffer[tensor, block] = data[at : at + size]
                at += size
        return places

    def bytes_of(self, content: dict[int, int], group: int) -> np.ndarray:
        size = self.cache.layout.buffers.layout.group_bytes(group)
        seed = [value for pair in sorted(content.items()) for value in pair]
        return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


class RealSimulation(OffloadSimulation):
    """Random requests over a cache with bytes."""

    def __init__(self, seed: int, name: str):
        self.name = name
        super().__init__(seed, name, [])
        self.oracle.device = RealDevice(self.plan, self.manager.max_requests)
        self.oracle.groups = self.oracle.device.groups

    def random_plan(self) -> Plan:
        return plan_named(self.name)

    def num_rows(self) -> int:
        return 3  # a step is compiled for it


@pytest.mark.parametrize("name", PLANS if IS_LONG else ["hybrid"])
def test_the_bytes_of_both_memories_are_those_of_their_requests(name: str) -> None:
    seen, first = Counter[str](), random.SystemRandom().randrange(2**40) if IS_LONG else 8
    for seed in range(first, first + (50 if IS_LONG else 1)):
        simulation = RealSimulation(seed, name)
        seen += simulation.run(60 if IS_LONG else 20) + simulation.oracle.device.checked
    assert min(seen[what] for what in ("stored", "loaded", "blocks", "host blocks")) > 0, seen


# --- moves by hand ----------------------------------------------------------------------


def filled(name: str, **options) -> KVCache:
    """Returns a cache of random bytes."""
    cache = make_cache(plan_named(name), max_requests=3, **options)
    draw = np.random.default_rng(0)
    buffers = tuple(
        jax.device_put(draw.integers(0, 256, buffer.shape, np.uint8), buffer.sharding)
        for buffer in cache.buffers
    )
    return dataclasses.replace(cache, buffers=buffers)


def bytes_in(cache: KVCache) -> list[np.ndarray]:
    return [np.array(buffer) for buffer in cache.buffers]


def chunk(number: int, *block_ids: int, group: int = 0) -> Chunk:
    return Chunk(number, group, np.array(block_ids, np.int32))


def transfers(
    number: int, stores=(), loads=(), dropped=(), *, is_anew=False, lookahead=()
) -> Transfers:
    return Transfers(number, tuple(stores), tuple(loads), tuple(dropped), is_anew, tuple(lookahead))


ORDERS = [
    {"stacked": True},
    {"stacked": False},
    {"order": "LHBNC"},
    {"order": "BLNHC"},
    {"order": "BHLNC"},
]


@pytest.mark.parametrize(
    ("name", "options", "group"),
    # Group 1 has one layer, and group 2 two, whose pages of odd bytes together are words.
    [*(("windows", order, 1) for order in ORDERS), ("odd bytes", {}, 1), ("odd bytes", {}, 2)],
    ids=str,
)
def test_a_block_comes_back_in_every_order_of_a_pool(name: str, options: dict, group: int) -> None:
    cache, memory = filled(name, **options), HostBlocks()
    before, axis = bytes_in(cache), cache.layout.buffers.block_axis
    cache = memory.transfer(cache, transfers(1, [chunk(1, 3, 5, 1, 2, group=group)]))
    assert memory.num_bytes == 4 * cache.layout.buffers.layout.group_bytes(group)
    # A block may be stored and loaded into at once, and a chunk be used in part.
    cache = memory.transfer(
        cache,
        transfers(2, [chunk(2, 7, group=group)], [chunk(1, 7, -1, 9, -1, group=group)], [1]),
    )
    cache = memory.transfer(cache, transfers(3, [], [chunk(2, 8, group=group)]))
    assert memory.num_bytes == cache.layout.buffers.layout.group_bytes(group)
    after = bytes_in(cache)
    wanted = [buffer.copy() for buffer in before]
    mine = cache.layout.buffers.layout.tensors_of(group)
    for buffer, old, stack in zip(wanted, before, cache.layout.buffers.stacks, strict=True):
        for source, into in ((3, 7), (1, 9), (7, 8)):
            new, had = (np.moveaxis(array, axis, 0) for array in (buffer, old))
            layers = [i for i, tensor in enumerate(stack) if tensor in mine]
            if "L" not in cache.layout.buffers.axes:
                if layers:
                    new[into] = had[source]
                continue
            at = cache.layout.buffers.axes.replace("B", "").index("L")
            where = (slice(None),) * at + (layers,)
            new[into][where] = had[source][where]
    for buffer, want in zip(after, wanted, strict=True):
        np.testing.assert_array_equal(buffer, want)


@pytest.mark.parametrize("stacked", [True, False])
def test_the_lowered_copies_for_a_gpu_alias_every_buffer(stacked: bool) -> None:
    cache = filled("hybrid", stacked=stacked)
    ids = jnp.arange(1, 5, dtype=jnp.int32)
    taken = take(cache, ids, group=0)
    assert {array.dtype.name for array in taken} == {"uint32"}
    into = jnp.stack([ids, ids - 1])
    lowered = put.trace(cache, into, taken, group=0).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("tf.aliasing_output") >= len(cache.buffers)


def test_copies_work_in_place_and_are_compiled_before_they_are_needed() -> None:
    cache, memory = filled("full"), HostBlocks()
    before = bytes_in(cache)
    cache = memory.warm_up(cache)
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        np.testing.assert_array_equal(buffer, old)
    assert not memory.num_bytes
    counts = take._cache_size(), put._cache_size()
    pointers = [buffer.unsafe_buffer_pointer() for buffer in cache.buffers]
    for number, blocks in enumerate([range(1, 17), range(1, 5), [3]], 1):
        moved, here = (
            len(blocks) * cache.layout.buffers.layout.group_bytes(0),
            [chunk(number, *blocks)],
        )
        for given in (transfers(2 * number - 1, here), transfers(2 * number, [], here, [number])):
            with mock.patch.object(memory, "_forget_ended"):  # as if they took longer
                cache = memory.transfer(cache, given)
                assert memory.bytes_in_flight == moved
            jax.block_until_ready((cache, memory._chunks))
            assert memory.bytes_in_flight == 0
    assert [buffer.unsafe_buffer_pointer() for buffer in cache.buffers] == pointers
    assert (take._cache_size(), put._cache_size()) == counts


def test_copies_wait_for_older_ones_that_take_device_memory(monkeypatch) -> None:
    monkeypatch.setattr(_host_blocks, "MAX_STAGED", 20)
    for num_bytes, waited in ((10, 3), (7, 3), (11, 4), (5, 1), (4, 0)):
        memory, staged, copies = HostBlocks(), _host_blocks.Staged(), []
        for _ in range(5):
            copies.append(mock.Mock())
            memory._note(staged, copies[-1], (np.zeros(num_bytes, np.uint8),))
        assert [copy.block_until_ready.called for copy in copies] == [i < waited for i in range(5)]


@needs_devices(2)
def test_a_mesh_keeps_the_share_of_each_device() -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    plan = plan_of({"a": spec, "b": spec}, 20, LONGEST)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    cache, memory = make_cache(plan, max_requests=2, mesh=mesh, axis="x"), HostBlocks()
    draw = np.random.default_rng(1)
    buffers = tuple(
        jax.device_put(draw.integers(0, 256, buffer.shape, np.uint8), buffer.sharding)
        for buffer in cache.buffers
    )
    cache = dataclasses.replace(cache, buffers=buffers)
    before = bytes_in(cache)
    cache = memory.transfer(cache, transfers(1, [chunk(1, 1, 2, 3, 4)]))
    (array,) = memory._chunks[1]
    assert array.sharding.memory_kind == "pinned_host" and len(array.sharding.device_set) == 2
    assert array.addressable_shards[0].data.nbytes == array.nbytes // 2
    cache = memory.transfer(cache, transfers(2, [], [chunk(1, 5, 6, 7, 8)]))
    assert cache.buffers[0].sharding.is_equivalent_to(buffers[0].sharding, buffers[0].ndim)
    axis = cache.layout.buffers.block_axis
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        now, had = np.moveaxis(buffer, axis, 0), np.moveaxis(old, axis, 0)
        np.testing.assert_array_equal(now[5:9], had[1:5])
        np.testing.assert_array_equal(now[:5], had[:5])


def test_copies_that_start_ahead_are_put_by_the_next_moves() -> None:
    cache, memory = filled("two sizes"), HostBlocks()  # of one group, in a buffer each
    before, size = bytes_in(cache), cache.layout.buffers.layout.group_bytes(0)
    cache = memory.transfer(cache, transfers(1, [chunk(1, 1, 2, 3, 4), chunk(2, 5)]))
    cache = memory.transfer(cache, transfers(2, lookahead=[1, 2]))
    jax.block_until_ready((cache, memory._chunks))
    assert memory.bytes_in_flight == 5 * size
    gone = chunk(1, -1, -1, -1, -1)  # its blocks are others' by now
    with mock.patch.object(memory, "_to_device", wraps=memory._to_device) as copies:
        cache = memory.transfer(cache, transfers(3, [], [gone, chunk(2, 6)], [1], lookahead=[2]))
        assert copies.mock_calls == [mock.call(mock.ANY, 2)]
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        old[:, 6] = old[:, 5]
        np.testing.assert_array_equal(buffer, old)
    cache = memory.transfer(cache, transfers(1, is_anew=True))
    jax.block_until_ready(cache)
    assert memory.bytes_in_flight == 0


def test_many_chunks_come_back_at_once_and_few_of_them_lie_beside_the_pool(monkeypatch) -> None:
    monkeypatch.setattr(_host_blocks, "AT_ONCE", 2)
    cache, memory = filled("full"), HostBlocks()
    before, count = bytes_in(cache), 6
    assert count > max(_host_blocks.AT_ONCE, _host_blocks.LOOKAHEAD_LOADS)
    cache = memory.transfer(cache, transfers(1, [chunk(i, i) for i in range(1, 1 + count)]))
    jax.block_until_ready((cache, memory._chunks))
    assert not memory.bytes_in_flight
    assert repr(memory) == f"HostBlocks({count} chunks, {memory.num_bytes:,} bytes)"
    real, lookahead = memory._to_device, list[int]()

    def to_device(*given):
        lookahead.append(len(memory._lookahead))
        return real(*given)

    monkeypatch.setattr(memory, "_to_device", to_device)
    cache = memory.transfer(
        cache, transfers(2, [], [chunk(i, i + count) for i in range(1, 1 + count)])
    )
    assert lookahead == [0, 1, 2, 3, 3, 3]
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        old[:, 1 + count : 1 + 2 * count] = old[:, 1 : 1 + count]
        np.testing.assert_array_equal(buffer, old)


# --- failures ---------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(4))
def test_a_failed_copy_leaves_the_state_before_and_can_be_repeated(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, memory = filled("full"), HostBlocks()
    cache = memory.transfer(cache, transfers(1, [chunk(1, 1, 2, 3, 4), chunk(2, 5)]))
    before, size = bytes_in(cache), memory.num_bytes
    real, calls = jax.device_put, iter(range(100))

    def device_put(values, place):
        if isinstance(values, tuple) and next(calls) == failing:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return real(values, place)

    monkeypatch.setattr(_host_blocks.jax, "device_put", device_put)
    both = transfers(2, [chunk(3, 6), chunk(4, 7)], [chunk(1, 6, 7, 8, 9), chunk(2, 10)], [1])
    with pytest.raises(TransferError) as caught:
        memory.transfer(cache, both)
    cache = caught.value.cache
    untouched = [i for i in range(cache.layout.num_blocks) if not 6 <= i <= 10]
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        np.testing.assert_array_equal(buffer[:, untouched], old[:, untouched])
        if failing < 3:  # nothing was put yet
            np.testing.assert_array_equal(buffer, old)
    if failing < 2:
        assert memory.num_bytes == size
    monkeypatch.undo()
    cache = memory.transfer(cache, both)
    cache = memory.transfer(cache, transfers(3, [], [chunk(3, 11), chunk(4, 12)]))
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        np.testing.assert_array_equal(buffer[:, 6:10], old[:, 1:5])
        np.testing.assert_array_equal(buffer[:, 10:13], old[:, 5:8])


def fail_at_the_second_put(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = _host_blocks.put, itertools.count()

    def put(*args, **options):
        if next(calls) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return real(*args, **options)

    monkeypatch.setattr(_host_blocks, "put", put)


def test_what_was_copied_ahead_is_copied_again_after_a_failure(monkeypatch) -> None:
    cache, memory = filled("full"), HostBlocks()
    before = bytes_in(cache)
    cache = memory.transfer(cache, transfers(1, [chunk(1, 1), chunk(2, 2)]))
    cache = memory.transfer(cache, transfers(2, lookahead=[1, 2]))
    fail_at_the_second_put(monkeypatch)
    loads = transfers(3, [], [chunk(1, 6), chunk(2, 7)])
    with pytest.raises(TransferError) as caught:
        memory.transfer(cache, loads)
    cache = memory.transfer(caught.value.cache, loads)
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        np.testing.assert_array_equal(buffer[:, 6:8], old[:, 1:3])


def test_moves_after_a_reset_go_on_where_a_copy_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, memory = filled("full"), HostBlocks()
    before = bytes_in(cache)
    swap = transfers(
        5, [chunk(8, 6), chunk(9, 7)], [chunk(8, 7), chunk(9, 6)], [8, 9], is_anew=True
    )
    fail_at_the_second_put(monkeypatch)  # when what is to be stored from one block is gone
    with pytest.raises(TransferError) as caught:
        memory.transfer(cache, swap)
    cache = memory.transfer(caught.value.cache, swap)
    for buffer, old in zip(bytes_in(cache), before, strict=True):
        np.testing.assert_array_equal(buffer[:, [6, 7]], old[:, [7, 6]])


def test_moves_in_another_order_are_refused() -> None:
    cache, memory = filled("full"), HostBlocks()
    with pytest.raises(ValueError, match="num_bytes must be at least 0, got -1"):
        memory.warm_up(cache, -1)
    for _ in range(2):
        with pytest.raises(ValueError, match="number 2"):
            memory.transfer(cache, transfers(2))
    cache = memory.transfer(cache, transfers(1, [chunk(1, 1)]))
    with pytest.raises(ValueError, match="once and in order"):
        memory.transfer(cache, transfers(1))
    cache = memory.transfer(cache, transfers(7, is_anew=True))
    assert not memory.num_bytes
    cache = memory.transfer(cache, transfers(8))
    assert memory.transfer(cache, None) is cache
