"""Requests that begin with the same blocks, for steps that read those once. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._src.internal.numbers import INT32_MAX

LEAST_TOKENS = 256  # of a beginning; sharing a shorter one costs as much as it saves
LEAST_PART = 8  # a step must save one in 8 of the tokens that it would read
MOST_LEVELS = 6  # of beginnings within beginnings


class PrefixGroup(NamedTuple):
    """Requests that begin with the same tokens."""

    members: np.ndarray  # int64[M], by their index in the step
    tokens: int

    @property
    def saved(self) -> int:
        """Tokens that need not be read if the members read theirs together."""
        return (self.members.size - 1) * self.tokens


def group_by_beginning(
    tables: Sequence[np.ndarray], block_tokens: Sequence[int], computed: np.ndarray, most: int
) -> list[PrefixGroup]:
    """Returns groups of N requests whose common blocks a step should read once.

    A request is in one group at most. Of beginnings within beginnings those are taken with which
    the fewest tokens are read; and none at all unless that saves an eighth of them.

    Args:
      tables: int32[N, logical blocks] per table, the blocks of each request, all of
        which it reads.
      block_tokens: tokens of a logical block of each table.
      computed: int64[N], tokens of each request whose blocks are in the tables.
      most: groups at most.
    """
    found = _split(tables, block_tokens, computed, np.arange(computed.size), 0, MOST_LEVELS)
    found = sorted(found, key=lambda group: group.saved, reverse=True)[:most]
    saved = sum(group.saved for group in found)
    return found if saved * LEAST_PART >= computed.sum() else []


def _split(
    tables: Sequence[np.ndarray],
    block_tokens: Sequence[int],
    computed: np.ndarray,
    members: np.ndarray,
    tokens: int,
    levels: int,
) -> list[PrefixGroup]:
    """Returns the groups that save the most among members that share ``tokens`` tokens."""
    size = block_tokens[0]
    members = members[computed[members] >= tokens + size]
    if members.size < 2 or not levels:
        return []
    each = zip(tables, block_tokens, strict=True)
    ids = np.array([table[members, tokens // size] for table, size in each])
    order = np.lexsort(ids)
    members, ids = members[order], ids[:, order]
    starts = np.flatnonzero(np.append(True, (ids[:, 1:] != ids[:, :-1]).any(axis=0)))
    if starts.size == members.size:
        return []
    same = _same_tokens(tables, block_tokens, members)
    same[starts - 1] = INT32_MAX  # from one run of equal ids to the next
    same = np.minimum(same, computed[members])
    shared = (np.minimum.reduceat(same, starts) // size * size).tolist()
    found: list[PrefixGroup] = []
    for part, tokens in zip(np.split(members, starts[1:]), shared, strict=True):
        if part.size > 1:
            whole = PrefixGroup(part, tokens if tokens >= LEAST_TOKENS else 0)
            deeper = _split(tables, block_tokens, computed, part, tokens, levels - 1)
            is_best = whole.saved > sum(group.saved for group in deeper)
            found += [whole] if is_best else deeper
    return found


def _same_tokens(
    tables: Sequence[np.ndarray], block_tokens: Sequence[int], members: np.ndarray
) -> np.ndarray:
    """Returns how many first tokens of each member are in the next one's blocks; int64[M]."""
    same = np.full(members.size, INT32_MAX, np.int64)
    for table, size in zip(tables, block_tokens, strict=True):
        rows = table[members]
        differ = rows[1:] != rows[:-1]
        first = np.where(differ.any(axis=1), differ.argmax(axis=1), table.shape[1])
        np.minimum(same[:-1], first * size, out=same[:-1])
    return same
