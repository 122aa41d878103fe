"""Requests that go on in another cache: the blocks that they name, and where these lie."""

import ctypes
import dataclasses
import functools
import math
import os
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv import BlockManager, HostMemory, KVCache, OutOfBlocksError, Scheduler, StepShape
from jaxkv._src.layout import list_descriptors
from jaxkv.blocks import ExportedBlocks
from jaxkv.pool import BlockDescriptors, describe_blocks
from tests.helpers import ON_GPU, needs_devices
from tests.layer_examples import plan_of
from tests.test_host_blocks import LONGEST, ORDERS, filled
from tests.test_offload import ALL, FULL, STATE, WINDOW, Served, host, prompt

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"


def manager_of(layers, num_blocks: int) -> tuple[BlockManager, StepShape]:
    plan = plan_of(layers, num_blocks, LONGEST)
    shape = StepShape.for_plan(plan, max_requests=3, max_tokens=LONGEST, cached_tokens=LONGEST)
    return BlockManager(plan, max_requests=3), shape


def cut(pieces: BlockDescriptors) -> list[ctypes.Array]:
    """Returns the bytes of all pieces, which a transfer would read."""
    found = [ctypes.create_string_buffer(length) for length in pieces.lengths.tolist()]
    for data, address in zip(found, pieces.addresses.tolist(), strict=True):
        copy_memory(ctypes.addressof(data), address, len(data))
    return found


def copy_memory(to: int, source: int, num_bytes: int) -> None:
    """Copies from an address to another, of the host or of a GPU."""
    if not ON_GPU:
        ctypes.memmove(to, source, num_bytes)
        return
    driver = of_this_thread()
    addresses = ctypes.c_uint64(to), ctypes.c_uint64(source)
    assert not driver.cuMemcpy(*addresses, ctypes.c_size_t(num_bytes))
    assert not driver.cuCtxSynchronize()


@functools.cache
def of_this_thread() -> ctypes.CDLL:
    """Returns CUDA's driver, with the context of the first GPU for the thread that calls."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    assert not driver.cuCtxSetCurrent(context)
    return driver


@pytest.mark.parametrize("num_tokens", [1, 18, 24])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_an_import_has_the_columns_of_the_export(mode: str, num_tokens: int) -> None:
    layers = ALL | {
        "s": jaxkv.StateSpec(
            block_size=4,
            shapes=((32,),),
            dtypes=("f32",),
            cache_mode=mode,  # pyrefly: ignore
        )
    }
    source, shape = manager_of(layers, 60)
    source.start("a")
    with pytest.raises(ValueError, match="after its next step"):
        source.export_blocks("a")
    source.step(shape, {"a": num_tokens})
    export_blocks = source.export_blocks("a")
    assert isinstance(export_blocks, ExportedBlocks)
    source.fork("a", ["c"])
    with pytest.raises(ValueError, match="after its next step"):
        source.export_blocks("c")
    other, shape = manager_of(layers, 50)
    other.start("before")
    other.step(shape, {"before": 7})
    imported = other.import_blocks("b", num_tokens)
    assert imported.num_tokens == export_blocks.num_tokens == num_tokens
    assert imported.first_logical_blocks == export_blocks.first_logical_blocks
    for mine, theirs, of_row in zip(
        imported.block_ids, export_blocks.block_ids, source.block_ids("a"), strict=True
    ):
        assert mine.size == theirs.size and set(theirs.tolist()) <= set(of_row)
    given = [ids.tolist() for ids in export_blocks.block_ids]
    source.finish("a")
    assert [ids.tolist() for ids in export_blocks.block_ids] == given
    held = [set(ids) for ids in other.block_ids("before")]
    assert not set.union(*held) & {i for ids in imported.block_ids for i in ids.tolist()}
    parts = other.step(shape, {"b": 1}).parts()
    assert parts["num_computed_tokens"].tolist() == [num_tokens]
    zeroed = set(parts["zero_ids"].tolist()) if "zero_ids" in parts else set()
    assert not zeroed & {i for ids in imported.block_ids for i in ids.tolist()}
    for name in ("before", "b"):
        other.finish(name)
    assert other.num_free_blocks == 49


def test_blocks_that_the_next_upload_copies_are_not_exported_before() -> None:
    manager, _ = manager_of(ALL, 60)
    shape = StepShape.for_plan(manager.plan, max_requests=3, max_tokens=8, forks=1)
    manager.start("a")
    manager.step(shape, {"a": 5})
    manager.fork("a", ["b"])
    assert manager.export_blocks("a").num_tokens == 5
    manager.grow({"a": 1})  # takes blocks of its own in place of those that both write to
    with pytest.raises(ValueError, match="after its next step"):
        manager.export_blocks("a")
    manager.step(shape, {"a": 1})
    assert manager.export_blocks("a").num_tokens == 6


def test_all_ids_of_an_import_are_known_even_if_steps_are_ahead() -> None:
    tokens = {"r": [1, 2, 3, 4]}
    manager, _ = manager_of({"a": FULL}, 16)
    scheduler = Scheduler(manager, max_tokens=8, tokens=tokens, cached_tokens=8, lookahead_steps=2)
    with pytest.raises(ValueError, match="request='r'"):
        scheduler.import_blocks("r", 5)
    tokens["r"].append(5)
    assert scheduler.import_blocks("r", 5) is not None


def test_an_import_that_does_not_fit_changes_nothing() -> None:
    manager, _ = manager_of({"a": FULL, "s": STATE}, 16)
    manager.import_blocks("a", 40)
    for count, error in ((48, OutOfBlocksError), (LONGEST + 1, ValueError), (0, ValueError)):
        free = manager.num_free_blocks
        with pytest.raises(error):
            while True:
                manager.import_blocks(object(), count)
                free = manager.num_free_blocks
        assert manager.num_free_blocks == free
        assert sum(name != "a" for name in manager.requests) <= 1
    with pytest.raises(ValueError, match="in use"):
        manager.import_blocks("a", 4)
    cross = jaxkv.CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    limits = jaxkv.Limits(max_encoder_tokens=4)
    plan = jaxkv.plan_cache({"a": FULL, "c": cross}, 2**20, max_model_len=LONGEST, limits=limits)
    manager = jaxkv.BlockManager(plan, max_requests=1)
    with pytest.raises(ValueError, match="a plan that stores encoder tokens exports no blocks"):
        manager.import_blocks("a", 4)
    assert not manager.requests and manager.num_free_blocks == plan.usable_blocks
    manager.start("a", encoder_tokens=0)


@pytest.mark.parametrize(
    ("name", "options"),
    # The pages of two sizes are of one group, in a buffer each.
    [*(("windows", order) for order in ORDERS), *(("two sizes", order) for order in ORDERS[:3])],
    ids=str,
)
def test_pieces_are_the_bytes_of_their_blocks(name: str, options: dict) -> None:
    cache = jax.block_until_ready(filled(name, **options))
    count = len(cache.layout.buffers.layout.groups)
    ids = [np.array(of) for of in ([3, 1], [4], [7, 5, 6])[:count]]
    ((_, pieces),) = describe_blocks(cache, ids).items()
    layout = cache.layout.buffers
    for group, of in enumerate(ids):
        for column, block in enumerate(of):
            here = (pieces.groups == group) & (pieces.logical_blocks == column)
            assert pieces.lengths[here].sum() == layout.layout.group_bytes(group)
            found = [b.raw for b, of_block in zip(cut(pieces), here, strict=True) if of_block]
            assert b"".join(found) and sorted(b"".join(found)) == sorted(
                b"".join(bytes_of(cache, group, block))
            )
    # A transfer to other blocks, as one of NIXL's would make it.
    into = [np.array(of) for of in ([8, 9], [10], [12, 11, 2])[:count]]
    ((_, places),) = describe_blocks(cache, into).items()
    assert (places.lengths == pieces.lengths).all()
    for data, address in zip(cut(pieces), places.addresses.tolist(), strict=True):
        copy_memory(address, ctypes.addressof(data), len(data))
    for group, (of, new) in enumerate(zip(ids, into, strict=True)):
        for block, other in zip(of, new, strict=True):
            assert bytes_of(cache, group, other) == bytes_of(cache, group, block)


def bytes_of(cache: KVCache, group: int, block: int) -> list[bytes]:
    """Returns the bytes of a block in each tensor of its group."""
    layout = cache.layout.buffers
    mine, found = layout.layout.tensors_of(group), []
    for buffer, stack in zip(cache.buffers, layout.stacks, strict=True):
        # A copy, because jax keeps what it has read from a GPU, and memory changes behind its back.
        at = np.asarray(jnp.copy(buffer)).take(block, axis=layout.block_axis)
        axes = layout.axes.replace("B", "")
        for i, tensor in enumerate(stack):
            if tensor in mine:
                found.append((at.take(i, axes.index("L")) if "L" in axes else at).tobytes())
    return found


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_pieces_of_large_memory_are_those_of_small_memory_further_on(options: dict) -> None:
    """An address has 64 bits, and so have the bytes from the first block to the last."""
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
    num_blocks = 2**28
    plan = plan_of({"a": spec, "b": spec}, num_blocks, LONGEST)
    buffers = jax.eval_shape(lambda: jaxkv.make_cache(plan, max_requests=2, **options))
    buffers = buffers.layout.buffers
    addresses = [2**47 - 2**40 + 2**38 * i for i, _ in enumerate(buffers.shapes)]
    far, near = (
        list_descriptors(buffers, [np.array([last])], addresses) for last in (num_blocks - 1, 1)
    )
    strides = [math.prod(shape[buffers.block_axis + 1 :]) for shape in buffers.shapes]
    moved = [int(a) - int(b) for a, b in zip(far.addresses, near.addresses, strict=True)]
    assert set(moved) == {stride * (num_blocks - 2) for stride in strides}
    origin = list_descriptors(buffers, [np.array([1])], [0] * len(addresses))
    shifts = {int(a) - int(b) for a, b in zip(near.addresses, origin.addresses, strict=True)}
    assert shifts == set(addresses)


@needs_devices(2)
@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_each_device_of_a_mesh_has_pieces_of_its_share(options: dict) -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
    plan = plan_of({"a": spec, "b": spec}, 20, LONGEST)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    cache = jaxkv.make_cache(plan, max_requests=2, mesh=mesh, axis="x", **options)
    draw = np.random.default_rng(0)
    buffers = tuple(
        jax.device_put(draw.integers(0, 255, b.shape).astype(b.dtype), b.sharding)
        for b in cache.buffers
    )
    cache = jax.block_until_ready(dataclasses.replace(cache, buffers=buffers))
    of_devices = describe_blocks(cache, [np.array([5, 2])])
    assert set(of_devices) == set(mesh.devices.flat)
    for device, pieces in of_devices.items():
        shards = [s.data for b in buffers for s in b.addressable_shards if s.device == device]
        share = dataclasses.replace(cache, buffers=tuple(shards))
        for column, block in enumerate((5, 2)):
            here = pieces.logical_blocks == column
            found = b"".join(b.raw for b, is_in in zip(cut(pieces), here, strict=True) if is_in)
            assert sorted(found) == sorted(b"".join(bytes_of(share, 0, block)))


def test_blocks_of_a_worker_without_layers_have_no_pieces() -> None:
    plan = jaxkv.plan_cache([{"a": FULL}, {}], [2**16] * 2, max_model_len=16)
    cache = jaxkv.make_cache(plan, max_requests=2, worker=1)
    (pieces,) = describe_blocks(cache, [np.array([1])]).values()
    assert not pieces.addresses.size and not pieces.lengths.size


def test_blocks_that_are_not_in_the_pool_have_no_address() -> None:
    cache = filled("full")
    for ids in ([0], [cache.layout.num_blocks]):
        with pytest.raises(ValueError, match="block_ids"):
            describe_blocks(cache, [np.array(ids)])
    with pytest.raises(ValueError, match="groups"):
        describe_blocks(cache, [])
    buffers = cache.layout.buffers
    for count in (len(buffers.shapes) - 1, len(buffers.shapes) + 1):
        with pytest.raises(ValueError, match=f"1 groups and addresses {count} buffers; the pool"):
            list_descriptors(buffers, [np.array([1])], [0] * count)
    with pytest.raises(TypeError, match="block_ids must be block ids per group, got set"):
        describe_blocks(cache, {1})
    tables = jaxkv.make_cache(plan_of({"a": FULL}, 20, LONGEST), max_requests=2, tables_only=True)
    with pytest.raises(ValueError, match="the cache has block tables only"):
        describe_blocks(tables, [np.array([1])])


# --- schedulers -------------------------------------------------------------------------


class Worker:
    """A scheduler, and a device that notes the tokens on which each byte depends.

    A request is named by all tokens that it will have, of which ``given`` are not drawn.
    """

    def __init__(self, layers, num_blocks: int, *, has_tokens: bool, **memory) -> None:
        plan = plan_of(layers, num_blocks, 48)
        self.manager = BlockManager(plan, max_requests=4, **memory)
        self.tokens: dict[tuple[int, ...], list[int]] = {}
        tokens = self.tokens if has_tokens else None
        self.scheduler = Scheduler(
            self.manager, max_tokens=16, tokens=tokens, forks=4, cached_tokens=48
        )
        self.shape = self.scheduler.shape()
        self.blocks: dict[int, dict[int, int]] = {}
        self.host: dict[int, list[dict[int, int]]] = {}
        self.preempted = 0

    def step(self) -> list[tuple[int, ...]]:
        """Runs a step in which each request reads its own; returns those that want a token."""
        schedule = self.scheduler.schedule()
        self.preempted += len(schedule.preempted)
        before = self.manager.computed_tokens
        ids = schedule.token_ids if self.scheduler._options.tokens is not None else ()
        upload = self.manager.step(self.shape, schedule.work, extra=ids)
        self.transfer(self.manager.take_transfers())
        parts = upload.parts()
        sources, into = (parts[f"copy_{name}"].tolist() for name in ("sources", "destinations"))
        copies = [dict(self.blocks.get(block, {})) for block in sources]
        self.blocks.update(zip(into, copies, strict=True))
        for name, count in schedule.work.items():
            start = before.get(name, self.manager.num_computed_tokens(name) - count)
            for place, content in self.places(name, start, of_next=True):
                assert self.blocks.get(place[0], {}).get(place[1]) == content, "a wrong byte"
        for name, count in schedule.work.items():
            start = self.manager.num_computed_tokens(name) - count
            for end in range(start + 1, start + count + 1):
                for (block, at), content in self.places(name, end):
                    self.blocks.setdefault(block, {})[at] = content
        return list(schedule.samples)

    def transfer(self, transfers) -> None:
        """Copies blocks between the memories."""
        for chunk in () if transfers is None else transfers.stores:
            contents = [dict(self.blocks.get(block, {})) for block in chunk.block_ids.tolist()]
            self.host[chunk.number] = contents
        for chunk in () if transfers is None else transfers.loads:
            for block, content in zip(
                chunk.block_ids.tolist(), self.host[chunk.number], strict=True
            ):
                if block >= 0:
                    self.blocks[block] = dict(content)

    def places(self, name: tuple[int, ...], num_tokens: int, *, of_next: bool = False):
        """Yields places and contents: that of the last of some tokens, or what the next reads."""
        for index, group in enumerate(self.manager.plan.groups):
            row, growth = self.manager.block_ids(name)[index], group.growth
            if growth.stores == "state":
                if num_tokens:
                    yield (row[0], 0), hash((index, name[:num_tokens]))
                continue
            first = max(0, num_tokens - growth.window + 1) if growth.kind == "sliding" else 0
            for position in range(first if of_next else num_tokens - 1, num_tokens):
                content = hash((index, name[: position + 1]))
                yield (row[position // group.block_size], position % group.block_size), content


def served_apart(seed: int, layers, *, has_tokens: bool, has_host: bool = False) -> Counter[str]:
    """Computes prompts on one worker and answers on another; copies take some steps."""
    draw, seen = random.Random(seed), Counter[str]()
    memory = {"host_memory": HostMemory(num_bytes=2**20, min_tokens=1)} if has_host else {}
    blocks = draw.choices(range(26, 38) if len(layers) == 2 else range(15, 22), k=2)
    first = Worker(layers, blocks[0], has_tokens=has_tokens)
    second = Worker(layers, blocks[1], has_tokens=has_tokens, **memory)
    roots = [tuple(draw.randint(0, 9) for _ in range(48)) for _ in range(2)]
    prompts: dict[tuple[int, ...], int] = {}
    export_blocks: list[tuple[tuple[int, ...], ExportedBlocks]] = []
    flying: list[tuple[int, tuple[int, ...], ExportedBlocks, ExportedBlocks]] = []
    for step in range(600):
        if step < 60 and draw.random() < 0.4:
            size = draw.randint(1, 30)
            own = tuple(draw.randint(0, 9) for _ in range(18))
            name = (draw.choice(roots)[:size] + own)[:48]
            if name not in prompts:
                prompts[name] = draw.randint(max(1, size - 3), len(name) - 2)
                where = draw.choice([first, first, second])  # some compute their own prompt
                where.tokens[name] = list(name[: prompts[name]])
                where.scheduler.add(name, prompts[name], max_tokens=len(name))
        for worker in (first, second):
            for name in worker.step():
                if worker is first and len(worker.tokens[name]) == prompts[name]:
                    export_blocks.append((name, first.scheduler.export_blocks(name)))
                    continue
                worker.tokens[name].append(name[len(worker.tokens[name])])
                if len(worker.tokens[name]) < len(name):
                    worker.scheduler.append({name: 1})
                else:
                    worker.scheduler.finish(name)
                    seen["answered"] += 1
        for name, source in export_blocks.copy():
            second.tokens[name] = list(name[: source.num_tokens])
            into = second.scheduler.import_blocks(name, source.num_tokens, max_tokens=len(name))
            second.transfer(second.manager.take_transfers())
            if into is not None:
                assert into.first_logical_blocks == source.first_logical_blocks
                flying.append((step + draw.randint(0, 6), name, source, into))
                export_blocks.remove((name, source))
        for landing in [each for each in flying if each[0] <= step]:
            _, name, source, into = landing
            flying.remove(landing)
            for theirs, mine in zip(source.block_ids, into.block_ids, strict=True):
                for old, new in zip(theirs.tolist(), mine.tolist(), strict=True):
                    second.blocks[new] = dict(first.blocks[old])
            first.scheduler.finish(name)
            second.tokens[name].append(name[source.num_tokens])
            second.scheduler.append({name: 1})
            seen["handed"] += 1
        if step > 60 and not (first.scheduler.has_work or second.scheduler.has_work):
            break
    assert not (first.scheduler.has_work or second.scheduler.has_work or flying or export_blocks)
    for worker in (first, second):
        assert worker.manager.num_free_blocks == worker.manager.plan.num_blocks - 1
    return seen + Counter(preempted=first.preempted + second.preempted)


def test_room_for_cached_tokens_goes_to_requests_of_the_step() -> None:
    """And not to drafts that came before them, for which the step has too few tokens."""
    manager, _ = manager_of({"a": FULL}, 40)
    scheduler = Scheduler(manager, max_tokens=4, cached_tokens=48, forks=1)
    for name, count, more in (("drafts", 40, 3), ("other", 10, 1)):
        assert scheduler.import_blocks(name, count, max_tokens=48) is not None
        scheduler.append({name: more})
    assert scheduler.schedule(max_tokens=1).work == {"other": 1}


def test_drafts_that_have_to_wait_leave_room_for_cached_prefixes() -> None:
    manager, shape = manager_of({"a": FULL}, 60)
    tokens = {"donor": list(range(16)), "late": list(range(17))}
    tokens |= {"first": [1] * 11, "second": [2] * 34}
    scheduler = Scheduler(manager, max_tokens=16, tokens=tokens, cached_tokens=48)
    scheduler.add("donor", 16)
    manager.step(shape, scheduler.schedule().work)
    scheduler.finish("donor")
    for name, count, more in (("first", 8, 3), ("second", 30, 4)):
        assert scheduler.import_blocks(name, count, max_tokens=48) is not None
        scheduler.append({name: more})
    scheduler.add("late", 17)
    schedule = scheduler.schedule(max_tokens=5)
    assert (
        schedule.work == {"first": 3, "late": 1} and schedule.hits["late"].num_cached_tokens == 16
    )


@pytest.mark.parametrize(("has_tokens", "has_host"), [(False, False), (True, True)])
@pytest.mark.parametrize("layers", [{"a": FULL, "w": WINDOW}, ALL], ids=len)
def test_requests_go_on_in_another_scheduler(layers, has_tokens: bool, has_host: bool) -> None:
    seen = Counter[str]()
    for seed in range(100 if IS_LONG else 2):
        seen += served_apart(seed, layers, has_tokens=has_tokens, has_host=has_host)
    assert min(seen[what] for what in ("handed", "answered", "preempted")) > 0, seen


def test_what_a_scheduler_cannot_hand_over_is_refused() -> None:
    worker = Worker({"a": FULL}, 13, has_tokens=False)
    scheduler, name = worker.scheduler, tuple(range(20))
    scheduler.add(name, 18)
    with pytest.raises(ValueError, match="computed 0 of 18"):
        scheduler.export_blocks(name)
    worker.step()
    with pytest.raises(ValueError, match="computed 16 of 18"):
        scheduler.export_blocks(name)
    worker.step()
    assert scheduler.export_blocks(name).num_tokens == 18
    with pytest.raises(ValueError, match="being exported"):
        scheduler.rewind({name: 18})
    assert scheduler.import_blocks("b", 32) is None  # five blocks are taken
    assert scheduler.running == (name,) and not scheduler.waiting
    assert scheduler.import_blocks("b", 16) is not None
    for _ in range(3):  # a request waits for the blocks of others, and nobody answers
        assert not scheduler.schedule().work
    with pytest.raises(ValueError, match="in use"):
        scheduler.import_blocks("b", 16)
    scheduler.finish("b")
    scheduler.append({name: 1})
    scheduler.rewind({name: 18})
    assert scheduler.export_blocks(name).num_tokens == 18
    scheduler.finish(name)
    scheduler.add(name, 18)  # another one
    for _ in range(2):
        worker.step()
    scheduler.rewind({name: 18})
    few = Scheduler(BlockManager(worker.manager.plan, max_requests=4), max_tokens=16)
    with pytest.raises(ValueError, match="cached_tokens=0"):
        few.import_blocks("b", 1)


def test_a_request_of_another_cache_has_its_own_prefix_and_end() -> None:
    """Computed again, it finds what its salt and its adapter let it share."""
    manager, shape = manager_of({"a": FULL}, 40)
    ids, adapter = list(range(16)), [jaxkv.ExtraKey.lora("a", "/a")]
    tokens = {name: list(ids) for name in ("plain", "same", "salted", "adapted", "late")}
    scheduler = Scheduler(manager, max_tokens=48, tokens=tokens, cached_tokens=48)
    scheduler.add("plain", 16)
    manager.step(shape, scheduler.schedule().work)
    scheduler.finish("plain")
    options = {"same": {}, "salted": {"salt": "s"}, "adapted": {"extra_keys": adapter}}
    for name, prefix in options.items():
        assert scheduler.import_blocks(name, 16, max_tokens=17, **prefix) is not None
    refused = [("late", 49, None), ("late", 16, 15), ("late", 0, None), ("late", 16, 49)]
    for name, count, most in refused:
        with pytest.raises(ValueError, match="num_tokens"):
            scheduler.import_blocks(name, count, max_tokens=most)
    scheduler.restart()
    hits = scheduler.schedule().hits
    assert {name: hit.num_cached_tokens > 0 for name, hit in hits.items()} == {
        "same": True,
        "salted": False,
        "adapted": False,
    }


def test_as_many_tokens_are_imported_as_a_step_brings_to_the_device() -> None:
    manager, _ = manager_of({"a": FULL}, 40)
    scheduler = Scheduler(manager, max_tokens=16, cached_tokens=20)
    with pytest.raises(ValueError, match="num_tokens=21 is more than cached_tokens=20"):
        scheduler.import_blocks("a", 21)
    assert not scheduler.has_work
    assert scheduler.import_blocks("a", 20, max_tokens=22) is not None
    with pytest.raises(ValueError, match="more than its max_tokens=22; finish it"):
        scheduler.append({"a": 3})
    scheduler.append({"a": 2})
    for name in ("b", "c"):
        assert scheduler.import_blocks(name, 1) is not None
    assert scheduler.import_blocks("d", 1) is None  # no row is free
    assert scheduler.running == ("a", "b", "c") and not scheduler.waiting


def test_a_request_whose_export_is_refused_is_not_handed_over() -> None:
    manager = BlockManager(plan_of({"a": FULL}, 13, 48), max_requests=2)
    scheduler = Scheduler(manager, max_tokens=16, forks=1)
    scheduler.add("a", 6)
    manager.step(scheduler.shape(), scheduler.schedule().work)
    scheduler.fork("a", ["b"])
    with pytest.raises(ValueError, match="none of them in a step since"):
        scheduler.export_blocks("b")
    scheduler.rewind({"b": 6})
    scheduler.finish("a")
    assert not scheduler._queues.exporting


def test_what_an_import_overwrites_goes_to_host_memory_first() -> None:
    served = Served({"a": FULL}, 9, host(100, {"a": FULL}))
    served.run("a", prompt(1, 32))
    handed = served.manager.import_blocks("b", 32)
    for call in (
        lambda: served.manager.import_blocks("c", 1),
        lambda: served.step({"b": 1}),
    ):
        with pytest.raises(RuntimeError, match="take_transfers"):
            call()
    assert [*served.manager.requests] == ["b"]
    transfers = served.manager.take_transfers()
    assert transfers is not None and not transfers.loads
    stored = [i for chunk in transfers.stores for i in chunk.block_ids.tolist()]
    assert sorted(stored) == sorted(handed.block_ids[0].tolist())
