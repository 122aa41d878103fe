"""Events for the whole blocks that are cached, named by block keys. No jax."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxkv._src.prefixes._events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventGroup,
    EventLog,
    Medium,
)
from jaxkv._src.prefixes._extra_keys import ExtraKey, extra_keys_by_block
from jaxkv._src.prefixes._keys import block_keys
from jaxkv._src.prefixes._tokens import MAX_TOKEN


@dataclasses.dataclass(slots=True, eq=False)
class KeyChain:
    """Block keys of a prompt's first tokens, extended as more tokens are computed.

    salt, extra_keys: of the prompt.
    keys: one key for every `PrefixEvents.grain` tokens.
    """

    salt: str | None
    extra_keys: tuple[ExtraKey, ...]
    keys: list[bytes] = dataclasses.field(default_factory=list)

    def copy(self) -> "KeyChain":
        """Returns an independent copy, for a request that continues differently."""
        return dataclasses.replace(self, keys=[*self.keys])

    def extend(self, tokens: np.ndarray, grain: int, root: bytes) -> None:
        """Appends the keys of the tokens that have none yet.

        Args:
          tokens: the prompt from its first token on.
          grain: tokens of one key.
          root: parent of the first key.
        """
        done = len(self.keys) * grain
        if tokens.size - done >= grain:
            self.keys += block_keys(
                tokens[done:],
                grain,
                salt=self.salt,
                extra_keys=self.extra_keys,
                root=root,
                start=done,
                parent=self.keys[-1] if self.keys else None,
            )


Name = tuple[Medium, int, bytes]  # of a block: its memory, group and key
Place = tuple[BlocksStored, int]  # of a block: the event that told of its tokens, and its index


class PrefixEvents:
    """Writes into a log which whole blocks are cached.

    Keys leave out what no model depends on, such as the length of an image that they identify
    otherwise, so several blocks may have the same key. The log gets an event when the first block
    of a key is cached, and another when the last one is gone.

    grain: tokens per key, the greatest common divisor of the groups' block sizes.
    """

    def __init__(self, log: EventLog, groups: Sequence[EventGroup]):
        """Creates the events of a plan's groups, for ``log``.

        Raises:
          ValueError: the log has another manager.
        """
        if log.has_manager:
            raise ValueError(
                f"events={log!r} is the log of another BlockManager, and nobody could tell their "
                "blocks apart; give each an EventLog of its own"
            )
        self._log, self._groups, log.has_manager = log, groups, True
        cached = [group.block_size for group in self._groups if group.kind != "ring"]
        self.grain = math.gcd(*cached) or 1
        self._names: dict[int, Name] = {}  # by block id
        self._counts: collections.Counter[Name] = collections.Counter()
        self._places: dict[tuple[int, bytes], Place] = {}  # by group and key, of those on the GPU

    def stored(
        self, chain: KeyChain, tokens: np.ndarray, group: int, first: int, ids: Sequence[int]
    ) -> None:
        """Records that blocks are cached; skips blocks that are recorded already.

        Args:
          chain: the keys of the prompt.
          tokens: int64[N], codes of the prompt's tokens.
          group: index of the group.
          first: logical index of the first block.
          ids: consecutive block ids, also beyond the tokens; 0 for a block that is not cached.
        """
        size = self._groups[group].block_size
        tokens = tokens & MAX_TOKEN
        chain.extend(tokens, self.grain, self._log.root)
        step = size // self.grain
        fresh: list[int] = []
        for logical_block, block_id in zip(range(first, tokens.size // size), ids, strict=False):
            if block_id and block_id not in self._names:
                if self._is_first(
                    block_id, ("GPU", group, chain.keys[(logical_block + 1) * step - 1])
                ):
                    fresh.append(logical_block)
        for start, end in _runs(fresh):
            event = self._event(chain, tokens, self._groups[group], start, end)
            self._places.update(
                {(group, key): (event, i) for i, key in enumerate(event.block_keys)}
            )
            self._log.append(event)

    def _is_first(self, block_id: int, name: Name) -> bool:
        """Names a block. Returns whether no other has this name."""
        self._names[block_id] = name
        self._counts[name] += 1
        return self._counts[name] == 1

    def stored_on_host(self, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Records that host memory gets copies of blocks, if these are recorded."""
        fresh: dict[int, tuple[BlocksStored, list[int]]] = {}  # by the event that told of them
        for block_id, host_id in zip(ids, host_ids, strict=True):
            name = self._names.get(block_id)
            if name is not None and self._is_first(host_id, ("CPU", *name[1:])):
                event, index = self._places[name[1:]]
                fresh.setdefault(id(event), (event, []))[1].append(index)
        for event, indices in fresh.values():
            for start, end in _runs(sorted(indices)):
                self._log.append(_on_host(event, start, end))

    def _event(
        self, chain: KeyChain, tokens: np.ndarray, group: EventGroup, start: int, end: int
    ) -> BlocksStored:
        size, step = group.block_size, group.block_size // self.grain
        extras = extra_keys_by_block(
            chain.extra_keys, size, end - start, salt=chain.salt, start=start * size
        )
        adapters = [key.value[0] for key in chain.extra_keys if isinstance(key.value, tuple)]
        return BlocksStored(
            group,
            block_keys=tuple(chain.keys[(start + 1) * step - 1 : end * step : step]),
            parent_key=chain.keys[start * step - 1] if start else None,
            token_ids=tuple(tokens[start * size : end * size].tolist()),
            extra_keys=tuple(extras) if any(extras) else None,
            adapter=adapters[0] if adapters else None,
        )

    def removed(self, ids: Sequence[int]) -> None:
        """Records that blocks are no longer cached in their memory."""
        gone: dict[tuple[Medium, int], list[bytes]] = {}
        for block_id in ids:
            name = self._names.pop(block_id, None)
            if name is None:  # the end of a prefix, which is not a whole block
                continue
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
                medium, group, key = name
                gone.setdefault((medium, group), []).append(key)
                if medium == "GPU":
                    del self._places[group, key]
        for (medium, group), keys in gone.items():
            self._log.append(BlocksRemoved(self._groups[group], tuple(keys), medium))

    def cleared(self) -> None:
        """Records that no block is cached any more."""
        self._names.clear()
        self._counts.clear()
        self._places.clear()
        self._log.append(AllBlocksCleared())


def _on_host(event: BlocksStored, start: int, end: int) -> BlocksStored:
    """Returns the event that host memory has some blocks of an earlier one."""
    keys, size, extras = event.block_keys, event.group.block_size, event.extra_keys
    return dataclasses.replace(
        event,
        block_keys=keys[start:end],
        parent_key=keys[start - 1] if start else event.parent_key,
        token_ids=event.token_ids[start * size : end * size],
        extra_keys=None if extras is None else extras[start:end],
        medium="CPU",
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields first and end of each run of consecutive ascending indices."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1
