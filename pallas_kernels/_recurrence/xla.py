"""Recurrent layers in XLA: one token of each request, and prompts in chunks of tokens."""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels._recurrence.chunks import CHUNK, Chunks, cut_chunks
from pallas_kernels._recurrence.pages import StatePages
from pallas_kernels._recurrence.rings import Ring, count_rows, empty_rings
from pallas_kernels._recurrence.rule import (
    LEAST_LOG_DECAY,
    NORM_EPSILON,
    Replay,
    Requests,
    Rule,
    Spans,
    Tokens,
)

TOGETHER = 32  # chunks whose tokens are combined at once, which takes 4 to 5 MB each


def recur_xla(
    rule: Rule, tokens: Tokens, requests: Requests, out: jnp.dtype
) -> tuple[Array, Array]:
    """Returns the data of the pages with the new states, and the outputs, [T, value_heads, V]."""
    if requests.spans is None:
        return _step(rule, tokens, requests, out)
    return run_chunks(rule, tokens, requests, requests.spans, out)


def prepare(rule: Rule, inputs: Array) -> tuple[Array, Array, Array]:
    """Returns scaled queries, keys, and values, in float32, from [..., columns]."""
    queries, keys, values = rule.split(inputs.astype(jnp.float32))
    if rule.normalize:
        queries, keys = _normalize(queries), _normalize(keys)
    return queries * rule.scale, keys, values


def _normalize(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def _step(rule: Rule, tokens: Tokens, requests: Requests, out: jnp.dtype) -> tuple[Array, Array]:
    """Computes one token of each request; outputs of none are undefined."""
    queries, keys, values = prepare(rule, tokens.inputs)
    queries, keys = (jnp.repeat(x, rule.group, axis=1) for x in (queries, keys))
    decay = jnp.exp(tokens.log_decay.astype(jnp.float32))
    decay = decay[..., None, :] if decay.ndim == 3 else decay[..., None, None]
    checkpoint = tokens.states.read(requests.read_ids).astype(jnp.float32)
    rings = None if tokens.replay is None else _StepRings(tokens.replay, tokens, requests)
    before = checkpoint if rings is None else rings.resume(checkpoint)
    state = before * decay
    if rule.delta:
        values = values - jnp.sum(state * keys[:, :, None], axis=-1)
    added = values * tokens.beta[..., None].astype(jnp.float32)
    state = state + added[..., None] * keys[:, :, None]
    outputs = jnp.sum(state * queries[:, :, None], axis=-1)
    write_ids = requests.write_ids[:, 0]
    if rings is None:
        return tokens.states.write(write_ids, state), outputs.astype(out)
    states = _StepStates(checkpoint, before, state)
    return rings.write(states, keys[:, :: rule.group], added), outputs.astype(out)


class _StepStates(NamedTuple):
    """The checkpoints of a step's requests, and the states before and after their tokens."""

    checkpoint: Float32[Array, "requests value_heads value_size key_size"]
    before: Float32[Array, "requests value_heads value_size key_size"]
    after: Float32[Array, "requests value_heads value_size key_size"]


class _StepRings:
    """The rings of requests with one token each."""

    def __init__(self, replay: Replay, tokens: Tokens, requests: Requests) -> None:
        self.replay, self.tokens, self.requests = replay, tokens, requests
        self.computed, data = requests.tokens_before(), tokens.states.data
        self.filled = count_rows(replay, data, requests.read_ids, self.computed)
        self.before = Ring.read(replay, data, requests.read_ids)

    def resume(self, checkpoint: Array) -> Array:
        """Returns the states before the tokens."""
        return jax.vmap(Ring.resume)(self.before, checkpoint, self.computed, self.filled)

    def write(self, states: _StepStates, keys: Array, added: Array) -> Array:
        """Returns the data of the pages with the tokens, and their checkpoints if they change."""
        limit, filled = self.replay.limit, self.filled
        is_due, due = filled == limit - 1, states.after
        if self.replay.drafts:
            is_due, due = filled >= limit, states.before
            filled = jnp.where(is_due, 0, filled)
        rows = self.computed % self.replay.rows
        given = keys, added, self.tokens.log_decay
        rows, *given = (array[:, None] for array in (rows, *given))
        rings = jax.vmap(Ring.append)(self.before, rows, filled, *given)
        write_ids, pages = self.requests.write_ids[:, 0], self.tokens.states
        checkpoint = jnp.where(is_due[:, None, None, None], due, states.checkpoint)
        moves = is_due | (self.requests.read_ids != write_ids)
        data = pages.write(jnp.where(moves, write_ids, -1), checkpoint)
        return rings.write(self.replay, data, write_ids)


class _Parts(NamedTuple):
    """The parts of a chunk that do not depend on the state; heads before tokens.

    inner: weights of the chunk's own tokens in the outputs.
    queries: with the decay from the chunk's beginning.
    values: what is added by each token if the state were zeros.
    erased: what the state takes from these; zeros without a delta rule.
    keys: with the decay to the chunk's end.
    decay: of the whole chunk, for all key channels or for each.
    """

    inner: Float32[Array, "*chunks heads tokens tokens"]
    queries: Float32[Array, "*chunks heads tokens key_size"]
    values: Float32[Array, "*chunks heads tokens value_size"]
    erased: Float32[Array, "*chunks heads tokens key_size"]
    keys: Float32[Array, "*chunks heads tokens key_size"]
    decay: Float32[Array, "*chunks heads channels"]


def run_chunks(
    rule: Rule, tokens: Tokens, requests: Requests, spans: Spans, out: jnp.dtype
) -> tuple[Array, Array]:
    """Computes any number of tokens of each request, chunk by chunk.

    Within a chunk, tokens are combined by matrix products (Yang et al. 2024, arXiv:2412.06464,
    section 3.3), of `TOGETHER` chunks at once. A loop carries the state from chunk to chunk.
    """
    count, rings = tokens.inputs.shape[0], None
    if tokens.replay is not None:
        rings = _ChunkRings.cut(tokens.replay, tokens.states.data, requests, spans)
        spans = rings.spans
    chunks = cut_chunks(requests, spans, count, CHUNK)
    together = min(TOGETHER, chunks.first.size)

    def run_some(turn: Array, carry: _Carry) -> _Carry:
        index = turn * together + jnp.arange(together, dtype=jnp.int32)
        mine = jax.tree.map(
            lambda array: array.at[index].get(mode="clip"), chunks._replace(count=index)
        )
        parts, inside = _parts(rule, tokens, mine)
        some = jnp.minimum(together, chunks.count - turn * together)
        run_one = functools.partial(_run_chunk, rule, tokens, mine, parts, inside, rings)
        return lax.fori_loop(0, some, run_one, carry)

    carry = _Carry(
        tokens.states.data,
        jnp.zeros((count + CHUNK, rule.value_heads, rule.value_size), out),
        jnp.zeros((rule.value_heads, rule.value_size, rule.key_size), jnp.float32),
    )
    done = lax.fori_loop(0, -(-chunks.count // together), run_some, carry)
    data = done.data if rings is None else rings.finish(done.data)
    return data, done.outputs[:count]


class _Carry(NamedTuple):
    """The loop's arrays: the pages, the outputs, and the state after the last chunk."""

    data: Shaped[Array, "extents elements"]
    outputs: Float[Array, "tokens value_heads value_size"]
    state: Float32[Array, "value_heads value_size key_size"]


def _run_chunk(
    rule: Rule,
    tokens: Tokens,
    chunks: Chunks,
    parts: _Parts,
    inside: Array,
    rings: "_ChunkRings | None",
    i: Array,
    carry: _Carry,
) -> _Carry:
    """Adds one of some chunks to the outputs and to the state."""
    data, outputs, state = carry
    pages = tokens.states._replace(data=data)
    mine, chunk = (jax.tree.map(lambda array: array[i], x) for x in (parts, chunks))
    resumed = checkpoint = pages.read(chunk.read_ids).astype(jnp.float32)
    if rings is not None:
        resumed, checkpoint = rings.resume(data, chunk, checkpoint)
    state = jnp.where(chunk.is_first, resumed, state)
    added = mine.values - jnp.einsum("hck,hvk->hcv", mine.erased, state)
    given = jnp.einsum("hck,hvk->hcv", mine.queries, state)
    given += jnp.einsum("hcd,hdv->hcv", mine.inner, added)
    state = state * mine.decay[:, None] + jnp.einsum("hcv,hck->hvk", added, mine.keys)
    states = jnp.broadcast_to(state, (*chunk.write_ids.shape, *state.shape))
    if rings is None:
        data = pages.write(chunk.write_ids, states)
    else:
        data = rings.write(
            pages, chunk, checkpoint, states, _ring_inputs(rule, tokens, chunk, added)
        )
    # Rows past the chunk's end stay what they are.
    before = lax.dynamic_slice_in_dim(outputs, chunk.first, CHUNK)
    given = jnp.swapaxes(given, 0, 1).astype(outputs.dtype)
    given = jnp.where(inside[i][:, None, None], given, before)
    outputs = lax.dynamic_update_slice_in_dim(outputs, given, chunk.first, axis=0)
    return _Carry(data, outputs, state)


class _Inputs(NamedTuple):
    """The rows of a chunk's tokens in a ring."""

    keys: Float32[Array, "tokens key_heads key_size"]
    added: Float32[Array, "tokens value_heads value_size"]
    log_decay: Float[Array, "tokens value_heads"]


def _ring_inputs(rule: Rule, tokens: Tokens, chunk: Chunks, added: Array) -> _Inputs:
    token = chunk.first + jnp.arange(CHUNK, dtype=jnp.int32)
    inputs, log_decay = (x.at[token].get(mode="clip") for x in (tokens.inputs, tokens.log_decay))
    return _Inputs(prepare(rule, inputs)[1], jnp.swapaxes(added, 0, 1), log_decay)


class _ChunkRings(NamedTuple):
    """The rings that tokens in chunks read and write.

    A page takes the state after some tokens: the last checkpoint before, which another page has if
    the step does not reach it, and the tokens since.

    spans: of the requests; states are written where checkpoints are reached.
    computed: tokens of the requests before the step.
    filled: rows of the requests before the step.
    begins: tokens before the checkpoint of each page.
    ends: position after the last token of each page, or -1 for pages that take nothing.
    write_ids: the pages.
    """

    replay: Replay
    spans: Spans
    computed: Int32[Array, " requests"]
    filled: Int32[Array, " requests"]
    begins: Int32[Array, "requests writes"]
    ends: Int32[Array, "requests writes"]
    write_ids: Int32[Array, "requests writes"]

    @classmethod
    def cut(cls, replay: Replay, data: Array, requests: Requests, spans: Spans) -> Self:
        """Returns the rings of a step."""
        starts, counts, after = spans.arrays()
        before = requests.tokens_before()
        filled = count_rows(replay, data, requests.read_ids, before)
        due = (after > 0) & (after <= counts[:, None])
        ends = jnp.where(due, before[:, None] + after, -1)
        if replay.drafts:
            first = before - jnp.where(filled >= replay.limit, 0, filled)
            are_few = counts <= 1 + replay.drafts
            begins = jnp.where(are_few[:, None], first[:, None], ends)
        else:
            begins = ends // replay.rows * replay.rows
        until = jnp.where(due, begins - before[:, None], 0)
        spans = Spans(starts, counts, until)
        return cls(replay, spans, before, filled, begins, ends, requests.write_ids)

    def resume(self, data: Array, chunk: Chunks, checkpoint: Array) -> tuple[Array, Array]:
        """Returns the state before the first chunk of a request, and the checkpoint to go on from.

        Args:
          checkpoint: of the page.
        """
        ring, filled = Ring.read(self.replay, data, chunk.read_ids), self.filled[chunk.request]
        state = ring.resume(checkpoint, self.computed[chunk.request], filled)
        return state, jnp.where(filled >= self.replay.limit, state, checkpoint)

    def write(
        self, pages: StatePages, chunk: Chunks, checkpoint: Array, states: Array, given: _Inputs
    ) -> Array:
        """Returns the data of the pages with what they take of a chunk.

        Args:
          checkpoint: that the request goes on from.
          states: after the chunk, one for each page.
        """
        rows, computed = self.replay.rows, self.computed[chunk.request]
        begins, ends, write_ids = (
            array[chunk.request] for array in (self.begins, self.ends, self.write_ids)
        )  # [W]
        # A checkpoint that the step does not reach is the one that it goes on from.
        copies = chunk.is_first & (ends >= 0) & (begins <= computed)
        is_new = self.filled[chunk.request] >= self.replay.limit
        moves = copies & (is_new | (write_ids != chunk.read_ids))
        states = jnp.where(copies[:, None, None, None], checkpoint, states)
        data = pages.write(jnp.where(moves, write_ids, chunk.write_ids), states)
        first = computed + chunk.first - self.spans.starts[chunk.request]
        offset = jnp.arange(CHUNK, dtype=jnp.int32)[None]
        position = first + offset
        takes = (position >= begins[:, None]) & (position < ends[:, None])
        takes &= offset < chunk.end - chunk.first
        before = Ring.read(self.replay, data, jnp.where(copies, chunk.read_ids, write_ids))
        at = jnp.where(takes, position % rows, rows)
        rings = jax.vmap(lambda ring, *filled: ring.append(*filled, *given))(
            before, at, first - begins
        )
        return rings.write(self.replay, data, jnp.where(takes.any(axis=1), write_ids, -1))

    def finish(self, data: Array) -> Array:
        """Returns the data of the pages with rings without rows, where drafts left none."""
        if not self.replay.drafts:
            return data
        is_empty = (self.ends >= 0) & (self.begins == self.ends)
        return empty_rings(self.replay, data, jnp.where(is_empty, self.write_ids, -1).reshape(-1))


def _parts(rule: Rule, tokens: Tokens, chunks: Chunks) -> tuple[_Parts, Array]:
    """Returns the parts of some chunks, and which tokens they have, bool[N, C]."""
    token = chunks.first[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    inside = token < chunks.end[:, None]

    def take(array: Array) -> Array:
        rows = array.at[token].get(mode="clip").astype(jnp.float32)
        return jnp.where(jnp.expand_dims(inside, range(2, rows.ndim)), rows, 0)

    given = take(tokens.inputs), take(tokens.log_decay), take(tokens.beta)
    return _combine(rule, *given), inside


def _combine(rule: Rule, inputs: Array, log_decay: Array, beta: Array) -> _Parts:
    """Computes the parts of all chunks, [N, ...], from their tokens, [N, C, ...]."""
    queries, keys, values = prepare(rule, inputs)
    queries, keys = (jnp.repeat(x, rule.group, axis=2) for x in (queries, keys))
    queries, keys, values = (jnp.moveaxis(x, 2, 1) for x in (queries, keys, values))
    beta = jnp.moveaxis(beta, 2, 1)[..., None]
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    log_decay = jnp.maximum(log_decay, LEAST_LOG_DECAY)
    total = jnp.cumsum(jnp.moveaxis(log_decay, 2, 1), axis=2)  # [N, heads, C, 1 or K]
    from_start, to_end = jnp.exp(total), jnp.exp(total[:, :, -1:] - total)
    weights = _products(queries, keys, total)
    if rule.delta:
        weighed = _products(keys, keys, total, strictly=True) * beta
        solved = _solve(weighed, jnp.concatenate([values, keys * from_start], axis=-1) * beta)
        values, erased = solved[..., : rule.value_size], solved[..., rule.value_size :]
    else:
        values, erased = values * beta, jnp.zeros_like(keys)
    return _Parts(
        weights, queries * from_start, values, erased, keys * to_end, from_start[:, :, -1]
    )


def _products(left: Array, right: Array, total: Array, strictly: bool = False) -> Array:
    """Returns [..., C, C]: products of each token with the tokens up to it, decayed in between.

    Args:
      total: [..., C, 1 or K], logarithm of the decay up to each token.
      strictly: leaves out the product of a token with itself.
    """
    size = left.shape[-2]
    seen = jnp.tril(jnp.ones((size, size), bool), -1 if strictly else 0)
    # Differences of positions that do not see each other may be large, and are not needed.
    between = total[..., :, None, :] - total[..., None, :, :]
    seen = jnp.broadcast_to(seen[..., None], between.shape)
    between = jnp.where(seen, between, -jnp.inf)
    if total.shape[-1] == 1:
        return jnp.einsum("...ik,...jk->...ij", left, right) * jnp.exp(between[..., 0])
    products = left[..., :, None, :] * right[..., None, :, :] * jnp.exp(between)
    return jnp.sum(products, axis=-1)


def _solve(lower: Array, right: Array) -> Array:
    """Returns ``(I + lower)^-1 right`` for strictly lower triangular matrices, [..., C, C].

    Inverts blocks on the diagonal, of 1, 2, 4 ... rows, from blocks of half the size. Powers of
    ``lower`` would need fewer products, but theirs cancel out where keys are alike.
    """
    size = lower.shape[-1]
    multiply = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    half = 1
    while half < size:
        block = np.arange(size) // half
        is_below = (block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1)
        below = jnp.where(jnp.broadcast_to(is_below, lower.shape), lower, 0)
        inverse = inverse - multiply(inverse, multiply(below, inverse))
        half *= 2
    return multiply(inverse, right)
