"""Events about the whole blocks that prefix caching keeps, by the keys of their tokens. No jax."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from jaxkv.planning import Plan
from jaxkv.prefixes import (
    MAX_TOKEN,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventGroup,
    EventLog,
    ExtraKey,
    GroupKind,
    block_keys,
    extra_keys_by_block,
)


@dataclasses.dataclass(slots=True, eq=False)
class KeyChain:
    """The block keys of a prompt's first tokens, which grow with the prompt.

    salt, extra_keys: of the prompt.
    keys: one for each ``grain`` of `PrefixEvents` tokens.
    """

    salt: str | None
    extra_keys: tuple[ExtraKey, ...]
    keys: list[bytes] = dataclasses.field(default_factory=list)

    def copy(self) -> "KeyChain":
        """Returns a chain that goes on by itself, for a request that goes on differently."""
        return dataclasses.replace(self, keys=[*self.keys])

    def extend(self, tokens: np.ndarray, grain: int, root: bytes) -> None:
        """Adds the keys of tokens that have none yet.

        Args:
          tokens: the prompt from its first token on.
          grain: tokens of one key.
          root: key before the first.
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


class PrefixEvents:
    """Writes into a log which whole blocks are kept.

    Keys leave out what no model depends on, such as the length of an image that is named
    anyway, so two blocks may have one key. The log hears of a key when the first of its blocks
    is kept, and when the last one is gone.

    grain: tokens of one key: the most that whole blocks of all groups are multiples of.
    """

    def __init__(self, log: EventLog, plan: Plan):
        """Writes into ``log`` about the groups of a plan."""
        self._log = log
        self._groups = [
            EventGroup(
                index=index,
                kind=cast(GroupKind, group.specs[0].kind),
                block_size=group.block_size * plan.context_parallel,
                window=group.growth.window if group.growth.kind == "sliding" else None,
            )
            for index, group in enumerate(plan.groups)
        ]
        self.grain = math.gcd(*(group.block_size for group in self._groups)) or 1
        self._names: dict[int, tuple[int, bytes]] = {}  # of blocks: group and key
        self._counts: collections.Counter[tuple[int, bytes]] = collections.Counter()

    def stored(
        self, chain: KeyChain, tokens: np.ndarray, group: int, first: int, ids: Sequence[int]
    ) -> None:
        """Notes that blocks are kept, unless it is noted already.

        Args:
          tokens: int64[N], codes of the prompt's tokens, at least those of the blocks.
          first: column of the first block.
          ids: of consecutive columns; 0: that column is not kept.
        """
        size = self._groups[group].block_size
        tokens = tokens[: (first + len(ids)) * size] & MAX_TOKEN
        chain.extend(tokens, self.grain, self._log.root)
        step = size // self.grain
        fresh: list[int] = []
        for column, block_id in enumerate(ids, first):
            if block_id and block_id not in self._names:
                name = self._names[block_id] = group, chain.keys[(column + 1) * step - 1]
                self._counts[name] += 1
                if self._counts[name] == 1:
                    fresh.append(column)
        for start, end in _runs(fresh):
            self._log.append(self._event(chain, tokens, self._groups[group], start, end))

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
        """Notes that blocks are no longer kept."""
        gone: dict[int, list[bytes]] = {}
        for block_id in ids:
            name = self._names.pop(block_id, None)
            if name is None:  # it kept the end of a prefix, and no whole block
                continue
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
                gone.setdefault(name[0], []).append(name[1])
        for group, keys in gone.items():
            self._log.append(BlocksRemoved(self._groups[group], tuple(keys)))

    def cleared(self) -> None:
        """Notes that no block is kept."""
        self._names.clear()
        self._counts.clear()
        self._log.append(AllBlocksCleared())


def _runs(columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the end of runs of consecutive ascending columns."""
    for _, run in itertools.groupby(enumerate(columns), lambda pair: pair[1] - pair[0]):
        found = [column for _, column in run]
        yield found[0], found[-1] + 1
