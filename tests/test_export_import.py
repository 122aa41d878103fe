"""Requests that go on in another cache: the blocks that they name, and where these lie."""

import ctypes
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv import BlockManager, KVCache, OutOfBlocksError, Scheduler, StepShape
from jaxkv._src.layout import list_descriptors
from jaxkv.blocks import ExportedBlocks
from jaxkv.pool import BlockDescriptors, describe_blocks
from tests.helpers import ON_GPU, needs_devices
from tests.layer_examples import plan_of
from tests.test_host_blocks import LONGEST, ORDERS, filled
from tests.test_offload import ALL, FULL, STATE


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
            shapes=((2, 4, 4),),
            dtypes=("f32",),
            cache_mode=mode,  # pyrefly: ignore
            replay=4,
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


def test_what_a_scheduler_cannot_export_or_import_is_refused() -> None:
    manager = BlockManager(plan_of({"a": FULL}, 13, 48), max_requests=4)
    scheduler = Scheduler(manager, max_tokens=16, cached_tokens=48)

    def step() -> None:
        manager.step(scheduler.shape(), scheduler.schedule().work)

    scheduler.add("a", 18)
    for computed in (0, 16):
        with pytest.raises(ValueError, match=f"computed {computed} of 18"):
            scheduler.export_blocks("a")
        step()
    assert scheduler.export_blocks("a").num_tokens == 18
    with pytest.raises(ValueError, match="being exported"):
        scheduler.rewind({"a": 18})
    assert scheduler.import_blocks("b", 32) is None  # five blocks are taken
    assert scheduler.running == ("a",) and not scheduler.waiting
    assert scheduler.import_blocks("b", 16) is not None
    with pytest.raises(ValueError, match="in use"):
        scheduler.import_blocks("b", 16)
    few = Scheduler(BlockManager(manager.plan, max_requests=4), max_tokens=16)
    with pytest.raises(ValueError, match="cached_tokens=0"):
        few.import_blocks("b", 1)
