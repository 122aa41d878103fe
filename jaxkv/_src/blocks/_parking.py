"""`ParkedRequest`, all that a preempted request goes on with. No jax."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv._src.blocks._cells import NO_IDS
from jaxkv._src.blocks._prompts import CachedPrompt
from jaxkv._src.blocks._resuming import columns_to_share
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.prefixes import ParkedBlocks, PrefixPolicy, SharedColumns


@dataclasses.dataclass(frozen=True, eq=False)
class ParkedRequest:
    """A preempted request, and all that it goes on with.

    blocks: its blocks, group by group, wherever they lie now.
    columns: theirs, with the ids of when it was parked.
    lost_ends: see `RequestState`.
    prompt: None: it was started without tokens.
    """

    blocks: ParkedBlocks
    columns: Sequence[SharedColumns]
    lost_ends: np.ndarray
    prompt: CachedPrompt | None

    @classmethod
    def of(
        cls,
        state: RequestState,
        policies: Sequence[PrefixPolicy],
        row: int,
        prompt: CachedPrompt | None,
    ) -> "ParkedRequest | None":
        """Returns the request of a row; None if it has nothing, or no block has its newest state.

        That is so after a step of drafts, whose state may lie in the block of one of them, and
        while the next upload copies into one of its blocks.
        """
        count = state.computed.item(row)
        if not count or state.awaits_copy(row):
            return None
        try:
            columns = columns_to_share(state, row, count)
        except ValueError:
            return None
        groups = np.repeat(range(len(columns)), [part.block_ids.size for part in columns])
        ends = [NO_IDS]
        for policy, part in zip(policies, columns, strict=True):
            whole = (np.arange(part.first, part.end) + 1) * policy.block
            until = policy.until(count)
            ends.append(
                np.full(whole.size, until) if policy.by_checkpoint else whole.clip(0, until)
            )
        ids = np.concatenate([NO_IDS, *(part.block_ids for part in columns)])
        blocks = ParkedBlocks(count, ids, groups, np.concatenate(ends))
        return cls(blocks, columns, state.lost_ends[:, row].copy(), prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that it has computed; 0: a block of them is gone."""
        return self.blocks.position if self.blocks.is_kept else 0

    def columns_now(self) -> list[SharedColumns]:
        """Returns its columns, with the ids that the blocks have now."""
        ends = np.cumsum([part.block_ids.size for part in self.columns])
        each = zip(self.columns, np.split(self.blocks.blocks, ends[:-1]), strict=True)
        return [part._replace(block_ids=ids) for part, ids in each]
