"""Prompts by Mosaic GPU kernels: the parts of all chunks, then the states from chunk to chunk."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _capability
from pallas_kernels._bitcast import as_elements, from_words
from pallas_kernels._mosaic import writable, written
from pallas_kernels._recurrence.chunks import CHUNK, Chunks, cut_chunks
from pallas_kernels._recurrence.pages import StatePages
from pallas_kernels._recurrence.prompt_parts import find_parts
from pallas_kernels._recurrence.prompt_shape import COPIED, PromptShape
from pallas_kernels._recurrence.prompt_states import pass_states
from pallas_kernels._recurrence.prompt_states_block import CARRIED, NOTHING
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY, Requests, Rule, Spans, Tokens

GRANULE = 8  # tokens
TURN_BYTES = 256 * 2**20  # of the parts of the chunks of a turn


def run_prompts(
    rule: Rule, tokens: Tokens, requests: Requests, spans: Spans, outputs: Array
) -> tuple[Array, Array]:
    """Returns the data of the pages, and ``outputs`` with the tokens of the requests written.

    Chunks are taken in turns, which bounds the memory of their parts. Requests follow each other,
    so that at most one of them goes on in the next turn.

    Args:
      tokens: at least T tokens.
      outputs: [T, value_heads, V], T a multiple of `GRANULE`.
    """
    tiles = -(-outputs.shape[0] // CHUNK)
    per_key, count = tokens.log_decay.ndim == 3, tokens.log_decay.shape[0]
    given = tokens.inputs, tokens.log_decay.reshape(count, -1), tokens.beta
    inputs, log_decay, beta = (_pad(array, tiles * CHUNK) for array in given)
    tokens = Tokens(inputs, log_decay, beta, tokens.states)
    states, heads = tokens.states, rule.value_heads
    chunks = cut_chunks(requests, spans, tokens.inputs.shape[0], CHUNK)
    most = chunks.first.size
    operand = tokens.inputs.dtype
    columns = rule.value_size + CHUNK + rule.key_size * (rule.delta + 2 * per_key)
    turns = -(-most * heads * CHUNK * columns * operand.itemsize // TURN_BYTES)
    size = -(-most // turns)
    instructions = _capability.instructions_of("recurrent_prompt")
    shape = PromptShape(
        rule, size, requests.batch, operand, jnp.dtype(states.dtype), per_key, instructions
    )
    rows = _chunk_rows(states, chunks, size * turns)
    gates = _gates(tokens, rows, per_key)
    per_channel = log_decay.astype(jnp.float32) if per_key else None
    decay = _chunk_decay(tokens, rows) if per_key else None
    pages = writable(as_elements(states.data, states.dtype, (-1, rule.key_size)))
    out = writable(outputs)
    carried = jnp.zeros((heads * rule.value_size, rule.key_size), jnp.float32)
    # Jitted functions, so that turns share one trace and one lowering.
    find, advance = (jax.jit(functools.partial(run, shape)) for run in (find_parts, pass_states))
    for first in range(0, size * turns, size):
        mine = slice(first, first + size)
        parts = find(rows[mine], gates[mine], inputs, per_channel)
        runs = _runs(states, requests, chunks, first, size)
        decay_of_turn = None if decay is None else decay[mine]
        carried = advance(runs, rows[mine], parts, decay_of_turn, inputs, carried, pages, out)
    return from_words(written(pages), states.data), written(out)


def _pad(array: Array, rows: int) -> Array:
    return jnp.pad(array, ((0, rows - array.shape[0]), (0, 0)))


def _state_rows(states: StatePages, ids: Array) -> Array:
    """Returns the first row of the states in pages; `NOTHING` for ids that are not pages'."""
    row_bytes = states.shape[-1] * states.itemsize
    first = (states.first + ids * states.page_step) * (states.extent_bytes // row_bytes)
    rows = jnp.asarray(first + states.start // row_bytes, jnp.int32)
    return jnp.where(states.contains(ids), rows, NOTHING)


def _chunk_rows(states: StatePages, chunks: Chunks, count: int) -> Array:
    """Returns int32[count, 4 + W], the chunks as the kernels take them; empty past the last."""
    tile = chunks.first // CHUNK
    begin, end = chunks.first - tile * CHUNK, chunks.end - tile * CHUNK
    targets = _state_rows(states, chunks.write_ids)
    fields = tile, begin, end, jnp.max(targets, axis=1), *targets.T
    is_there = jnp.arange(tile.size, dtype=jnp.int32) < chunks.count
    rows = jnp.where(is_there[:, None], jnp.stack(fields, axis=1), 0)
    return jnp.pad(rows, ((0, count - tile.size), (0, 0)))


def _take(array: Array, rows: Array) -> Array:
    """Returns float32[chunks, CHUNK, n], the tokens of chunks; zeros for other rows."""
    begin, end = rows[:, 1, None], rows[:, 2, None]
    token = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    own = ((token >= begin) & (token < end))[..., None]
    tiles = array.astype(jnp.float32).reshape(-1, CHUNK, array.shape[1])
    return jnp.where(own, tiles[rows[:, 0]], 0.0)


def _gates(tokens: Tokens, rows: Array, per_key: bool) -> Array:
    """Returns the gates of the tokens of chunks, as `find_parts` takes them."""
    beta = jnp.swapaxes(_take(tokens.beta, rows), 1, 2)
    total = jnp.zeros_like(beta)
    if not per_key:
        until = jnp.triu(jnp.ones((CHUNK, CHUNK), jnp.float32))
        log_decay = jnp.maximum(_take(tokens.log_decay, rows), LEAST_LOG_DECAY)
        log_decay = jnp.swapaxes(log_decay, 1, 2)
        total = jnp.matmul(log_decay, until, precision=lax.Precision.HIGHEST)
    return jnp.concatenate([total, beta], axis=2)


def _chunk_decay(tokens: Tokens, rows: Array) -> Array:
    """Returns float32[chunks, heads, COPIED], the decay of each key channel in a chunk."""
    log_decay = jnp.maximum(_take(tokens.log_decay, rows), LEAST_LOG_DECAY)
    heads, _, key_size = tokens.states.shape
    decay = jnp.exp(log_decay.sum(axis=1)).reshape(-1, heads, key_size)
    return jnp.pad(decay, ((0, 0), (0, 0), (0, COPIED - key_size)))


def _runs(states: StatePages, requests: Requests, chunks: Chunks, first: int, size: int) -> Array:
    """Returns int32[B, 4], the chunks of requests in a turn, as `pass_states` takes them."""
    begins, ends = chunks.begins[:-1], chunks.begins[1:]
    source = jnp.where(begins < first, CARRIED, _state_rows(states, requests.read_ids))
    inside = [jnp.clip(chunk - first, 0, size) for chunk in (begins, ends)]
    runs = jnp.stack([*inside, source, ends > first + size], axis=1, dtype=jnp.int32)
    # Long ones first, because thread blocks start in order.
    length, index = inside[1] - inside[0], jnp.arange(ends.size, dtype=jnp.int32)
    is_before = length[None] > length[:, None]
    is_before |= (length[None] == length[:, None]) & (index[None] < index[:, None])
    return jnp.zeros_like(runs).at[jnp.sum(is_before, axis=1)].set(runs, unique_indices=True)
