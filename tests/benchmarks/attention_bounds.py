"""Bounds of attention on a device: the time that reading takes, and the rate of a plain product."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability
from tests.benchmarks.timing import Times, measure

STEP = 64  # tokens that are waited for together, as in decoding
IN_FLIGHT = (1, 4), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4)  # thread blocks per SM, steps of each
SMEM_PER_SM = 200 * 1024
ELEMENT = 4  # bytes; what they mean makes no difference
MAX_ROW_BYTES = SMEM_PER_SM // (4 * STEP)  # with 4 steps in flight


def time_reading(tokens: int, page_tokens: int, heads: int, row_bytes: int) -> Times:
    """Times a kernel that only copies pages to shared memory, in any order; the fastest of several.

    Each thread block copies the rows of one head, as decoding does.

    Args:
      tokens: a multiple of ``page_tokens`` and of `STEP`.
      row_bytes: bytes of a token and head, at most `MAX_ROW_BYTES`.
    """
    words = row_bytes // ELEMENT
    pages = np.random.default_rng(0).permutation(tokens // page_tokens)
    granule = math.gcd(page_tokens, STEP)
    places = pages[:, None] * page_tokens + np.arange(0, page_tokens, granule)[None]
    places = jnp.asarray(places.reshape(-1, STEP // granule), jnp.int32)
    rows = jnp.zeros((tokens, heads * words), jnp.uint32)
    found = []
    for blocks_per_sm, stages in IN_FLIGHT:
        if blocks_per_sm * stages * STEP * row_bytes <= SMEM_PER_SM:
            read = jax.jit(make_reader(places, heads, words, blocks_per_sm, stages))
            found.append(measure(lambda read=read: read(places, rows)))
    return min(found, key=lambda times: times.kernels or times.synced or 0.0)


def make_reader(
    places: Array, heads: int, words: int, blocks_per_sm: int, stages: int
) -> Callable[..., Array]:
    """Returns a function of places int32[steps, copies] and rows uint32[tokens, heads * words]."""
    steps, copies = places.shape
    granule = STEP // copies
    lanes = max(1, _capability.max_thread_blocks(blocks_per_sm) // heads)

    def read(places, rows, done, buffer, full):
        head, lane = lax.axis_index("head"), lax.axis_index("worker")
        begin, end = lane * steps // lanes, (lane + 1) * steps // lanes

        def fetch(step):
            stage = lax.rem(step - begin, stages)
            for copy in range(copies):
                place = pl.multiple_of(places[step, copy], 8)
                plgpu.copy_gmem_to_smem(
                    rows.at[pl.ds(place, granule), pl.ds(head * words, words)],
                    buffer.at[stage, pl.ds(copy * granule, granule)],
                    full.at[stage],
                )

        for stage in range(stages):
            pl.when(begin + stage < end)(lambda stage=stage: fetch(begin + stage))

        @pl.loop(begin, end)
        def _(step):
            plgpu.barrier_wait(full.at[lax.rem(step - begin, stages)])
            pl.when(step + stages < end)(lambda: fetch(step + stages))

        done[head, lane] = end

    return plgpu.kernel(
        read,
        out_type=jax.ShapeDtypeStruct((heads, lanes), jnp.int32),
        grid=(heads, lanes),
        grid_names=("head", "worker"),
        kernel_name="read_pages",
        scratch_types=[
            plgpu.SMEM((stages, STEP, words), jnp.uint32),
            plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        ],
    )


def time_product(size: int) -> Times:
    """Times a product of two square matrices of bf16, `2 * size**3` operations."""
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return measure(lambda: multiply(matrix, matrix))
