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

from pallas_kernels._bitcast import as_elements, from_words
from pallas_kernels._mosaic import Ref, call_kernel, writable, written
from pallas_kernels._recurrence.limits import THREADS, channels_per_thread
from pallas_kernels._recurrence.rule import Convolution, Requests


def convolve_step(
    conv: Convolution, inputs: Array, requests: Requests, most: int
) -> tuple[Array, Array]:
    """Returns the data of the pages, and the outputs: [T, channels] in the dtype of inputs.

    Args:
      most: most tokens of a request.
    """
    pages = conv.pages
    extents = as_elements(pages.data, pages.dtype, (-1, pages.extent_bytes // pages.itemsize))
    operands = [
        jnp.asarray(pages.first, jnp.int32).reshape(1),
        requests.read_ids,
        requests.write_ids,
        *([requests.tokens_before()] if conv.takes_drafts else []),
        *(requests.spans.arrays() if requests.spans else ()),
        inputs,
        conv.weights,
        *(() if conv.bias is None else (conv.bias,)),
    ]
    ref = writable(extents)
    (out,) = call_kernel(
        lambda *refs: _Convolver(conv, requests, refs).run(most),
        name="causal_conv1d",
        num_thread_blocks=requests.batch * _num_parts(conv),
        operands=operands,
        refs=[ref],
        out_type=[jax.ShapeDtypeStruct((inputs.shape[0], conv.weights.shape[1]), inputs.dtype)],
    )
    return from_words(written(ref), pages.data), out


def _num_parts(conv: Convolution) -> int:
    """Returns the thread blocks of a request, which have equal parts of the channels."""
    return conv.weights.shape[1] // (THREADS * channels_per_thread(conv))


class _Convolver:
    """The code of one thread block."""

    def __init__(self, conv: Convolution, requests: Requests, refs: tuple[Ref, ...]) -> None:
        self.conv, self.pages, self.writes = conv, conv.pages, requests.write_ids.shape[1]
        rest = iter(refs)
        self.first, self.read_ids, self.write_ids = (next(rest) for _ in range(3))
        self.computed: Ref = next(rest) if conv.takes_drafts else None
        spans: list[Ref] = [None if requests.spans is None else next(rest) for _ in range(3)]
        self.starts, self.counts, self.after = spans
        self.inputs, self.weights = next(rest), next(rest)
        self.bias = None if conv.bias is None else next(rest)
        self.data, self.out = next(rest), next(rest)
        self.vector = channels_per_thread(conv)
        self.size, parts = THREADS * self.vector, _num_parts(conv)
        self.layout = plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)
        index = lax.axis_index("cta")
        self.request, part = lax.div(index, parts), lax.rem(index, parts)
        self.channel = part * self.size
        self.channels = pl.ds(pl.multiple_of(self.channel, self.size), self.size)

    def run(self, most: int) -> None:
        window, is_needed = self._resume()
        taps = [self._load(self.weights.at[t, self.channels]) for t in range(self.conv.width)]
        bias = [] if self.bias is None else [self._load(self.bias.at[self.channels])]
        token, count = self.request, 1
        is_needed |= self._page(self.write_ids[self.request, 0])[1]
        if self.starts is not None:
            token, count = self.starts[self.request], self.counts[self.request]
        for t in range(most):
            position = jnp.minimum(token + t, self.inputs.shape[0] - 1)
            newest = self._load(self.inputs.at[position, self.channels])
            window.append(newest.astype(self.pages.dtype).astype(jnp.float32))
            products = map(operator.mul, window, taps)
            total = functools.reduce(jnp.add, itertools.chain(bias, products))
            total = total / (1.0 + jnp.exp(-total)) if self.conv.silu else total
            window = window[1:]
            if self.starts is None:  # zeros for a request that neither reads nor writes
                total = jnp.where(lax.broadcast(is_needed, (self.size,)), total, 0.0)

            @pl.when(t < count)
            def _(total: Array = total, position: Array = position) -> None:
                self.out[position, self.channels] = total.astype(self.out.dtype)

            if self.computed is None:
                self._save(window, t, count)
            else:
                self._save_newest(window[-1], t, count)

    def _resume(self) -> tuple[list[Array], Array]:
        """Returns the inputs to resume from, zeros without a page, and whether there is one."""
        extent, is_known = self._page(self.read_ids[self.request])
        rows: list[Array | int] = [*range(self.conv.width - 1)]
        are_there = [is_known] * len(rows)
        if self.computed is not None:
            places = [self.computed[self.request] - (self.conv.width - 1) + j for j in rows]
            rows = [self._row_of(place) for place in places]
            are_there = [is_known & (place >= 0) for place in places]
        before = [self._load(self._saved_input(extent, row)) for row in rows]
        given = [lax.broadcast(is_there, (self.size,)) for is_there in are_there]
        window = [jnp.where(*one, 0.0) for one in zip(given, before, strict=True)]
        if self.computed is not None:
            self._move(window, rows)
        return window, is_known

    def _row_of(self, position: Array) -> Array:
        """Returns the row of the input at a position, from ``1 - width`` on."""
        rows = self.pages.shape[0]
        return lax.rem(position + rows, rows)

    def _move(self, window: list[Array], rows: list[Array | int]) -> None:
        """Writes the inputs to resume from to another page."""
        target, is_known = self._page(self.write_ids[self.request, 0])
        is_needed = True if self.counts is None else self.counts[self.request] > 0

        @pl.when(
            is_known & is_needed & (self.read_ids[self.request] != self.write_ids[self.request, 0])
        )
        def _() -> None:
            for row, value in zip(rows, window, strict=True):
                self._saved_input(target, row)[...] = value.astype(self.pages.dtype)

    def _save_newest(self, newest: Array, t: int, count: Array | int) -> None:
        """Writes the input of token ``t`` to its row."""
        target, is_known = self._page(self.write_ids[self.request, 0])
        row = self._row_of(self.computed[self.request] + t)

        @pl.when(is_known & (t < count))
        def _() -> None:
            self._saved_input(target, row)[...] = newest.astype(self.pages.dtype)

    def _save(self, window: list[Array], t: int, count: Array | int) -> None:
        """Writes the last inputs to the pages that take them after token ``t``."""
        for w in range(self.writes):
            target, due = self._page(self.write_ids[self.request, w])
            if self.after is not None:
                due &= (self.after[self.request, w] == t + 1) & (t < count)

            @pl.when(due)
            def _(target: Array = target) -> None:
                for j, value in enumerate(window):
                    ref = self._saved_input(target, j)
                    ref[...] = value.astype(self.pages.dtype)

    def _load(self, ref: Ref) -> Array:
        return plgpu.load(ref, layout=self.layout).astype(jnp.float32)

    def _page(self, page: Array) -> tuple[Array, Array]:
        """Returns the extent of a page, and whether there is one."""
        is_known = (page >= 0) & (page < self.pages.num_pages)
        return self.first[0] + jnp.where(is_known, page, 0) * self.pages.page_step, is_known

    def _saved_input(self, extent: Array, j: Array | int) -> Ref:
        """Returns a reference to the input in row ``j`` of those that a page saves."""
        start = self.pages.start // self.pages.itemsize + j * self.conv.weights.shape[1]
        column = pl.multiple_of(start + self.channel, self.vector)
        return self.data.at[extent, pl.ds(column, self.size)]
