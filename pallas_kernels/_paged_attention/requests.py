"""The requests of a call of attention over pages: their pages, lengths and queries."""

import dataclasses
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Interleaving:
    """A division of the positions of every request among ranks, for context parallelism.

    Ranks take turns: each gets the next ``interleave_tokens`` positions. The pages of a rank have
    its positions without gaps.

    rank: int or int32[], the rank whose pages these are.
    ranks: number of ranks.
    interleave_tokens: consecutive positions that a rank gets in its turn.
    """

    rank: Int32[Array, ""] | int
    ranks: int = dataclasses.field(metadata={"static": True})
    interleave_tokens: int = dataclasses.field(metadata={"static": True})


class SharedPrefixes(NamedTuple):
    """Groups of requests that begin with the same pages.

    The first ``lens[g]`` tokens of all members of group g must be in pages with the same content.
    They are read once for the whole group, from the table of its first member.

    members: requests, by their index in the batch, group after group; a request is in one group at
      most. -1: padding.
    ends: ascending: the members of group g end here, and the members of the next one begin.
    lens: tokens that the members of each group share; 0: none.
    """

    members: Int32[Array, " members"]
    ends: Int32[Array, " groups"]
    lens: Int32[Array, " groups"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestPages:
    """The requests of a call: where their keys are, and which queries are theirs.

    block_tables: the pages of each request in the order of its tokens. An id below 0 or at least
      ``blocks`` has no keys.
    seq_lens: tokens of each request, including its queries; 0 for padding.
    query_start_loc: the index of each request's first query; the last entry is the number of
      queries, and ``queries`` past it are padding. The last query of a request is its last token.
      None: one query per request, the fastest case of ``"mosaic_gpu"``.
    first_positions: position of the first token in each row of ``block_tables``, for tables that
      leave out blocks below a window; None: 0.
    interleaving: for pages with only one rank's share of the positions of every request;
      ``seq_lens`` still count all positions. None: the pages have all positions.
    shared_prefixes: groups of requests that begin with the same pages, which are then read once
      for a whole group. For one query each, without a window, a chunk or ``interleaving``, and not
      ``reproducible``. Of each group, as many whole steps of 64 tokens count as come before the
      last token of every member. Latent vectors with more than 32 heads are read for each request
      nevertheless, because their products take longer. None, or groups that share 0 tokens:
      nothing is shared.
    max_query_len: most queries of a request; None: all of them. A small number spares a batch of
      drafts the kernel for many queries. A request with more is served correctly, but slowly.
    """

    block_tables: Int32[Array, "requests pages"]
    seq_lens: Int32[Array, " requests"]
    query_start_loc: Int32[Array, " requests+1"] | None = None
    first_positions: Int32[Array, " requests"] | None = None
    interleaving: Interleaving | None = None
    shared_prefixes: SharedPrefixes | None = None
    max_query_len: int | None = dataclasses.field(default=None, metadata={"static": True})
