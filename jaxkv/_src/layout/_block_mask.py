"""Sizes of FlexAttention's block mask over the pages of a pool, known before serving. No jax.

A *page* is a kernel block. A *query group* is ``q_block_tokens`` consecutive tokens of a flat
batch. The tokens that a query group and a request have in common are consecutive in the request, so
they see one range of pages, with a causal mask, a window, chunks or no mask.
"""

import dataclasses
import functools
import math

from jaxkv._src.internal.checks import check_flag, check_positive
from jaxkv._src.internal.numbers import INT32_MAX, cdiv


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMaskSizes:
    """The maxima of a batch and its mask, from which the shapes of a block mask follow.

    Plans memory before there is a cache; `jaxkv.attention.block_mask_sizes` derives the sizes from
    a cache. Static: each distinct value is one compilation.

    max_num_batched_tokens: tokens that a step computes, over all its requests. Not the longest
      sequence: a batch of many short requests can have more tokens than any of them.
    max_num_seqs: requests of a step.
    max_model_len: tokens of the longest sequence, cached ones included.
    page_tokens: tokens of a page.
    q_block_tokens: tokens of a query group.
    num_pages: pages of one layer, including the null page.
    causal: a token sees itself and the tokens before it; False: its whole request.
    sliding_window: tokens that a token sees, including itself; None: all.
    chunk_size: tokens of an attention chunk; a token sees its own chunk. None: no chunks.

    Raises:
      TypeError, ValueError: by name, for a value that is not a size; for a window or chunks
        without ``causal``; if the block mask of a batch outgrows int32.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    page_tokens: int
    q_block_tokens: int
    num_pages: int
    causal: bool = True
    sliding_window: int | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        sizes = dict(vars(self))
        check_flag(causal=sizes.pop("causal"))
        optional = {name: sizes.pop(name) for name in ("sliding_window", "chunk_size")}
        limits = {name: size for name, size in optional.items() if size is not None}
        check_positive(**sizes, **limits)
        if self.num_pages < 2:
            raise ValueError(
                f"num_pages={self.num_pages} leaves no page next to the null page; want at least 2"
            )
        if len(limits) > 1:
            raise ValueError("sliding_window and chunk_size are both given; drop one of the two")
        for name, size in limits.items():
            if not self.causal:
                raise ValueError(
                    f"{name}={size} looks back from each token and needs causal=True; drop one of "
                    "the two"
                )
        last = (
            self.pages_per_seq * self.page_tokens + self.max_num_query_groups * self.q_block_tokens
        )
        if last > INT32_MAX:
            raise ValueError(
                f"token positions reach {last}, more than int32 holds; lower "
                "max_num_batched_tokens or max_model_len, or raise q_block_tokens or page_tokens"
            )

    @property
    def max_num_query_groups(self) -> int:
        """Query groups of the largest batch."""
        return cdiv(self.max_num_batched_tokens, self.q_block_tokens)

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return cdiv(self.max_model_len, self.page_tokens)

    @functools.cached_property
    def max_num_kv_indices(self) -> int:
        """The most distinct pages that one query group sees: at most the layer's."""
        pages = self._most_pages(self.requests_per_group, self._group_tokens)
        return min(pages, self.num_pages - 1)

    @property
    def requests_per_group(self) -> int:
        """The most requests whose tokens one query group holds."""
        return min(self._group_tokens, self.max_num_seqs)

    @functools.cached_property
    def pages_per_request(self) -> int:
        """The most pages of one request that a query group sees."""
        return self._most_pages(1, self._group_tokens)

    @property
    def block_mask_bytes(self) -> int:
        """Bytes of ``kv_num_blocks`` and ``kv_indices`` of `jaxkv.attention.block_mask_indices`.

        While they are built, temporaries take a few times ``max_num_query_groups *
        requests_per_group * pages_per_request`` int32s, independent of the pool.
        """
        return 4 * self.max_num_query_groups * (1 + self.max_num_kv_indices)

    @property
    def physical_to_logical_bytes(self) -> int:
        """Bytes of `jaxkv.attention.physical_to_logical`."""
        return 4 * (self.max_num_seqs * self.num_pages + 1)

    @property
    def _group_tokens(self) -> int:
        return min(self.q_block_tokens, self.max_num_batched_tokens)

    def _most_pages(self, requests: int, tokens: int) -> int:
        """Returns the most pages that consecutive tokens of some requests see."""
        most = requests * min(self.pages_per_seq, self.num_pages - 1)
        reach = self.sliding_window or self.chunk_size
        if reach is None:
            return most
        # t tokens of a request see reach - 1 + t tokens in a row. The first of them lies anywhere
        # in its page with a window, at multiples of `align` with chunks: n tokens touch at most
        # (n + page_tokens - 1 - align) // page_tokens + 1 pages. So give each request one token,
        # and spend the others where they reach into one more page soonest.
        align = 1 if self.chunk_size is None else math.gcd(self.chunk_size, self.page_tokens)
        first_span = reach + self.page_tokens - 1 - align
        to_next_page = self.page_tokens - first_span % self.page_tokens
        spare = tokens - requests
        extended = min(requests, spare // to_next_page)
        extra = extended + (spare - extended * to_next_page) // self.page_tokens
        return min(most, requests * (first_span // self.page_tokens + 1) + extra)
