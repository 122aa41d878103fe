"""How large FlexAttention metadata gets: shapes and bytes, known before serving. No jax.

Knows the most that a batch of so many tokens and requests can list. Knows no batch and
no table: `jaxkv.flex_attention` builds arrays of exactly these shapes, and nothing else
decides one. It has all the names of this module too, and needs jax.

A *query group* is ``q_block_tokens`` consecutive tokens of a batch laid end to end. A
*segment* is what a query group and a request have in common: the pages that one segment
sees are one run of the request's pages, whatever the mask here. Everything is counted in
segments: per group at most one per token and one per request; over a batch at most
``groups + requests - 1``, since that many pieces are all that the groups' and the
requests' borders together can cut.
"""

import dataclasses
import functools

from jaxkv.checks import check_positive

INT32_MAX = 2**31 - 1


def max_num_query_groups(max_num_batched_tokens: int, q_block_tokens: int) -> int:
    """Query groups of the largest batch: ``ceil(max_num_batched_tokens / q_block_tokens)``.

    Of the tokens *computed in a step*, not of the longest sequence: groups are cut from
    the batch, and a batch of short requests can be longer than any of them.

    Raises:
      TypeError, ValueError: an argument that is not an int >= 1.
    """
    check_positive(max_num_batched_tokens=max_num_batched_tokens, q_block_tokens=q_block_tokens)
    return -(-max_num_batched_tokens // q_block_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetadataSizes:
    """The maxima of a batch and its mask. Static: each distinct value is one compilation.

    max_num_batched_tokens: tokens computed in a step, T in shape legends.
    max_num_seqs: requests with at least one token in a step.
    max_model_len: tokens of the longest sequence, past ones included.
    page_size: tokens of a page, the unit of the lists: a *kernel* block.
    q_block_tokens: tokens of a query group.
    num_blocks: pages in the pool, the null page among them.
    causal: a token sees itself and what came before; False: its whole request.
    sliding_window: tokens that a token sees, itself among them; None: all.
    pages_are_shared: requests may hold the same page (prefix caching). False makes
      `list_width` smaller: no more pages than the pool has.

    Raises:
      TypeError, ValueError: by name, for what is not a size; for a window without
        ``causal``; and where the lists of a batch outgrow int32.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    page_size: int
    q_block_tokens: int
    num_blocks: int
    causal: bool = True
    sliding_window: int | None = None
    pages_are_shared: bool = True

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for name in ("causal", "pages_are_shared"):
            if not isinstance(sizes.pop(name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.sliding_window is None:
            del sizes["sliding_window"]
        check_positive(**sizes)
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks={self.num_blocks} has no page beside the null page")
        if self.sliding_window is not None and not self.causal:
            raise ValueError(
                f"sliding_window={self.sliding_window} looks back from each token and needs "
                "causal=True; drop one of the two"
            )
        self._check_int32()

    def _check_int32(self) -> None:
        """Prefix sums over a batch's pages, and token positions, are int32."""
        segments = self.num_query_groups + self.max_num_seqs
        largest = {
            "token positions": (
                self.pages_per_seq * self.page_size + self.num_query_groups * self.q_block_tokens
            ),
            "the pages that a batch lists": segments * self.pages_per_seq + self.list_width,
        }
        for what, value in largest.items():
            if value > INT32_MAX:
                raise ValueError(
                    f"{what} reach {value}, more than int32 holds; lower "
                    "max_num_batched_tokens or max_model_len, or raise q_block_tokens or page_size"
                )

    @functools.cached_property
    def num_query_groups(self) -> int:
        """G in shape legends; see `max_num_query_groups`."""
        return max_num_query_groups(self.max_num_batched_tokens, self.q_block_tokens)

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence: ``ceil(max_model_len / page_size)``."""
        return -(-self.max_model_len // self.page_size)

    @functools.cached_property
    def list_width(self) -> int:
        """L, the most (request, page) pairs that one query group sees.

        ``min(q_block_tokens, max_num_seqs)`` segments, each of at most ``pages_per_seq``
        pages, the pool's usable pages, and what the window spans. Without sharing, all
        together at most the pool's usable pages.
        """
        segments = min(self.q_block_tokens, self.max_num_seqs, self.max_num_batched_tokens)
        pages = self._pages_of(segments, min(self.q_block_tokens, self.max_num_batched_tokens))
        return pages if self.pages_are_shared else min(pages, self._usable_pages)

    @property
    def block_mask_width(self) -> int:
        """K, the most distinct pages that one query group sees: never more than the pool has."""
        return min(self.list_width, self._usable_pages)

    @functools.cached_property
    def csr_capacity(self) -> int:
        """C, the most (request, page) pairs that all query groups of a batch see together.

        ``groups + requests - 1`` segments (and no more than tokens), each bounded as in
        `list_width`; and never more than the padded lists hold.
        """
        tokens = self.max_num_batched_tokens
        requests = min(self.max_num_seqs, tokens)
        segments = min(self.num_query_groups + requests - 1, tokens)
        return min(self._pages_of(segments, tokens), self.num_query_groups * self.list_width)

    @property
    def _usable_pages(self) -> int:
        return self.num_blocks - 1

    def _pages_of(self, segments: int, tokens: int) -> int:
        """The most pages that so many segments see, which have so many tokens in all."""
        most = segments * min(self.pages_per_seq, self._usable_pages)
        if self.sliding_window is None:
            return most
        # A segment of t tokens sees w - 1 + t tokens, and n tokens touch at most
        # (n + page_size - 2) // page_size + 1 pages. So give each segment one token, and
        # spend the others where they reach into one more page soonest.
        first_span = self.sliding_window + self.page_size - 2
        step = self.page_size - first_span % self.page_size
        spare = tokens - segments
        steps = min(segments, spare // step)
        steps += (spare - steps * step) // self.page_size
        return min(most, segments * (first_span // self.page_size + 1) + steps)


FORMS = ("lists", "csr", "block_mask", "physical_to_logical")


def metadata_bytes(sizes: MetadataSizes, form: str = "lists") -> int:
    """Bytes of every array that a builder returns, to be planned before the pool is sized.

    Args:
      sizes: the maxima; T, G, L, K and C as in their docstrings, B = ``max_num_seqs``.
      form: which builder's result. All elements are int32, 4 bytes:
        ``"lists"``, `build_page_lists`: ``3 * G * L`` (page, logical page, owner) +
        ``G`` counts + ``2 * T`` (document, position) + ``B`` lengths + 1 word of problems.
        ``"csr"``, `build_page_csr`: ``3 * C`` + ``G + 1`` offsets + ``2 * T`` + ``B`` + 1.
        ``"block_mask"``, `block_mask_indices`: ``G * K`` + ``G`` counts + 1; it is made
        from lists, whose bytes come on top while it is.
        ``"physical_to_logical"``, `physical_to_logical`: ``B * num_blocks`` + 1.

    Temporaries come on top while a builder runs. On a CPU, as compiled by jax 0.12: for
    ``"lists"`` and ``"csr"`` about 64 bytes a pair, of 2**20 pairs at most (64 MiB), and once
    more the result for ``"csr"``; for ``"block_mask"`` once the lists' pages, ``4 * G * L``.
    None grows with the pool.

    Raises:
      ValueError: an unknown form.
    """
    groups = sizes.num_query_groups
    of_batch = 2 * sizes.max_num_batched_tokens + sizes.max_num_seqs
    elements = {
        "lists": 3 * groups * sizes.list_width + groups + of_batch + 1,
        "csr": 3 * sizes.csr_capacity + groups + 1 + of_batch + 1,
        "block_mask": groups * sizes.block_mask_width + groups + 1,
        "physical_to_logical": sizes.max_num_seqs * sizes.num_blocks + 1,
    }
    if form not in elements:
        raise ValueError(f"form must be one of {', '.join(FORMS)}; got {form!r}")
    return 4 * elements[form]
