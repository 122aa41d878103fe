"""Requests that go on in another cache: the blocks that they name, and where these lie."""

import ctypes

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv import BlockManager, KVCache, OutOfBlocksError, StepShape
from jaxkv.blocks import HandedBlocks
from jaxkv.pool import BlockPieces, block_pieces
from tests.layer_examples import plan_of
from tests.test_host_blocks import LONGEST, ORDERS, filled
from tests.test_host_tier import ALL, FULL, STATE


def manager_of(layers, num_blocks: int) -> tuple[BlockManager, StepShape]:
    plan = plan_of(layers, num_blocks, LONGEST)
    shape = StepShape.for_plan(plan, max_requests=3, max_tokens=LONGEST, cached_tokens=LONGEST)
    return BlockManager(plan, max_requests=3), shape


def cut(pieces: BlockPieces) -> list[bytes]:
    pairs = zip(pieces.addresses.tolist(), pieces.lengths.tolist(), strict=True)
    return [ctypes.string_at(address, length) for address, length in pairs]


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
    exported = source.export_blocks("a")
    assert isinstance(exported, HandedBlocks)
    source.fork("a", ["c"])
    with pytest.raises(ValueError, match="after its next step"):
        source.export_blocks("c")
    other, shape = manager_of(layers, 50)
    other.start("before")
    other.step(shape, {"before": 7})
    imported = other.import_blocks("b", num_tokens)
    assert imported.num_tokens == exported.num_tokens == num_tokens
    assert imported.first_columns == exported.first_columns
    for mine, theirs, of_row in zip(
        imported.block_ids, exported.block_ids, source.block_ids("a"), strict=True
    ):
        assert mine.size == theirs.size and set(theirs.tolist()) <= set(of_row)
    held = [set(ids) for ids in other.block_ids("before")]
    assert not set.union(*held) & {i for ids in imported.block_ids for i in ids.tolist()}
    parts = other.step(shape, {"b": 1}).parts()
    assert parts["num_computed_tokens"].tolist() == [num_tokens]
    zeroed = set(parts["zero_ids"].tolist()) if "zero_ids" in parts else set()
    assert not zeroed & {i for ids in imported.block_ids for i in ids.tolist()}
    for name in ("before", "b"):
        other.finish(name)
    assert other.num_free_blocks == 49


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


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_pieces_are_the_bytes_of_their_blocks(options: dict) -> None:
    cache = filled("windows", **options)
    ids = [np.array(of) for of in ([3, 1], [4], [7, 5, 6])]
    ((_, pieces),) = block_pieces(cache, ids).items()
    layout = cache.layout.buffers
    for group, of in enumerate(ids):
        for column, block in enumerate(of):
            here = (pieces.groups == group) & (pieces.columns == column)
            assert pieces.lengths[here].sum() == layout.layout.group_bytes(group)
            found = sorted(b for b, of_block in zip(cut(pieces), here, strict=True) if of_block)
            assert b"".join(found) and sorted(b"".join(found)) == sorted(
                b"".join(bytes_of(cache, group, block))
            )
    # A transfer to other blocks, as one of NIXL's would make it.
    into = [np.array(of) for of in ([8, 9], [10], [12, 11, 2])]
    ((_, places),) = block_pieces(cache, into).items()
    assert (places.lengths == pieces.lengths).all()
    for data, address in zip(cut(pieces), places.addresses.tolist(), strict=True):
        ctypes.memmove(address, data, len(data))
    for group, (of, new) in enumerate(zip(ids, into, strict=True)):
        for block, other in zip(of, new, strict=True):
            assert bytes_of(cache, group, other) == bytes_of(cache, group, block)


def bytes_of(cache: KVCache, group: int, block: int) -> list[bytes]:
    """Returns the bytes of a block in each tensor of its group."""
    layout = cache.layout.buffers
    mine, found = layout.layout.tensors_of(group), []
    for buffer, stack in zip(cache.buffers, layout.stacks, strict=True):
        at = np.asarray(buffer).take(block, axis=layout.block_axis)
        axes = layout.axes.replace("B", "")
        for i, tensor in enumerate(stack):
            if tensor in mine:
                found.append((at.take(i, axes.index("L")) if "L" in axes else at).tobytes())
    return found


def test_each_device_of_a_mesh_has_pieces_of_its_share() -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
    plan = plan_of({"a": spec, "b": spec}, 20, LONGEST)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    cache = jaxkv.make_cache(plan, max_requests=2, mesh=mesh, axis="x")
    of_devices = block_pieces(cache, [np.array([1, 2])])
    assert len(of_devices) == 2
    whole = cache.layout.buffers.layout.group_bytes(0)
    for pieces in of_devices.values():
        assert pieces.lengths.sum() * 2 == 2 * whole


def test_blocks_that_are_not_in_the_pool_have_no_address() -> None:
    cache = filled("full")
    for ids in ([0], [cache.layout.num_blocks]):
        with pytest.raises(ValueError, match="block_ids"):
            block_pieces(cache, [np.array(ids)])
    with pytest.raises(ValueError, match="groups"):
        block_pieces(cache, [])
