"""`PrefixTree`: remembered prompts, and their cached blocks. NumPy only."""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.prefixes._checkpoints import EVICTED, Checkpoint, Checkpoints
from jaxkv._src.prefixes._nodes import Node, PromptTree
from jaxkv._src.prefixes._policies import PrefixPolicy


class PrefixTree:
    """A radix tree of prompts, and their cached blocks.

    prompts: the tree.
    same_before: int64[N], by block that moved between two memories: the position before which both
      have the same content for as long as it stays cached.
    state: a new object after every change, so that a caller can tell whether an earlier lookup
      is still valid.
    checkpoints: the cached checkpoints.
    swapped: the blocks of preempted requests that still have all of them.
    grid: least common multiple of the groups' block sizes, at which a prefix of whole blocks ends.
    whole_groups: tokens that hold whole groups of all rings; prefixes end at multiples of it.
    has_states: whether a group overwrites its states, so that prefixes end at checkpoints.
    host_ids: ids from this one on are of blocks in host memory.
    on_recomputed: called with blocks in host memory, and with the blocks on the device that
      replace them because a request has computed the same content (or None).
    """

    def __init__(
        self,
        policies: Sequence[PrefixPolicy],
        read_only_until: np.ndarray,
        *,
        max_tokens: int,
        host_ids: int,
    ):
        """Creates an empty tree.

        Args:
          policies: one per group.
          read_only_until: int64[N], which the tree writes: the position before which no token of a
            block may be overwritten; 0: the block is not cached.
          host_ids: the first id of a block in host memory; N: there are none.
          max_tokens: tokens to remember, as for `PromptTree`.
        """
        self.policies = tuple(policies)
        self.read_only_until, self.host_ids = read_only_until, host_ids
        sizes = [policy.block for policy in self.policies]
        self.grid = math.lcm(*sizes)
        self.whole_groups = math.lcm(*[p.growth.group_size for p in self.policies])
        self._new_prompts = functools.partial(PromptTree, sizes, max_tokens)
        self.has_states = any(policy.by_checkpoint for policy in self.policies)
        # The node and group (see `_owner`) and the logical block that a block is cached
        # for. Arrays, because a step evicts many blocks at once.
        self._owner_of = np.full(read_only_until.size, -1, np.int64)  # -1: for none
        self._index_of = np.full(read_only_until.size, 0, np.int64)
        self._is_in_checkpoint = np.zeros(read_only_until.size, bool)
        self.same_before = np.zeros(read_only_until.size, np.int64)
        self.on_recomputed: Callable[[np.ndarray, np.ndarray], None] | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self.state = object()
        self.prompts = self._new_prompts()
        self._of_block: dict[int, list[Checkpoint]] = {}
        self.checkpoints = Checkpoints()
        self.swapped: dict[Checkpoint, None] = {}

    def clear(self) -> np.ndarray:
        """Forgets everything, and returns the blocks that were cached."""
        cached = self.read_only_until.nonzero()[0]
        self.read_only_until[:] = 0
        self._owner_of[:], self._is_in_checkpoint[:] = -1, False
        self._forget_all()
        return cached

    # --- reading ------------------------------------------------------------------

    def are_cached(self, ids: np.ndarray) -> np.ndarray:
        """Returns which blocks are cached as whole blocks, bool of the ids' shape."""
        return self._owner_of[ids] >= 0

    def group_of(self, block_id: int) -> int:
        """Returns the group of a cached block."""
        owner = self._owner_of.item(block_id)
        if owner >= 0:
            return owner % len(self.policies)
        return self._of_block[block_id][0].group_of(block_id)

    def is_inside(self, block_id: int) -> bool:
        """Returns whether a prefix that ends where its tokens do reads a cached block.

        Blocks that have left a window by then serve prompts that part from these tokens earlier.
        """
        if block_id in self._of_block:
            return True
        index, group = divmod(self._owner_of.item(block_id), len(self.policies))
        node, policy = self.prompts.nodes[index], self.policies[group]
        if node is None or policy.growth.keeps_all_tokens or policy.only_last:
            return node is not None
        logical_block, last = self._index_of.item(block_id), (node.end - 1) // self.grid * self.grid
        ends = [*node.checkpoints, last, node.end]
        return any(policy.first_block(n) <= logical_block < cdiv(n, policy.block) for n in ends)

    def _until(self, block_id: int) -> int:
        """Returns the position before which no token of a block may be overwritten."""
        until, owner = 0, self._owner_of.item(block_id)
        if owner >= 0:
            block = self.policies[owner % len(self.policies)].block
            until = (self._index_of.item(block_id) + 1) * block
        return max([until, *(c.until(block_id) for c in self._of_block.get(block_id, ()))])

    def _owner(self, node: Node, group: int) -> int:
        """Returns a number for a node and a group."""
        return node.index * len(self.policies) + group

    # --- caching -----------------------------------------------------------------

    def cache(
        self,
        namespace: Hashable,
        tokens: np.ndarray,
        whole: Sequence[tuple[int, np.ndarray]],
        checkpoint: np.ndarray | None = None,
        is_wanted: bool = False,
    ) -> Checkpoint | None:
        """Caches blocks of a request, where no other block is cached for the same tokens.

        Args:
          tokens: int32[N] or int64[N], the request's first tokens. The tree holds on to the array.
          whole: per group, a logical block and the ids of whole blocks from there on.
          checkpoint: int32[G], the blocks of a checkpoint at the end of the tokens.
          is_wanted: as in `Checkpoint`.

        Returns:
          The checkpoint, which may be an older one that has blocks of these now; None if none was
          given, or an older one at this position stays.
        """
        self.state = object()
        path, rest = self.prompts.grow(namespace, tokens)
        if rest is not None:
            for group, blocks in enumerate(rest.blocks):
                self._owner_of[blocks[blocks > 0]] = self._owner(rest, group)
        for group, (first, ids) in enumerate(whole):
            if ids.size:
                self._cache_blocks(path, group, first, ids)
        self.prompts.touch(path)
        added = None
        if checkpoint is not None:
            ends = np.array([policy.until(tokens.size) for policy in self.policies])
            added = Checkpoint(tokens.size, checkpoint, ends, is_wanted=is_wanted)
            added = self._add_checkpoint(path[-1], added)
        self.prompts.prune()
        return added

    def _cache_blocks(self, path: Sequence[Node], group: int, first: int, ids: np.ndarray) -> None:
        block, ids = self.policies[group].block, ids.astype(np.intp)  # faster as an index
        for node in path:
            begin, end = node.start // block, node.end // block
            low, high = max(begin, first), min(end, first + ids.size)
            if low >= high:
                continue
            here, new = (
                node.blocks[group][low - begin : high - begin],
                ids[low - first : high - first],
            )
            indices = np.arange(low, high)
            if np.count_nonzero(here):  # some have a block already, or had one
                self._take_over(here, new, (indices + 1) * block)
                fresh = (here <= 0).nonzero()[0]
                if not fresh.size:
                    continue
                new, indices = new[fresh], indices[fresh]
                here[fresh] = new
            else:
                here[:] = new
            self._owner_of[new], self._index_of[new] = self._owner(node, group), indices
            self.read_only_until[new] = (indices + 1) * block

    def _take_over(self, here: np.ndarray, computed: np.ndarray, ends: np.ndarray) -> bool:
        """Caches blocks on the device instead of blocks with the same content in host memory.

        Args:
          here: int[N], the cached blocks.
          computed: int[N], blocks of a request.
          ends: int64[N], the positions where their equal content ends.

        Returns:
          Whether any is taken over.
        """
        is_new = (here >= self.host_ids) & (self.read_only_until[computed] == 0)
        at = (is_new & (self.read_only_until[here] <= ends)).nonzero()[0]
        if at.size:
            ids, into = here[at].astype(np.intp), computed[at]
            self.move(ids, into)
            if self.on_recomputed is not None:
                self.on_recomputed(ids, into)
        return bool(at.size)

    def _add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> Checkpoint | None:
        known = node.checkpoints.get(checkpoint.position)
        if known is not None and known.is_cached:
            is_taken = self._take_over(known.blocks, checkpoint.blocks, checkpoint.ends)
            self.checkpoints.touch(known, is_wanted=checkpoint.is_wanted)
            return known if is_taken else None
        node.checkpoints[checkpoint.position] = checkpoint
        self._freeze(checkpoint)
        self.checkpoints.add(checkpoint)
        return checkpoint

    def swap_out(self, swapped: Checkpoint) -> None:
        """Caches all blocks of a preempted request, until one of them is forgotten."""
        self.state = object()
        self._freeze(swapped)
        self.swapped[swapped] = None

    def _freeze(self, checkpoint: Checkpoint) -> None:
        for block_id in checkpoint.blocks[checkpoint.blocks > 0].tolist():
            self._of_block.setdefault(block_id, []).append(checkpoint)
            self._is_in_checkpoint[block_id] = True
            until = max(self.read_only_until.item(block_id), checkpoint.until(block_id))
            self.read_only_until[block_id] = until

    # --- forgetting -----------------------------------------------------------------

    def drop_checkpoint(self, checkpoint: Checkpoint) -> list[int]:
        """Drops a checkpoint, and returns its blocks that are no longer cached."""
        self.state = object()
        freed: list[int] = []
        for block_id in checkpoint.blocks[checkpoint.blocks > 0].tolist():
            others = self._of_block[block_id]
            others.remove(checkpoint)
            if not others:
                del self._of_block[block_id]
                self._is_in_checkpoint[block_id] = False
            until = self.read_only_until[block_id] = self._until(block_id)
            # A request may write on from there, and what it wrote may be cached, too.
            self.same_before[block_id] = min(self.same_before[block_id], until)
            if not until:
                freed.append(block_id)
        self.checkpoints.remove(checkpoint)
        self.swapped.pop(checkpoint, None)
        checkpoint.blocks = np.where(checkpoint.blocks, EVICTED, 0).astype(np.int32)
        return freed

    def forget(self, ids: np.ndarray) -> list[int]:
        """Forgets blocks that are about to be reused.

        Returns:
          Other blocks that are no longer cached, because their checkpoint has lost one of ``ids``.
        """
        self.state = object()
        ids = ids.astype(np.intp)  # faster as an index
        self._replace(ids, np.full(ids.size, EVICTED))
        freed: list[int] = []
        for block_id in ids[self._is_in_checkpoint[ids]].tolist():
            for checkpoint in list(self._of_block.get(block_id, ())):
                freed += self.drop_checkpoint(checkpoint)
        self._owner_of[ids], self.read_only_until[ids] = -1, 0
        return [block_id for block_id in freed if not (ids == block_id).any()]

    def _replace(self, ids: np.ndarray, into: np.ndarray) -> None:
        """Replaces blocks that are cached as whole blocks by other ids, or by `EVICTED`."""
        order = self._owner_of[ids].argsort(kind="stable")
        ids, into = ids[order], into[order]
        owners, indices = self._owner_of[ids], self._index_of[ids]
        cuts = (owners[1:] != owners[:-1]).nonzero()[0] + 1
        for begin, end in itertools.pairwise([0, *cuts.tolist(), owners.size]):
            if owners[begin] >= 0:
                index, group = divmod(int(owners[begin]), len(self.policies))
                node = self.prompts.nodes[index]
                if node is not None:
                    first = node.start // self.policies[group].block
                    node.blocks[group][indices[begin:end] - first] = into[begin:end]

    # --- two memories -----------------------------------------------------------------

    def move(self, ids: np.ndarray, into: np.ndarray) -> None:
        """Caches distinct blocks' content under other ids, as it moves between two memories.

        Args:
          ids: int[N], cached blocks.
          into: int[N], ids that are not cached.
        """
        self.state = object()
        ids, into = ids.astype(np.intp), into.astype(np.intp)
        self._replace(ids, into)
        self._index_of[into] = self._index_of[ids]
        for array, empty in (
            (self._owner_of, -1),
            (self.read_only_until, 0),
            (self._is_in_checkpoint, False),
        ):
            array[into], array[ids] = array[ids], empty
        self.same_before[into] = self.read_only_until[into]
        in_checkpoints = self._is_in_checkpoint[into]
        new_of = dict(zip(ids[in_checkpoints].tolist(), into[in_checkpoints].tolist(), strict=True))
        moved: dict[Checkpoint, None] = {}
        for block_id, new in new_of.items():
            self._of_block[new] = self._of_block.pop(block_id)
            moved |= dict.fromkeys(self._of_block[new])
        for checkpoint in moved:
            self.checkpoints.remove(checkpoint)
            blocks = [new_of.get(block_id, block_id) for block_id in checkpoint.blocks.tolist()]
            checkpoint.blocks = np.array(blocks, np.int32)
            if checkpoint not in self.swapped and (checkpoint.blocks < self.host_ids).all():
                self.checkpoints.add(checkpoint)
