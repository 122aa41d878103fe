"""Recurrent layers over states in pages."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from pallas_kernels._arguments import as_array, as_dtype, check_type
from pallas_kernels._capability import Implementation, Kernel
from pallas_kernels._dispatch import choose
from pallas_kernels._recurrence.arguments import (
    DTYPES,
    check_convolution,
    check_requests,
    check_tokens,
)
from pallas_kernels._recurrence.conv_xla import convolve_xla
from pallas_kernels._recurrence.limits import (
    MAX_STEP_TOKENS,
    why_not_convolution,
    why_not_prompt,
    why_not_step,
)
from pallas_kernels._recurrence.pages import StatePages
from pallas_kernels._recurrence.requests import RequestStates
from pallas_kernels._recurrence.rule import Convolution, Replay, Requests, Rule, Tokens
from pallas_kernels._recurrence.xla import recur_xla

Data = Shaped[Array, "extents elements"]


def gated_delta_rule(
    inputs: Float[Array, "tokens columns"],
    log_decay: Float[Array, "tokens value_heads"] | Float[Array, "tokens value_heads key_size"],
    beta: Float[Array, "tokens value_heads"],
    states: StatePages,
    requests: RequestStates,
    *,
    num_key_heads: int,
    convolution: Convolution | None = None,
    replay: Replay | None = None,
    scale: float | None = None,
    normalize: bool = True,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Data, Float[Array, "tokens value_heads value_size"]]:
    """Runs a gated delta rule over the tokens of each request, and its states in pages.

    Example::

        data = jnp.zeros((9, 2 * 64 * 64))                     # 9 pages of 2 heads of 64 x 64
        states = pallas_kernels.StatePages(data, jnp.float32, (2, 64, 64), num_pages=9)
        inputs = jnp.ones((3, 2 * 64 + 2 * 64))                # one token for each of 3 requests
        ids = jnp.array([4, 2, 7], jnp.int32)
        requests = pallas_kernels.RequestStates(read_ids=ids, write_ids=ids)
        data, out = pallas_kernels.gated_delta_rule(
            inputs, jnp.zeros((3, 2)), jnp.ones((3, 2)), states, requests, num_key_heads=1
        )                                                      # [3, 2, 64]

    The state S of a value head becomes ``S' = a S + beta (v - a S k) k^T``, and the output is
    ``S' q``, with ``a = exp(log_decay)`` (Gated DeltaNet, arXiv:2412.06464), for each key channel
    by itself if ``log_decay`` has key channels (Kimi Linear, arXiv:2510.26692). Products and sums
    are float32; in prompts, jax chooses their precision.

    Args:
      inputs: queries [key_heads * K], keys, and values [value_heads * V] side by side; value head h
        has key head ``h * key_heads // value_heads``.
      log_decay: at most 0.
      states: [value_heads, V, K] in pages, float32, bfloat16 or float16.
      requests: the pages that each request reads and writes, and its tokens.
      num_key_heads: heads of queries and of keys.
      convolution: a convolution that comes first; its pages lie in the same ``data``.
      replay: rings beside the states, which take the inputs of a token instead of the state after
        it, and ``requests.num_computed_tokens``; states are written where these are multiples of
        the rings' length. A page of ``requests.write_after`` takes a state after such a multiple,
        or after the last token of its request.
      scale: factor of the queries; None: ``K ** -0.5``.
      normalize: whether queries and keys are divided by their l2 norm.
      out_dtype: dtype of the output; None: the dtype of inputs.
      implementation: as for `causal_conv1d`.

    Returns:
      ``states.data`` with the states written, and [T, value_heads, V]: zeros for padding.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `causal_conv1d`.
    """
    rule, tokens = check_tokens(
        *(inputs, log_decay, beta, states, num_key_heads),
        delta=True,
        normalize=normalize,
        scale=scale,
        replay=replay,
    )
    return _run(rule, tokens, requests, convolution, out_dtype, implementation)


def selective_scan(
    inputs: Float[Array, "tokens columns"],
    log_decay: Float[Array, "tokens heads"],
    steps: Float[Array, "tokens heads"],
    states: StatePages,
    requests: RequestStates,
    *,
    num_groups: int,
    convolution: Convolution | None = None,
    replay: Replay | None = None,
    scale: float = 1.0,
    values_first: bool = True,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Data, Float[Array, "tokens heads value_size"]]:
    """Runs a linear recurrence with decay over the tokens of each request: Mamba-2, for one.

    The state S of a head becomes ``S' = a S + step x b^T``, and the output is ``S' c``, with ``a =
    exp(log_decay)`` (the SSD of Mamba-2, arXiv:2405.21060, section 6, with ``log_decay = step *
    A``; linear attention with a decay for each head, with steps of 1).

    Args:
      inputs: x [heads * V], b [groups * K] and c side by side; or in reverse order, c, b, x
        (queries, keys and values), without ``values_first``.
      log_decay: at most 0.
      states: [heads, V, K] in pages, float32, bfloat16 or float16.
      requests: the pages that each request reads and writes, and its tokens.
      num_groups: groups of heads that share b and c.
      scale: factor of c.
      values_first: as above.
      convolution, replay, out_dtype: as for `gated_delta_rule`.
      implementation: as for `causal_conv1d`.

    Returns:
      ``states.data`` with the states written, and [T, heads, V]: zeros for padding.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `causal_conv1d`.
    """
    rule, tokens = check_tokens(
        *(inputs, log_decay, steps, states, num_groups),
        delta=False,
        normalize=False,
        scale=scale,
        values_first=values_first,
        replay=replay,
    )
    return _run(rule, tokens, requests, convolution, out_dtype, implementation)


def causal_conv1d(
    inputs: Float[Array, "tokens channels"],
    convolution: Convolution,
    requests: RequestStates,
    *,
    implementation: Implementation | None = None,
) -> tuple[Data, Float[Array, "tokens channels"]]:
    """Convolves each channel over the tokens of a request, and saves its last inputs in pages.

    ``out[t] = sum_i weights[width - 1 - i] * inputs[t - i] + bias``, followed by SiLU if the
    convolution says so; inputs before the request's tokens come from its page.

    Args:
      convolution: pages, weights and bias.
      requests: the pages that each request reads and writes, and its tokens.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best; see `pallas_kernels`.

    Returns:
      ``convolution.pages.data`` with the inputs written, and [T, channels] in the dtype of inputs:
      zeros for padding.

    Raises:
      TypeError: ids that are not int32, a dtype that is not a float of 16 or 32 bits.
      ValueError: shapes that do not fit, or an unknown implementation.
      NotImplementedError: ``"mosaic_gpu"`` where it is not supported.
    """
    check_type(Convolution, convolution=convolution)
    inputs = as_array("inputs", inputs)
    checked, most = check_requests(inputs, requests)
    check_convolution(convolution, checked, inputs, convolution.pages.data)
    if not inputs.size or not checked.batch:
        return convolution.pages.data, jnp.zeros_like(inputs)
    given = convolution, inputs, checked
    return choose(
        implementation,
        why_not_convolution(convolution),
        kernels=["convolution"],
        mosaic_gpu=functools.partial(_convolve_mosaic, *given, most),
        xla=functools.partial(_convolve_xla, *given),
    )


def _run(
    rule: Rule,
    tokens: Tokens,
    given_requests: RequestStates,
    conv: Convolution | None,
    out_dtype: DTypeLike | None,
    implementation: Implementation | None,
) -> tuple[Array, Array]:
    requests, most = check_requests(tokens.inputs, given_requests)
    check_convolution(conv, requests, tokens.inputs, tokens.states.data)
    if tokens.replay is not None:
        requests.tokens_before()  # or it raises, whatever computes the call
    out = as_dtype("out_dtype", tokens.inputs.dtype if out_dtype is None else out_dtype, DTYPES)
    if not tokens.inputs.size or not requests.batch:
        shape = (tokens.inputs.shape[0], rule.value_heads, rule.value_size)
        return tokens.states.data, jnp.zeros(shape, out)
    given = rule, tokens, requests, conv
    kernels: list[Kernel] = ["recurrent_replay" if tokens.replay else "recurrent_step"]
    if conv is not None and not why_not_convolution(conv):
        kernels.append("convolution")
    if most > MAX_STEP_TOKENS and not why_not_prompt(rule, tokens, out):
        kernels.append("recurrent_prompt")
    return choose(
        implementation,
        why_not_step(rule, tokens, requests, most),
        kernels=kernels,
        mosaic_gpu=functools.partial(_run_mosaic, *given, most, out),
        xla=functools.partial(_run_xla, *given, out),
    )


def _clear_padding(requests: Requests, pages: StatePages, outputs: Array) -> Array:
    """Returns outputs with zeros for tokens of no request."""
    if requests.spans is None:
        is_covered = pages.contains(requests.read_ids) | pages.contains(requests.write_ids[:, 0])
    else:
        is_covered = requests.spans.cover(outputs.shape[0])
    return jnp.where(is_covered.reshape(-1, *[1] * (outputs.ndim - 1)), outputs, 0)


def _run_xla(
    rule: Rule, tokens: Tokens, requests: Requests, conv: Convolution | None, out: jnp.dtype
) -> tuple[Array, Array]:
    if conv is not None:
        tokens = tokens.after(*convolve_xla(conv, tokens.inputs, requests))
    data, outputs = recur_xla(rule, tokens, requests, out)
    return data, _clear_padding(requests, tokens.states, outputs)


def _convolve_xla(conv: Convolution, inputs: Array, requests: Requests) -> tuple[Array, Array]:
    data, out = convolve_xla(conv, inputs, requests)
    return data, _clear_padding(requests, conv.pages, out)


def _run_mosaic(
    rule: Rule,
    tokens: Tokens,
    requests: Requests,
    conv: Convolution | None,
    most: int,
    out: jnp.dtype,
) -> tuple[Array, Array]:
    from pallas_kernels._recurrence.mosaic import run_mosaic

    return run_mosaic(rule, tokens, requests, conv, most, out)


def _convolve_mosaic(
    conv: Convolution, inputs: Array, requests: Requests, most: int
) -> tuple[Array, Array]:
    from pallas_kernels._recurrence.mosaic import clear_padding, convolve_mosaic

    data, out = convolve_mosaic(conv, inputs, requests, most)
    return data, clear_padding(requests, out)
