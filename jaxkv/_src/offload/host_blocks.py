"""`HostBlocks`, the blocks of a cache in page-locked host memory."""

import collections
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax import Array

from jaxkv._src.cache import KVCache, check_cache
from jaxkv._src.internal.allocation import HOST_MEMORY
from jaxkv._src.internal.checks import check_count, check_kind
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.unique import Unique
from jaxkv._src.offload import Chunk, Transfers, chunk_sizes
from jaxkv._src.offload._chunk_copies import ChunkArrays, put, take

MAX_STAGED = 2**29  # bytes that take device memory on their way, in each direction
LOOKAHEAD_LOADS = 4  # chunks
AT_ONCE = 16  # chunks whose indices go to the device in one call


Staged = collections.deque[tuple[Array, int]]  # copies that were started, and their bytes


class TransferError(RuntimeError):
    """A copy between the memories failed, and no block has got lost.

    cache: the cache as it is now, instead of the one that was passed: `HostBlocks.transfer` of it
      and of the same transfers goes on where this one failed.
    """

    def __init__(self, cache: KVCache):
        super().__init__(
            "blocks could not be copied between device and host memory; free memory, and call "
            "transfer(error.cache, transfers) with the same transfers again"
        )
        self.cache = cache


class HostBlocks(Unique):
    """The blocks of a cache in page-locked host memory.

    Example::

        manager = jaxkv.BlockManager(
            plan, max_requests=256, host_memory=jaxkv.HostMemory(num_bytes=host_bytes)
        )
        host = jaxkv.HostBlocks()
        ...
        upload = manager.step(shape, work)
        cache = host.transfer(cache, manager.take_transfers())    # before the step runs
        cache, out = step(params, cache, upload)

    Copies to the host run next to the steps that follow them. Copies to the device wait for the
    steps before, and run next to one step if `Transfers` name them ahead. Not thread-safe.
    """

    why = "it owns page-locked memory that goes with one manager; make another for another manager"

    def __init__(self) -> None:
        """Creates empty host memory; it grows with the transfers of one manager."""
        self._chunks: dict[int, ChunkArrays] = {}
        # Copies that may not have ended: an array that is ready when one has, and its bytes.
        self._copies: list[tuple[Array, int]] = []
        self._lookahead = collections.deque[ChunkArrays]()  # on their way to the device, in order
        self._number = self._begun = 0

    def __repr__(self) -> str:
        return f"HostBlocks({len(self._chunks)} chunks, {self.num_bytes:,} bytes)"

    @property
    def num_bytes(self) -> int:
        """Bytes of page-locked memory that hold blocks, over all devices together."""
        return sum(array.nbytes for chunk in self._chunks.values() for array in chunk)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes whose copies to host memory and back have been started, and have not ended."""
        self._forget_ended()
        lookahead = sum(array.nbytes for arrays in self._lookahead for array in arrays)
        return lookahead + sum(num_bytes for _, num_bytes in self._copies)

    def transfer(self, cache: KVCache, transfers: Transfers | None) -> KVCache:
        """Copies blocks to host memory and back, before the step that was packed with them.

        Args:
          cache: as the step before returned it. Donated.
          transfers: from `BlockManager.take_transfers`; None: the cache is returned as it is.

        Returns:
          The cache for the step.

        Raises:
          TransferError: a copy failed, usually because memory ran out.
          ValueError: other transfers than the next ones, or a cache on devices of other processes.
        """
        check_cache(cache)
        if transfers is None:
            return cache
        check_kind(Transfers, "what take_transfers returned", transfers=transfers)
        _check_devices(cache)
        self._begin(transfers)
        self._forget_ended()
        try:
            self._chunks |= self._stored(cache, transfers)
            staged, lookahead = Staged(), self._lookahead
            for index, (chunk, into) in enumerate(_with_indices(cache, transfers.loads)):
                # A copy waits for the programs that were started before it, so that a few copies
                # start ahead of the programs that put others into the pool.
                for later in transfers.loads[index + len(lookahead) : index + LOOKAHEAD_LOADS]:
                    lookahead.append(self._to_device(cache, later.number))
                done = lookahead[0][0]
                if (chunk.block_ids >= 0).any():  # or others have all of its blocks by now
                    cache, done = put(cache, into, lookahead[0], group=chunk.group)
                self._note(staged, done, lookahead.popleft())
            for number in transfers.lookahead:
                lookahead.append(self._to_device(cache, number))
        except Exception as error:
            self._lookahead.clear()  # the same transfers, and the next ones, copy these again
            raise TransferError(cache) from error
        for number in transfers.dropped:
            del self._chunks[number]
        self._number = transfers.number
        return cache

    def warm_up(self, cache: KVCache, num_bytes: int = 0) -> KVCache:
        """Compiles all copies of a cache, so that serving never does, and takes host memory.

        Args:
          cache: donated; its null block is copied onto itself.
          num_bytes: of `HostMemory`, to take now; 0: as transfers need it. The system
            allocates some GB a second of page-locked memory, and jax does not give it back.

        Returns:
          The cache.

        Raises:
          ValueError: a cache on devices of other processes.
        """
        check_cache(cache)
        check_count(num_bytes=num_bytes)
        _check_devices(cache)
        layout = cache.layout
        group_bytes = [layout.buffers.layout.group_bytes(i) for i in range(len(layout.growths))]
        for group, block_bytes in enumerate(group_bytes):
            for size in chunk_sizes(block_bytes):
                ids, into = _on_device(
                    cache, [np.zeros(size, np.int32), np.zeros((2, size), np.int32)]
                )
                self._chunks[0] = self._to_host(cache, ids, group)
                cache, _ = put(cache, into, self._to_device(cache, 0), group=group)
                del self._chunks[0]
        if num_bytes and any(group_bytes):
            group = next(i for i, block_bytes in enumerate(group_bytes) if block_bytes)
            (ids,) = _on_device(cache, [np.zeros(chunk_sizes(group_bytes[group])[0], np.int32)])
            count = cdiv(num_bytes, ids.size * group_bytes[group])
            taken: list[ChunkArrays] = []
            while len(taken) < count:  # one by one, because each is staged on the device
                taken.append(jax.block_until_ready(self._to_host(cache, ids, group)))
        return cache

    def _forget_ended(self) -> None:
        self._copies = [
            (array, num_bytes)
            for array, num_bytes in self._copies
            if not array.is_ready()  # pyrefly: ignore
        ]

    def _begin(self, transfers: Transfers) -> None:
        if transfers.number == self._begun != self._number:
            return  # after a failure
        if transfers.number != self._number + 1 and not transfers.is_anew:
            raise ValueError(
                f"transfers have the number {transfers.number}, and those before had "
                f"{self._number}: carry out all that take_transfers returns, once "
                "and in order, or reset the manager"
            )
        if transfers.is_anew:
            self._chunks.clear()
            self._lookahead.clear()
        self._begun = transfers.number

    def _stored(self, cache: KVCache, transfers: Transfers) -> dict[int, ChunkArrays]:
        """Returns the chunks of stores that were not made yet."""
        stored: dict[int, ChunkArrays] = {}
        staged = Staged()
        all_ids = _on_device(cache, [chunk.block_ids for chunk in transfers.stores])
        for chunk, ids in zip(transfers.stores, all_ids, strict=True):
            if chunk.number not in self._chunks:
                stored[chunk.number] = self._to_host(cache, ids, chunk.group)
                self._note(staged, stored[chunk.number][0], stored[chunk.number])
        return stored

    def _to_host(self, cache: KVCache, block_ids: Array, group: int) -> ChunkArrays:
        taken = take(cache, block_ids, group=group)
        return jax.device_put(
            taken, tuple(array.sharding.with_memory_kind(HOST_MEMORY) for array in taken)
        )

    def _to_device(self, cache: KVCache, number: int) -> ChunkArrays:
        arrays = self._chunks[number]
        kind = cache.status.sharding.memory_kind or "device"
        return jax.device_put(
            arrays, tuple(array.sharding.with_memory_kind(kind) for array in arrays)
        )

    def _note(self, staged: Staged, done: Array, copied: ChunkArrays) -> None:
        """Notes a copy that was started; waits for older ones if many take device memory."""
        num_bytes = sum(array.nbytes for array in copied)
        self._copies.append((done, num_bytes))
        staged.append((done, num_bytes))
        while sum(size for _, size in staged) > MAX_STAGED:
            staged.popleft()[0].block_until_ready()


def _check_devices(cache: KVCache) -> None:
    if not cache.status.sharding.is_fully_addressable:
        raise ValueError(
            "cache lies on devices of other processes, too; HostBlocks copies blocks of one "
            "process only: leave host_memory= of the manager out"
        )


def _with_indices(cache: KVCache, loads: Sequence[Chunk]) -> Iterator[tuple[Chunk, Array]]:
    """Yields chunks and `_into` of each on the device; `AT_ONCE` at a time, for copies to start."""
    for at in range(0, len(loads), AT_ONCE):
        some = loads[at : at + AT_ONCE]
        yield from zip(some, _on_device(cache, [_into(chunk) for chunk in some]), strict=True)


def _into(chunk: Chunk) -> np.ndarray:
    """Returns the blocks that a load writes, and their indices in the chunk, int32[2, N]."""
    wanted = np.flatnonzero(chunk.block_ids >= 0)
    indices = np.resize(wanted, chunk.block_ids.size)  # some several times, instead of others
    return np.stack([chunk.block_ids[indices], indices], dtype=np.int32, casting="same_kind")


def _on_device(cache: KVCache, numbers: list[np.ndarray]) -> list[Array]:
    """Returns numbers on all devices of a cache; explicitly, because of transfer guards.

    One call for many: with a call for each, the host took longer than a link of 50 GB/s.
    """
    return jax.device_put(numbers, cache.status.sharding)
