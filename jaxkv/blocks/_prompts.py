"""Prompts of running requests, and the answers that prefix caching gives. No jax."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.blocks._pool import BlockPool
from jaxkv.blocks._prefix_events import KeyChain
from jaxkv.prefixes import Checkpoint, ExtraKey, Found, Node, Reason


class Namespace(NamedTuple):
    """Everything but its tokens that a prompt's content depends on; only equal ones share."""

    epoch: int
    salt: str | None
    keys: frozenset[ExtraKey]  # of the whole sequence: adapters


class FoundPrefix(NamedTuple):
    """The prefix of a prompt that the cache holds, before a request is started with it.

    It is true until the next change of the cache. `BlockManager.start` takes it in place of the
    prompt, and looks the prompt up again only if there was one.

    namespace, tokens, salt, extra_keys: of the prompt; see `TokenCodes`.
    path, num_seen: see `PrefixTree.walk`.
    limit: the most tokens that may be shared.
    found: what is.
    state: of the tree: as long as it has no other, ``found`` is true.
    pool: of the blocks.
    """

    namespace: Namespace
    tokens: np.ndarray
    salt: str | None
    extra_keys: tuple[ExtraKey, ...]
    path: Sequence[Node]
    num_seen: int
    limit: int
    found: Found
    state: object
    pool: BlockPool

    def __repr__(self) -> str:
        return f"FoundPrefix({self.num_cached_tokens} of {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.size

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prefix."""
        return self.found.num_tokens

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the prefix that requests hold now, so that one more takes no free ones."""
        ids = np.concatenate([columns.block_ids for columns in self.found.columns])
        return self.pool.num_held(ids)


class PrefixHit(NamedTuple):
    """The prefix that a request found in the cache, and why it is not longer.

    row: of the block tables.
    num_cached_tokens: tokens that need not be computed: those before the first one of the next
      step.
    shared_blocks: per group, the blocks that the request shares.
    reasons: per group, why there is no longer prefix. "complete": all that can be shared is, and
      of a prompt that is not longer than a block that is nothing.
      "other_groups": this group holds more, others do not. "never_seen": no remembered prompt
      goes on like this one. "shorter_than_a_block": one does, for less than a block. "evicted":
      the blocks were needed for other requests. "no_checkpoint": no state was kept there.
      "left_window": the blocks had left the window before they could be kept. "other_salt",
      "other_keys", "other_epoch": the same tokens are there under another salt, with other
      extra keys, from before `BlockManager.new_epoch`. "not_looked_up": the request was
      started without tokens, or has an encoder's.
    chunk_ends: tokens after which a chunk of the prompt should end, ascending, so that states
      can be kept there: the boundaries that were named, where this prompt parts from another
      one, and before its last token. Empty for plans whose states need none.
    """

    row: int
    num_cached_tokens: int
    shared_blocks: tuple[int, ...]
    reasons: tuple[Reason, ...]
    chunk_ends: tuple[int, ...]

    @classmethod
    def of(cls, row: int, prompt: "Prompt", found: Found) -> "PrefixHit":
        shared = tuple([columns.block_ids.size for columns in found.columns])
        return cls(row, found.num_tokens, shared, found.reasons, prompt.chunk_ends)

    @classmethod
    def nothing(cls, row: int, num_groups: int) -> "PrefixHit":
        """Returns that of a request whose prompt was not looked up."""
        none: tuple[Reason, ...] = ("not_looked_up",) * num_groups
        return cls(row, 0, (0,) * num_groups, none, ())


@dataclasses.dataclass(slots=True, eq=False)
class Prompt:
    """The tokens of a running request, as far as they are known.

    namespace: see `PrefixTree`.
    tokens: [N], with their extra keys.
    chunk_ends: where states are to be kept.
    wanted: those of them where another prompt is known to go on.
    num_kept: tokens whose blocks were kept already.
    checkpoints: that the request began at, and those that were made of it.
    may_go_on: whether tokens that the request computes after these may be kept.
    chain: the keys of its blocks; None: nobody wants to know them.
    """

    namespace: Namespace
    tokens: np.ndarray
    chunk_ends: tuple[int, ...]
    wanted: frozenset[int]
    num_kept: int
    checkpoints: list[Checkpoint]
    may_go_on: bool = True
    chain: KeyChain | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixStats:
    """Counts since the manager was made.

    requests, hits: that were looked up, and those of them that found a prefix.
    prompt_tokens, cached_tokens: of them; and those that need not be computed.
    evicted_blocks: kept blocks that were taken for other requests.
    kept_blocks, checkpoint_blocks: blocks that are kept now; those of them that belong to
      checkpoints of states.
    reasons: requests by the reason why their prefix was not longer, of the groups that ended it.
    """

    requests: int
    hits: int
    prompt_tokens: int
    cached_tokens: int
    evicted_blocks: int
    kept_blocks: int
    checkpoint_blocks: int
    reasons: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """The part of all prompt tokens that needed not be computed; 0.0 before any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
