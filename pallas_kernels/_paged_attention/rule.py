"""The rule of attention over pages: the keys that a query sees, and their scores."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels._paged_attention.packed import LatentPacking, PackedRow
from pallas_kernels._paged_attention.token_heads import TokenHeadRow

MAX_PART, PART = 256, 128  # columns of a value; latent vectors have more, a multiple of 128


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """The keys that a query sees, their scores, and the format of values and outputs; static.

    scale: factor of the scores; None: ``K ** -0.5``.
    soft_cap: caps scores at ``soft_cap * tanh(score / soft_cap)``; None: no cap.
    sliding_window: keys that a query sees, including its own; None: no window.
    chunk_size: tokens of a chunk; a query sees only keys of its own chunk. None: no chunks.
    causal: False: queries see all keys of their request, at any position.
    value_width: elements of a value, V; None: all elements of a row that follow its key. If rows
      are only keys, [blocks, tokens, kv_heads, K], the value is the first V elements of its key.
    row_packing: the form of rows of bytes, in pages uint8[blocks, tokens, 1, bytes]. None: a row
      has elements of the dtype of ``pages``. A `TokenHeadRow` for keys and values with a scale for
      each token and head; for prompts ``"mosaic_gpu"`` rounds keys and values times their scales
      to the dtype of queries, in a workspace of at most 256 MiB. ``"fp8_ds_mla"`` for latent
      vectors as vLLM stores them for DeepSeek-V3.2, V + V / 32 + 2 (K - V) bytes; see `PackedRow`.
      Pass ``value_width``, V, with it; values times their scales are rounded to the dtype of
      queries, but for keys of GPUs other than 9.x, whose products are multiplied by the scales.
      Their queries are rounded to float16.
    reproducible: True: the bits of a token's output depend on its own position, query and keys
      alone, not on other requests, on rows, page ids or the lengths of arrays, nor on whether its
      request has one query in this call or many. Splits are then fixed ranges of positions, and
      prompts take the kernel of decodes, which is slower for them. Holds between calls of one
      implementation on one kind of device, with equal rules, page size and dtypes; of ``"xla"`` on
      CPUs only, because XLA chooses GEMMs on GPUs by their shapes.
    out_dtype: dtype of the output; None: the dtype of queries. Use float32 for outputs that are to
      be combined; ``"mosaic_gpu"`` computes them in the dtype of queries nevertheless.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sliding_window: int | None = None
    chunk_size: int | None = None
    causal: bool = True
    value_width: int | None = None
    row_packing: LatentPacking | TokenHeadRow | None = None
    reproducible: bool = False
    out_dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AttentionRule):
    """An `AttentionRule` with its defaults filled in, and the shapes of a call.

    kv_heads: KV heads.
    group: query heads of one KV head.
    key_width: elements of a key.
    page_tokens: tokens of a page.
    values_in_keys: whether a row is only a key, whose first elements are the value.
    ranks, interleave_tokens: of the `Interleaving`; 1 rank without one.
    max_queries: queries that requests are expected to have at most; more take longer.
    """

    scale: float
    value_width: int
    out_dtype: jnp.dtype
    kv_heads: int
    group: int
    key_width: int
    page_tokens: int
    values_in_keys: bool
    ranks: int
    interleave_tokens: int
    max_queries: int

    def replace(self, **fields: object) -> "Config":
        """Returns the same with other fields."""
        return dataclasses.replace(self, **fields)

    @property
    def row_width(self) -> int:
        """Returns the elements of a row: a key and its value, or a key that contains it."""
        return self.key_width + (0 if self.values_in_keys else self.value_width)

    @property
    def stored_widths(self) -> tuple[int, int]:
        """Returns the elements of pages that a key has, and a value beside it; bytes of 4 bits."""
        row = self.token_head_row
        if row is not None:
            return row.key_bytes, row.value_bytes
        return self.key_width, self.row_width - self.key_width

    @property
    def stored_value(self) -> tuple[int, int]:
        """Returns the first element of the value in the row of a head, and its elements."""
        return (0, self.value_width) if self.values_in_keys else self.stored_widths

    @property
    def first_value(self) -> int:
        """Returns the index of the first element of the value in a row."""
        return 0 if self.values_in_keys else self.key_width

    @property
    def latent_row(self) -> PackedRow | None:
        """Returns the parts of a packed latent vector; None: rows are something else."""
        if self.row_packing is None or isinstance(self.row_packing, TokenHeadRow):
            return None
        return PackedRow(self.value_width, self.key_width - self.value_width)

    @property
    def token_head_row(self) -> TokenHeadRow | None:
        """Returns the parts of a row with scales of each head; None: rows are something else."""
        return self.row_packing if isinstance(self.row_packing, TokenHeadRow) else None

    @property
    def value_parts(self) -> list[tuple[int, int]]:
        """Returns the first column and the width of parts of a value that are multiplied at once.

        Their widths are multiples of 64. The last one may overlap the one before, and end with the
        value.
        """
        whole = self.value_width // 64 * 64
        if whole > MAX_PART:
            return [(first, PART) for first in range(0, whole, PART)]
        return [(0, whole)] + [(self.value_width - 64, 64)] * (self.value_width > whole)

    def first_visible(self, positions: Array, chunk_offset: Array) -> Array:
        """Returns the first position that queries at these positions see.

        Args:
          positions: counted from the first position in the block tables.
          chunk_offset: distance of that first position from the beginning of its chunk.
        """
        first = jnp.zeros_like(positions)
        if self.sliding_window is not None:
            first = jnp.maximum(first, positions - (self.sliding_window - 1))
        if self.chunk_size is not None:
            within = lax.rem(positions + chunk_offset, self.chunk_size)
            first = jnp.maximum(first, positions - within)
        return first

    def allocated_before(self, positions: Array, rank: Array) -> Array:
        """Returns how many of the positions below these belong to the rank."""
        if self.ranks == 1:
            return positions
        interleave, turn = self.interleave_tokens, self.ranks * self.interleave_tokens
        positions = jnp.maximum(positions, 0)
        whole = lax.div(positions, turn)
        rest = positions - whole * turn - rank * interleave
        return whole * interleave + jnp.minimum(jnp.maximum(rest, 0), interleave)
