"""The chunks of a ragged batch: runs of tokens between the states that are named."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._recurrence.rule import Requests, Spans

CHUNK = 64  # tokens


class Chunks(NamedTuple):
    """Up to N chunks, in the order of their tokens; entries from ``count`` on are undefined.

    first, end: int32[N], tokens.
    is_first: bool[N], whether a chunk is the first one of its request.
    read_ids: int32[N], the page that its request resumes from.
    write_ids: int32[N], the page that takes the state after the chunk; -1: none.
    count: int32[].
    """

    first: Array
    end: Array
    is_first: Array
    read_ids: Array
    write_ids: Array
    count: Array


def max_chunks(num_tokens: int, batch: int, writes: int, size: int) -> int:
    """Returns the most chunks of a batch: each request and each state may end one early."""
    return max(1, min(num_tokens, num_tokens // size + batch * (1 + writes)))


def cut_chunks(requests: Requests, spans: Spans, num_tokens: int, size: int) -> Chunks:
    """Cuts the tokens of each request after ``size`` of them, and where a state is written."""
    starts, counts, after = spans
    batch, writes = requests.write_ids.shape
    ends = starts + counts
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    begins = jnp.where(counts > 0, starts, num_tokens)
    cuts = jnp.where((after > 0) & (after < counts[:, None]), starts[:, None] + after, num_tokens)
    places = jnp.concatenate([begins, cuts.reshape(-1)])
    is_cut = jnp.zeros(num_tokens, bool).at[places].set(True, mode="drop")
    run = lax.cummax(jnp.where(is_cut, index, 0))
    is_first = ((index - run) % size == 0) & spans.holds(num_tokens)
    most = max_chunks(num_tokens, batch, writes, size)
    (first,) = jnp.nonzero(is_first, size=most, fill_value=num_tokens)
    first = first.astype(jnp.int32)
    token = first[:, None]
    request = jnp.argmax((starts[None] <= token) & (token < ends[None]), axis=1)
    start = starts[request]
    end = jnp.minimum(jnp.append(first[1:], num_tokens), ends[request])
    due = after[request] == (end - start)[:, None]  # [N, W]
    write_ids = jnp.max(jnp.where(due, requests.write_ids[request], -1), axis=1)
    return Chunks(
        first,
        end,
        first == start,
        requests.read_ids[request],
        write_ids,
        jnp.sum(is_first, dtype=jnp.int32),
    )
