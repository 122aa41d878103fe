"""A radix tree of remembered prompts, and the blocks that are kept for them. NumPy only.

Lookups compare token ids and not hashes, so collisions cannot occur.
"""

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.prefixes._checkpoints import EVICTED, Checkpoint, Checkpoints, ParkedBlocks
from jaxkv._src.specs import Growth

WHOLE = np.iinfo(np.int64).max  # `frozen_before` of a block of which no byte may change
PLAIN_INTS = types.SimpleNamespace(maximum=max)  # replaces NumPy for `Growth` of one int
COLUMN_BITS = 32
COLUMNS = (1 << COLUMN_BITS) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixPolicy:
    """The rule by which a group keeps the blocks of a prefix.

    growth: block rule of the group.
    block: tokens per column of its block table.
    shares_rows: whether several tokens of a layer share a row.
    """

    growth: Growth
    block: int
    shares_rows: bool = False

    @functools.cached_property
    def by_checkpoint(self) -> bool:
        """Whether a block holds a state that later tokens overwrite."""
        return self.growth.stores == "state" and self.growth.cache_mode != "all"

    @functools.cached_property
    def only_last(self) -> bool:
        """Whether the next token reads only the block at the end of the prefix."""
        return self.growth.stores == "state"

    def first_column(self, position: int) -> int:
        """Returns the column of the oldest token that the one at a position reads."""
        return int(self.growth.first_visible(position, PLAIN_INTS)) // self.block

    def until(self, position: int) -> int:
        """Returns the position before which the last block of a prefix may not be written."""
        if self.only_last:
            return WHOLE
        # The next token would write into the row that it shares with the prefix's last tokens.
        return cdiv(position, self.block) * self.block if self.shares_rows else position


class Node:
    """Tokens ``start .. end - 1`` that one or more prompts have in common, and their blocks.

    index: index in the tree's list of nodes.
    blocks: per group, int32[...], the blocks of the columns that end in this node,
      ``start // block <= column < end // block``; 0 where none was kept, `EVICTED` where it is
      gone.
    checkpoints: by position, ``start < position <= end``.
    """

    __slots__ = ("blocks", "checkpoints", "children", "index", "parent", "start", "tokens")

    def __init__(
        self, parent: "Node | None", start: int, tokens: np.ndarray, blocks: list[np.ndarray]
    ):
        self.parent, self.start, self.tokens, self.blocks = parent, start, tokens, blocks
        self.children: dict[int, Node] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.index = -1

    @property
    def end(self) -> int:
        return self.start + self.tokens.size

    @property
    def is_empty(self) -> bool:
        """Whether no block of these tokens is kept any more."""
        if any(checkpoint.is_kept for checkpoint in self.checkpoints.values()):
            return False
        return not any((blocks > 0).any() for blocks in self.blocks)


class PrefixTree:
    """A radix tree of prompts for each namespace.

    A namespace separates prompts whose blocks differ although their tokens are equal: other
    weights, other adapters, another tenant.

    same_before: int64[N], by block that moved between two memories: the position before which both
      have the same content for as long as it stays kept.
    state: a new object after every change, so that a caller can tell whether an earlier lookup
      is still valid.
    checkpoints: the kept checkpoints.
    parked: the blocks of preempted requests, as far as all of them are kept.
    num_tokens: remembered tokens.
    grid: least common multiple of the groups' block sizes, at which a prefix of whole blocks ends.
    has_states: whether a group overwrites its states, so that prefixes end at checkpoints.
    host_ids: ids from this one on are of blocks in host memory.
    on_recomputed: called with blocks in host memory, and with those on the device that are kept
      in their place from now on, because a request has computed the same content (or None).
    """

    def __init__(
        self,
        policies: Sequence[PrefixPolicy],
        frozen_before: np.ndarray,
        *,
        max_tokens: int,
        host_ids: int | None = None,
    ):
        """Creates an empty tree.

        Args:
          policies: one per group.
          frozen_before: int64[N], which the tree writes: the position before which no token of a
            block may be overwritten; 0: the block is not kept.
          host_ids: the first id of a block in host memory; None: there are none.
          max_tokens: tokens to remember. Beyond it, the tree forgets tokens without kept blocks,
            the least recently used first.
        """
        self.policies = tuple(policies)
        self.frozen_before = frozen_before
        self.host_ids = frozen_before.size if host_ids is None else host_ids
        self.grid = math.lcm(*(policy.block for policy in self.policies))
        self.has_states = any(policy.by_checkpoint for policy in self.policies)
        self._max_tokens = self._prune_at = max_tokens
        # By block: the node and group (see `_place`) and the column that it is kept for; -1: none.
        self._home_of = np.full(frozen_before.size, -1, np.int64)
        self._is_in_checkpoint = np.zeros(frozen_before.size, bool)
        self.same_before = np.zeros(frozen_before.size, np.int64)
        self.on_recomputed: Callable[[np.ndarray, np.ndarray], None] | None = None
        self._clear()

    def _clear(self) -> None:
        self.state = object()
        self._roots: dict[Hashable, Node] = {}
        self._nodes: list[Node | None] = []
        self._free_indices: list[int] = []
        self._recent: dict[Node, None] = {}  # the least recently used first
        self._of_block: dict[int, list[Checkpoint]] = {}
        self.checkpoints = Checkpoints()
        self.parked: dict[ParkedBlocks, None] = {}
        self.num_tokens = 0

    def clear(self) -> np.ndarray:
        """Forgets everything, and returns the blocks that were kept."""
        kept = self.frozen_before.nonzero()[0]
        self.frozen_before[:] = 0
        self._home_of[:], self._is_in_checkpoint[:] = -1, False
        self._clear()
        return kept

    # --- reading ------------------------------------------------------------------

    def walk(self, namespace: Hashable, tokens: np.ndarray) -> tuple[list[Node], int]:
        """Returns the nodes along tokens, and the number of tokens that agree.

        The last node may agree in part.
        """
        path: list[Node] = []
        node, at = self._roots.get(namespace), 0
        while node is not None and at < tokens.size:
            node = node.children.get(int(tokens[at]))
            if node is None:
                break
            path.append(node)
            count = min(node.tokens.size, tokens.size - at)
            same = node.tokens[:count] == tokens[at : at + count]
            count = count if same.all() else int(same.argmin())
            at += count
            if count < node.tokens.size:
                break
        return path, at

    def columns(self, path: Sequence[Node], group: int, num_tokens: int) -> np.ndarray:
        """Returns the blocks of a group's whole columns in the first tokens of a path, int32[C]."""
        count = num_tokens // self.policies[group].block
        parts = [node.blocks[group] for node in path]
        if not parts:
            return np.zeros(0, np.int32)
        return (parts[0] if len(parts) == 1 else np.concatenate(parts))[:count]

    def keeps(self, ids: np.ndarray) -> np.ndarray:
        """Returns which blocks are kept as whole columns, bool of the ids' shape."""
        return self._home_of[ids] >= 0

    def touch(self, path: Sequence[Node]) -> None:
        """Marks the nodes of a path as the most recently used."""
        for node in reversed(path):  # a child is forgotten before its parent
            self._recent.pop(node, None)
            self._recent[node] = None

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
        path = self._grow_path(namespace, tokens)
        for group, (first, ids) in enumerate(columns):
            if ids.size:
                self._keep_columns(path, group, first, ids)
        self.touch(path)
        made = (
            None
            if checkpoint is None
            else self._add_checkpoint(
                path[-1], Checkpoint(tokens.size, checkpoint, is_wanted=is_wanted)
            )
        )
        if self.num_tokens > self._prune_at:
            self._prune()
        return made

    def _keep_columns(self, path: Sequence[Node], group: int, first: int, ids: np.ndarray) -> None:
        block, ids = self.policies[group].block, ids.astype(np.intp)  # faster as an index
        for node in path:
            begin, end = node.start // block, node.end // block
            low, high = max(begin, first), min(end, first + ids.size)
            if low >= high:
                continue
            here = node.blocks[group][low - begin : high - begin]
            kept, place = ids[low - first : high - first], self._place(node, group)
            homes = np.arange(place + low, place + high)
            until = np.arange((low + 1) * block, (high + 1) * block, block)
            if np.count_nonzero(here):  # some columns have a block already, or had one
                self._take_over(here, kept, until)
                fresh = (here <= 0).nonzero()[0]
                if not fresh.size:
                    continue
                kept, homes, until = kept[fresh], homes[fresh], until[fresh]
                here[fresh] = kept
            else:
                here[:] = kept
            self._home_of[kept], self.frozen_before[kept] = homes, until

    def _take_over(self, here: np.ndarray, made: np.ndarray, ends: np.ndarray) -> bool:
        """Keeps blocks on the device in place of those with the same content in host memory.

        Args:
          here: int[N], the blocks that are kept.
          made: int[N], blocks of a request.
          ends: int64[N], the positions up to which these have the same content.

        Returns:
          Whether any is taken over.
        """
        is_new = (here >= self.host_ids) & (made > 0) & (self.frozen_before[made] == 0)
        at = (is_new & (self.frozen_before[here] <= ends)).nonzero()[0]
        if at.size:
            ids, into = here[at].astype(np.intp), made[at]
            self.move(ids, into)
            if self.on_recomputed is not None:
                self.on_recomputed(ids, into)
        return bool(at.size)

    def _place(self, node: Node, group: int) -> int:
        """Returns a number for a node and a group, in the bits above the column."""
        return node.index * len(self.policies) + group << COLUMN_BITS

    def _add_checkpoint(self, node: Node, made: Checkpoint) -> Checkpoint | None:
        position, blocks = made.position, made.blocks
        known = node.checkpoints.get(position)
        if known is not None and known.is_kept:
            ends = np.array([policy.until(position) for policy in self.policies])
            is_taken = self._take_over(known.blocks, blocks, ends)
            self.checkpoints.touch(known, is_wanted=made.is_wanted)
            return known if is_taken else None
        node.checkpoints[position] = made
        self._freeze(made)
        self.checkpoints.add(made)
        return made

    def park(self, parked: ParkedBlocks) -> None:
        """Keeps all blocks of a preempted request, until one of them is forgotten."""
        self.state = object()
        self._freeze(parked)
        self.parked[parked] = None

    def _freeze(self, made: Checkpoint) -> None:
        for block_id in made.blocks[made.blocks > 0].tolist():
            until = self._end_of(made, block_id)
            self.frozen_before[block_id] = max(int(self.frozen_before[block_id]), until)
            self._of_block.setdefault(block_id, []).append(made)
            self._is_in_checkpoint[block_id] = True

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
            until = self.frozen_before[block_id] = self._until(block_id)
            # A request may write on from there, and what it wrote may be kept, too.
            self.same_before[block_id] = min(self.same_before[block_id], until)
            if not until:
                freed.append(block_id)
        self.checkpoints.remove(checkpoint)
        if isinstance(checkpoint, ParkedBlocks):
            self.parked.pop(checkpoint, None)
        checkpoint.blocks = np.where(checkpoint.blocks, EVICTED, 0).astype(np.int32)
        return freed

    def _until(self, block_id: int) -> int:
        """Returns the position before which no token of a block may be overwritten."""
        until, home = 0, int(self._home_of[block_id])
        if home >= 0:
            policy = self.policies[(home >> COLUMN_BITS) % len(self.policies)]
            until = ((home & COLUMNS) + 1) * policy.block
        for checkpoint in self._of_block.get(block_id, ()):
            until = max(until, self._end_of(checkpoint, block_id))
        return until

    def _end_of(self, checkpoint: Checkpoint, block_id: int) -> int:
        """Returns the position before which no token of a checkpoint's block may be overwritten."""
        if isinstance(checkpoint, ParkedBlocks):
            return checkpoint.until(block_id)
        return self.policies[checkpoint.group_of(block_id)].until(checkpoint.position)

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
        self._home_of[ids], self.frozen_before[ids] = -1, 0
        return [block_id for block_id in freed if not (ids == block_id).any()]

    def _replace(self, ids: np.ndarray, into: np.ndarray) -> None:
        """Puts other ids, or `EVICTED`, in place of blocks that are kept as whole columns."""
        order = self._home_of[ids].argsort(kind="stable")
        homes, into = self._home_of[ids][order], into[order]
        places = homes >> COLUMN_BITS
        cuts = (places[1:] != places[:-1]).nonzero()[0] + 1
        for begin, end in itertools.pairwise([0, *cuts.tolist(), homes.size]):
            if begin < end and places[begin] >= 0:
                index, group = divmod(int(places[begin]), len(self.policies))
                node = self._nodes[index]
                if node is not None:
                    first = node.start // self.policies[group].block
                    node.blocks[group][(homes[begin:end] & COLUMNS) - first] = into[begin:end]

    # --- blocks in host memory ------------------------------------------------------

    def move(self, ids: np.ndarray, into: np.ndarray) -> None:
        """Keeps distinct blocks' content under other ids, to which it moves between two memories.

        Args:
          ids: int[N], kept blocks.
          into: int[N], ids that are not kept.
        """
        self.state = object()
        ids, into = ids.astype(np.intp), into.astype(np.intp)
        self._replace(ids, into)
        for array, empty in (
            (self._home_of, -1),
            (self.frozen_before, 0),
            (self._is_in_checkpoint, False),
        ):
            array[into], array[ids] = array[ids], empty
        self.same_before[into] = self.frozen_before[into]
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
            is_parked = checkpoint in self.parked
            if not is_parked and (checkpoint.blocks < self.host_ids).all():
                self.checkpoints.add(checkpoint)

    def group_of(self, block_id: int) -> int:
        """Returns the group of a kept block."""
        home = int(self._home_of[block_id])
        if home >= 0:
            return (home >> COLUMN_BITS) % len(self.policies)
        return self._of_block[block_id][0].group_of(block_id)

    def is_inside(self, block_id: int) -> bool:
        """Returns whether a prefix that ends where its tokens do reads a kept block.

        Blocks that have left a window by then serve prompts that part from these tokens earlier.
        """
        home = int(self._home_of[block_id])
        if block_id in self._of_block or home < 0:
            return True
        index, group = divmod(home >> COLUMN_BITS, len(self.policies))
        node, policy = self._nodes[index], self.policies[group]
        if node is None or policy.growth.keeps_all_tokens or policy.only_last:
            return node is not None
        column, last = home & COLUMNS, (node.end - 1) // self.grid * self.grid
        ends = [*node.checkpoints, last, node.end]
        return any(policy.first_column(n) <= column < cdiv(n, policy.block) for n in ends)

    # --- the tree -----------------------------------------------------------------

    def _grow_path(self, namespace: Hashable, tokens: np.ndarray) -> list[Node]:
        """Returns the nodes of all tokens, split and added so that the last one ends there."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, 0, np.zeros(0, np.int64), [])
        path, at = self.walk(namespace, tokens)
        if path and at < path[-1].end:
            self._split(path[-1], at)
        if at < tokens.size:
            last = path[-1] if path else self._roots[namespace]
            if path and not last.children:
                self._extend(last, tokens)
            else:
                path.append(self._add(last, at, tokens[at:]))
        return path

    def _no_blocks(self, start: int, end: int) -> list[np.ndarray]:
        return [np.zeros(end // k.block - start // k.block, np.int32) for k in self.policies]

    def _add(self, parent: Node, start: int, tokens: np.ndarray) -> Node:
        node = Node(parent, start, tokens, self._no_blocks(start, start + tokens.size))
        parent.children[int(tokens[0])] = node
        self._enter(node)
        self.num_tokens += tokens.size
        return node

    def _enter(self, node: Node) -> None:
        if self._free_indices:
            node.index = self._free_indices.pop()
            self._nodes[node.index] = node
        else:
            node.index = len(self._nodes)
            self._nodes.append(node)
        self._recent[node] = None

    def _extend(self, leaf: Node, tokens: np.ndarray) -> None:
        """Extends a leaf to the end of tokens that begin with all of its own."""
        more = self._no_blocks(leaf.end, tokens.size)
        leaf.blocks = [np.concatenate(pair) for pair in zip(leaf.blocks, more, strict=True)]
        self.num_tokens += tokens.size - leaf.end
        leaf.tokens = tokens[leaf.start :]

    def _split(self, node: Node, at: int) -> None:
        """Splits a node at a position; the second part becomes its only child."""
        cuts = [at // k.block - node.start // k.block for k in self.policies]
        rest = Node(
            node,
            at,
            node.tokens[at - node.start :],
            [blocks[cut:] for blocks, cut in zip(node.blocks, cuts, strict=True)],
        )
        rest.children, node.children = node.children, {int(rest.tokens[0]): rest}
        for child in rest.children.values():
            child.parent = rest
        rest.checkpoints = {n: c for n, c in node.checkpoints.items() if n > at}
        node.checkpoints = {n: c for n, c in node.checkpoints.items() if n <= at}
        node.tokens = node.tokens[: at - node.start]
        node.blocks = [blocks[:cut] for blocks, cut in zip(node.blocks, cuts, strict=True)]
        self._enter(rest)
        for group, blocks in enumerate(rest.blocks):
            kept = (blocks > 0).nonzero()[0]
            first = at // self.policies[group].block
            self._home_of[blocks[kept]] = kept + first + self._place(rest, group)

    def _prune(self) -> None:
        """Forgets tokens without kept blocks, until a quarter of ``max_tokens`` is free."""
        for node in self._forgettable():
            if self.num_tokens <= 0.75 * self._max_tokens:
                break
            if node.parent is not None:
                del node.parent.children[int(node.tokens[0])]
            del self._recent[node]
            self._nodes[node.index] = None
            self._free_indices.append(node.index)
            self.num_tokens -= node.tokens.size
        self._roots = {name: root for name, root in self._roots.items() if root.children}
        self._prune_at = max(self._max_tokens, self.num_tokens * 5 // 4)

    def _forgettable(self) -> Iterator[Node]:
        """Yields leaves without kept blocks, the least recently used first."""
        for node in list(self._recent):
            if not node.children and node.is_empty:
                yield node
