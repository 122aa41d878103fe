"""`PrefixTree`: remembered prompts, and the blocks that are kept for them. NumPy only."""

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
    """A radix tree of prompts, and the blocks that are kept for them.

    prompts: the tree.
    same_before: int64[N], by block that moved between two memories: the position before which both
      have the same content for as long as it stays kept.
    state: a new object after every change, so that a caller can tell whether an earlier lookup
      is still valid.
    checkpoints: the kept checkpoints.
    parked: the blocks of preempted requests, as far as all of them are kept.
    grid: least common multiple of the groups' block sizes, at which a prefix of whole blocks ends.
    has_states: whether a group overwrites its states, so that prefixes end at checkpoints.
    host_ids: ids from this one on are of blocks in host memory.
    on_recomputed: called with blocks in host memory, and with those on the device that are kept
      in their place from now on, because a request has computed the same content (or None).
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
            block may be overwritten; 0: the block is not kept.
          host_ids: the first id of a block in host memory; N: there are none.
          max_tokens: tokens to remember, as for `PromptTree`.
        """
        self.policies = tuple(policies)
        self.read_only_until, self.host_ids = read_only_until, host_ids
        sizes = [policy.block for policy in self.policies]
        self.grid = math.lcm(*sizes)
        self._new_prompts = functools.partial(PromptTree, sizes, max_tokens)
        self.has_states = any(policy.by_checkpoint for policy in self.policies)
        # The node and group (see `_place`) and the column that a block is kept for. Arrays, because
        # a step evicts many blocks at once.
        self._place_of = np.full(read_only_until.size, -1, np.int64)  # -1: for none
        self._column_of = np.full(read_only_until.size, 0, np.int64)
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
        """Forgets everything, and returns the blocks that were kept."""
        kept = self.read_only_until.nonzero()[0]
        self.read_only_until[:] = 0
        self._place_of[:], self._is_in_checkpoint[:] = -1, False
        self._forget_all()
        return kept

    # --- reading ------------------------------------------------------------------

    def keeps(self, ids: np.ndarray) -> np.ndarray:
        """Returns which blocks are kept as whole columns, bool of the ids' shape."""
        return self._place_of[ids] >= 0

    def group_of(self, block_id: int) -> int:
        """Returns the group of a kept block."""
        place = self._place_of.item(block_id)
        if place >= 0:
            return place % len(self.policies)
        return self._of_block[block_id][0].group_of(block_id)

    def is_inside(self, block_id: int) -> bool:
        """Returns whether a prefix that ends where its tokens do reads a kept block.

        Blocks that have left a window by then serve prompts that part from these tokens earlier.
        """
        if block_id in self._of_block:
            return True
        index, group = divmod(self._place_of.item(block_id), len(self.policies))
        node, policy = self.prompts.nodes[index], self.policies[group]
        if node is None or policy.growth.keeps_all_tokens or policy.only_last:
            return node is not None
        column, last = self._column_of.item(block_id), (node.end - 1) // self.grid * self.grid
        ends = [*node.checkpoints, last, node.end]
        return any(policy.first_column(n) <= column < cdiv(n, policy.block) for n in ends)

    def _until(self, block_id: int) -> int:
        """Returns the position before which no token of a block may be overwritten."""
        until, place = 0, self._place_of.item(block_id)
        if place >= 0:
            block = self.policies[place % len(self.policies)].block
            until = (self._column_of.item(block_id) + 1) * block
        return max([until, *(made.until(block_id) for made in self._of_block.get(block_id, ()))])

    def _place(self, node: Node, group: int) -> int:
        """Returns a number for a node and a group."""
        return node.index * len(self.policies) + group

    # --- keeping -----------------------------------------------------------------

    def keep(
        self,
        namespace: Hashable,
        tokens: np.ndarray,
        columns: Sequence[tuple[int, np.ndarray]],
        checkpoint: np.ndarray | None = None,
        is_wanted: bool = False,
    ) -> Checkpoint | None:
        """Keeps blocks of a request, where no other block is kept for the same tokens.

        Args:
          tokens: int32[N] or int64[N], the request's first tokens. The tree holds on to the array.
          columns: per group, a column and the blocks from that column on, all of them whole.
          checkpoint: int32[G], the blocks of a checkpoint at the end of the tokens.
          is_wanted: as in `Checkpoint`.

        Returns:
          The checkpoint, which may be an older one that has blocks of these now; None if none was
          given, or an older one at this position is kept as it is.
        """
        self.state = object()
        path, rest = self.prompts.grow(namespace, tokens)
        if rest is not None:
            for group, blocks in enumerate(rest.blocks):
                self._place_of[blocks[blocks > 0]] = self._place(rest, group)
        for group, (first, ids) in enumerate(columns):
            if ids.size:
                self._keep_columns(path, group, first, ids)
        self.prompts.touch(path)
        made = None
        if checkpoint is not None:
            ends = np.array([policy.until(tokens.size) for policy in self.policies])
            made = Checkpoint(tokens.size, checkpoint, ends, is_wanted=is_wanted)
            made = self._add_checkpoint(path[-1], made)
        self.prompts.prune()
        return made

    def _keep_columns(self, path: Sequence[Node], group: int, first: int, ids: np.ndarray) -> None:
        block, ids = self.policies[group].block, ids.astype(np.intp)  # faster as an index
        for node in path:
            begin, end = node.start // block, node.end // block
            low, high = max(begin, first), min(end, first + ids.size)
            if low >= high:
                continue
            here, kept = (
                node.blocks[group][low - begin : high - begin],
                ids[low - first : high - first],
            )
            columns = np.arange(low, high)
            if np.count_nonzero(here):  # some columns have a block already, or had one
                self._take_over(here, kept, (columns + 1) * block)
                fresh = (here <= 0).nonzero()[0]
                if not fresh.size:
                    continue
                kept, columns = kept[fresh], columns[fresh]
                here[fresh] = kept
            else:
                here[:] = kept
            self._place_of[kept], self._column_of[kept] = self._place(node, group), columns
            self.read_only_until[kept] = (columns + 1) * block

    def _take_over(self, here: np.ndarray, made: np.ndarray, ends: np.ndarray) -> bool:
        """Keeps blocks on the device in place of those with the same content in host memory.

        Args:
          here: int[N], the blocks that are kept.
          made: int[N], blocks of a request.
          ends: int64[N], the positions up to which these have the same content.

        Returns:
          Whether any is taken over.
        """
        is_new = (here >= self.host_ids) & (self.read_only_until[made] == 0)
        at = (is_new & (self.read_only_until[here] <= ends)).nonzero()[0]
        if at.size:
            ids, into = here[at].astype(np.intp), made[at]
            self.move(ids, into)
            if self.on_recomputed is not None:
                self.on_recomputed(ids, into)
        return bool(at.size)

    def _add_checkpoint(self, node: Node, made: Checkpoint) -> Checkpoint | None:
        known = node.checkpoints.get(made.position)
        if known is not None and known.is_kept:
            is_taken = self._take_over(known.blocks, made.blocks, made.ends)
            self.checkpoints.touch(known, is_wanted=made.is_wanted)
            return known if is_taken else None
        node.checkpoints[made.position] = made
        self._freeze(made)
        self.checkpoints.add(made)
        return made

    def swap_out(self, swapped: Checkpoint) -> None:
        """Keeps all blocks of a preempted request, until one of them is forgotten."""
        self.state = object()
        self._freeze(swapped)
        self.swapped[swapped] = None

    def _freeze(self, made: Checkpoint) -> None:
        for block_id in made.blocks[made.blocks > 0].tolist():
            self._of_block.setdefault(block_id, []).append(made)
            self._is_in_checkpoint[block_id] = True
            until = max(self.read_only_until.item(block_id), made.until(block_id))
            self.read_only_until[block_id] = until

    # --- forgetting -----------------------------------------------------------------

    def drop_checkpoint(self, checkpoint: Checkpoint) -> list[int]:
        """Drops a checkpoint, and returns those of its blocks that are no longer kept."""
        self.state = object()
        freed: list[int] = []
        for block_id in checkpoint.blocks[checkpoint.blocks > 0].tolist():
            others = self._of_block[block_id]
            others.remove(checkpoint)
            if not others:
                del self._of_block[block_id]
                self._is_in_checkpoint[block_id] = False
            until = self.read_only_until[block_id] = self._until(block_id)
            # A request may write on from there, and what it wrote may be kept, too.
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
          Other blocks that are no longer kept, because their checkpoint has lost one of ``ids``.
        """
        self.state = object()
        ids = ids.astype(np.intp)  # faster as an index
        self._replace(ids, np.full(ids.size, EVICTED))
        freed: list[int] = []
        for block_id in ids[self._is_in_checkpoint[ids]].tolist():
            for checkpoint in list(self._of_block.get(block_id, ())):
                freed += self.drop_checkpoint(checkpoint)
        self._place_of[ids], self.read_only_until[ids] = -1, 0
        return [block_id for block_id in freed if not (ids == block_id).any()]

    def _replace(self, ids: np.ndarray, into: np.ndarray) -> None:
        """Puts other ids, or `EVICTED`, in place of blocks that are kept as whole columns."""
        order = self._place_of[ids].argsort(kind="stable")
        ids, into = ids[order], into[order]
        places, columns = self._place_of[ids], self._column_of[ids]
        cuts = (places[1:] != places[:-1]).nonzero()[0] + 1
        for begin, end in itertools.pairwise([0, *cuts.tolist(), places.size]):
            if places[begin] >= 0:
                index, group = divmod(int(places[begin]), len(self.policies))
                node = self.prompts.nodes[index]
                if node is not None:
                    first = node.start // self.policies[group].block
                    node.blocks[group][columns[begin:end] - first] = into[begin:end]

    # --- two memories -----------------------------------------------------------------

    def move(self, ids: np.ndarray, into: np.ndarray) -> None:
        """Keeps distinct blocks' content under other ids, to which it moves between two memories.

        Args:
          ids: int[N], kept blocks.
          into: int[N], ids that are not kept.
        """
        self.state = object()
        ids, into = ids.astype(np.intp), into.astype(np.intp)
        self._replace(ids, into)
        self._column_of[into] = self._column_of[ids]
        for array, empty in (
            (self._place_of, -1),
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
