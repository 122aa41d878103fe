"""The Mosaic GPU kernel of a convolution over a few tokens of each request, in place.

A thread block computes some channels of a request. It alone reads and writes their last inputs.
"""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, call_kernel, writable, written
from pallas_kernels._recurrence.limits import THREADS, channels_per_thread
from pallas_kernels._recurrence.pages import as_rows, from_rows
from pallas_kernels._recurrence.rule import Convolution, Requests


def convolve_step(
    conv: Convolution, inputs: Array, requests: Requests, most: int
) -> tuple[Array, Array]:
    """Returns the data of the pages, and the outputs: [T, channels] in the dtype of inputs.

    Args:
      most: most tokens of a request.
    """
    pages, width, kept = conv.pages, conv.width, conv.width - 1
    vector = channels_per_thread(conv)
    size, channels = THREADS * vector, conv.weights.shape[1]
    parts = channels // size
    extents = as_rows(pages.data, pages.dtype, pages.extent_bytes // pages.itemsize)
    start = pages.start // pages.itemsize
    ragged = requests.spans is not None
    operands = [
        jnp.asarray(pages.first, jnp.int32).reshape(1),
        requests.read_ids,
        requests.write_ids,
        *(requests.spans.arrays() if requests.spans else ()),
        inputs,
        conv.weights,
        *(() if conv.bias is None else (conv.bias,)),
    ]
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    def kernel(*refs: Ref) -> None:
        rest = iter(refs)
        first, read_ids, write_ids = (next(rest) for _ in range(3))
        starts, counts, after = (next(rest) if ragged else None for _ in range(3))
        x, weights = next(rest), next(rest)
        bias = None if conv.bias is None else next(rest)
        data, out = next(rest), next(rest)
        index = lax.axis_index("cta")
        request, part = lax.div(index, parts), lax.rem(index, parts)
        place = pl.ds(pl.multiple_of(part * size, size), size)

        def load(ref: Ref) -> Array:
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        def page(ids: Array) -> tuple[Array, Array]:
            is_known = (ids >= 0) & (ids < pages.num_pages)
            return first[0] + jnp.where(is_known, ids, 0) * pages.page_step, is_known

        def saved_input(extent: Array, j: int) -> Ref:
            column = pl.multiple_of(start + j * channels + part * size, vector)
            return data.at[extent, pl.ds(column, size)]

        extent, is_known = page(read_ids[request])
        before = [load(saved_input(extent, j)) for j in range(kept)]
        window = [jnp.where(lax.broadcast(is_known, (size,)), b, 0.0) for b in before]
        factors = [load(weights.at[t, place]) for t in range(width)]
        constant = [] if bias is None else [load(bias.at[place])]
        token, count = request, 1
        is_needed = is_known | page(write_ids[request, 0])[1]  # is of a request, if it has a token
        if starts is not None and counts is not None:
            token, count = starts[request], counts[request]
        for t in range(most):
            position = jnp.minimum(token + t, inputs.shape[0] - 1)
            window.append(load(x.at[position, place]).astype(pages.dtype).astype(jnp.float32))
            products = map(operator.mul, window, factors)
            total = functools.reduce(jnp.add, itertools.chain(constant, products))
            total = total / (1.0 + jnp.exp(-total)) if conv.silu else total
            window = window[1:]
            if not ragged:
                total = jnp.where(lax.broadcast(is_needed, (size,)), total, 0.0)

            @pl.when(t < count)
            def _(total: Array = total, position: Array = position) -> None:
                out[position, place] = total.astype(out.dtype)

            for w in range(requests.write_ids.shape[1]):
                target, due = page(write_ids[request, w])
                if after is not None:
                    due &= (after[request, w] == t + 1) & (t < count)

                @pl.when(due)
                def _(target: Array = target, window: list[Array] = window) -> None:
                    for j, value in enumerate(window):
                        ref = saved_input(target, j)
                        ref[...] = value.astype(pages.dtype)

    ref = writable(extents)
    (out,) = call_kernel(
        kernel,
        name="causal_conv1d",
        num_thread_blocks=requests.batch * parts,
        operands=operands,
        refs=[ref],
        out_type=[jax.ShapeDtypeStruct((inputs.shape[0], channels), inputs.dtype)],
    )
    return from_rows(written(ref), pages.data), out
