"""vLLM's attention over the pages of a benchmark: its Triton kernel, and its build of FA3."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests.benchmarks.vllm_peer import VllmPeer

# As vLLM's Triton backend chooses them.
SEGMENTS, LEAST_PROGRAMS = 16, 128


class Tensors(NamedTuple):
    """Torch's view of a call's arrays, on the same bytes."""

    queries: Any
    keys: Any
    values: Any
    out: Any
    query_start_loc: Any
    seq_lens: Any
    block_tables: Any
    most_queries: int
    longest: int


def as_tensors(
    queries: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array | None,
) -> Tensors:
    import torch

    if query_start_loc is None:
        query_start_loc = jnp.arange(len(seq_lens) + 1, dtype=jnp.int32)
    data = pages
    if pages.dtype.itemsize == 1:  # DLPack has no name for it
        data = jax.lax.bitcast_convert_type(pages, jnp.uint8)
    rows = torch.from_dlpack(jax.block_until_ready(data))
    if data is not pages:
        rows = rows.view(getattr(torch, pages.dtype.name))
    width = queries.shape[-1]
    tensors = [torch.from_dlpack(array) for array in (queries, query_start_loc, seq_lens)]
    return Tensors(
        tensors[0],
        rows[..., :width],
        rows[..., width:],
        tensors[0].new_empty((*queries.shape[:2], rows.shape[-1] - width)),
        *tensors[1:],
        torch.from_dlpack(block_tables),
        most_queries=int(jnp.diff(query_start_loc).max()),
        longest=int(seq_lens.max()),
    )


def triton_call(peer: VllmPeer, given: Tensors, window: int | None) -> Callable[[], Any]:
    """Returns a call of vLLM's unified attention; queries keep their 16 bits."""
    import torch

    heads, width = given.queries.shape[1:]
    kv_heads, batch = given.keys.shape[2], len(given.seq_lens)
    threshold = LEAST_PROGRAMS // kv_heads
    like = {"dtype": torch.float32, "device": given.queries.device}
    parts = (threshold, heads, SEGMENTS)
    padded = 1 << math.ceil(math.log2(width))
    output = torch.empty((*parts, padded), **like)
    highest, total = torch.empty(parts, **like), torch.empty(parts, **like)
    scale = None
    if given.keys.dtype != given.queries.dtype:
        scale = torch.ones((batch, kv_heads), **like)

    def call() -> Any:
        peer.attention.unified_attention(
            q=given.queries,
            k=given.keys,
            v=given.values,
            out=given.out,
            cu_seqlens_q=given.query_start_loc,
            max_seqlen_q=given.most_queries,
            seqused_k=given.seq_lens,
            max_seqlen_k=given.longest,
            softmax_scale=width**-0.5,
            causal=True,
            window_size=window_size(window),
            block_table=given.block_tables,
            softcap=0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=output,
            softmax_segm_max=highest,
            softmax_segm_expsum=total,
        )
        return given.out

    return call


def window_size(window: int | None) -> tuple[int, int]:
    """Returns the keys that a query sees on its left and right, besides its own; -1: all."""
    return (-1, -1) if window is None else (window - 1, 0)


def fa3_call(
    peer: VllmPeer, given: Tensors, window: int | None, splits: int = 0
) -> Callable[[], Any]:
    """Returns a call of FA3. Of 8-bit pages it wants 8-bit queries, which it then gets.

    Args:
      splits: of the keys of a request; 0: its scheduler's choice. With 1, as vLLM sets it for bits
        that do not depend on the batch, no request is split.
    """
    import torch

    forward, queries, scale = peer.flash_attention_3(), given.queries, None
    if given.keys.dtype != queries.dtype:
        queries = queries.to(given.keys.dtype)
        size = len(given.seq_lens), given.keys.shape[2]
        scale = torch.ones(size, dtype=torch.float32, device=queries.device)

    def call() -> Any:
        return forward(
            *(queries, given.keys, given.values),
            *(None, None, None),  # new keys and values, queries for values
            *(None, given.query_start_loc, None, None),  # out, and where keys would begin
            *(None, given.seq_lens, given.most_queries, given.longest, given.block_tables),
            *(None, None, None, None, None),  # batch, padding on the left, rotation
            *(scale, scale, scale),
            *(queries.shape[-1] ** -0.5, True, *window_size(window), 0.0, True),
            *(None, splits, None, 0, None),
            *(1, 0, None),  # context parallelism
        )[0]

    return call


def wait(_: Any) -> None:
    import torch

    torch.cuda.synchronize()
