"""Random models and plans, and a forward function for them, over a cache."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.layout import ORDERS
from tests.traffic.oracle import MODULUS as M
from tests.traffic.oracle import OFFSET, ROWS, SMALL, VOCAB, WIDTH, Layer, factors, make_weights

SECOND, OTHERS = -0.5, -1e4  # logits of the second token, and of those that are never sampled
RECURRENT = ("linear", "delta", "mamba", "conv")
OWNERS = ("full", "sliding", "mla", "pooled")
KINDS = tuple(kind for kind in ROWS if kind != "shared")
# Scores are integers: a step of the distance to a class outweighs the newest position.
OF_CLASS, OF_PLACE = 2.0**10, 16.0  # of 64 places
DIGITS = 8  # where tokens have scales, numbers are stored by their digits, which 4 bits hold
BY_HEADS = {"int8_per_token_head": 127, "fp8_per_token_head": 448, "int4_per_token_head": 7}
Layers = tuple[tuple[str, Layer], ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its plan.

    layers: in the order of the model.
    order, kernel_block_sizes: as for `jaxkv.make_cache`.
    """

    layers: Layers
    plan: jaxkv.Plan
    order: str
    kernel_block_sizes: tuple[int, ...] | None

    @property
    def is_legal(self) -> bool:
        """Whether the plan can have the order and the sizes of kernel blocks."""
        try:
            jax.eval_shape(functools.partial(self.make_cache, 1, is_poisoned=False))
        except ValueError:
            return False
        return True

    def make_cache(self, max_requests: int, *, is_poisoned: bool) -> jaxkv.KVCache:
        """Returns a cache, full of NaN if it is poisoned."""
        sizes = {"order": self.order, "kernel_block_sizes": self.kernel_block_sizes}
        cache = jaxkv.make_cache(self.plan, max_requests=max_requests, **sizes)
        if not is_poisoned:
            return cache
        buffers = tuple(jnp.full_like(buffer, 255) for buffer in cache.buffers)
        return dataclasses.replace(cache, buffers=buffers)


# --- plans ----------------------------------------------------------------------------


def random_model(draw: random.Random, drafts: int = 0) -> Model:
    """Returns a model of one to five layers of any kinds, over a pool that holds few requests.

    Args:
      drafts: that layers can be set back by.
    """
    kinds = draw.choices(KINDS, k=draw.choice([1, 1, 2, 3]))
    layers, specs = dict[str, Layer](), dict[str, Any]()
    for kind in kinds:
        one, spec = random_layer(draw, kind)
        for _ in range(draw.choice([1, 1, 1, 2])):
            name = f"{kind}.{len(layers)}"
            layers[name], specs[name] = one, spec
            if kind == "pooled":  # groups are whole before tokens leave the ring
                size = {"block_size": one.span + draw.choice([0, 1, 3]), "dtype": spec.dtype}
                ring = jaxkv.RingSpec(group_size=one.span, head_size=WIDTH, **size)
                specs[f"{name}.ring"] = ring
    owners = [name for name, layer in layers.items() if layer.kind in OWNERS]
    if owners and draw.random() < 0.25:
        owner = draw.choice(owners)
        name = f"shared.{len(layers)}"
        layers[name] = Layer("shared", heads=layers[owner].heads, owner=owner)
        specs[name] = jaxkv.SharedKVSpec(owner)
    plan = random_plan(draw, {name: with_drafts(spec, drafts) for name, spec in specs.items()})
    sizes = None
    if draw.random() < 0.4:
        sizes = tuple(kernel_block_size(draw, group) for group in plan.groups)
    # Not each plan can have each order, and sizes of kernel blocks that cut overlaid ones alike.
    orders = [*draw.sample(ORDERS, len(ORDERS)), "LBNHC"] if draw.random() < 0.6 else ["LBNHC"]
    models = [
        Model(tuple(layers.items()), plan, *one) for one in itertools.product(orders, (sizes, None))
    ]
    return next(model for model in models if model.is_legal)


def random_layer(draw: random.Random, kind: str) -> tuple[Layer, jaxkv.specs.LayerSpec]:
    size = {"block_size": draw.choice([1, 2, 4, 4, 8])}
    if kind in RECURRENT:
        taps = draw.choice([2, 3, 4])
        shapes = {
            "linear": ((2, 2, 2),),
            "delta": ((taps - 1, 3 * WIDTH), (2, 2, 4)),
            "mamba": ((taps - 1, 2 * WIDTH), (2, 2, 2)),
            "conv": ((taps - 1, WIDTH),),
        }[kind]
        dtypes = ["f32"] * len(shapes)
        if kind != "linear":
            dtypes[0] = draw.choice(["f32", "bf16"])
        size |= {"cache_mode": draw.choice(["none", "align", "all"])}
        if kind != "conv":
            is_any = size["cache_mode"] != "all"
            lengths = [n for n in (1, 2, 3, 4) if is_any or size["block_size"] % n == 0]
            size |= {"replay": random.Random(f"{kind} {size}").choice([0, *lengths])}
        return Layer(kind, taps=taps), jaxkv.StateSpec(shapes=shapes, dtypes=tuple(dtypes), **size)
    size |= {"dtype": draw.choice(["f32", "f32", "bf16", "f16"])}
    span = draw.choice([1, 3, 4, 6, 8])
    limits = {"sliding": {"sliding_window": span}, "chunked": {"chunk_size": span}}.get(kind, {})
    if kind == "pooled":
        span = draw.choice([1, 2, 4])
        size |= {"block_size": span * draw.choice([1, 2, 4]), "head_size": WIDTH}
        return Layer(kind, span=span), jaxkv.MLASpec(**size, compress_ratio=span)
    if kind.endswith("mla"):
        limits = {"sliding_window": span} if kind == "sliding_mla" else {}
        spec = jaxkv.MLASpec if kind == "mla" else jaxkv.SlidingWindowMLASpec
        width = WIDTH + draw.choice([3, 4])
        size |= {"head_size": width, "value_size": WIDTH}
        return Layer(kind, width=width, span=span), spec(**size, **limits)
    spec = {
        "full": jaxkv.FullAttentionSpec,
        "sliding": jaxkv.SlidingWindowSpec,
        "chunked": jaxkv.ChunkedAttentionSpec,
    }[kind]
    heads, width = draw.choice([1, 2]), draw.choice([3, 4, 8])
    size |= {"num_kv_heads": heads, "head_size": width, "head_size_v": WIDTH}
    largest = 0
    if width == 8:
        dtypes = random.Random(f"{kind} {size} {span}")
        if dtype := dtypes.choice([None, *BY_HEADS]):
            largest = BY_HEADS[dtype]
            size |= {"dtype": dtype, "head_size_v": 2 * WIDTH + 2}
    layer = Layer(kind, heads=heads, width=width, span=span, largest=largest)
    return layer, spec(**size, **limits)


def with_drafts(spec: Any, count: int) -> Any:
    if count and isinstance(spec, jaxkv.StateSpec):
        spec = dataclasses.replace(spec, cache_mode="none")
        if not spec.replay:
            return dataclasses.replace(spec, speculative_blocks=count)
        shapes = spec.shapes
        if len(shapes) == 2:  # the convolution's inputs of drafts
            (kept, channels), states = shapes
            shapes = (kept + count, channels), states
        rows = spec.replay + 2 * count + 1
        return dataclasses.replace(spec, shapes=shapes, replay=rows, speculative_tokens=count)
    if count and isinstance(spec, jaxkv.RingSpec):
        return dataclasses.replace(spec, block_size=spec.block_size + count)
    return spec


def random_plan(draw: random.Random, specs: dict[str, Any]) -> jaxkv.Plan:
    """Returns a plan whose pool holds one of the longest requests, and not much more."""
    options: dict[str, Any] = {
        "max_model_len": draw.choice([24, 40, 64]),
        "limits": jaxkv.Limits(max_in_flight_tokens=draw.choice([4, 16, 32])),
        "zero_policy": draw.choice(["when_needed", "when_needed", "always"]),
        "grouping": draw.choice(["auto", "auto", "packed"]),
    }
    large = jaxkv.plan_cache(specs, 2**24, **options)
    least = large.admission_blocks(large.max_model_len) + large.reserved_blocks
    more = draw.choice([0, 1, 3, 10, 30, 100])
    return jaxkv.plan_cache(specs, 2**24, num_blocks_override=least + more, **options)


def kernel_block_size(draw: random.Random, group: Any) -> int:
    size = group.block_size
    if group.growth.stores in ("state", "ring"):
        return size
    return draw.choice([part for part in range(1, size + 1) if size % part == 0])


# --- a logits processor ---------------------------------------------------------------


class Swaps:
    """Swaps the likeliest token and the second one after some sequences of tokens.

    Its state follows from each token, and from their order. Data: the state before the prompt.
    """

    def init(self, data: int | None, prompt: np.ndarray) -> np.ndarray:
        return np.asarray(functools.reduce(self.following, prompt.tolist(), data or 0), np.int32)

    def following(self, state: Any, token: Any) -> Any:
        return (3 * state + token) % 7

    def apply(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        is_swapped = (state < 3) & (logits == logits.max())
        return jnp.where(is_swapped, logits + 2 * SECOND, logits)

    def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return self.following(state, token)


# --- the model over a cache -----------------------------------------------------------


@functools.lru_cache(16)
def make_params(layers: Layers, seed: int) -> dict[str, Any]:
    return jax.device_put(make_weights(layers, seed))


def forward(
    layers: Layers, has_head: bool, params: dict[str, Any], step: jaxkv.StepContext
) -> jax.Array | jaxkv.ModelOutput:
    """Returns logits; or the hidden states for a `head`, and side outputs."""
    hidden = hidden_states(layers, params, step)
    if not has_head:
        return head(params, hidden[step.last_tokens])
    return jaxkv.ModelOutput(hidden, side=[step.token_ids, hidden[:, :WIDTH].astype(jnp.int8)])


@jax.default_matmul_precision("highest")
def hidden_states(layers: Layers, params: dict[str, Any], step: jaxkv.StepContext) -> jax.Array:
    """Returns hidden states, and how far their sums are from integers, f32[T, WIDTH + 1]."""
    places = jnp.maximum(step.positions, 0)
    x = (params["embed"][step.token_ids] + (places[:, None] + 1) * params["turn"][None]) % M
    far = jnp.zeros(len(x), jnp.float32)  # from an integer
    for name, layer in layers:
        of = params[name]
        owner = dict(layers)[layer.owner or name]
        if layer.kind in RECURRENT:
            y = recurrent(name, layer, x, of["matrices"], of["taps"], step)
        elif layer.kind == "pooled":
            values = floats(times(x, of["matrices"][0]) % M)
            own = step.call(pool_group, f"{name}.ring", values, span=layer.span)
            y = own.sum(axis=1) + step.call(whole_groups, name, own[:, 0], span=layer.span)
        elif owner.kind == "pooled":
            y = step.call(whole_groups, name, None, span=owner.span)
        else:
            y = attention(name, layer, dict(layers), places, x, of["matrices"], step)
        whole = jnp.round(y)
        far = jnp.maximum(far, jnp.abs(y - whole).max(axis=1))
        x = (x + times(whole.astype(jnp.int32) % M, of["matrices"][-1])) % M
    return jnp.concatenate([x.astype(jnp.float32), far[:, None]], axis=1)


def head(params: dict[str, Any], hidden: jax.Array) -> jax.Array:
    """Returns logits: 0 and `SECOND` for the likeliest tokens; NaN if sums are no integers."""
    x, far = hidden[:, :WIDTH].astype(jnp.int32), hidden[:, WIDTH]
    first, second = (times(x, params["head"].T)[:, i] for i in range(2))
    first %= VOCAB
    second = (first + 1 + second % (VOCAB - 1)) % VOCAB
    ids = jnp.arange(VOCAB, dtype=jnp.int32)[None]
    logits = jnp.where(ids == second[:, None], SECOND, OTHERS)
    logits = jnp.where(ids == first[:, None], 0.0, logits)
    return jnp.where(far[:, None] < 0.1, logits, jnp.nan)


def times(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns a product of integers, whatever a device does to products of floats."""
    return (x[:, :, None] * matrix[None]).sum(axis=1)


def floats(x: jax.Array, *shape: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(len(x), *(shape or x.shape[1:]))


def attention(
    name: str,
    layer: Layer,
    layers: dict[str, Layer],
    places: jax.Array,
    x: jax.Array,
    matrices: jax.Array,
    step: jaxkv.StepContext,
) -> jax.Array:
    owner = layers[layer.owner or name]
    spans = {"chunked": places % owner.span + 1} if owner.span else {}
    if owner.kind.startswith("sliding"):
        spans = {owner.kind: jnp.minimum(places + 1, owner.span)}
    count = spans.get(owner.kind, places + 1)
    heads, width = layer.heads, owner.width
    is_latent = owner.kind.endswith("mla")
    at = WIDTH if is_latent else 0  # of the class and the place in a key
    asked = floats(times(x, matrices[2]) % M)[:, :heads]
    ask = [2 * OF_CLASS * asked, jnp.full_like(asked, -OF_CLASS), jnp.full_like(asked, OF_PLACE)]
    if owner.largest:
        ask = [part * DIGITS**i for part, n in zip(ask, PARTS, strict=True) for i in range(n)]
    # The first query of each KV head sees all alike, the second one finds one token.
    queries = jnp.zeros((len(x), heads, 2, width), jnp.float32)
    queries = queries.at[:, :, 1, at : at + len(ask)].set(jnp.stack(ask, axis=-1))
    queries = queries.reshape(len(x), 2 * heads, width)
    if layer.kind == "shared":
        out = step.attend(name, queries, scale=1.0)
    else:
        classes = floats(times(x, matrices[1]) % M)[:, :heads]
        keys = jnp.zeros((len(x), heads, width), jnp.float32)
        place = jnp.broadcast_to(floats(places, 1), classes.shape)
        content = [classes, classes**2, place]
        if layer.largest:
            content = digits(content, PARTS)
            content.append(jnp.full_like(place, layer.largest))
        keys = keys.at[:, :, at : at + len(content)].set(jnp.stack(content, axis=-1))
        scale = jnp.arange(1, heads + 1, dtype=jnp.int32)[None, :, None]
        values = floats(times(x, matrices[0])[:, None] * scale % M, heads, WIDTH)
        if is_latent:
            rows = keys.at[:, :, :WIDTH].set(values)[:, 0]
            out = step.attend(name, queries, rows, scale=1.0)
        else:
            if layer.largest:
                most = jnp.full((*values.shape[:2], 2), layer.largest, jnp.float32)
                values = jnp.concatenate([*digits([values], [2]), most], axis=-1)
                values *= floats(factors(places), 1, 1)
            out = step.attend(name, queries, keys, values, scale=1.0)
    out = out.reshape(len(x), heads, 2, -1)
    if owner.largest:
        out = out[..., :WIDTH] + DIGITS * out[..., WIDTH : 2 * WIDTH]
    odd = 2 * jnp.arange(heads, dtype=jnp.float32)[None, :, None] + 1
    return (odd * out[:, :, 0] * floats(count, 1, 1) + (odd + 2) * out[:, :, 1]).sum(axis=1)


PARTS = 2, 3, 2  # digits of a class, of its square, and of a place


def digits(numbers: list[jax.Array], counts: Sequence[int]) -> list[jax.Array]:
    """Returns the digits of each number, the lowest first."""
    pairs = zip(numbers, counts, strict=True)
    return [part // DIGITS**i % DIGITS for part, count in pairs for i in range(count)]


def pool_group(
    cache: jaxkv.KVCache, layer: str, batch: jaxkv.StepBatch, values: jax.Array, *, span: int
) -> tuple[jaxkv.KVCache, jax.Array]:
    """Writes the values to a ring, and returns two parts of a sum over the group of each token.

    [T, 2, WIDTH]: the sum of its values, and what the rule counts beyond that.
    """
    places, requests = batch.positions, jnp.maximum(batch.token_requests, 0)
    stored_rows = jaxkv.read_rows(cache, layer, batch)  # of earlier steps
    rows = stored_rows[requests].astype(jnp.float32)
    first = (batch.seq_lens - batch.query_lens)[requests]
    plain, more = jnp.zeros_like(values), jnp.zeros_like(values)
    for back in range(span):
        at = jnp.maximum(places - back, 0)
        stored = jnp.take_along_axis(rows, (at % rows.shape[1])[:, None, None], axis=1)[:, 0]
        given = values[jnp.maximum(jnp.arange(len(values)) - back, 0)]
        value = jnp.where((at >= first)[:, None], given, stored)
        value = jnp.where((back <= places % span)[:, None], value, 0)
        plain, more = plain + value, more + back * value
    new = jaxkv.write_rows(cache, layer, batch, values.astype(stored_rows.dtype))
    return new, jnp.stack([plain, more], axis=1)


def whole_groups(
    cache: jaxkv.KVCache,
    layer: str,
    batch: jaxkv.StepBatch,
    sums: jax.Array | None,
    *,
    span: int,
) -> tuple[jaxkv.KVCache, jax.Array] | jax.Array:
    """Writes the sums of the groups that are whole, and returns one over all that a token sees."""
    places, requests = batch.positions, jnp.maximum(batch.token_requests, 0)
    if sums is not None:
        ends = (places >= 0) & ((places + 1) % span == 0)
        rows = sums.astype(jaxkv.read_rows(cache, layer, batch).dtype)
        cache = jaxkv.write_rows(cache, layer, batch, rows, mask=ends)
    rows = jaxkv.read_rows(cache, layer, batch)[requests].astype(jnp.float32)
    groups = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    seen = groups < (places[:, None] + 1) // span
    parts = jnp.where(seen[:, :, None], rows, 0) * floats(groups[0] + 1, 1)[None]
    return parts.sum(axis=1) if sums is None else (cache, parts.sum(axis=1))


def recurrent(
    name: str,
    layer: Layer,
    x: jax.Array,
    matrices: jax.Array,
    taps: jax.Array,
    step: jaxkv.StepContext,
) -> jax.Array:
    given = [times(x, matrices[i]) % M for i in range(len(matrices) - 1)]
    small = [floats(one % SMALL, WIDTH) for one in given]
    weights = taps.astype(jnp.float32)
    if layer.kind == "conv":
        return step.short_conv(name, small[0], conv_weights=weights)
    decay = jnp.where(given[3][:, :2] % SMALL != 0, 0.0, -1000.0)
    if layer.kind == "linear":
        out = step.linear_attention(name, jnp.concatenate(small[:3], axis=1), decay)
    elif layer.kind == "mamba":
        steps, options = floats(given[2][:, :2] % 3, 2), {"num_groups": 1}
        options |= {"conv_weights": jnp.concatenate([weights] * 2, axis=1)}
        options |= {"conv_bias": jnp.full(2 * WIDTH, OFFSET, jnp.float32)}
        inputs = jnp.concatenate(small[:2], axis=1)
        out = step.mamba2(name, inputs, decay, steps, **options)
    else:
        units = [32 * jax.nn.one_hot(one[:, 0].astype(jnp.int32), 4) for one in small[:2]]
        newest, late = (jnp.zeros_like(weights).at[-back].set(1) for back in (1, 2))
        options = {"conv_weights": jnp.concatenate([late, newest, weights], axis=1)}
        bias = np.repeat(np.float32([0, 0, OFFSET]), WIDTH)
        options |= {"conv_bias": jnp.asarray(bias), "num_key_heads": 1, "scale": 1.0}
        beta = floats(given[3][:, 2:] % 3 != 0, 2)
        inputs = jnp.concatenate([*units, small[2]], axis=1)
        out = step.gated_delta(name, inputs, decay, beta, **options)
    return out.reshape(len(x), WIDTH)
