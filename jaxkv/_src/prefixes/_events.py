"""Events of stored and removed blocks, for routers and connectors. NumPy only."""

import collections
import dataclasses
import time
from typing import Literal, get_args

from jaxkv._src.internal.checks import (
    check_at_most,
    check_choice,
    check_count,
    check_number,
    check_positive,
)
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.prefixes._extra_keys import BlockExtras
from jaxkv._src.prefixes._keys import DEFAULT_ROOT, check_key

#: the memory that a block is in, by vLLM's names
Medium = Literal["GPU", "CPU", "STORAGE"]
#: kinds of layers, as `jaxkv.specs.LayerSpec.kind`
GroupKind = Literal["full", "mla", "sliding", "sliding_mla", "chunked", "ring", "state", "cross"]
_MEDIA = ("GPU", "CPU", "STORAGE")
_KINDS = get_args(GroupKind)
_KEEP_ALL_TOKENS = ("full", "mla")


@dataclasses.dataclass(frozen=True)
class EventGroup:
    """The group of layers that an event is about.

    index: index of the group in the plan.
    kind: kind of its layers.
    block_size: tokens that one key covers beyond its parent key.
    window: tokens of a sliding window, if the layers have one.
    """

    index: int
    kind: GroupKind
    block_size: int
    window: int | None = None

    def __post_init__(self) -> None:
        check_count(index=self.index)
        check_choice(_KINDS, kind=self.kind)
        check_positive(block_size=self.block_size)
        if self.window is not None:
            check_positive(window=self.window)

    @property
    def is_counted(self) -> bool:
        """Whether a router may count the group's blocks as cached prefixes.

        False for windows, chunks, states and encoders, because such a group caches only the end of
        a prefix. In a model that has such groups too, the blocks of the other groups are an upper
        bound of the hit.
        """
        return self.kind in _KEEP_ALL_TOKENS


@dataclasses.dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks of one group that a request can now share.

    group: group of the blocks.
    block_keys: one per block; see `block_keys`.
    parent_key: key of the block before the first; None at the start of the sequence.
    token_ids: token ids of all blocks, ``len(block_keys) * group.block_size`` of them.
    medium: the memory that the blocks are in.
    extra_keys: per block, as `extra_keys_by_block` returns them; None if no block has any.
    adapter: name of the LoRA adapter, if any.
    adapter_id: number of the adapter, which old routers read instead of its name.
    """

    group: EventGroup
    block_keys: tuple[bytes, ...]
    parent_key: bytes | None
    token_ids: tuple[int, ...]
    medium: Medium = "GPU"
    extra_keys: tuple[BlockExtras, ...] | None = None
    adapter: str | None = None
    adapter_id: int | None = None

    def __post_init__(self) -> None:
        check_choice(_MEDIA, medium=self.medium)
        _check_not_empty(self.block_keys)
        num_blocks, size = len(self.block_keys), self.group.block_size
        if len(self.token_ids) != num_blocks * size:
            raise ValueError(
                f"token_ids has {len(self.token_ids)} tokens; {num_blocks} blocks of {size} have "
                f"{num_blocks * size}"
            )
        if self.extra_keys is not None and len(self.extra_keys) != num_blocks:
            raise ValueError(
                f"extra_keys has {len(self.extra_keys)} entries; give one for each of the "
                f"{num_blocks} blocks, or None"
            )


@dataclasses.dataclass(frozen=True)
class BlocksRemoved:
    """Blocks of one group that can no longer be shared from a medium.

    group: group of the blocks.
    block_keys: one per block, in any order.
    medium: the memory that the blocks were in.
    """

    group: EventGroup
    block_keys: tuple[bytes, ...]
    medium: Medium = "GPU"

    def __post_init__(self) -> None:
        check_choice(_MEDIA, medium=self.medium)
        _check_not_empty(self.block_keys)


@dataclasses.dataclass(frozen=True)
class AllBlocksCleared:
    """All blocks that were stored before are removed, in every group and medium."""


def _check_not_empty(block_keys: tuple[bytes, ...]) -> None:
    if not block_keys:
        raise ValueError("block_keys is empty; give at least one key, or leave out the event")


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclasses.dataclass(frozen=True)
class EventBatch:
    """Events that are sent together, such as the events of one step.

    sequence: number of the batch: 0, 1, 2 ... without a gap.
    timestamp: seconds since 1970.
    events: in the order in which they happened.
    """

    sequence: int
    timestamp: float
    events: tuple[CacheEvent, ...]


class EventLog:
    """A log of one cache's events, in numbered batches that can be sent again.

    A router that applies all batches in order knows which blocks are cached. A router that
    misses a number asks for a replay: the batches `since` that number. Pass a log to one
    `jaxkv.BlockManager`, which appends the events of its blocks.

    has_manager: whether one appends to it.
    """

    def __init__(self, *, max_batches: int = 10_000, root: bytes = DEFAULT_ROOT):
        """Creates an empty log, whose first batch will have number 0.

        Args:
          max_batches: batches to keep for `since`; the oldest are dropped first.
          root: `root_key` of the seed that all readers use.
        """
        check_positive(max_batches=max_batches)
        check_at_most(INT32_MAX, max_batches=max_batches)
        check_key(root=root)
        self.root, self.has_manager = root, False
        self._pending: list[CacheEvent] = []
        self._batches: collections.deque[EventBatch] = collections.deque(maxlen=max_batches)
        self._next = 0

    def __repr__(self) -> str:
        return (
            f"EventLog({self._next} batches taken, the last {len(self._batches)} kept, "
            f"{len(self._pending)} events pending)"
        )

    @property
    def next_sequence(self) -> int:
        """Number of the batch that will be taken next."""
        return self._next

    def append(self, event: CacheEvent) -> None:
        """Appends an event to the next batch.

        Raises:
          TypeError: something that is not an event.
        """
        if not isinstance(event, CacheEvent):
            raise TypeError(f"event must be a cache event, got {type(event).__name__}")
        self._pending.append(event)

    def take(self, timestamp: float | None = None) -> EventBatch | None:
        """Returns the events since the last call as a batch; None if there are none.

        Args:
          timestamp: seconds since 1970; by default now.
        """
        now = time.time() if timestamp is None else timestamp
        check_number(timestamp=now)
        if not self._pending:
            return None
        batch = EventBatch(self._next, now, tuple(self._pending))
        self._pending.clear()
        self._batches.append(batch)
        self._next += 1
        return batch

    def since(self, sequence: int) -> tuple[EventBatch, ...]:
        """Returns the taken batches, from a number on.

        Args:
          sequence: number of the first batch to return.

        Raises:
          ValueError: a batch that is no longer kept, so that a replay cannot be complete.
        """
        check_count(sequence=sequence)
        oldest = self._next - len(self._batches)
        if sequence < oldest:
            raise ValueError(
                f"sequence={sequence} is not kept any more, only batches {oldest} to "
                f"{self._next - 1} are kept; send AllBlocksCleared and all blocks again, or raise "
                "max_batches"
            )
        return tuple(batch for batch in self._batches if batch.sequence >= sequence)
