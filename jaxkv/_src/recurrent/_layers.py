"""Recurrent layers: each writes the states that its step reaches, in place."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_array, check_flag, check_number, check_positive
from jaxkv._src.internal.persistent_jit import persistent_jit
from jaxkv._src.pool import SAME, BoundLayer, bind, on_devices, put_back
from jaxkv._src.recurrent._heads import (
    Heads,
    by_rank,
    check_convolution,
    check_heads,
    count_channels,
)
from jaxkv._src.recurrent._states import check_states, flat_tokens, state_pages, step_states
from jaxkv._src.specs import StateSpec
from pallas_kernels import (
    Convolution,
    Implementation,
    Replay,
    RequestStates,
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
)


def gated_delta(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    qkv: Float[Array, "*tokens channels"],
    log_decay: Float[Array, "..."],
    beta: Float[Array, "*tokens value_heads"],
    *,
    conv_weights: Float[Array, "width channels"],
    num_key_heads: int,
    conv_bias: Float[Array, "channels"] | None = None,
    scale: float | None = None,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Float[Array, "*tokens value_heads value_size"]]:
    """Runs a gated delta net (Qwen3-Next, Kimi Linear) over a step's tokens, states in place.

    A causal convolution and SiLU come first; then queries and keys are divided by their l2 norm.
    The state S of a value head becomes ``S' = a S + beta (v - a S k) k^T`` with ``a =
    exp(log_decay)``, and the output is ``S' q`` (arXiv:2412.06464; with a decay for each key
    channel arXiv:2510.26692). A request that has computed nothing starts from zeros.

    The layer's `StateSpec` has shapes ((width - 1, channels), (value_heads, V, K)): the last inputs
    of the convolution, and the states, of one rank. Call it inside ``jit``; with a donated cache,
    no state is copied. With ``cache_mode="all"``, the state at the end of each block is stored,
    too. With ``speculative_blocks``, so is the state after each token of a step that may verify
    drafts, and the next step resumes after the tokens that `BlockManager.rewind` has left. With
    ``replay``, a step writes what its token adds to the state into a ring, and the state itself
    every L-th time; a decay for each key channel is refused then. The next step may resume after
    any token of one of up to ``1 + speculative_tokens``. The kernel of Hopper and later takes keys
    of 128 channels, values of 64 or 128, and rings of 8 or 16 tokens; XLA computes others, and
    takes longer than without ``replay``.

    Outside of ``shard_map``, the arrays have the heads of all ranks of a sharded cache, and each
    rank computes its own; queries and keys of fewer heads than ranks are repeated. XLA moves the
    channels of ``qkv`` to the ranks of their heads.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer of states.
      qkv: [T, channels], or [B, T / B, channels] for a rectangular batch: queries [key_heads * K],
        keys, and values [value_heads * V] side by side, before the convolution.
      log_decay: float[T, value_heads], or [T, value_heads, K]; at most 0.
      beta: float[T, value_heads].
      conv_weights: [width, channels], the newest input's last; 2 to 4 wide.
      num_key_heads: heads of queries and of keys, a divisor of value_heads.
      conv_bias: [channels]; None: zeros.
      scale: factor of the queries; None: ``K ** -0.5``.
      layer_index: int32[], may be traced: uses layer ``cache.stacked_layers(layer)[layer_index]``
        instead of ``layer``; see `write_tokens`.
      implementation: as for `pallas_kernels.gated_delta_rule`.

    Returns:
      The cache with the states written, and the output in the dtype of ``qkv``: [T, value_heads,
      V], or [B, T / B, value_heads, V]; zeros for padding.

    Raises:
      TypeError: the layer stores no states, or dtypes that are no floats of 16 or 32 bits.
      ValueError: shapes that do not fit the layer and the batch, or a layer that has
        ``speculative_blocks`` and another ``cache_mode`` than "none".
      NotImplementedError: ``"mosaic_gpu"`` for what Mosaic does not support.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec = check_states(layer, bound, (2, 3))
    check_positive(num_key_heads=num_key_heads)
    heads, keys, values = _heads(bound, spec, "num_key_heads", num_key_heads)
    parts = keys, keys, values
    check_convolution(layer, spec, count_channels(parts), conv_weights, conv_bias)
    check_array(log_decay=log_decay)
    per_key = (keys.size,) if log_decay.ndim == len(batch.token_shape) + 2 else ()
    given = _Given(
        flat_tokens(bound, "qkv", qkv, (count_channels(parts),)),
        flat_tokens(bound, "log_decay", log_decay, (heads, *per_key)),
        flat_tokens(bound, "beta", beta, (heads,)),
        *(conv_weights, conv_bias),
    )
    if scale is not None:
        check_number(scale=scale)
        scale = float(scale)
    return _finish(cache, layer, bound, given, _How("delta", parts, num_key_heads, scale))


def mamba2(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    xbc: Float[Array, "*tokens channels"],
    log_decay: Float[Array, "*tokens heads"],
    steps: Float[Array, "*tokens heads"],
    *,
    conv_weights: Float[Array, "width channels"],
    num_groups: int,
    conv_bias: Float[Array, "channels"] | None = None,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Float[Array, "*tokens heads value_size"]]:
    """Runs a Mamba-2 mixer over a step's tokens, states in place.

    A causal convolution and SiLU come first. The state S of a head becomes ``S' = a S + step x
    b^T`` with ``a = exp(log_decay)``, and the output is ``S' c`` (arXiv:2405.21060, section 6, with
    ``log_decay = step * A``). The skip connection ``D x`` is left to the model.

    The layer's `StateSpec` has shapes ((width - 1, channels), (heads, V, K)), as
    `jaxkv.specs.mamba2_state` returns them.

    Args:
      xbc: [T, channels], or [B, T / B, channels] for a rectangular batch: x [heads * V], b
        [groups * K] and c side by side, before the convolution.
      log_decay, steps: float[T, heads].
      num_groups: groups of heads that share b and c.
      cache, layer, batch, conv_weights, conv_bias, layer_index, implementation: as for
        `gated_delta`.

    Returns:
      The cache with the states written, and the output in the dtype of ``xbc``: [T, heads, V], or
      [B, T / B, heads, V]; zeros for padding.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `gated_delta`.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec = check_states(layer, bound, (2, 3))
    check_positive(num_groups=num_groups)
    heads, keys, values = _heads(bound, spec, "num_groups", num_groups)
    parts = values, keys, keys
    check_convolution(layer, spec, count_channels(parts), conv_weights, conv_bias)
    given = _Given(
        flat_tokens(bound, "xbc", xbc, (count_channels(parts),)),
        flat_tokens(bound, "log_decay", log_decay, (heads,)),
        flat_tokens(bound, "steps", steps, (heads,)),
        *(conv_weights, conv_bias),
    )
    return _finish(cache, layer, bound, given, _How("scan", parts, num_groups))


def linear_attention(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    qkv: Float[Array, "*tokens channels"],
    log_decay: Float[Array, "*tokens value_heads"] | Float[Array, "value_heads"],
    *,
    num_key_heads: int | None = None,
    scale: float = 1.0,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Float[Array, "*tokens value_heads value_size"]]:
    """Runs linear attention with decay (MiniMax-Text) over a step's tokens, states in place.

    The state S of a head becomes ``S' = a S + v k^T`` with ``a = exp(log_decay)``, and the output
    is ``S' q``. The layer's `StateSpec` has the shape ((value_heads, V, K),).

    Args:
      qkv: [T, channels], or [B, T / B, channels] for a rectangular batch: queries, keys and values
        side by side.
      log_decay: float[value_heads], or float[T, value_heads]; at most 0.
      num_key_heads: heads of queries and of keys; None: as many as values have.
      scale: factor of the queries.
      cache, layer, batch, layer_index, implementation: as for `gated_delta`.

    Returns:
      The cache with the states written, and the output in the dtype of ``qkv``: [T, value_heads,
      V], or [B, T / B, value_heads, V]; zeros for padding.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `gated_delta`.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec, tokens = check_states(layer, bound, (3,)), batch.token_shape
    heads, keys, values = _heads(bound, spec, "num_key_heads", num_key_heads)
    parts = keys, keys, values
    check_array(log_decay=log_decay)
    check_number(scale=scale)
    if log_decay.shape == (heads,):
        log_decay = jnp.broadcast_to(log_decay, (*tokens, heads))
    given = _Given(
        flat_tokens(bound, "qkv", qkv, (count_channels(parts),)),
        flat_tokens(bound, "log_decay", log_decay, (heads,)),
        jnp.ones((math.prod(tokens), heads), jnp.float32),
        *(None, None),
    )
    return _finish(cache, layer, bound, given, _How("attention", parts, keys.count, float(scale)))


def short_conv(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    inputs: Float[Array, "*tokens channels"],
    *,
    conv_weights: Float[Array, "width channels"],
    conv_bias: Float[Array, "channels"] | None = None,
    silu: bool = False,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Float[Array, "*tokens channels"]]:
    """Runs a short causal convolution (LFM2) over a step's tokens, its last inputs in place.

    The layer's `StateSpec` has the shape ((width - 1, channels),).

    Args:
      inputs: [T, channels], or [B, T / B, channels] for a rectangular batch.
      silu: whether SiLU follows.
      cache, layer, batch, conv_weights, conv_bias, layer_index, implementation: as for
        `gated_delta`.

    Returns:
      The cache with the inputs written, and the output, of the shape and dtype of ``inputs``;
      zeros for padding.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `gated_delta`.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec = check_states(layer, bound, (2,))
    check_flag(silu=silu)
    parts = (Heads(bound.ranks_of_heads, spec.shapes[0][1]),)
    check_convolution(layer, spec, count_channels(parts), conv_weights, conv_bias)
    flat = flat_tokens(bound, "inputs", inputs, (count_channels(parts),))
    given = _Given(flat, None, None, conv_weights, conv_bias)
    return _finish(cache, layer, bound, given, _How("convolution", parts, silu=silu))


def _heads(
    bound: BoundLayer, spec: StateSpec, name: str, count: int | None
) -> tuple[int, Heads, Heads]:
    """Returns the number of heads over all ranks, and the heads of keys and of values.

    Args:
      count: heads of keys, an argument of this name; None: as many as values have.
    """
    heads, value_size, key_size = spec.shapes[-1]
    heads *= bound.ranks_of_heads
    count = heads if count is None else count
    check_heads(bound, name, count, heads)
    return heads, Heads(count, key_size), Heads(heads, value_size)


class _Given(NamedTuple):
    """The arrays of a call; tokens in one axis."""

    inputs: Float[Array, "tokens channels"]
    log_decay: Float[Array, "tokens heads ..."] | None
    beta: Float[Array, "tokens heads"] | None
    conv_weights: Float[Array, "width channels"] | None
    conv_bias: Float[Array, "channels"] | None


class _How(NamedTuple):
    """The kind of a layer: "delta", "scan", "attention" or "convolution", and its constants.

    parts: the channels of its inputs, over all ranks.
    """

    kind: str
    parts: tuple[Heads, ...]
    key_heads: int = 1
    scale: float | None = 1.0
    silu: bool = True


def _finish(
    cache: KVCache, layer: str, bound: BoundLayer, given: _Given, how: _How
) -> tuple[KVCache, Array]:
    """Runs a layer, and returns the cache and the outputs in the batch's token shape."""
    buffer, out = _recur(bound, given, how=how)
    out = out.reshape(*bound.batch.token_shape, *out.shape[1:])
    return put_back(cache, layer, bound, buffer), out


@persistent_jit
def _recur(bound: BoundLayer, given: _Given, *, how: _How) -> tuple[Array, Array]:
    """Returns the buffer with the states written, and the outputs, [T, ...].

    A jitted function of its own, so that layers that are alike share one trace and one lowering.
    """
    ranks, axis = bound.ranks_of_heads, bound.layout.heads_axis
    arrays = {
        name: by_rank(array, how.parts, ranks)
        for name in ("inputs", "conv_weights", "conv_bias")
        if (array := getattr(given, name)) is not None
    }
    by_head = PartitionSpec(None, axis) if axis else SAME
    of_bias = PartitionSpec(axis) if axis else SAME
    specs: list[Any] = [*[by_head] * 4, of_bias]
    how = how._replace(key_heads=max(1, how.key_heads // ranks))
    return on_devices(
        functools.partial(_run, how=how),
        *(bound, given._replace(**arrays)),
        in_specs=(_Given(*specs),),
        out_specs=(bound.layout.buffer_spec, by_head),
    )


def _run(bound: BoundLayer, given: _Given, *, how: _How) -> tuple[Array, Array]:
    """Runs the heads of one device."""
    options: dict[str, Any] = {"implementation": bound.implementation}
    requests = _requests(bound, len(given.inputs))
    pages = state_pages(bound)
    conv: Any = None
    if given.conv_weights is not None:
        kept = len(given.conv_weights) - 1 + bound.form.spec.speculative_tokens
        inputs = pages[0]._replace(shape=(kept, pages[0].shape[1]))
        conv = Convolution(inputs, given.conv_weights, given.conv_bias, how.silu)
    if given.log_decay is None or given.beta is None:
        data, out = causal_conv1d(given.inputs, conv, requests, **options)
        return data.reshape(bound.buffer.shape), out
    spec = bound.form.spec
    states = len(spec.shapes) - 1  # rings follow
    replay = None
    if spec.replay:
        replay = Replay(*pages[states + 1 :], drafts=spec.speculative_tokens)
    arguments = given.inputs, given.log_decay, given.beta, pages[states], requests
    options |= {"convolution": conv, "replay": replay, "scale": how.scale}
    if how.kind == "delta":
        data, out = gated_delta_rule(*arguments, num_key_heads=how.key_heads, **options)
    else:
        options["values_first"] = how.kind == "scan"
        data, out = selective_scan(*arguments, num_groups=how.key_heads, **options)
    return data.reshape(bound.buffer.shape), out


def _requests(bound: BoundLayer, num_tokens: int) -> RequestStates:
    """Returns the requests of a step, and the blocks of their states."""
    batch, states = bound.batch, step_states(bound)
    is_one_each = batch.shape.max_query_len == 1 and num_tokens == batch.shape.batch_size
    if is_one_each and states.write_ids.shape[1] == 1:
        before = batch.num_computed_tokens
        return RequestStates(states.read_ids, states.write_ids[:, 0], num_computed_tokens=before)
    starts = batch.query_start_loc
    if batch.is_rectangular:
        starts = jnp.arange(len(states.read_ids) + 1, dtype=jnp.int32) * batch.token_shape[1]
    return RequestStates(
        states.read_ids,
        states.write_ids,
        starts,
        query_lens=batch.query_lens,
        write_after=states.write_after,
        max_query_len=batch.shape.max_query_len,
        num_computed_tokens=batch.num_computed_tokens,
    )
