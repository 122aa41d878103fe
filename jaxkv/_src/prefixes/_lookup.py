"""Lookup of the longest prefix that every group still caches. NumPy only."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.prefixes._checkpoints import EVICTED, Checkpoint
from jaxkv._src.prefixes._nodes import Node
from jaxkv._src.prefixes._policies import PrefixPolicy
from jaxkv._src.prefixes._tree import PrefixTree

Reason = Literal[
    "complete",
    "other_groups",
    "never_seen",
    "shorter_than_a_block",
    "evicted",
    "no_checkpoint",
    "left_window",
    "other_salt",
    "other_keys",
    "other_epoch",
    "on_host",
    "not_looked_up",
]


class SharedBlocks(NamedTuple):
    """Logical blocks of one group that a request takes from the cache.

    source, first, end: as in `jaxkv.specs.LiveRange`.
    block_ids: int32[end - first].
    """

    source: int
    first: int
    end: int
    block_ids: np.ndarray


NO_BLOCKS = SharedBlocks(-1, 0, 0, np.zeros(0, np.int32))


class CachedPrefix(NamedTuple):
    """The longest prefix of a prompt that a request can share.

    num_tokens: tokens of the prefix; 0: none.
    num_seen: leading tokens that a remembered prompt has too, with or without their blocks.
    shared: the shared logical blocks, per group.
    reasons: why the prefix is not longer, per group; see `jaxkv.blocks.PrefixHit`.
    checkpoint: checkpoint at the end of the prefix, if a group needs one.
    num_host_tokens: tokens of the prefix beyond the part in device memory.
    """

    num_tokens: int
    num_seen: int
    shared: tuple[SharedBlocks, ...]
    reasons: tuple[Reason, ...]
    checkpoint: Checkpoint | None
    num_host_tokens: int = 0


def find(
    tree: PrefixTree,
    path: Sequence[Node],
    num_seen: int,
    limit: int,
    *,
    on_device: bool = False,
) -> CachedPrefix:
    """Finds the longest prefix of at most ``limit`` tokens that all groups cache.

    Args:
      path: nodes from `PromptTree.walk`.
      num_seen: tokens of the prompt that agree with the path.
      limit: the most tokens to share; less than the prompt, whose last token is always computed.
      on_device: whether blocks in host memory count as evicted.
    """
    seen = min(num_seen, limit)
    if not seen:
        return _nothing_seen(tree, num_seen, limit)
    block_ids = [
        np.concatenate([node.blocks[group] for node in path]) for group in range(len(tree.policies))
    ]
    end_id = tree.host_ids if on_device else tree.read_only_until.size
    if on_device:
        block_ids = [np.where(ids < end_id, ids, EVICTED) for ids in block_ids]
    checkpoint: Checkpoint | None = None
    if tree.has_states:
        num_tokens, checkpoint = _longest_checkpoint(tree.policies, path, block_ids, seen, end_id)
        reasons = _reasons_by_checkpoint(tree.policies, path, block_ids, num_tokens, seen, limit)
    else:
        num_tokens = _longest_whole(tree, block_ids, seen)
        reasons = _reasons_whole(tree, block_ids, num_tokens, seen, limit)
    shared = (NO_BLOCKS,) * len(block_ids)
    if num_tokens:
        partial = [0] * len(block_ids) if checkpoint is None else checkpoint.blocks.tolist()
        each = zip(tree.policies, block_ids, partial, strict=True)
        shared = tuple([_shared(policy, ids, num_tokens, last) for policy, ids, last in each])
    return CachedPrefix(num_tokens, num_seen, shared, reasons, checkpoint)


def _nothing_seen(tree: PrefixTree, num_seen: int, limit: int) -> CachedPrefix:
    """Returns the result for a prompt that is not remembered, or that may share nothing."""
    num_groups, shortest = len(tree.policies), 1 if tree.has_states else tree.grid
    reason: Reason = "complete" if limit < shortest else "never_seen"
    return CachedPrefix(0, num_seen, (NO_BLOCKS,) * num_groups, (reason,) * num_groups, None)


def _shared(
    policy: PrefixPolicy, block_ids: np.ndarray, num_tokens: int, partial: int
) -> SharedBlocks:
    """Returns the logical blocks that the token after a prefix reads.

    Args:
      block_ids: int32[C], the group's whole blocks, and more that nobody reads.
      partial: the group's block in the checkpoint; 0: none.
    """
    block = policy.block
    end = cdiv(num_tokens, block)
    if policy.is_ring:
        return NO_BLOCKS
    if policy.by_checkpoint:
        ids = np.array([partial], np.int32)
        if policy.growth.cache_mode == "none":
            return SharedBlocks(-1, 0, 1, ids)
        return SharedBlocks(end - 1, end - 1, end, ids)
    first = end - 1 if policy.only_last else policy.first_block(num_tokens)
    ids = block_ids[first : num_tokens // block]
    if num_tokens % block:
        ids = np.concatenate([ids, np.array([partial], np.int32)])
    return SharedBlocks(-1, first, end, ids)


# --- plans without states that are overwritten: prefixes of whole blocks ---------------


def _held_at(policy: PrefixPolicy, block_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns whether a group caches what the token at each position reads, bool[P].

    Args:
      positions: ends of whole blocks, at least one block each.
    """
    last = positions // policy.block - 1
    if policy.only_last:
        return block_ids[last] > 0
    if policy.is_ring or (block_ids > 0).all():
        return np.ones(positions.size, bool)
    index = np.arange(block_ids.size)
    newest_hole = np.maximum.accumulate(np.where(block_ids > 0, -1, index))
    first = np.asarray(policy.growth.first_visible(positions)) // policy.block
    return newest_hole[last] < first


def _holds_whole(policy: PrefixPolicy, block_ids: np.ndarray, position: int) -> bool:
    """As `_held_at`, for one position."""
    end = position // policy.block
    if policy.only_last:
        return bool(block_ids[end - 1] > 0)
    if policy.is_ring:
        return position % policy.growth.group_size == 0
    first = policy.first_block(position)
    return bool((block_ids[first:end] > 0).all())


def _longest_whole(tree: PrefixTree, block_ids: Sequence[np.ndarray], seen: int) -> int:
    policies, grid = tree.policies, tree.grid
    if seen < grid:
        return 0
    longest = seen // grid * grid  # tried first: usually every group caches it
    if all(_holds_whole(*of_group, longest) for of_group in zip(policies, block_ids, strict=True)):
        return longest
    positions = np.arange(grid, seen + 1, grid)
    held = np.ones(positions.size, bool)
    for policy, ids in zip(policies, block_ids, strict=True):
        held &= _held_at(policy, ids, positions)
    return int(positions[held][-1]) if held.any() else 0


def _reasons_whole(
    tree: PrefixTree, block_ids: Sequence[np.ndarray], hit: int, seen: int, limit: int
) -> tuple[Reason, ...]:
    policies, grid = tree.policies, tree.grid
    if hit + grid > limit:
        return ("complete",) * len(policies)
    if hit + grid > seen:
        return ("never_seen" if seen <= hit else "shorter_than_a_block",) * len(policies)
    positions = np.arange(hit + grid, seen + 1, grid)
    reasons: list[Reason] = []
    for policy, ids in zip(policies, block_ids, strict=True):
        if _held_at(policy, ids, positions).any():
            reasons.append("other_groups")
        else:
            reasons.append(_why_not_held(policy, ids, positions))
    return tuple(reasons)


def _why_not_held(policy: PrefixPolicy, block_ids: np.ndarray, positions: np.ndarray) -> Reason:
    """Returns the reason why a group caches too little for a token at any of these positions."""
    if policy.is_ring:
        return "no_checkpoint"
    end = positions // policy.block
    if policy.only_last:
        first = end - 1
    else:
        first = np.asarray(policy.growth.first_visible(positions)) // policy.block
    evicted = np.cumsum(np.concatenate([[0], block_ids == EVICTED]))
    if (evicted[end] > evicted[first]).any():
        return "evicted"
    return "no_checkpoint" if policy.only_last else "left_window"


# --- plans with states that are overwritten: prefixes that end at a checkpoint ----------


def _checkpoints(path: Sequence[Node], above: int, up_to: int) -> list[Checkpoint]:
    """Returns the checkpoints at ``above < position <= up_to``, the last position first."""
    found = [
        checkpoint
        for node in path
        for position, checkpoint in node.checkpoints.items()
        if above < position <= up_to
    ]
    return sorted(found, key=lambda checkpoint: -checkpoint.position)


def _holds(policy: PrefixPolicy, block_ids: np.ndarray, position: int) -> bool:
    """Returns whether a group caches what the token after a cached checkpoint reads."""
    if policy.by_checkpoint or (policy.only_last and position % policy.block):
        return True  # it reads the group's block in the checkpoint
    return _holds_whole(policy, block_ids, position)


def _longest_checkpoint(
    policies: Sequence[PrefixPolicy],
    path: Sequence[Node],
    block_ids: Sequence[np.ndarray],
    seen: int,
    end_id: int,
) -> tuple[int, Checkpoint | None]:
    for checkpoint in _checkpoints(path, 0, seen):
        position, is_here = checkpoint.position, (checkpoint.blocks < end_id).all()
        each = zip(policies, block_ids, strict=True)
        if (
            checkpoint.is_cached
            and is_here
            and all(_holds(*of_group, position) for of_group in each)
        ):
            return position, checkpoint
    return 0, None


def _reasons_by_checkpoint(
    policies: Sequence[PrefixPolicy],
    path: Sequence[Node],
    block_ids: Sequence[np.ndarray],
    hit: int,
    seen: int,
    limit: int,
) -> tuple[Reason, ...]:
    if hit == limit:
        return ("complete",) * len(policies)
    if seen <= hit:
        return ("never_seen",) * len(policies)
    longer = _checkpoints(path, hit, seen)
    kept = [checkpoint.position for checkpoint in longer if checkpoint.is_cached]
    gone: Reason = "evicted" if longer else "no_checkpoint"
    reasons: list[Reason] = []
    for group, policy in enumerate(policies):
        if policy.by_checkpoint:
            reasons.append("other_groups" if kept else gone)
        elif not kept or any(_holds(policy, block_ids[group], position) for position in kept):
            reasons.append("other_groups")
        else:
            reasons.append(_why_not_held(policy, block_ids[group], np.array(kept)))
    return tuple(reasons)
