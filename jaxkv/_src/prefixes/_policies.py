"""The rules that groups cache the blocks of prefixes by. NumPy only."""

import dataclasses
import functools

import numpy as np

from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.specs import PLAIN_INTS, Growth

WHOLE = np.iinfo(np.int64).max  # `read_only_until` of a block that no token may change


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixPolicy:
    """The rule that a group caches the blocks of a prefix by.

    growth: block rule of the group.
    block: tokens per entry of its block table; of a ring, of which nothing is cached, a multiple of
      its ``group_size``.
    shares_rows: whether several tokens of a layer share a vector.
    """

    growth: Growth
    block: int
    shares_rows: bool = False

    @functools.cached_property
    def by_checkpoint(self) -> bool:
        """Whether a block has a state that later tokens overwrite."""
        return self.growth.stores == "state" and self.growth.cache_mode != "all"

    @functools.cached_property
    def is_ring(self) -> bool:
        """Whether nothing is cached; prefixes then end at whole groups of tokens."""
        return self.growth.stores == "ring"

    @functools.cached_property
    def by_block(self) -> bool:
        """Whether whole blocks are cached, each by itself."""
        return not (self.by_checkpoint or self.is_ring)

    @functools.cached_property
    def only_last(self) -> bool:
        """Whether the next token reads only the block at the end of the prefix."""
        return self.growth.stores == "state"

    def first_block(self, position: int) -> int:
        """Returns the logical block of the oldest token that the one at a position reads."""
        return int(self.growth.first_visible(position, PLAIN_INTS)) // self.block

    def until(self, position: int) -> int:
        """Returns the position before which the last block of a prefix may not be written."""
        if self.only_last or self.is_ring:
            return WHOLE
        # The next token would write into the vector that it shares with the prefix's last tokens.
        return cdiv(position, self.block) * self.block if self.shares_rows else position
