"""`HostBlockPool`, the ids and the bytes of blocks in host memory, and their chunks. NumPy only."""

from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from jaxkv._src.offload._transfers import Chunk

CHUNK_SIZES = (16, 4, 1)  # blocks; each size is a program of its own
MAX_CHUNK_BYTES = 2**26  # of a chunk of more than one block
UNFLUSHED = -1  # instead of the number of a chunk


def chunk_sizes(block_bytes: int) -> list[int]:
    """Returns the numbers of blocks that chunks of a group may have, the largest first."""
    return [size for size in CHUNK_SIZES if size == 1 or size * block_bytes <= MAX_CHUNK_BYTES]


class HostBlockPool:
    """Blocks of host memory, each with the bytes of a block of its group.

    A block is alive while its content is of use. Those that are stored together make up a chunk,
    which leaves as a whole: when none of its blocks is alive, or when it is the least recently used
    one and others need its bytes. An id that is no longer alive is free after the next transfers.

    num_ids: number of ids, from ``first_id`` on.
    used_bytes: of all chunks, and of blocks that are to be stored.
    """

    def __init__(self, block_bytes: Sequence[int], num_bytes: int, first_id: int):
        self.block_bytes = np.array(block_bytes, np.int64)
        self.num_bytes, self.first_id, self.used_bytes = num_bytes, first_id, 0
        self.num_ids = 2 * (num_bytes // min(block_bytes))  # half of them may be leaving
        self._group_of, self._chunk_of, self._index_of = np.zeros((3, self.num_ids), np.int64)
        self.is_alive = np.zeros(self.num_ids, bool)
        self._free: list[int] = []
        self._unused = first_id  # no block has had this id or one after it
        self._leaving: list[int] = []
        self._unflushed: dict[int, None] = {}
        self._members: dict[int, list[int]] = {}  # by chunk, the least recently used first
        self._num_alive: dict[int, int] = {}  # by chunk
        self._bytes: dict[int, int] = {}  # by chunk, whose ids may be of other chunks by now
        self._sizes: dict[int, int] = {}  # by chunk, dropped ones until `settle`
        self._dropped: list[int] = []
        self._number = 0

    @property
    def has_changed(self) -> bool:
        """Whether `flush` or `settle` has anything to do."""
        return bool(self._unflushed or self._dropped or self._leaving)

    @property
    def num_used_ids(self) -> int:
        """Ids that are not free."""
        return self._unused - self.first_id - len(self._free)

    @property
    def alive(self) -> np.ndarray:
        """Ids of all blocks whose content is of use, int64[N]."""
        return self.is_alive.nonzero()[0] + self.first_id

    def groups(self, ids: np.ndarray) -> np.ndarray:
        """Returns the group of each block, int64[N]."""
        return self._group_of[ids - self.first_id]

    def chunks(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of each block's chunk, int64[N]; `UNFLUSHED` for one without."""
        return self._chunk_of[ids - self.first_id]

    def bytes_to_load(self, ids: np.ndarray) -> int:
        """Returns the bytes of all chunks that hold any of the blocks."""
        numbers = self.chunks(ids)
        alone = ids[numbers == UNFLUSHED]
        whole = sum(self._bytes[number] for number in set(numbers[numbers >= 0].tolist()))
        return whole + int(self.block_bytes[self.groups(alone)].sum())

    def take(self, groups: np.ndarray) -> np.ndarray:
        """Takes a block for each of the given groups, int64[N]; they fit."""
        again = [self._free.pop() for _ in range(min(len(groups), len(self._free)))]
        begin, self._unused = self._unused, self._unused + len(groups) - len(again)
        ids = np.array([*again, *range(begin, self._unused)], np.int64)
        at = ids - self.first_id
        self._group_of[at], self._chunk_of[at], self.is_alive[at] = groups, UNFLUSHED, True
        self.used_bytes += int(self.block_bytes[groups].sum())
        self._unflushed.update(dict.fromkeys(ids.tolist()))
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Notes that blocks are of no use any more, and drops chunks that have no others."""
        for host_id in ids:
            at = host_id - self.first_id
            self.is_alive[at] = False
            self._leaving.append(host_id)
            number = int(self._chunk_of[at])
            if number == UNFLUSHED:
                continue
            self.unpin(number)

    def pin(self, number: int) -> bool:
        """Keeps a chunk until `unpin`, whatever its blocks; False: it was dropped already."""
        if number in self._num_alive:
            self._num_alive[number] += 1
        return number in self._num_alive

    def unpin(self, number: int) -> None:
        """Takes back one `pin` of a chunk, which is dropped if none of its blocks is alive."""
        self._num_alive[number] -= 1
        if not self._num_alive[number]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        self.used_bytes -= self._bytes.pop(number)
        self._dropped.append(number)
        del self._members[number], self._num_alive[number]

    def touch(self, ids: np.ndarray) -> None:
        """Marks the chunks of blocks as the most recently used."""
        for number in dict.fromkeys(self.chunks(ids).tolist()):
            if number != UNFLUSHED:
                self._members[number] = self._members.pop(number)

    def oldest(self, spared: Set[int]) -> list[int] | None:
        """Drops the least recently used chunk but for some; returns its blocks that were alive."""
        number = next((n for n in self._members if n not in spared), None)
        if number is None:
            return None
        members = np.array(self._members[number])
        at = members - self.first_id  # ids that have left may be of other chunks by now
        ids = members[self.is_alive[at] & (self._chunk_of[at] == number)].tolist()
        self.release(ids)
        return ids

    # --- transfers --------------------------------------------------------------------

    def flush(self, sources: dict[int, int], wanted: set[int]) -> list[Chunk]:
        """Makes chunks of the blocks that were taken since the last call.

        Args:
          sources: their blocks on the device.
          wanted: blocks that are read although they may not be alive any more.
        """
        chunks: list[Chunk] = []
        by_group: dict[int, list[int]] = {}
        for host_id in self._unflushed:
            group = int(self._group_of[host_id - self.first_id])
            if self.is_alive[host_id - self.first_id] or host_id in wanted:
                by_group.setdefault(group, []).append(host_id)
            else:
                self.used_bytes -= int(self.block_bytes[group])
        self._unflushed.clear()
        for group, ids in by_group.items():
            for members in self._cut(group, ids):
                chunks.append(self._chunk(group, members, [sources[i] for i in members]))
        return chunks

    def _cut(self, group: int, ids: list[int]) -> list[list[int]]:
        """Cuts blocks of a group into the sizes of chunks, the largest first."""
        parts: list[list[int]] = []
        for size in chunk_sizes(int(self.block_bytes[group])):
            while len(ids) >= size:
                parts.append(ids[:size])
                ids = ids[size:]
        return parts

    def _chunk(self, group: int, members: list[int], sources: list[int]) -> Chunk:
        self._number += 1
        at = np.array(members) - self.first_id
        self._chunk_of[at], self._index_of[at] = self._number, np.arange(len(members))
        self._members[self._number], self._sizes[self._number] = members, len(members)
        self._num_alive[self._number] = int(self.is_alive[at].sum())
        self._bytes[self._number] = len(members) * int(self.block_bytes[group])
        return Chunk(self._number, group, np.array(sources, np.int32))

    def loads(self, pairs: Mapping[int, int]) -> list[Chunk]:
        """Returns the chunks to copy to the device.

        Args:
          pairs: blocks on the device and the blocks of chunks that come there.
        """
        at = np.fromiter(pairs.values(), np.int64, len(pairs)) - self.first_id
        numbers, indices, turns = self._chunk_of[at], self._index_of[at], np.zeros_like(at)
        order = np.lexsort((indices, numbers))
        again = np.diff(numbers[order], prepend=-1) == 0
        again &= np.diff(indices[order], prepend=-1) == 0
        for i in again.nonzero()[0].tolist():  # blocks that are loaded more than once
            turns[order[i]] = turns[order[i - 1]] + 1
        keys = numbers * (1 + turns.max(initial=0)) + turns
        _, firsts, of_chunk = np.unique(keys, return_index=True, return_inverse=True)
        ids = np.full((firsts.size, CHUNK_SIZES[0]), -1, np.int32)
        ids[of_chunk, indices] = np.fromiter(pairs, np.int64, len(pairs))
        return [
            Chunk(number, group, ids[i, : self._sizes[number]])
            for i in np.argsort(firsts).tolist()
            for number, group in [(numbers.item(firsts[i]), self._group_of.item(at[firsts[i]]))]
        ]

    def settle(self) -> tuple[int, ...]:
        """Frees the ids of blocks that are not alive; returns the chunks that were dropped."""
        dropped = tuple(self._dropped)
        for number in dropped:
            del self._sizes[number]
        self._dropped.clear()
        self._free += self._leaving
        self._leaving.clear()
        return dropped
