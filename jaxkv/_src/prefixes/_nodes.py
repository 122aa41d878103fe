"""A radix tree of remembered prompts. NumPy only.

Lookups compare token ids and not hashes, so collisions cannot occur.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.prefixes._checkpoints import Checkpoint


class Node:
    """Tokens ``start .. end - 1`` that one or more prompts have in common, and their blocks.

    index: index in the tree's list of nodes; -1 for the root of a namespace, which has no tokens.
    blocks: per group, int32[...], the blocks that end in this node, at the logical indices
      ``start // block .. end // block - 1``; 0 where none was cached, `EVICTED` where it is
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
        """Whether no block of these tokens is cached any more."""
        if any(checkpoint.is_cached for checkpoint in self.checkpoints.values()):
            return False
        return not any((blocks > 0).any() for blocks in self.blocks)


class PromptTree:
    """The tokens of prompts and the ids of their blocks; a tree for each namespace.

    A namespace separates prompts whose blocks differ although their tokens are equal: other
    weights, other adapters, another tenant.

    nodes: by their index; None where there is none.
    """

    def __init__(self, block_sizes: Sequence[int], max_tokens: int):
        """Creates an empty tree.

        Args:
          block_sizes: tokens of a block of each group.
          max_tokens: tokens to remember. Beyond it, `prune` forgets tokens without cached blocks,
            the least recently used first.
        """
        self._block_sizes, self._max_tokens, self._prune_at = block_sizes, max_tokens, max_tokens
        self._num_tokens = 0
        self._roots: dict[Hashable, Node] = {}
        self.nodes: list[Node | None] = []
        self._free_indices: list[int] = []
        self._recent: dict[Node, None] = {}  # the least recently used first

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

    def touch(self, path: Sequence[Node]) -> None:
        """Marks the nodes of a path as the most recently used."""
        for node in reversed(path):  # a child is forgotten before its parent
            self._recent.pop(node, None)
            self._recent[node] = None

    def grow(self, namespace: Hashable, tokens: np.ndarray) -> tuple[list[Node], Node | None]:
        """Returns the nodes of all tokens, split and added so that the last one ends there.

        The second result is a new node that has some of the blocks of the last one; None if no node
        was split. The tree holds on to the array of tokens.
        """
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, 0, np.zeros(0, np.int64), [])
        path, at = self.walk(namespace, tokens)
        rest = self._split(path[-1], at) if path and at < path[-1].end else None
        if at < tokens.size:
            last = path[-1] if path else self._roots[namespace]
            if path and not last.children:
                self._extend(last, tokens)
            else:
                path.append(self._add(last, at, tokens[at:]))
        return path, rest

    def _no_blocks(self, start: int, end: int) -> list[np.ndarray]:
        return [np.zeros(end // size - start // size, np.int32) for size in self._block_sizes]

    def _add(self, parent: Node, start: int, tokens: np.ndarray) -> Node:
        node = Node(parent, start, tokens, self._no_blocks(start, start + tokens.size))
        parent.children[int(tokens[0])] = node
        self._enter(node)
        self._num_tokens += tokens.size
        return node

    def _enter(self, node: Node) -> None:
        if self._free_indices:
            node.index = self._free_indices.pop()
            self.nodes[node.index] = node
        else:
            node.index = len(self.nodes)
            self.nodes.append(node)
        self._recent[node] = None

    def _extend(self, leaf: Node, tokens: np.ndarray) -> None:
        """Extends a leaf to the end of tokens that begin with all of its own."""
        more = self._no_blocks(leaf.end, tokens.size)
        leaf.blocks = [np.concatenate(pair) for pair in zip(leaf.blocks, more, strict=True)]
        self._num_tokens += tokens.size - leaf.end
        leaf.tokens = tokens[leaf.start :]

    def _split(self, node: Node, at: int) -> Node:
        """Splits a node at a position; the second part becomes its only child, and is returned."""
        cuts = [at // size - node.start // size for size in self._block_sizes]
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
        return rest

    def prune(self) -> None:
        """Forgets tokens without cached blocks if there are too many, until a quarter is free."""
        if self._num_tokens <= self._prune_at:
            return
        for node in list(self._recent):
            if self._num_tokens <= 0.75 * self._max_tokens:
                break
            if node.parent is None or node.children or not node.is_empty:
                continue
            del node.parent.children[int(node.tokens[0])], self._recent[node]
            self.nodes[node.index] = None
            self._free_indices.append(node.index)
            self._num_tokens -= node.tokens.size
        self._roots = {name: root for name, root in self._roots.items() if root.children}
        self._prune_at = max(self._max_tokens, self._num_tokens * 5 // 4)
