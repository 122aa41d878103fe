"""A cache as the state machine sees it: the methods that a subclass writes, and its settings."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxkv._src.blocks import OutOfBlocksError
from jaxkv._src.planning import Plan
from jaxkv._src.testing.reference_cache import Write


class CacheUnderTest:
    """The part of `jaxkv.testing.CacheStateMachine` that a subclass writes; see there."""

    plan: ClassVar[Plan]
    max_requests: ClassVar[int] = 4
    unwritten_reads_zero: ClassVar[bool] = False
    copies_on_write: ClassVar[bool] = False
    out_of_blocks: ClassVar[type[Exception]] = OutOfBlocksError

    def make_cache(self) -> None:
        """Makes the cache under test, empty, for `plan` and `max_requests`."""
        raise NotImplementedError("write make_cache in your subclass")

    def start(self, request: int) -> None:
        """Starts a request, which holds nothing yet."""
        raise NotImplementedError("write start in your subclass")

    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Gives a request the blocks to compute its tokens up to ``num_tokens``.

        It then needs, for each ``group`` of ``plan.groups``, a block for every logical block of
        ``group.growth.live_blocks(num_computed_tokens, num_tokens)``. With windows and chunks
        these leave out old logical blocks: you may give their blocks back.

        Raises:
          out_of_blocks: too few are free, and nothing was changed.
        """
        raise NotImplementedError("write grow in your subclass")

    def write(self, writes: Sequence[Write]) -> None:
        """Runs one step: writes the rows of all layers of all requests of the batch."""
        raise NotImplementedError("write write in your subclass")

    def finish(self, request: int) -> None:
        """Takes everything back from a request that ends or is preempted."""
        raise NotImplementedError("write finish in your subclass")

    def num_free_blocks(self) -> int:
        """Returns the number of blocks that can be allocated, including cached ones."""
        raise NotImplementedError("write num_free_blocks in your subclass")

    def block_ids(self, request: int) -> Sequence[Sequence[int]]:
        """Returns, per group of the plan, the request's blocks in order; 0 where it holds none."""
        raise NotImplementedError("write block_ids in your subclass")

    def read_pages(self, request: int, layer: str) -> np.ndarray:
        """Returns uint8[W, data_bytes]: the request's pages of a layer, by logical block.

        Read them the way that your attention reads them, for the next token of the request. A
        page has the rows of its tokens one after the other, as `write` was given them, in
        whatever order your pool keeps them; `jaxkv.testing.locate_in_row` says where each begins.
        Columns that it does not hold may be anything.
        """
        raise NotImplementedError("write read_pages in your subclass")

    def read_null_block(self) -> Iterable[np.ndarray]:
        """Returns the bytes of block 0, in any arrays; they must not change."""
        raise NotImplementedError("write read_null_block in your subclass")

    def start_prompt(self, request: int, tokens: Sequence[int], salt: str | None) -> int:
        """Starts a request that may share the blocks of others with the same prefix (optional).

        Args:
          tokens: token ids of its prompt, at least one.
          salt: it shares only with requests of the same salt.

        Returns:
          The tokens that it found in the cache, and need not compute: not all of its prompt.
        """
        raise NotImplementedError("write start_prompt in your subclass")

    def finish_prompt(self, request: int, tokens: Sequence[int]) -> None:
        """Finishes a request of `start_prompt` (optional; otherwise `finish` does).

        Args:
          tokens: token ids after its prompt, or after what `fork` and `rewind` left of that.
            The last one may not be computed yet.
        """
        self.finish(request)

    def chunk_end(self, request: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Returns where the next chunk of a request ends, at most ``num_tokens`` (optional).

        Called before `grow`, so that states can be cached where other prompts may go on.
        """
        return num_tokens

    def new_epoch(self) -> None:
        """Discards what later prompts could share (optional)."""
        raise NotImplementedError("write new_epoch in your subclass")

    def fork(self, request: int, donor: int, num_tokens: int) -> bool:
        """Starts a request that shares the blocks of a donor's first tokens (optional).

        Sampled for whole blocks, of plans whose groups all keep tokens; see `copies_on_write`.
        Returns whether it did: False, with nothing changed, when no block that can be shared
        holds the state after those tokens.
        """
        raise NotImplementedError("write fork in your subclass")

    def rewind(self, request: int, num_tokens: int) -> bool:
        """Sets a request back to its first tokens, after drafts were rejected (optional).

        Returns whether it did: False, with nothing changed, when a block that the next token
        reads was given back, or holds a later state.
        """
        raise NotImplementedError("write rewind in your subclass")


def overrides(method: str) -> Callable[[Any], bool]:
    """Returns a test of whether a machine wrote a method that is optional."""
    base = getattr(CacheUnderTest, method)
    return lambda machine: getattr(type(machine), method) is not base
