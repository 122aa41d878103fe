"""Checks of the arguments of the recurrent layers."""

import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels._arguments import as_array, as_dtype, as_number, check_type, shown
from pallas_kernels._recurrence.pages import StatePages
from pallas_kernels._recurrence.requests import RequestStates
from pallas_kernels._recurrence.rule import (
    Convolution,
    Replay,
    Requests,
    Rule,
    Spans,
    Tokens,
    replay_shapes,
)

DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (2, 3, 4)


def check_tokens(
    inputs: Array,
    log_decay: Array,
    beta: Array,
    states: StatePages,
    key_heads: int,
    *,
    delta: bool,
    normalize: bool,
    scale: float | None,
    values_first: bool = False,
    replay: Replay | None = None,
) -> tuple[Rule, Tokens]:
    """Checks what a recurrence computes, and returns its rule and its tokens."""
    check_type(bool, normalize=normalize, values_first=values_first)
    inputs, log_decay = as_array("inputs", inputs), as_array("log_decay", log_decay)
    beta = as_array("beta" if delta else "steps", beta)
    check_pages("states", states, 3)
    value_heads, value_size, key_size = states.shape
    heads = "num_key_heads" if delta else "num_groups"
    if not isinstance(key_heads, int) or key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"{heads}={shown(key_heads)} must be an int that divides the {value_heads} heads of "
            "states"
        )
    scale = key_size**-0.5 if scale is None else as_number("scale", scale)
    rule = Rule(
        *(key_heads, value_heads, key_size, value_size, delta, normalize, scale, values_first)
    )
    tokens = Tokens(inputs, log_decay, beta, states, replay)
    _check_token_shapes(rule, tokens, heads, "beta" if delta else "steps")
    if replay is not None:
        _check_replay(rule, tokens, replay)
    return rule, tokens


def _check_replay(rule: Rule, tokens: Tokens, replay: Replay) -> None:
    """Raises TypeError or ValueError unless rings of this shape lie in the pages of the states."""
    check_type(Replay, replay=replay)
    states = tokens.states
    if tokens.log_decay.ndim == 3:
        raise ValueError(
            f"log_decay has shape {tokens.log_decay.shape}; with replay, each head has one decay: "
            "pass replay=None"
        )
    for name, pages in zip(replay._fields, replay.arrays, strict=False):
        check_pages(f"replay.{name}", pages, 3)
        if not pages.are_beside(states):
            raise ValueError(
                f"replay.{name} must have data, num_pages, first and page_step of states, the very "
                "same"
            )
        if jnp.dtype(pages.dtype) != jnp.dtype(states.dtype):
            raise ValueError(f"replay.{name} has dtype {pages.dtype}, and states {states.dtype}")
    if not isinstance(replay.drafts, int) or replay.drafts < 0 or replay.limit < 1:
        raise ValueError(
            f"replay.drafts={shown(replay.drafts)} must be an int of at least 0, and less than "
            f"half of the {replay.rows} rows of a ring"
        )
    form = states.shape, rule.key_heads, states.itemsize, replay.drafts
    wanted = replay_shapes(replay.rows, *form)
    given = tuple(pages.shape for pages in replay.arrays)
    if given != wanted:
        raise ValueError(f"replay has pages of {given}; states of {states.shape} want {wanted}")


def _check_token_shapes(rule: Rule, tokens: Tokens, heads: str, beta: str) -> None:
    """Checks the arrays of tokens; ``heads``, ``beta``: names of arguments."""
    inputs, log_decay, count = tokens.inputs, tokens.log_decay, tokens.inputs.shape[:1]
    _check_floats(inputs=inputs, log_decay=log_decay, **{beta: tokens.beta})
    if inputs.ndim != 2 or inputs.shape[1] != rule.columns:
        raise ValueError(
            f"inputs has shape {inputs.shape}; {heads}={rule.key_heads} and states of "
            f"{tokens.states.shape} want [T, {rule.columns}]"
        )
    shapes = [(*count, rule.value_heads)]
    if rule.delta:
        shapes.append((*count, rule.value_heads, rule.key_size))
    if log_decay.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"log_decay has shape {log_decay.shape}; wants {wanted}")
    if tokens.beta.shape != shapes[0]:
        raise ValueError(f"{beta} has shape {tokens.beta.shape}; wants {shapes[0]}")


def check_requests(inputs: Array, given: RequestStates) -> tuple[Requests, int]:
    """Checks the requests of a call, and returns them and the most tokens of one."""
    check_type(RequestStates, requests=given)
    read_ids, write_ids = _as_int32("read_ids", given.read_ids, (None,)), given.write_ids
    query_start_loc, max_query_len = given.query_start_loc, given.max_query_len
    batch = read_ids.shape[0]
    if jnp.ndim(write_ids) == 1:
        write_ids = _as_int32("write_ids", write_ids, (batch,))[:, None]
    write_ids = _as_int32("write_ids", write_ids, (batch, None))
    count, writes, computed = inputs.shape[0], write_ids.shape[1], given.num_computed_tokens
    if computed is not None:
        computed = _as_int32("num_computed_tokens", computed, (batch,))
    if given.write_after is None and writes != 1:
        raise ValueError(
            f"write_ids has {writes} pages for each request; pass write_after, which says after "
            "how many tokens each of them is written"
        )
    if max_query_len is not None and not (isinstance(max_query_len, int) and max_query_len >= 1):
        raise ValueError(
            f"max_query_len={shown(max_query_len)} must be an int of at least 1, or None"
        )
    if query_start_loc is None:
        if count != batch:
            raise ValueError(
                f"inputs has {count} tokens for {batch} requests; pass query_start_loc, because "
                "without it each request has one token"
            )
        if given.write_after is None and given.query_lens is None:
            return Requests(read_ids, write_ids, None, computed), 1
        query_start_loc = jnp.arange(batch + 1, dtype=jnp.int32)
        max_query_len = 1
    starts = _as_int32("query_start_loc", query_start_loc, (batch + 1,))
    counts, write_after = jnp.diff(starts), None
    if given.query_lens is not None:
        counts = _as_int32("query_lens", given.query_lens, (batch,))
    if given.write_after is not None:
        write_after = _as_int32("write_after", given.write_after, (batch, writes))
    most = count if max_query_len is None else min(count, max_query_len)
    spans = Spans(starts[:-1], counts, write_after)
    return Requests(read_ids, write_ids, spans, computed), most


def check_convolution(
    conv: Convolution | None, requests: Requests, inputs: Array, data: Array
) -> None:
    """Checks a convolution over these inputs, whose pages lie in ``data``."""
    if conv is None:
        return
    check_type(Convolution, convolution=conv)
    check_pages("convolution.pages", conv.pages, 2)
    weights, (saved, channels) = conv.weights, conv.pages.shape
    if conv.pages.data is not data:
        raise ValueError("convolution.pages.data must be the very array that states.data is")
    if weights.ndim != 2 or weights.shape[0] not in WIDTHS:
        raise ValueError(
            f"convolution.weights has shape {weights.shape}; wants [width, channels], with a "
            f"width of {WIDTHS[0]} to {WIDTHS[-1]}"
        )
    if weights.shape[1] != channels or saved < weights.shape[0] - 1:
        raise ValueError(
            f"convolution.weights has shape {weights.shape}; pages of {conv.pages.shape} want "
            f"{(saved + 1, channels)}, or a lower width if they take drafts"
        )
    if conv.takes_drafts:
        requests.tokens_before()  # or it raises
    if inputs.ndim != 2 or inputs.shape[1] != channels:
        raise ValueError(f"inputs has shape {inputs.shape}; the convolution wants [T, {channels}]")
    floats = {"inputs": inputs, "convolution.weights": weights}
    if conv.bias is not None:
        floats["convolution.bias"] = conv.bias
        if conv.bias.shape != (channels,):
            raise ValueError(f"convolution.bias has shape {conv.bias.shape}; wants ({channels},)")
    _check_floats(**floats)


def check_pages(name: str, pages: StatePages, ndim: int) -> None:
    """Raises TypeError or ValueError unless the arrays lie within their extents."""
    check_type(StatePages, **{name: pages})
    data = pages.data
    dtype = as_dtype(f"{name}.dtype", pages.dtype, DTYPES)
    if len(pages.shape) != ndim or not math.prod(pages.shape):
        raise ValueError(f"{name}.shape={pages.shape} must have {ndim} sizes of at least 1")
    if data.ndim != 2 or data.dtype not in (jnp.uint8, dtype):
        raise ValueError(
            f"{name}.data must be [extents, n] of uint8 or {dtype}, got {data.dtype}"
            f"{list(data.shape)}"
        )
    end = pages.start + pages.num_bytes
    if pages.start < 0 or end > pages.extent_bytes or pages.start % pages.itemsize:
        raise ValueError(
            f"{name} ends at byte {end} of an extent, from start={pages.start} on, and extents "
            f"have {pages.extent_bytes} bytes; it must lie within its extent, and start be a "
            "multiple of the element size"
        )
    _check_extents(name, pages)


def _check_extents(name: str, pages: StatePages) -> None:
    """Raises ValueError unless all pages lie within the data; counts a traced first one as 0."""
    for field, least in {"num_pages": 0, "page_step": 1}.items():
        count = getattr(pages, field)
        if not isinstance(count, int) or count < least:
            raise ValueError(f"{name}.{field}={shown(count)} must be an int of at least {least}")
    first, extents = pages.first, pages.data.shape[0]
    first = first if isinstance(first, int) else 0
    last = first + (pages.num_pages - 1) * pages.page_step
    if first < 0 or last >= extents:
        raise ValueError(
            f"{name} has pages in extents {first} to {last}, and {name}.data has {extents}; "
            f"pass the data of all num_pages={pages.num_pages}"
        )


def _check_floats(**arrays: Array) -> None:
    for name, array in arrays.items():
        as_dtype(name, array.dtype, DTYPES)


def _as_int32(name: str, array: Array, shape: tuple[int | None, ...]) -> Array:
    """Returns ids or lengths as a `jax.Array`; checks the dtype first, which jax would change."""
    dtype, given = getattr(array, "dtype", type(array).__name__), jnp.shape(array)
    fits = len(given) == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, given, strict=True)
    )
    if str(dtype) != "int32" or not fits:
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        error = TypeError if str(dtype) != "int32" else ValueError
        raise error(f"{name} must be int32[{wanted}], got {dtype}{list(given)}")
    return jnp.asarray(array)
