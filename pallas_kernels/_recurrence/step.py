"""The Mosaic GPU kernel of recurrent steps: a few tokens of each request, states in place.

A state moves once in and once out: rows of it come to shared memory by TMA, are updated in
registers, and leave from the same place. The rows of a state are independent of each other, given
the key and the query, so that a thread block works on one piece of them after another, and loads
the next ones meanwhile. Thread blocks start in the order of the memory that they read; ones that
stay, and go from state to state, drift apart, and were 3 to 10 % slower on an H200.

The convolution before the recurrence is part of the kernel where one thread block computes all
value heads of a key head: then each input of the convolution is read and moved on by one block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability
from pallas_kernels._mosaic import own_buffers
from pallas_kernels._recurrence.pages import as_rows, from_rows
from pallas_kernels._recurrence.rule import (
    NORM_EPSILON,
    Convolution,
    Requests,
    Rule,
    Tokens,
)

# Interpret mode cannot reshape references. With False, values are reshaped instead.
RESHAPES_REFERENCES = True
PIECE_BYTES = 16 * 1024  # of a state, that a thread block works on at once
STAGES = 4  # pieces that a thread block holds
LEAST_ITEMS = 2  # per SM, for the convolution to be a part of the kernel


class StepShape(NamedTuple):
    """Constants of a compiled kernel.

    tokens: most tokens of a request.
    writes: states that are written of each request.
    conv_width: of the convolution; 0: none.
    silu: whether SiLU follows the convolution.
    packed: inputs of the convolution in an element of the pages, 1 or 2.
    decay_per_key: whether every key channel has a decay of its own.
    heads: value heads of an item, which are of one key head.
    rows: of a state in a piece.
    page: dtype of the pages.
    inner: dtype of the convolution's inputs.
    ragged: whether requests have other numbers of tokens than one.
    """

    rule: Rule
    tokens: int
    writes: int
    conv_width: int
    silu: bool
    packed: int
    decay_per_key: bool
    heads: int
    rows: int
    stages: int
    page: jnp.dtype
    inner: jnp.dtype
    ragged: bool
    page_rows: int
    num_pages: int
    batch: int

    @property
    def pieces(self) -> int:
        """Returns the pieces of an item."""
        return self.heads * self.rule.value_size // self.rows

    @property
    def items(self) -> int:
        return self.batch * self.rule.value_heads // self.heads

    @property
    def channels(self) -> int:
        """Returns the inputs of an item: queries, keys, and the values of its heads."""
        return 2 * self.rule.key_size + self.heads * self.rule.value_size

    @property
    def staged(self) -> int:
        """Returns the vectors of inputs of an item."""
        return self.conv_width or self.tokens


def step_mosaic(
    rule: Rule, tokens: Tokens, requests: Requests, conv: Convolution | None, most: int, out: Any
) -> tuple[Array, Array]:
    """Returns the data of the pages with the new states, and the outputs, [T, value_heads, V].

    Outputs of tokens that belong to no request are undefined.

    Args:
      conv: the convolution, if it is to be a part of the kernel; then requests have one token.
      most: most tokens of a request.
      out: dtype of the outputs.
    """
    shape = _shape(rule, tokens, requests, conv, most)
    states, width = tokens.states, rule.key_size
    pages = as_rows(states.data, states.dtype, width)
    first = states.first * (states.extent_bytes // (width * states.itemsize))
    places: list[Any] = [
        jnp.asarray(first, jnp.int32).reshape(1),
        requests.read_ids,
        requests.write_ids,
    ]
    if shape.ragged:
        places += [requests.starts, requests.counts, requests.write_after]
    log_decay = tokens.log_decay.astype(jnp.float32)
    log_decay = log_decay.reshape(log_decay.shape[0], -1)
    operands: list[Any] = [*places, log_decay, tokens.beta.astype(jnp.float32)]
    if conv is None:
        operands.append(tokens.inputs)
    else:
        inputs = tokens.inputs.astype(conv.pages.dtype)
        channels = inputs.shape[1]
        split = (channels // 2, 2) if shape.packed == 2 else (channels,)
        operands.append(as_rows(inputs, states.dtype, channels // shape.packed))
        operands.append(conv.weights.reshape(conv.width, *split))
        if conv.bias is not None:
            operands.append(conv.bias.reshape(split))
    head = states.start // (width * states.itemsize)
    conv_start = 0 if conv is None else conv.pages.start // states.itemsize
    has_bias = conv is not None and conv.bias is not None

    def kernel(*refs: Any) -> None:
        _Stepper(shape, head, conv_start, has_bias, refs).run()

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(
            (tokens.inputs.shape[0], rule.value_heads, rule.value_size), out
        ),
        grid=(shape.items,),
        grid_names=("cta",),
        kernel_name="recurrent_step",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    ref = jax.new_ref(pages)
    with jax.enable_x64(False):
        outputs = call(*own_buffers(operands), ref)
    return from_rows(jax.freeze(ref), states.data), outputs


def _shape(
    rule: Rule, tokens: Tokens, requests: Requests, conv: Convolution | None, most: int
) -> StepShape:
    states, width, size = tokens.states, rule.key_size, tokens.states.itemsize
    rows = max(16, min(rule.value_size, PIECE_BYTES // (width * size)))
    rows = math.gcd(rows, rule.value_size)
    heads = rule.group if conv is not None else 1
    while heads * rule.value_size // rows < STAGES and rule.group % (2 * heads) == 0:
        heads *= 2
    stages = min(STAGES, heads * rule.value_size // rows)
    return StepShape(
        rule=rule,
        tokens=most,
        writes=requests.write_ids.shape[1],
        conv_width=0 if conv is None else conv.width,
        silu=conv is not None and conv.silu,
        packed=1 if conv is None else size // conv.pages.itemsize,
        decay_per_key=tokens.log_decay.ndim == 3,
        heads=heads,
        rows=rows,
        stages=stages,
        page=jnp.dtype(states.dtype),
        inner=tokens.inputs.dtype if conv is None else jnp.dtype(conv.pages.dtype),
        ragged=requests.starts is not None,
        page_rows=states.page_step * (states.extent_bytes // (width * size)),
        num_pages=states.num_pages,
        batch=requests.batch,
    )


def _scratch(shape: StepShape) -> list[Any]:
    rule, channels = shape.rule, shape.channels
    fused = shape.conv_width > 0
    copies = shape.staged * (2 + shape.heads)
    scratch = [
        plgpu.SMEM((shape.stages, shape.rows, rule.key_size), shape.page),
        plgpu.SMEM((shape.staged, channels // shape.packed), shape.page if fused else shape.inner),
    ]
    if shape.decay_per_key:
        copies += shape.tokens * shape.heads
        scratch.append(plgpu.SMEM((shape.tokens, shape.heads * rule.key_size), jnp.float32))
    if fused:
        is_pairs = shape.packed == 2 and RESHAPES_REFERENCES
        scratch.append(plgpu.SMEM((channels // 2, 2) if is_pairs else (channels,), jnp.float32))
    return [
        *scratch,
        plgpu.Barrier(num_barriers=shape.stages),
        plgpu.Barrier(num_arrivals=copies),
    ]


def _tile(itemsize: int) -> Any:
    """Returns the layout of a piece: 8 threads for a row, with 16 bytes of each 128."""
    n = 16 // itemsize
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((16, 8 * n), (4, 8 * n), (n,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _pairs() -> Any:
    """Returns the layout of [n, 2] with one number for each thread, n a multiple of 64."""
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((64, 2), (16, 2), (1,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _store(ref: Any, value: Array) -> None:
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11 has no optimized store
        ref[...] = value


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _silu(x: Array) -> Array:
    return x / (1.0 + jnp.exp(-x))


class _Item(NamedTuple):
    """The value heads that a thread block computes, in int32 scalars and flags."""

    request: Array
    key_head: Array
    head: Array
    token: Array  # first of the request
    count: Array  # tokens of the request
    page: Array  # first row of the page to read
    is_known: Array  # whether there is such a page
    is_needed: Array  # whether there is anything to do


class _Stepper:
    """The kernel's references, and the code of one thread block."""

    def __init__(
        self,
        shape: StepShape,
        head_row: int,
        conv_start: int,
        has_bias: bool,
        refs: tuple[Any, ...],
    ) -> None:
        self.shape, self.rule = shape, shape.rule
        self.head_row, self.conv_start = head_row, conv_start
        rest = iter(refs)
        self.first, self.read_ids, self.write_ids = (next(rest) for _ in range(3))
        self.starts: Any = next(rest) if shape.ragged else None
        self.counts: Any = next(rest) if shape.ragged else None
        self.write_after: Any = next(rest) if shape.ragged else None
        self.log_decay, self.beta, self.inputs = (next(rest) for _ in range(3))
        self.weights: Any = next(rest) if shape.conv_width else None
        self.bias: Any = next(rest) if has_bias else None
        self.pages, self.out, self.loaded, self.staged = (next(rest) for _ in range(4))
        self.decays: Any = next(rest) if shape.decay_per_key else None
        self.mixed: Any = next(rest) if shape.conv_width else None
        self.full, self.ready = next(rest), next(rest)
        self.tile = _tile(shape.page.itemsize)
        self.row, self.column = self.tile.reduce(1), self.tile.reduce(0)

    def run(self) -> None:
        item = self._locate()
        pl.when(item.is_needed)(lambda: self._run_item(item))
        if not self.shape.ragged:
            pl.when(~item.is_needed)(lambda: self._give_zeros(item))

    def _locate(self) -> _Item:
        shape, index = self.shape, lax.axis_index("cta")
        parts = self.rule.value_heads // shape.heads
        request, head = lax.div(index, parts), lax.rem(index, parts) * shape.heads
        page, is_known = self._page(self.read_ids[request])
        if self.starts is None:
            token, count = request, jnp.int32(1)
            is_needed = is_known | self._page(self.write_ids[request, 0])[1]
        else:
            token, count = self.starts[request], self.counts[request]
            is_needed = count > 0
        return _Item(
            request=request,
            key_head=lax.div(head, self.rule.group),
            head=head,
            token=token,
            count=count,
            page=page,
            is_known=is_known,
            is_needed=is_needed,
        )

    def _page(self, page: Array) -> tuple[Array, Array]:
        """Returns the first row of a page, and whether there is one."""
        is_known = (page >= 0) & (page < self.shape.num_pages)
        return self.first[0] + jnp.where(is_known, page, 0) * self.shape.page_rows, is_known

    def _rows(self, page: Array, item: _Item, piece: Array | int) -> Any:
        """Returns a piece of the state in a page."""
        rows = self.shape.rows
        start = page + self.head_row + item.head * self.rule.value_size + piece * rows
        return self.pages.at[pl.ds(start, rows)]

    def _fetch(self, item: _Item, piece: Array | int, stage: Array | int) -> None:
        plgpu.copy_gmem_to_smem(
            self._rows(item.page, item, piece), self.loaded.at[stage], self.full.at[stage]
        )

    def _segments(self, item: _Item) -> list[tuple[int, Array, int]]:
        """Returns (place among the staged inputs, first column, width) of an item's inputs."""
        rule = self.rule
        queries, keys, values = rule.starts
        width, value = rule.key_size, rule.value_size
        segments = [
            (0, queries + item.key_head * width, width),
            (width, keys + item.key_head * width, width),
        ]
        return segments + [
            (2 * width + j * value, values + (item.head + j) * value, value)
            for j in range(self.shape.heads)
        ]

    def _conv_words(self, page: Array, tap: int, column: Array, width: int) -> Any:
        """Returns a reference to inputs of the convolution in a page, in elements of the pages."""
        shape, row = self.shape, self.rule.key_size
        start = self.conv_start + (tap * self.rule.columns + column) // shape.packed
        return self.pages.at[page + lax.div(start, row), pl.ds(lax.rem(start, row), width)]

    def _fetch_inputs(self, item: _Item) -> None:
        """Starts loading the inputs of an item, and those that its convolution remembers."""
        shape, packed, width = self.shape, self.shape.packed, self.rule.key_size
        for t in range(shape.staged):
            token = item.token
            if not shape.conv_width:
                token += jnp.clip(item.count - 1, 0, t)
            for place, column, n in self._segments(item):
                source = self.inputs.at[token, pl.ds(lax.div(column, packed), n // packed)]
                if t < shape.conv_width - 1:
                    source = self._conv_words(item.page, t, column, n // packed)
                target = self.staged.at[t, pl.ds(place // packed, n // packed)]
                plgpu.copy_gmem_to_smem(source, target, self.ready)
            if self.decays is not None and t < shape.tokens:
                for j in range(shape.heads):
                    source = self.log_decay.at[token, pl.ds((item.head + j) * width, width)]
                    target = self.decays.at[t, pl.ds(j * width, width)]
                    plgpu.copy_gmem_to_smem(source, target, self.ready)

    def _run_item(self, item: _Item) -> None:
        shape = self.shape
        self._fetch_inputs(item)
        for stage in range(shape.stages):
            self._fetch(item, stage, stage)
        write = self._page(self.write_ids[item.request, 0])
        gates = [[self._gates(item, t, j) for t in range(shape.tokens)] for j in range(shape.heads)]
        taps = self._taps(item)
        plgpu.barrier_wait(self.ready)
        if taps is not None:
            self._convolve(item, taps, *write)
        vectors = None if shape.ragged else self._vectors(0)
        per_head = shape.pieces // shape.heads
        for j in range(shape.heads):

            @pl.loop(0, per_head)
            def _(c: Array, j: int = j) -> None:
                piece = j * per_head + c
                stage = lax.rem(piece, shape.stages)
                self._run_piece(item, stage, j, piece, vectors, gates[j], write)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                # The stage of the piece before this one is free.
                ahead = piece + shape.stages - 1

                @pl.when((piece > 0) & (ahead < shape.pieces))
                def _() -> None:
                    self._fetch(item, ahead, lax.rem(ahead, shape.stages))

        plgpu.wait_smem_to_gmem(0)

    def _give_zeros(self, item: _Item) -> None:
        zeros = plgpu.layout_cast(jnp.zeros(self.shape.rows, jnp.float32), self.row)
        per_head = self.shape.pieces // self.shape.heads
        for j in range(self.shape.heads):

            @pl.loop(0, per_head)
            def _(c: Array, j: int = j) -> None:
                self._give(item, 0, j, j * per_head + c, zeros)

    def _gates(self, item: _Item, t: int, j: int) -> tuple[Any, Any]:
        """Returns the decay and beta of a token and head; no decay if each key has its own."""
        token = jnp.minimum(item.token + t, self.beta.shape[0] - 1)
        head = item.head + j
        decay = None if self.decays is not None else jnp.exp(self.log_decay[token, head])
        return decay, self.beta[token, head]

    def _vectors(self, t: int) -> tuple[Array, Array, Array]:
        """Returns a token's query and key as columns, and their product."""
        width = self.rule.key_size
        source = self.staged.at[t]
        if self.mixed is not None:
            source = self._mixed()
        query = _load(source.at[pl.ds(0, width)], self.column)
        key = _load(source.at[pl.ds(width, width)], self.column)
        if self.rule.normalize:
            query *= lax.rsqrt(jnp.sum(query * query) + NORM_EPSILON) * self.rule.scale
            key *= lax.rsqrt(jnp.sum(key * key) + NORM_EPSILON)
        elif self.rule.scale != 1.0:
            query *= self.rule.scale
        return query, key, jnp.sum(query * key)

    def _values(self, t: int, piece: Array) -> Array:
        source = self.staged.at[t] if self.mixed is None else self._mixed()
        start = 2 * self.rule.key_size + piece * self.shape.rows
        return _load(source.at[pl.ds(start, self.shape.rows)], self.row)

    def _mixed(self) -> Any:
        """Returns the outputs of the convolution as a vector."""
        if self.shape.packed == 2 and RESHAPES_REFERENCES:
            return self.mixed.reshape(self.shape.channels)
        return self.mixed

    def _run_piece(
        self,
        item: _Item,
        stage: Array,
        j: int,
        piece: Array,
        vectors: tuple[Array, Array, Array] | None,
        gates: list[tuple[Any, Any]],
        write: tuple[Array, Array],
    ) -> None:
        """Updates a piece of a state by all tokens of the request."""
        shape, loaded = self.shape, self.loaded.at[stage]
        size = (shape.rows, self.rule.key_size)
        values = self._values(0, piece)
        plgpu.barrier_wait(self.full.at[stage])
        state = _load(loaded, self.tile)
        state = jnp.where(lax.broadcast(item.is_known, size), state, 0.0)
        if not shape.ragged:
            state, out = self._update(state, values, vectors, gates[0], 0, j)
            self._leave(item, loaded, state, piece, *write)
            self._give(item, 0, j, piece, out)
            return
        for t in range(shape.tokens):
            state = self._run_token(item, loaded, state, t, j, piece, gates[t])

    def _run_token(
        self,
        item: _Item,
        loaded: Any,
        state: Array,
        t: int,
        j: int,
        piece: Array,
        gates: tuple[Any, Any],
    ) -> Array:
        """Updates a piece of a state by one of several tokens, which may be none."""
        values = self._values(t, piece)
        updated, out = self._update(state, values, self._vectors(t), gates, t, j)
        is_there = t < item.count
        state = jnp.where(lax.broadcast(is_there, state.shape), updated, state)
        pl.when(is_there)(lambda: self._give(item, t, j, piece, out))
        for w in range(self.shape.writes):
            page, is_known = self._page(self.write_ids[item.request, w])
            after = self.write_after[item.request, w]
            due = is_known & (after == t + 1) & is_there

            @pl.when(due)
            def _(page: Array = page, due: Array = due) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._leave(item, loaded, state, piece, page, due)

        return state

    def _update(
        self,
        state: Array,
        values: Array,
        vectors: tuple[Array, Array, Array] | None,
        gates: tuple[Any, Any],
        t: int,
        j: int,
    ) -> tuple[Array, Array]:
        """Returns the state after a token, and the token's output."""
        assert vectors is not None
        (query, key, product), (decay, beta), size = vectors, gates, state.shape
        if decay is None:
            place = pl.ds(j * self.rule.key_size, self.rule.key_size)
            decays = jnp.exp(_load(self.decays.at[t, place], self.column))
            state = state * lax.broadcast_in_dim(decays, size, [1])
        else:
            state = state * decay
        keys = lax.broadcast_in_dim(key, size, [1])
        seen = (state * lax.broadcast_in_dim(query, size, [1])).sum(axis=1)
        if self.rule.delta:
            values = values - (state * keys).sum(axis=1)
        added = values * beta
        state = state + lax.broadcast_in_dim(added, size, [0]) * keys
        return state, seen + added * product

    def _leave(
        self, item: _Item, loaded: Any, state: Array, piece: Array, page: Array, is_known: Array
    ) -> None:
        """Starts writing a piece of a state to its page, from where it was loaded to."""
        _store(loaded, state.astype(self.shape.page))
        plgpu.commit_smem()

        @pl.when(is_known)
        def _() -> None:
            plgpu.copy_smem_to_gmem(loaded, self._rows(page, item, piece), commit_group=False)

        plgpu.commit_smem_to_gmem_group()

    def _give(self, item: _Item, t: int, j: int, piece: Array, out: Array) -> None:
        rows = self.shape.rows
        start = lax.rem(piece, self.rule.value_size // rows) * rows
        target = self.out.at[item.token + t, item.head + j, pl.ds(start, rows)]
        _store(target, out.astype(target.dtype))

    # --- the convolution ----------------------------------------------------------

    def _taps(self, item: _Item) -> list[tuple[list[Array], Array | None]] | None:
        """Returns the weights of the convolution, and its bias, for each segment of inputs."""
        if self.weights is None:
            return None
        taps = []
        for _, column, width in self._segments(item):
            place, layout = self._channels(column, width)
            weights = [
                _load(self.weights.at[t, place], layout) for t in range(self.shape.conv_width)
            ]
            bias = None if self.bias is None else _load(self.bias.at[place], layout)
            taps.append((weights, bias))
        return taps

    def _channels(self, column: Array, width: int) -> tuple[Any, Any]:
        """Returns the place of channels in an array, and their layout."""
        if self.shape.packed == 2:
            return pl.ds(lax.div(column, 2), width // 2), _pairs()
        return pl.ds(column, width), plgpu.Layout.WG_STRIDED((width,), vec_size=1)

    def _convolve(self, item: _Item, taps: Any, write_page: Array, is_known: Array) -> None:
        """Computes an item's queries, keys and values, and moves the convolution's inputs on."""
        shape, packed = self.shape, self.shape.packed
        newest = shape.conv_width - 1

        @pl.when(~item.is_known)
        def _() -> None:
            for t in range(newest):
                whole = self.staged.at[t]
                zeros = jnp.zeros(whole.shape, whole.dtype)
                whole[...] = plgpu.layout_cast(
                    zeros, plgpu.Layout.WG_STRIDED(whole.shape, vec_size=1)
                )

        for (place, _, width), (weights, bias) in zip(self._segments(item), taps, strict=True):
            total = bias
            for t, weight in enumerate(weights):
                source = self.staged.at[t, pl.ds(place // packed, width // packed)]
                product = self._unpack(source, width) * weight
                total = product if total is None else total + product
            total = _silu(total) if shape.silu else total
            self._keep(place, width, total)
        plgpu.commit_smem()

        @pl.when(is_known)
        def _() -> None:
            for t in range(newest):
                for place, column, width in self._segments(item):
                    n = width // packed
                    plgpu.copy_smem_to_gmem(
                        self.staged.at[t + 1, pl.ds(place // packed, n)],
                        self._conv_words(write_page, t, column, n),
                        commit_group=False,
                    )

        plgpu.commit_smem_to_gmem_group()

    def _unpack(self, source: Any, width: int) -> Array:
        """Loads inputs of the convolution: float32[width], or [width / 2, 2] of packed ones."""
        shape = self.shape
        if shape.packed == 1:
            return _load(source, plgpu.Layout.WG_STRIDED((width,), vec_size=1))
        words = plgpu.load(source, layout=_pairs().reduce(1), optimized=False)
        words = lax.bitcast_convert_type(words, jnp.uint32)
        words = lax.broadcast_in_dim(words, (width // 2, 2), [0])
        second = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=_pairs()) == 1
        # A bfloat16 is the upper half of a float32.
        bits = jnp.where(second, words & jnp.uint32(0xFFFF0000), words << 16)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _keep(self, place: int, width: int, mixed: Array) -> None:
        if self.shape.packed == 1:
            self.mixed[pl.ds(place, width)] = mixed
        elif RESHAPES_REFERENCES:
            _store(self.mixed.at[pl.ds(place // 2, width // 2)], mixed)
        else:
            _store(self.mixed.at[pl.ds(place, width)], mixed.reshape(width))


def can_fuse(rule: Rule, tokens: Tokens, requests: Requests, conv: Convolution) -> bool:
    """Returns whether the convolution can be, and is better, a part of the kernel of the step."""
    states, pages = tokens.states, conv.pages
    if rule.key_size % 128 or rule.value_size % 128 or requests.starts is not None:
        return False
    ratio = states.itemsize // pages.itemsize
    if jnp.dtype(pages.dtype) != jnp.dtype(states.dtype) and not (
        ratio == 2 and jnp.dtype(pages.dtype) == jnp.bfloat16
    ):
        return False
    row, segment = rule.key_size * states.itemsize, math.gcd(rule.key_size, rule.value_size)
    segment_bytes = segment * pages.itemsize
    same = functools.reduce(
        lambda ok, name: ok and getattr(states, name) == getattr(pages, name),
        ("num_pages", "page_step"),
        states.data is pages.data,
    )
    # A segment of inputs lies within a row of the pages.
    aligned = row % segment_bytes == 0 and pages.start % segment_bytes == 0
    aligned &= (rule.columns * pages.itemsize) % segment_bytes == 0
    items = requests.batch * rule.key_heads
    enough = items >= LEAST_ITEMS * _capability.SMS_WITHOUT_GPU or rule.group <= 4
    return bool(same and aligned and enough)
