"""The growth rules of all groups as arrays, for many rows at once. NumPy only."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.specs import Growth, first_visible_token

FEW = 4  # rows up to which ints are faster than arrays
RuleKind = Literal["sliding", "chunked", "aligned", "cross", "other"]


class Rule(NamedTuple):
    """The growth of one group in ints; see `Rules`."""

    block: int
    drafts: int
    window: int
    chunk: int
    kind: RuleKind


class Rules:
    """`jaxkv.specs.Growth` of G groups, for N rows at once: arrays are int64[G, N].

    block: int64[G, 1], tokens that a column stands for; `INT32_MAX` in groups whose rows hold the
      same columns from the first step on.
    drafts: int64[G, 1], columns for drafts, after the last token's column.
    aligned: int64[...], indices of the groups with "align" states.
    crossed: int64[...], indices of the groups that store encoder tokens.
    of_groups: the rule of each group, in ints.
    """

    def __init__(self, growths: Sequence[Growth], context_parallel: int):
        self.growths = tuple(growths)
        modes = [g.cache_mode if g.stores == "state" else g.kind for g in growths]

        def column(name: str) -> np.ndarray:
            return np.array([[getattr(growth, name)] for growth in growths], np.int64)

        never_grows = np.array([[mode in ("none", "cross")] for mode in modes])
        self.block = np.where(never_grows, INT32_MAX, column("block_size") * context_parallel)
        self._last_of_block = self.block - 1
        self.drafts = column("speculative_blocks")
        self.aligned = np.array([g for g, mode in enumerate(modes) if mode == "align"], np.int64)
        self.crossed = np.array([g for g, mode in enumerate(modes) if mode == "cross"], np.int64)
        self._has_drafts = bool(self.drafts.any())
        self._window, chunk = column("window"), column("chunk")
        self._chunk = chunk if "chunked" in modes else None
        #: whether rows give blocks back that no later token reads
        self.has_windows = "sliding" in modes or "chunked" in modes
        numbers = np.concatenate([self.block, self.drafts, self._window, chunk], axis=1).tolist()
        #: rows up to which changes are computed in ints; never for "align" states
        self.few_rows = 0 if self.aligned.size else FEW
        self.of_groups = tuple(
            Rule(block, drafts, window, longest, _kind_of_rule(growth))
            for growth, (block, drafts, window, longest) in zip(growths, numbers, strict=True)
        )

    def ends(self, totals: np.ndarray) -> np.ndarray:
        """Returns one past the last columns that rows of ``totals`` tokens hold.

        Invalid for groups in ``crossed``, whose columns depend on the encoder tokens.
        """
        ends = (totals + self._last_of_block) // self.block
        if self._has_drafts:
            ends += self.drafts
        return ends

    def firsts_visible(self, computed: np.ndarray) -> np.ndarray:
        """Returns the column of the oldest token that the next one attends to."""
        return first_visible_token(computed, self._window, self._chunk) // self.block

    def unchanged_until(self, computed: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Returns the number of tokens up to which rows need no change, int64[N].

        Args:
          computed: int64[N], tokens in the cache when the step begins.
          held: int64[3, G, N], source, first and end of the columns that the rows hold.
        """
        first, end = held[1], held[2]
        until = (end - self.drafts if self._has_drafts else end) * self.block
        if self.has_windows:  # the first held block leaves the window, or a new chunk begins
            left = (first + 1) * self.block
            left += self._window - 1
            np.minimum(until, left, out=until)
            if self._chunk is not None:
                np.minimum(until, (computed // self._chunk + 1) * self._chunk, out=until)
        if self.crossed.size:
            until[self.crossed] = INT32_MAX
        if self.aligned.size:  # the old source is dropped once the newest block is the source
            source, first = held[0, self.aligned], first[self.aligned]
            apart = np.where(source != first, first * self.block[self.aligned] + 1, INT32_MAX)
            until[self.aligned] = np.minimum(until[self.aligned], apart)
        return np.minimum.reduce(until, axis=0) if len(until) > 1 else until[0]


def _kind_of_rule(growth: Growth) -> RuleKind:
    if growth.kind == "state" and growth.cache_mode == "align":
        return "aligned"
    return growth.kind if growth.kind in ("sliding", "chunked", "cross") else "other"
