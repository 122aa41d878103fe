"""Prompts of running requests, and the results of prefix lookups. No jax."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._pool import BlockPool
from jaxkv._src.prefixes import (
    CachedPrefix,
    Checkpoint,
    ExtraKey,
    KeyChain,
    Namespace,
    Node,
    Reason,
)


class PrefixMatch(NamedTuple):
    """The prefix of a prompt that the cache holds, before a request is started with it.

    The result is valid until the cache changes. `BlockManager.start` takes it in place of the
    prompt, and looks the prompt up again only if the cache has changed.

    namespace, tokens, salt, extra_keys: of the prompt; see `TokenCodes`.
    path: see `PromptTree.walk`.
    limit: the most tokens that may be shared.
    found: the prefix, of at most ``limit`` tokens.
    state: of the tree during the lookup; ``found`` is valid until the tree has another one.
    pool: the pool of the blocks.
    """

    namespace: Namespace
    tokens: np.ndarray
    salt: str | None
    extra_keys: tuple[ExtraKey, ...]
    path: Sequence[Node]
    limit: int
    found: CachedPrefix
    state: object
    pool: BlockPool

    def __repr__(self) -> str:
        return f"PrefixMatch({self.num_cached_tokens} of {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.size

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prefix."""
        return self.found.num_tokens

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks of the prefix that requests hold now; sharing them takes no free blocks."""
        ids = np.concatenate([blocks.block_ids for blocks in self.found.shared])
        ids = ids[ids < self.pool.num_blocks]  # those in host memory take one each
        return int(np.count_nonzero(self.pool.references_of(ids)))


class PrefixHit(NamedTuple):
    """The prefix that a request found in the cache, and why it is not longer.

    row: of the block tables.
    num_cached_tokens: tokens of the prefix; the request's first step continues after them.
    shared_blocks: per group, the number of blocks that the request shares.
    reasons: per group, why the prefix is not longer. "complete": nothing more can be shared; of a
      prompt that is not longer than a block, nothing at all. "other_groups": this group holds
      more, but other groups do not. "never_seen": no remembered prompt continues like this one.
      "shorter_than_a_block": one does, but for less than a block. "evicted": the blocks were
      taken for other requests. "no_checkpoint": no state was cached there. "left_window": the
      blocks left the window before they could be cached. "other_salt", "other_keys",
      "other_epoch": the same tokens are cached under another salt, with other extra keys, or
      from before `BlockManager.new_epoch`. "on_host": the rest is in host memory, and loading it
      is not worth it (`HostMemory`), or too few blocks are free. "not_looked_up": the request was
      started without tokens, or the plan stores encoder tokens.
    chunk_ends: numbers of tokens after which a chunk of the prompt should end, ascending, so that
      states can be cached there: the given boundaries, the point where this prompt parts from a
      remembered one, and all tokens but the last. Empty for plans that need no such chunks.
    num_host_tokens: tokens of the prefix that come from host memory, beyond those that device
      memory alone holds.
    """

    row: int
    num_cached_tokens: int
    shared_blocks: tuple[int, ...]
    reasons: tuple[Reason, ...]
    chunk_ends: tuple[int, ...]
    num_host_tokens: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class CachedPrompt:
    """The tokens of a running request, as far as they are known.

    namespace: see `Namespace`.
    tokens: [N], codes of the tokens and their extra keys; see `TokenCodes`.
    chunk_ends: numbers of tokens after which states are to be cached.
    wanted: numbers of tokens after which other prompts are expected to continue.
    num_cached: first tokens whose blocks are cached already.
    checkpoints: the one that the request resumed from, and those that were made of its states.
    may_go_on: whether tokens that the request computes after ``tokens`` may be cached.
    chain: the keys of its blocks; None without an event log.
    """

    namespace: Namespace
    tokens: np.ndarray
    chunk_ends: tuple[int, ...]
    wanted: frozenset[int]
    num_cached: int
    checkpoints: list[Checkpoint]
    may_go_on: bool = True
    chain: KeyChain | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixStats:
    """Counts since the manager was made.

    requests: requests whose prompt was looked up.
    hits, host_hits: requests that found a prefix, and those of them that had some of it loaded.
    prompt_tokens: tokens of all prompts that were looked up.
    cached_tokens: tokens of all prefixes that were found.
    host_tokens: those of them that came from host memory.
    evicted_blocks: cached blocks that were taken for other requests.
    cached_blocks: blocks that are cached now, in device memory.
    checkpoint_blocks: cached blocks of checkpoints of states; a block of two of them counts twice.
    reasons: number of requests by the reason why their prefix was not longer, as given by the
      groups that ended it.
    """

    requests: int
    hits: int
    host_hits: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int
    evicted_blocks: int
    cached_blocks: int
    checkpoint_blocks: int
    reasons: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that were found in the cache; 0.0 before any lookup."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
