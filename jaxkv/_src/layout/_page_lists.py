"""Sizes and bytes of the page lists of a step, known before serving. No jax.

A *page* is a kernel block. A *query group* is ``q_block_tokens`` consecutive tokens of a batch
whose requests lie end to end. A *segment* is what a query group and a request have in common:
the pages that its tokens see follow each other in the request, whatever the mask. Everything is
counted in segments: a group has at most one for each of its tokens, and one for each request; a
batch at most ``groups + requests - 1``, since the borders of groups and requests cut it into no
more pieces.
"""

import dataclasses
import functools
import math
from typing import Literal, get_args

from jaxkv._src.internal.checks import check_choice, check_flag, check_kind, check_positive
from jaxkv._src.internal.numbers import INT32_MAX, cdiv

PageListKind = Literal["lists", "csr", "block_mask", "physical_to_logical"]


def max_num_query_groups(max_num_batched_tokens: int, q_block_tokens: int) -> int:
    """Returns the query groups of the largest batch.

    Args:
      max_num_batched_tokens: tokens that one step computes, over all requests. Not the longest
        sequence: a batch of many short requests can be longer than any of them.
      q_block_tokens: tokens of a query group.

    Raises:
      TypeError, ValueError: an argument that is not an int >= 1.
    """
    check_positive(max_num_batched_tokens=max_num_batched_tokens, q_block_tokens=q_block_tokens)
    return cdiv(max_num_batched_tokens, q_block_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageListSizes:
    """The maxima of a batch and its mask. Static: each distinct value is one compilation.

    To plan memory before there is a cache; `jaxkv.attention.page_list_sizes` derives them from
    a cache.

    max_num_batched_tokens: tokens computed in a step, T in shape legends.
    max_num_seqs: requests of a step, B in shape legends.
    max_model_len: tokens of the longest sequence, cached ones included.
    page_tokens: tokens of a page.
    q_block_tokens: tokens of a query group.
    num_pages: pages of one layer, the null page among them.
    causal: a token sees itself and the tokens before it; False: its whole request.
    sliding_window: tokens that a token sees, itself among them; None: all.
    chunk_size: tokens of an attention chunk; a token sees its own chunk. None: no chunks.
    pages_are_shared: requests may hold the same page (prefix caching). False makes
      `list_width` smaller: no more pages than the layer has.

    Raises:
      TypeError, ValueError: by name, for a value that is not a size; for a window or chunks
        without ``causal``; where the lists of a batch outgrow int32.
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
    pages_are_shared: bool = True

    def __post_init__(self) -> None:
        sizes = dict(vars(self))
        flags = {name: sizes.pop(name) for name in ("causal", "pages_are_shared")}
        check_flag(**flags)
        limits = [name for name in ("sliding_window", "chunk_size") if sizes[name] is not None]
        check_positive(**{name: size for name, size in sizes.items() if size is not None})
        if self.num_pages < 2:
            raise ValueError(
                f"num_pages={self.num_pages} leaves no page next to the null page; want at least 2"
            )
        if len(limits) > 1:
            raise ValueError("sliding_window and chunk_size are both given; drop one of the two")
        if limits and not self.causal:
            raise ValueError(
                f"{limits[0]}={sizes[limits[0]]} looks back from each token and needs "
                "causal=True; drop one of the two"
            )
        self._check_int32()

    def _check_int32(self) -> None:
        """Raises unless token positions, and sums over a batch's pages, are int32."""
        segments = self.num_query_groups + self.max_num_seqs
        largest = {
            "token positions": (
                self.pages_per_seq * self.page_tokens + self.num_query_groups * self.q_block_tokens
            ),
            "the pages that a batch lists": segments * self.pages_per_seq + self.list_width,
        }
        for name, value in largest.items():
            if value > INT32_MAX:
                raise ValueError(
                    f"{name} reach {value}, more than int32 holds; lower max_num_batched_tokens "
                    "or max_model_len, or raise q_block_tokens or page_tokens"
                )

    @functools.cached_property
    def num_query_groups(self) -> int:
        """G in shape legends; see `max_num_query_groups`."""
        return max_num_query_groups(self.max_num_batched_tokens, self.q_block_tokens)

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return cdiv(self.max_model_len, self.page_tokens)

    @functools.cached_property
    def list_width(self) -> int:
        """L, the most (request, page) pairs that one query group sees.

        ``min(q_block_tokens, max_num_seqs)`` segments, each of at most ``pages_per_seq`` pages,
        the layer's usable pages, and what the window or the chunk spans. Without sharing, all
        together at most the layer's usable pages.
        """
        tokens = min(self.q_block_tokens, self.max_num_batched_tokens)
        pages = self._pages_of(min(tokens, self.max_num_seqs), tokens)
        return pages if self.pages_are_shared else min(pages, self._usable_pages)

    @property
    def block_mask_width(self) -> int:
        """K, the most distinct pages that one query group sees: at most those of the layer."""
        return min(self.list_width, self._usable_pages)

    @functools.cached_property
    def csr_capacity(self) -> int:
        """C, the most (request, page) pairs that all query groups of a batch see together.

        ``groups + requests - 1`` segments (and no more than tokens), each bounded as in
        `list_width`; and never more than the padded lists hold.
        """
        tokens = self.max_num_batched_tokens
        segments = min(self.num_query_groups + self.max_num_seqs - 1, tokens)
        return min(self._pages_of(segments, tokens), self.num_query_groups * self.list_width)

    @property
    def _usable_pages(self) -> int:
        return self.num_pages - 1

    def _pages_of(self, segments: int, tokens: int) -> int:
        """Returns the most pages that so many segments see, which have so many tokens in all."""
        most = segments * min(self.pages_per_seq, self._usable_pages)
        reach = self.sliding_window or self.chunk_size
        if reach is None:
            return most
        # A segment of t tokens sees reach - 1 + t tokens in a row. The first of them lies
        # anywhere in its page with a window, at multiples of `align` with chunks: n tokens touch
        # at most (n + page_tokens - 1 - align) // page_tokens + 1 pages. So give each segment one
        # token, and spend the others where they reach into one more page soonest.
        align = 1 if self.chunk_size is None else math.gcd(self.chunk_size, self.page_tokens)
        first_span = reach + self.page_tokens - 1 - align
        to_next_page = self.page_tokens - first_span % self.page_tokens
        spare = tokens - segments
        extended = min(segments, spare // to_next_page)
        extra = extended + (spare - extended * to_next_page) // self.page_tokens
        return min(most, segments * (first_span // self.page_tokens + 1) + extra)


def page_list_bytes(sizes: PageListSizes, kind: PageListKind = "lists") -> int:
    """Returns the bytes of every array that a builder of `jaxkv.attention` returns.

    Temporaries come on top while a builder runs. On a CPU, as compiled by jax 0.12: for "lists"
    and "csr" about 64 bytes a pair, of 2**20 pairs at most (64 MiB), and once more the result
    for "csr"; for "block_mask" once the lists' pages, ``4 * G * L``. None grows with the pool.

    Args:
      sizes: the maxima; T, B, G, L, K and C as in their docstrings.
      kind: of the result. All elements are int32, 4 bytes:

        * "lists", of `build_page_lists`: ``3 * G * L`` (page, logical page, request) + ``G``
          counts + ``2 * T`` (request, position) + ``B`` lengths + 1 word of error flags.
        * "csr", of `build_page_csr`: ``3 * C`` + ``G + 1`` offsets + ``2 * T`` + ``B`` + 1.
        * "block_mask", of `block_mask_indices`: ``G * K`` + ``G`` counts + 1; it is made from
          lists, whose bytes come on top while it is.
        * "physical_to_logical", of `physical_to_logical`: ``B * num_pages`` + 2.

    Raises:
      ValueError: an unknown kind.
    """
    check_kind(PageListSizes, "what page_list_sizes returned", sizes=sizes)
    check_choice(get_args(PageListKind), kind=kind)
    groups = sizes.num_query_groups
    per_batch = 2 * sizes.max_num_batched_tokens + sizes.max_num_seqs + 1
    elements = {
        "lists": 3 * groups * sizes.list_width + groups + per_batch,
        "csr": 3 * sizes.csr_capacity + groups + 1 + per_batch,
        "block_mask": groups * sizes.block_mask_width + groups + 1,
        "physical_to_logical": sizes.max_num_seqs * sizes.num_pages + 2,
    }
    return 4 * elements[kind]
