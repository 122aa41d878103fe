"""The constants of the kernel of a recurrent step."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import _capability
from pallas_kernels._recurrence.rule import Convolution, Requests, Rule, Tokens

TILE_BYTES = 16 * 1024  # of a tile of a state: what a thread block works on at once
RING_TILE_BYTES = 8 * 1024  # the same of several tokens with rings, which take registers, too
DECODE_ROWS = 32  # of a tile of one token with a ring: more take more registers
DECODE_STAGES = {4: 3, 2: 4}  # of those, by the bytes of a number: three thread blocks fit
DRAFT_ROWS = 32  # of a tile of a few tokens with a ring that takes drafts
DRAFT_STAGES = 2  # tiles of those: shared memory is for more thread blocks
LEAST_BLOCKS = 512  # each of which computes a whole head of these; of fewer, each has one tile
STAGES = 4  # tiles that a thread block has in shared memory
SHARED_ALIGN = 1024  # bytes; Mosaic begins arrays in shared memory at multiples of it
BARRIER_BYTES = 8
LOADED = 16  # rows of a ring that are loaded at once; its length is not more
LEAST_VALUES = 256  # of the heads of an item with a ring, if there are as many for a key
GRANULE = 4  # rows of a ring that are copied at once
MOST_BLOCKS = 1024  # of several tokens with rings, most of which find none in many requests


class StepShape(NamedTuple):
    """Constants of a compiled kernel.

    tokens: most tokens of a request.
    writes: states that are written of each request.
    conv_width: of the convolution; 0: none.
    conv_rows: its rows of weights, and of bias if there is one.
    silu: whether SiLU follows the convolution.
    packed: inputs of the convolution in an element of the pages, 1 or 2.
    decay_per_key: whether every key channel has a decay of its own.
    heads: value heads of an item, which are of one key head.
    rows: of a state in a tile.
    page: dtype of the pages.
    inner: dtype of the convolution's inputs.
    ragged: whether requests have other numbers of tokens than one.
    by_tma: whether TMA copies; else states by cp.async, and the rest by loads and stores.
    replay: tokens of a ring; 0: none.
    terms: numbers that the logarithm of a decay is the sum of, in a ring.
    parts: thread blocks of a head, with equal numbers of its tiles; 1: one computes all tiles of
      its heads.
    at_once: requests that thread blocks begin with, and go from to others; 0: all of them.
    drafts, limit: of a ring, as `Replay` has them.
    """

    rule: Rule
    tokens: int
    writes: int
    conv_width: int
    conv_rows: int
    silu: bool
    packed: int
    decay_per_key: bool
    heads: int
    rows: int
    stages: int
    page: jnp.dtype
    inner: jnp.dtype
    ragged: bool
    by_tma: bool
    page_rows: int
    num_pages: int
    batch: int
    replay: int = 0
    terms: int = 1
    parts: int = 1
    at_once: int = 0
    drafts: int = 0
    limit: int = 0

    @property
    def tiles(self) -> int:
        """Returns the tiles of an item."""
        return self.heads * self.rule.value_size // self.rows // self.parts

    @property
    def items(self) -> int:
        return self.batch * self.items_of_request

    @property
    def items_of_request(self) -> int:
        return self.rule.value_heads // self.heads * self.parts

    @property
    def channels(self) -> int:
        """Returns the inputs of an item: queries, keys, and the values of its heads."""
        return 2 * self.rule.key_size + self.heads * self.rule.value_size

    @property
    def staged(self) -> int:
        """Returns the vectors of inputs of an item in shared memory, where no convolution is."""
        return 0 if self.conv_width else self.tokens

    @property
    def copies(self) -> int:
        """Returns how many copies an item waits for before it begins."""
        copies = self.staged * (2 + self.heads)
        copies += self.tokens * self.heads if self.decay_per_key else 0
        return copies + self.replay // GRANULE * (1 + self.heads)

    @property
    def scratch(self) -> list[tuple[tuple[int, ...], DTypeLike]]:
        """Returns shape and dtype of each array in shared memory."""
        rule, channels = self.rule, self.channels
        arrays: list[tuple[tuple[int, ...], DTypeLike]] = [
            ((self.stages, self.rows, rule.key_size), self.page),
        ]
        if self.staged:
            arrays.append(((self.staged, channels), self.inner))
        if self.decay_per_key:
            arrays.append(((self.tokens, self.heads * rule.key_size), jnp.float32))
        if self.conv_width:
            arrays.append(((channels,), jnp.float32))  # outputs of the convolution
        return [*arrays, *self.ring_scratch]

    @property
    def ring_scratch(self) -> list[tuple[tuple[int, ...], DTypeLike]]:
        """Returns shape and dtype of each array of `StepRing` in shared memory."""
        if not self.replay:
            return []
        rule, heads = self.rule, self.heads
        keys: tuple[tuple[int, ...], DTypeLike] = ((LOADED, rule.key_size), self.page)
        weights: tuple[tuple[int, ...], DTypeLike] = ((heads, 3, LOADED), jnp.float32)
        added = (heads, self.replay * rule.value_size // rule.key_size, rule.key_size), self.page
        if self.drafts:
            count = 2 * self.tokens  # keys and queries
            sizes = rule.key_size, LOADED, self.tiles * self.rows
            return [keys, weights, added, *(((count, size), jnp.float32) for size in sizes)]
        if self.tokens > 1:
            return [keys, weights, added]
        values, width = heads * rule.value_size, rule.key_size
        if self.page == jnp.bfloat16:  # of `MmaReplayDecoder`
            vectors = ((2, width), jnp.float32), ((3, values), jnp.float32)
            words = ((self.replay // 2, width), jnp.float32), ((8, width), self.page)
            return [keys, weights, added, *vectors, *words]
        vectors = ((width,), jnp.float32), ((2, values), jnp.float32)
        wide = [(keys[0], jnp.float32)] if self.page.itemsize < 4 else []
        return [keys, weights, added, *vectors, *wide]

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes of shared memory, barriers included."""
        sizes = [math.prod(size) * jnp.dtype(dtype).itemsize for size, dtype in self.scratch]
        arrays = sum(-(-size // SHARED_ALIGN) * SHARED_ALIGN for size in sizes)
        return arrays + BARRIER_BYTES * (self.stages + 1)

    def segments(self, head: Array, key_head: Array) -> list[tuple[int, Array, int]]:
        """Returns (offset among its inputs, first column, width) of the inputs of an item.

        Args:
          head, key_head: int32[], first value head of the item, and its key head.
        """
        rule = self.rule
        queries, keys, values = rule.starts
        width, value = rule.key_size, rule.value_size
        segments = [
            (0, queries + key_head * width, width),
            (width, keys + key_head * width, width),
        ]
        return segments + [
            (2 * width + j * value, values + (head + j) * value, value) for j in range(self.heads)
        ]


def step_shape(
    rule: Rule, tokens: Tokens, requests: Requests, conv: Convolution | None, most: int
) -> StepShape:
    """Chooses the constants of a call; ``most``: tokens of a request."""
    states, width, size = tokens.states, rule.key_size, tokens.states.itemsize
    tile_bytes = TILE_BYTES if tokens.replay is None else RING_TILE_BYTES
    rows = max(16, min(rule.value_size, tile_bytes // (width * size)))
    drafts = 0 if tokens.replay is None else tokens.replay.drafts
    decodes = tokens.replay is not None and most == 1 and not drafts
    rows = math.gcd(DECODE_ROWS if decodes else rows, rule.value_size)
    heads = rule.group if conv is not None else 1
    while heads * rule.value_size // rows < STAGES and rule.group % (2 * heads) == 0:
        heads *= 2
    while (
        tokens.replay and heads * rule.value_size < LEAST_VALUES and rule.group % (2 * heads) == 0
    ):
        heads *= 2
    parts, at_once = 1, 0
    if tokens.replay is not None and most > 1:  # of few requests, whose time counts
        heads, parts = 1, rule.value_size // rows
        at_once = max(1, min(requests.batch, MOST_BLOCKS // (rule.value_heads * parts)))
    stages = DECODE_STAGES[size] if decodes else STAGES
    if drafts:
        rows, stages = math.gcd(DRAFT_ROWS, rule.value_size), DRAFT_STAGES
        enough = requests.batch * rule.value_heads >= LEAST_BLOCKS
        heads, parts, at_once = 1, 1 if enough else rule.value_size // rows, 0
    stages = min(stages, heads * rule.value_size // rows // parts)
    return StepShape(
        rule=rule,
        tokens=most,
        writes=requests.write_ids.shape[1],
        conv_width=0 if conv is None else conv.width,
        conv_rows=0 if conv is None else conv.width + (conv.bias is not None),
        silu=conv is not None and conv.silu,
        packed=1 if conv is None else size // conv.pages.itemsize,
        decay_per_key=tokens.log_decay.ndim == 3,
        heads=heads,
        rows=rows,
        stages=stages,
        page=jnp.dtype(states.dtype),
        inner=tokens.inputs.dtype if conv is None else jnp.dtype(conv.pages.dtype),
        ragged=requests.spans is not None,
        by_tma=_capability.instructions_of("recurrent_step") != "cp.async",
        page_rows=states.page_step * (states.extent_bytes // (width * size)),
        num_pages=states.num_pages,
        batch=requests.batch,
        replay=0 if tokens.replay is None else tokens.replay.rows,
        terms=1 if tokens.replay is None else tokens.replay.log_decay.shape[1],
        parts=parts,
        at_once=at_once,
        drafts=drafts,
        limit=0 if tokens.replay is None else tokens.replay.limit,
    )
