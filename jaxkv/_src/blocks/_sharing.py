"""Groups of requests that begin with the same blocks, for steps that read those once. No jax."""

from typing import NamedTuple, Self

import numpy as np

from jaxkv._src.blocks._state import RequestState
from jaxkv._src.internal.numbers import INT32_MAX

LEAST_TOKENS = 256  # of a beginning; sharing a shorter one costs as much as it saves
LEAST_PART = 8  # one in so many tokens that a step would read must be saved
MOST_LEVELS = 6  # of beginnings within beginnings


class PrefixGroups(NamedTuple):
    """Groups of requests of a step, by their index in it; see `StepBatch.shared_prefixes`."""

    members: np.ndarray  # int[M]
    ends: np.ndarray  # int[G]
    lens: np.ndarray  # int[G]

    @classmethod
    def of(cls, chosen: list["Node"]) -> Self:
        """Returns groups of the members of nodes."""
        counts = [node.members.size for node in chosen]
        members = np.concatenate([NOBODY, *(node.members for node in chosen)])
        return cls(members, np.cumsum(counts, dtype=np.int64), np.array([n.tokens for n in chosen]))


class Node(NamedTuple):
    """Requests that begin with the same tokens, and those among them that share more."""

    members: np.ndarray  # int64[M], by their index in the step
    tokens: int
    children: list["Node"]

    @property
    def saved(self) -> int:
        """Tokens that need not be read if the members read theirs together."""
        return (self.members.size - 1) * self.tokens


NOBODY = np.zeros(0, np.int64)
NO_GROUPS = PrefixGroups.of([])


class PrefixFinder:
    """Finds what the requests of a step begin with, anew only after a change."""

    def __init__(self, state: RequestState):
        self._state = state
        self._groups = [
            group
            for group, growth in enumerate(state.growth.growths)
            if growth.stores == "tokens" and min(growth.window, growth.chunk) == INT32_MAX
        ]
        self._last: tuple[np.ndarray, int, int] | None = None
        self._found = NO_GROUPS

    def find(self, rows: np.ndarray, computed: np.ndarray, most: int) -> PrefixGroups:
        """Returns the groups for which a step is to read the common blocks once.

        A request is in one group at most. Of beginnings within beginnings those are taken with
        which the fewest tokens are read; and none at all unless that saves an eighth of them.

        Args:
          rows: int64[N], table rows of the step's requests, with the blocks of the step.
          computed: int64[N], tokens of each before the step.
          most: groups that the upload has room for.
        """
        if not self._groups or not self._state.pool.has_shared_blocks:
            return NO_GROUPS
        last, version = self._last, self._state.beginnings
        if last is not None and last[1:] == (version, most):
            if last[0] is rows or np.array_equal(last[0], rows):
                return self._found
        self._last = rows, version, most
        self._found = self._choose(rows, computed, most)
        return self._found

    def _choose(self, rows: np.ndarray, computed: np.ndarray, most: int) -> PrefixGroups:
        roots = self._split(rows, computed, np.arange(rows.size), 0, MOST_LEVELS)
        chosen = [node for root in roots for node in _best(root)[1]]
        chosen = sorted(chosen, key=lambda node: node.saved, reverse=True)[:most]
        saved = sum(node.saved for node in chosen)
        return PrefixGroups.of(chosen if saved * LEAST_PART >= computed.sum() else [])

    def _split(
        self, rows: np.ndarray, computed: np.ndarray, members: np.ndarray, tokens: int, levels: int
    ) -> list[Node]:
        """Returns the nodes of members that share ``tokens`` tokens, by their next block."""
        group = self._groups[0]
        size, start = self._state.column_tokens[group], int(self._state.starts[group])
        column = tokens // size
        members = members[computed[members] >= tokens + size]
        if members.size < 2 or not levels:
            return []
        ids = self._state.table[rows[members], start + column]
        order = ids.argsort(kind="stable")
        members, ids = members[order], ids[order]
        starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
        if starts.size == members.size:
            return []
        same = self._same_tokens(rows[members])
        same[starts - 1] = INT32_MAX  # from one run of equal ids to the next
        shared = np.minimum.reduceat(np.minimum(same, computed[members]), starts) // size * size
        counts = np.diff(starts, append=members.size)
        deeper = self._share_more(rows[members], computed[members], shared, counts)
        nodes: list[Node] = []
        for run in np.flatnonzero(counts > 1).tolist():
            part, tokens = members[starts[run] : starts[run] + counts[run]], int(shared[run])
            children: list[Node] = []
            if run in deeper:
                children = self._split(rows, computed, part, tokens, levels - 1)
            nodes.append(Node(part, tokens if tokens >= LEAST_TOKENS else 0, children))
        return nodes

    def _share_more(
        self, rows: np.ndarray, computed: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> set[int]:
        """Returns the runs in which some rows share the block after those that all share.

        Args:
          rows, computed: int64[N], run after run.
          tokens, counts: int64[R], tokens that the rows of each run share, and its rows.
        """
        group = self._groups[0]
        size, start = self._state.column_tokens[group], self._state.starts[group]
        run, tokens = np.arange(counts.size).repeat(counts), tokens.repeat(counts)
        held = (computed >= tokens + size) & (counts.repeat(counts) > 1)
        run, rows, tokens = run[held], rows[held], tokens[held]
        places = (run << 32) + self._state.table[rows, start + tokens // size]
        places.sort()
        return set((places[1:][places[1:] == places[:-1]] >> 32).tolist())

    def _same_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many first tokens of each row are in the next row's blocks; int64[N]."""
        state, same = self._state, np.full(rows.size, INT32_MAX, np.int64)
        for group in self._groups:
            end = int(state.held(rows)[2, group].max())
            table = state.table[rows, state.starts[group] : state.starts[group] + end]
            differ = table[1:] != table[:-1]
            first = differ.argmax(axis=1)
            first[~differ[np.arange(first.size), first]] = end
            np.minimum(same[:-1], first * state.column_tokens[group], out=same[:-1])
        return same


def _best(node: Node) -> tuple[int, list[Node]]:
    """Returns the most tokens that a node can save, and the nodes that do it."""
    of_children = [_best(child) for child in node.children]
    saved = sum(found[0] for found in of_children)
    if node.saved > saved:
        return node.saved, [node]
    return saved, [chosen for found in of_children for chosen in found[1]]
