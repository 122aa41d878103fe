"""The requests of a call of a recurrent layer, and the pages of their states."""

import dataclasses

import jax
from jax import Array
from jaxtyping import Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestStates:
    """The requests of a call: the pages that they read and write, and their tokens.

    read_ids: the page that each request resumes from. Ids of no page, like -1 for a new request:
      it starts from zeros.
    write_ids: the pages that take its states; ids of no page write nothing. No page may be written
      twice, or be written by one request and read by another.
    query_start_loc: the first token of each request; None: one token each.
    query_lens: tokens of each request; None: all up to the next one's.
    write_after: after how many of the request's tokens the state is written, each from 1 to their
      number; others write nothing. None: after the last one, to a single page.
    max_query_len: most tokens of a request; None: all. Up to 8 of them take a faster kernel.
    num_computed_tokens: tokens of each request before the call; `Replay` needs them.
    """

    read_ids: Int32[Array, " requests"]
    write_ids: Int32[Array, " requests"] | Int32[Array, "requests writes"]
    query_start_loc: Int32[Array, " requests+1"] | None = None
    query_lens: Int32[Array, " requests"] | None = None
    write_after: Int32[Array, "requests writes"] | None = None
    max_query_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    num_computed_tokens: Int32[Array, " requests"] | None = None
