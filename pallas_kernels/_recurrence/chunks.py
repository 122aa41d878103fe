"""The chunks of a ragged batch: runs of tokens of one request, each within a tile of tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from pallas_kernels._recurrence.rule import Requests, Spans

CHUNK = 64  # tokens of a tile, and most of a chunk


class Chunks(NamedTuple):
    """Chunks, in the order of their tokens; entries from ``count`` on are undefined.

    request: whose tokens they are.
    first, end: tokens.
    is_first: whether a chunk is the first one of its request.
    read_ids: the page that its request resumes from.
    write_ids: the pages that take the state after the chunk; -1: none.
    begins: the first chunk of each request, and ``count`` at last.
    """

    request: Int32[Array, " chunks"]
    first: Int32[Array, " chunks"]
    end: Int32[Array, " chunks"]
    is_first: Bool[Array, " chunks"]
    read_ids: Int32[Array, " chunks"]
    write_ids: Int32[Array, "chunks writes"]
    begins: Int32[Array, " requests+1"]
    count: Int32[Array, ""]


def max_chunks(num_tokens: int, batch: int, writes: int, size: int) -> int:
    """Returns the most chunks of a batch: each tile, request and state may begin one."""
    cuts = min(num_tokens, batch) * (1 + writes)
    return max(1, min(num_tokens, -(-num_tokens // size) + cuts))


def cut_chunks(requests: Requests, spans: Spans, num_tokens: int, size: int) -> Chunks:
    """Cuts the tokens of each request where tiles of ``size`` begin, and states are written."""
    starts, counts, after = spans.arrays()
    cuts = after[:, :0] if spans.write_after is None else after
    batch, writes = cuts.shape
    inner = jnp.where((cuts > 0) & (cuts < counts[:, None]), cuts, counts[:, None])
    inner = inner if writes < 2 else jnp.sort(inner, axis=1)
    ends = (starts[:, None] + jnp.append(inner, counts[:, None], axis=1)).reshape(-1)
    begins = (starts[:, None] + jnp.pad(inner, ((0, 0), (1, 0)))).reshape(-1)
    # Runs of tokens between these places, some of them empty, and the chunks of each.
    tiles = jnp.where(ends > begins, (ends - 1) // size - begins // size + 1, 0)
    until = jnp.cumsum(tiles, dtype=jnp.int32)
    chunk = jnp.arange(max_chunks(num_tokens, batch, writes, size), dtype=jnp.int32)
    run = jnp.sum(until[None] <= chunk[:, None], axis=1, dtype=jnp.int32)
    run = jnp.minimum(run, until.size - 1)
    tile = begins[run] // size + chunk - (until - tiles)[run]
    first = jnp.maximum(begins[run], tile * size)
    end = jnp.minimum(ends[run], (tile + 1) * size)
    request = run // (writes + 1)
    start = starts[request]
    due = after[request] == (end - start)[:, None]  # [N, W]
    return Chunks(
        request,
        first,
        end,
        first == start,
        requests.read_ids[request],
        jnp.where(due, requests.write_ids[request], -1),
        jnp.append(0, until[writes :: writes + 1]),
        until[-1],
    )
