"""The blocks that a request must hold as it grows: one rule per kind of layer. No jax.

The planner, the block manager and the device's tables all call it, with ints, NumPy arrays or
jax arrays.
"""

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jaxkv._src.internal.numbers import INT32_MAX, cdiv

GrowthKind = Literal["full", "sliding", "chunked", "ring", "state", "cross"]
CacheMode = Literal["none", "align", "all"]
Stores = Literal["tokens", "ring", "state", "encoder"]


@functools.cache
def _numpy() -> Any:
    """Returns NumPy, which planning never needs: it is half of the time to start the command."""
    import numpy as np

    return np


def first_visible_token(position: Any, window: Any, chunk: Any, xp: Any = None) -> Any:
    """Returns the oldest position that the token at ``position`` attends to.

    Args:
      position: int or integer array, at least 0.
      window: tokens of a sliding window, the token itself included; `INT32_MAX`: no window.
      chunk: tokens of an attention chunk; `INT32_MAX` or None without chunks.
      xp: `jax.numpy`, or None for NumPy.
    """
    xp = xp or _numpy()
    in_window = xp.maximum(position - (window - 1), 0)
    if chunk is None:
        return in_window
    return xp.maximum(in_window, position // chunk * chunk)


PLAIN_INTS = types.SimpleNamespace(maximum=max)  # replaces NumPy for `Growth` of one int


class LiveRange(NamedTuple):
    """The logical blocks that a request needs: ``first .. end - 1`` and ``source``.

    source: the recurrent state that the next token resumes from; -1 for none. It
      may lie inside the range. Always -1 for groups that store tokens.
    """

    source: Any
    first: Any
    end: Any


class _Columns:
    """Logical blocks that requests need, of a `Growth` or, as arrays, of a `GrowthTable`."""

    def first_visible(self: Any, position: Any, xp: Any = None) -> Any:
        """Returns the oldest position that a token attends to; see `first_visible_token`."""
        return first_visible_token(position, self.window, self.chunk, xp)

    def first_block(self: Any, num_computed_tokens: Any, xp: Any = None) -> Any:
        """Returns the logical block of the oldest token that the next one attends to."""
        return self.first_visible(num_computed_tokens, xp) // self.block_tokens

    def end_block(self: Any, num_tokens: Any) -> Any:
        """Returns one past the last logical block of requests of at least one token."""
        end = cdiv(num_tokens, self.block_tokens)
        return end + self.speculative_blocks if self.has_drafts else end

    def source_block(self: Any, num_computed_tokens: Any) -> Any:
        """Returns the logical block of the state that the next token resumes from; -1 for none."""
        return cdiv(num_computed_tokens, self.block_tokens) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(_Columns):
    """The rule that says which blocks a request needs as it grows.

    Layers of equal growth may share a block table. A *logical block* is an index into a row of
    that table: the block of position ``p`` stands at ``p // block_size`` for as long as the
    request holds it.

    kind: "full" (latent vectors included), "sliding", "chunked", "ring", "state" or "cross".
    block_size: tokens per block.
    window, chunk: tokens, for "sliding" and "chunked"; `INT32_MAX` for the other kinds.
    cache_mode, speculative_blocks, speculative_tokens: as for `StateSpec`.
    sink_tokens: as for `FullAttentionSpec`; all requests share the blocks of sinks.
    group_size: as for `RingSpec`.
    """

    kind: GrowthKind
    block_size: int
    window: int = INT32_MAX
    chunk: int = INT32_MAX
    cache_mode: CacheMode = "none"
    speculative_blocks: int = 0
    speculative_tokens: int = 0
    sink_tokens: int = 0
    group_size: int = 1

    @property
    def stores(self) -> Stores:
        """The content of a block: tokens, a ring of them, a recurrent state, or the encoder's."""
        if self.kind in ("ring", "state"):
            return self.kind
        return "encoder" if self.kind == "cross" else "tokens"

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether a request holds the blocks of all its tokens until it ends."""
        return self.kind == "full"

    @property
    def has_drafts(self) -> bool:
        """Whether a request holds blocks for the states of drafts."""
        return self.speculative_blocks > 0

    @property
    def max_drafts(self) -> int:
        """The most drafts of a step that a recurrent state can be set back by."""
        return self.speculative_blocks + self.speculative_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a logical block; `INT32_MAX`: the same blocks for every length."""
        fixed = self.kind == "ring" or (self.kind == "state" and self.cache_mode == "none")
        return INT32_MAX if fixed else self.block_size

    def live_range(
        self, num_computed_tokens: Any, num_tokens: Any, encoder_tokens: Any = 0, xp: Any = None
    ) -> LiveRange:
        """Returns the logical blocks that a request needs to compute its next tokens.

        Args:
          num_computed_tokens: tokens of the request that are in the cache.
          num_tokens: tokens in the cache after the step.
          encoder_tokens: encoder tokens of the request, for "cross".
          xp: `jax.numpy`, or None for NumPy; all arguments are ints or integer arrays.
        """
        if self.stores == "state":
            return self._state_range(num_computed_tokens, num_tokens, xp)
        if self.stores == "encoder":
            return LiveRange(-1, 0, cdiv(encoder_tokens, self.block_size))
        return LiveRange(-1, self.first_block(num_computed_tokens, xp), self.end_block(num_tokens))

    def _state_range(self, num_computed_tokens: Any, num_tokens: Any, xp: Any) -> LiveRange:
        end = self.end_block((xp or _numpy()).maximum(num_tokens, 1))
        first = end - 1 - self.speculative_blocks if self.cache_mode == "align" else 0
        return LiveRange(self.source_block(num_computed_tokens), first, end)

    def blocks_read(self, num_tokens: int, block_tokens: int) -> LiveRange:
        """Returns the logical blocks that the token after ``num_tokens`` tokens reads.

        Those of encoder tokens, which all tokens read, are left out, and a ring that has nothing
        but whole groups.

        Args:
          block_tokens: tokens of a logical block, over all ranks of context parallelism.
        """
        end = cdiv(num_tokens, block_tokens)
        if self.stores == "tokens":
            first = int(self.first_visible(num_tokens, PLAIN_INTS)) // block_tokens
            return LiveRange(-1, first, end)
        is_whole = self.stores == "ring" and num_tokens % self.group_size == 0
        if self.stores == "encoder" or not num_tokens or is_whole:
            return LiveRange(-1, 0, 0)
        return LiveRange(end - 1 if self.cache_mode == "align" else -1, end - 1, end)

    def step_start(self, num_computed_tokens: Any, num_tokens: Any, xp: Any = None) -> Any:
        """Returns the first logical block in a step's table (`StepBatch.kernel_block_tables`).

        For tokens, the block of the first visible token. For a state, the block that the
        state after the next token belongs to.
        """
        if self.kind == "state" and self.cache_mode == "all":
            return num_computed_tokens // self.block_size
        return self.live_range(num_computed_tokens, num_tokens, 0, xp).first

    def step_blocks(self, query_len: int, seq_len: int, encoder_tokens: int) -> int:
        """Returns the most logical blocks that a step's table lists for requests of these sizes.

        Args:
          query_len: most tokens of one request that the step computes.
          seq_len: most tokens of one request after the step.
          encoder_tokens: longest encoder input.
        """
        if self.kind != "state":
            return self.max_blocks(seq_len, query_len, encoder_tokens)
        new = 1
        if self.cache_mode == "all":  # a chunk that starts mid-block touches one block more
            new = min(cdiv(query_len - 1, self.block_size) + 1, cdiv(seq_len, self.block_size))
        return 1 + new + self.speculative_blocks  # the first entry is the source

    def live_blocks(
        self, num_computed_tokens: int, num_tokens: int, *, encoder_tokens: int = 0
    ) -> Sequence[int]:
        """Returns the logical blocks of `live_range`, ascending and without repeats."""
        source, first, end = map(
            int, self.live_range(num_computed_tokens, num_tokens, encoder_tokens)
        )
        live = range(first, end)
        return live if source < 0 or source in live else (source, *live)

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Returns the most blocks that a request growing to ``num_tokens`` tokens ever holds.

        Args:
          num_tokens: the request's length at its end.
          in_flight_tokens: most of its tokens that one step computes.
          encoder_tokens: longest encoder input.
        """
        b, whole = self.block_size, cdiv(num_tokens, self.block_size)
        match self.kind:
            case "full":
                return whole
            case "sliding":
                # A window that starts mid-block touches one block more than it fills, up to
                # all blocks of the request. vLLM 0.33 omits that cap and so rejects requests
                # about as long as the window.
                live = min(self.window - 1 + in_flight_tokens, num_tokens)
                return min(cdiv(live, b) + 1, whole)
            case "chunked":
                live = min(self.chunk + in_flight_tokens, num_tokens)
                straddle = self.chunk % b != 0  # the chunk starts mid-block
                return min(cdiv(live, b) + straddle, whole)
            case "ring":
                return 1
            case "state":
                running = {"none": 1, "align": 2, "all": whole}
                return running[self.cache_mode] + self.speculative_blocks
            case "cross":
                return cdiv(encoder_tokens, b)

    def most_new_blocks(
        self, batch: int, tokens: int, query: int, encoder_tokens: int, context_parallel: int
    ) -> int:
        """Returns the most blocks that the requests of one step take.

        A request that computes n tokens takes at most ``ceil(n / block_size)`` blocks. Over a
        batch, the sum is largest if all requests but one compute one token, and that one computes
        the rest.

        Args:
          batch: requests of the step.
          tokens: tokens of the step.
          query: most tokens of one request in the step.
          encoder_tokens: longest encoder input.
          context_parallel: ranks among which the tokens of a request are divided.
        """
        if self.stores == "encoder":
            return batch * cdiv(encoder_tokens, self.block_size)
        if self.kind == "ring" or (self.kind == "state" and self.cache_mode != "all"):
            return batch * (1 + self.speculative_blocks)
        block = self.block_size * context_parallel
        requests = min(batch, tokens)
        most = min(requests + (tokens - requests) // block, batch * cdiv(query, block))
        return most + batch * self.speculative_blocks

    def row_blocks(self, num_tokens: int, encoder_tokens: int) -> int:
        """Returns the number of logical blocks of a request of this length.

        Args:
          num_tokens: the request's length at its end.
          encoder_tokens: longest encoder input.
        """
        if self.kind == "cross":
            return cdiv(encoder_tokens, self.block_size)
        if self.block_tokens == INT32_MAX:
            return 1 + self.speculative_blocks
        return cdiv(num_tokens, self.block_size) + self.speculative_blocks


class GrowthTable(_Columns):
    """The growth of G groups, for N rows at once; arrays are int64[G, N]. NumPy only.

    growths: of the groups.
    block_tokens, window, chunk, speculative_blocks: int64[G, 1], as for `Growth`; blocks count
      the tokens of all ranks of context parallelism, and ``chunk`` is None without chunks.
    aligned: int64[...], indices of the groups with "align" states.
    crossed: int64[...], indices of the groups that store encoder tokens.
    ringed: int64[...], indices of the groups that are rings.
    drafted: indices of the groups with "all" states that have blocks for drafts.
    has_drafts: whether requests need blocks for the states of drafts.
    has_windows: whether requests free blocks that no later token reads.
    """

    def __init__(self, growths: Sequence[Growth], *, context_parallel: int = 1):
        np = _numpy()

        def column(name: str) -> Any:
            return np.array([[getattr(growth, name)] for growth in growths], np.int64)

        self.growths = tuple(growths)
        kinds = [growth.kind for growth in growths]
        aligned = [g.stores == "state" and g.cache_mode == "align" for g in growths]
        self.block_tokens = np.minimum(column("block_tokens") * context_parallel, INT32_MAX)
        self.window, self.speculative_blocks = column("window"), column("speculative_blocks")
        self.chunk = column("chunk") if "chunked" in kinds else None
        self.aligned = np.array(aligned, bool).nonzero()[0]
        self.crossed = np.array([kind == "cross" for kind in kinds], bool).nonzero()[0]
        self.ringed = np.array([kind == "ring" for kind in kinds], bool).nonzero()[0]
        self.drafted = [i for i, g in enumerate(growths) if g.has_drafts and g.cache_mode == "all"]
        self.has_drafts = bool(self.speculative_blocks.any())
        self.has_windows = "sliding" in kinds or "chunked" in kinds

    def aligned_range(self, num_computed_tokens: Any, num_tokens: Any) -> LiveRange:
        """Returns the logical blocks needed in the groups of ``aligned``; see `Growth`.

        Args:
          num_computed_tokens, num_tokens: int64[N], tokens before and after a step.
        """
        end = self.end_block(num_tokens)[self.aligned]
        source = self.source_block(num_computed_tokens)[self.aligned]
        return LiveRange(source, end - 1 - self.speculative_blocks[self.aligned], end)

    def needs_no_change_until(self, num_computed_tokens: Any, allocated: Any) -> Any:
        """Returns the number of tokens that the allocated blocks are enough for, int64[N].

        Args:
          num_computed_tokens: int64[N], tokens in the cache when the step begins.
          allocated: int64[3, G, N], source, first and end of the allocated logical blocks.
        """
        np = _numpy()
        first, end = allocated[1], allocated[2]  # unpacking an array takes several times as long
        until = end - self.speculative_blocks if self.has_drafts else end
        until = until * self.block_tokens
        if self.has_windows:  # the first block leaves the window, or a new chunk begins
            left = (first + 1) * self.block_tokens
            left += self.window - 1
            np.minimum(until, left, out=until)
            if self.chunk is not None:
                ends = (num_computed_tokens // self.chunk + 1) * self.chunk
                np.minimum(until, ends, out=until)
        if self.crossed.size:
            until[self.crossed] = INT32_MAX
        if self.aligned.size:  # the old source is dropped once the newest block is the source
            source, first = allocated[0, self.aligned], first[self.aligned]
            then = first * self.block_tokens[self.aligned] + 1
            until[self.aligned] = np.where(
                source != first, np.minimum(until[self.aligned], then), until[self.aligned]
            )
        return np.minimum.reduce(until, axis=0) if len(until) > 1 else until[0]
