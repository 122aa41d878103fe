"""The bytes of a model's weights, from the shapes that its configuration implies. No jax.

Norms and biases are left out: they are less than a thousandth. An architecture that is not
understood is refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._src.hf_config._families import open_config
from jaxkv._src.hf_config._layers import read_layers
from jaxkv._src.hf_config._reader import QUANTIZATION
from jaxkv._src.hf_config._weights._feed_forward import dense, expert_layers, experts
from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix, Placed
from jaxkv._src.hf_config._weights._mixers import mixers
from jaxkv._src.hf_config._weights._needed import check_needed
from jaxkv._src.hf_config._weights._quantization import Scheme, read_scheme
from jaxkv._src.hf_config._weights._stages import (
    Part,
    Weights,
    count_layers,
    layers_per_stage,
    num_layers,
)
from jaxkv._src.hf_config._weights._towers import towers
from jaxkv._src.hf_config._weights._traits import (
    ASSUMED,
    ENCODER_DECODERS,
    WITHOUT_FEED_FORWARD,
    Traits,
    hyper_connections,
    nemotron_kinds,
    per_layer_embeddings,
    traits_of,
    zamba2_blocks,
)
from jaxkv._src.internal.checks import check_flag
from jaxkv._src.internal.text import shown
from jaxkv._src.specs import SharedKVSpec, canonical_dtype, packed_bytes

__all__ = ["Weights", "count_weights", "layers_per_stage", "num_layers"]

TABLE = Scheme("fp8", 8, group=32, scale_bits=8)
LAYER = re.compile(r"layers\.(\d+)\.(\w+)")


def count_weights(config: Mapping[str, object], *, drafts: bool = False) -> Weights:
    """Counts the weights of a model, as its checkpoint stores them.

    Args:
      config: the content of a ``config.json``. If it names no dtype, bfloat16 counts. Encoders of
        images and sounds count if it describes them (``vision_config``, ``audio_config``).
      drafts: whether to count layers that draft tokens (``num_nextn_predict_layers``).

    Raises:
      ValueError: an architecture, a quantisation or a field that is not understood.
    """
    check_flag(drafts=drafts)
    reader, _ = open_config(config)
    inner = reader.fields.get("ffn_config")  # DBRX
    nested = inner if isinstance(inner, Mapping) else {}
    assumed = ASSUMED.get(reader.model_type, {})
    fields = Fields(reader.model_type, {**assumed, **reader.fields, **nested})
    dtype = canonical_dtype(str(reader.named_dtype() or "bfloat16"), "torch_dtype")
    quantization = fields.first(*QUANTIZATION)
    within = quantization.get("expert_dtype") if isinstance(quantization, Mapping) else None
    scheme = read_scheme(quantization, fields.first("expert_dtype") or within)
    check_needed(fields)
    placed = list(_matrices(config, fields, drafts=drafts))
    _check_sizes(fields)
    parts = [
        Part(_stored_bytes(matrix, scheme, dtype), tuple(layers), matrix.max_ranks)
        for layers, matrix in placed
    ]
    return Weights(
        parameters=sum(matrix.parameters for _, matrix in placed),
        num_bytes=sum(part.num_bytes for part in parts),
        stored=dtype if scheme is None else f"{scheme.name}, {dtype}",
        num_layers=count_layers(fields.model_type, fields.values),
        parts=tuple(parts),
    )


def _check_sizes(fields: Fields) -> None:
    """Raises ValueError for fields that may size a matrix, and that nothing has read."""
    if unknown := fields.unread_sizes():
        listed = ", ".join(f"{name}={shown(fields.values[name])}" for name in unknown)
        raise ValueError(
            f"{listed} may give the size of weights, and {'is' if len(unknown) == 1 else 'are'} "
            f"not understood for model_type={fields.model_type!r}"
        )


def _stored_bytes(matrix: Matrix, scheme: Scheme | None, dtype: str) -> int:
    if scheme is not None and matrix.role == "table":
        return TABLE.num_bytes(matrix)
    if scheme is not None and scheme.stores(matrix):
        return scheme.num_bytes(matrix)
    return packed_bytes(matrix.parameters, dtype)


def _matrices(config: Mapping[str, Any], fields: Fields, *, drafts: bool) -> Iterable[Placed]:
    if fields.model_type in ENCODER_DECODERS:
        yield from ENCODER_DECODERS[fields.model_type](fields)
        return
    traits = traits_of(fields.model_type)
    caches, with_experts = _caches(config, fields), expert_layers(fields)
    yield from _vocabulary(fields, traits, config)
    yield from per_layer_embeddings(fields)
    yield from hyper_connections(fields)
    if fields.model_type == "zamba2":
        yield from zamba2_blocks(fields)

    def layer(index: int) -> Iterable[Placed]:
        own, kinds = fields.at_layer(index), caches.get(index, {})
        matrices = _layer(own, traits, index, kinds, with_experts)
        return (((index,), matrix) for matrix in matrices)

    for index in range(fields.num_layers):
        yield from layer(index)
    last, hidden = fields.num_layers - 1, fields.hidden
    for _ in range(fields.number("num_nextn_predict_layers", default=0) if drafts else 0):
        yield (last,), Matrix("eh_proj", hidden, 2 * hidden, "other", max_ranks=WHOLE)
        yield from layer(last)
        tokens = fields.number("vocab_size")
        yield (last,), Matrix("embed_tokens and lm_head", tokens, hidden, "other", 2)
    yield from (((0,), matrix) for matrix in towers(config, hidden))


def _vocabulary(fields: Fields, traits: Traits, config: Mapping[str, Any]) -> Iterable[Placed]:
    tokens = fields.number("vocab_size", "padded_vocab_size")
    width = fields.number("word_embed_proj_dim", default=fields.hidden)
    first, last = 0, fields.num_layers - 1
    if width != fields.hidden:
        for place in (first, last):
            yield (place,), Matrix("project", width, fields.hidden, max_ranks=WHOLE)
    if traits.positions:
        positions = fields.number(traits.positions)
        yield (first,), Matrix("positions", positions, fields.hidden, "other", max_ranks=WHOLE)
    tied = config.get("tie_word_embeddings")
    tied = fields.first("tie_word_embeddings") if tied is None else tied
    tied = traits.tied if tied is None else tied
    yield (first, last) if tied else (first,), Matrix("embed_tokens", tokens, width, "other")
    if not tied:
        rows = fields.number("output_vocab_size", "unpadded_vocab_size", default=tokens)
        yield (last,), Matrix("lm_head", rows, fields.hidden, "head")


def _layer(
    fields: Fields,
    traits: Traits,
    layer: int,
    caches: dict[str, tuple[Any, bool]],
    with_experts: frozenset[int],
) -> Iterable[Matrix]:
    if fields.model_type == "zamba2":  # its attention is shared by all layers
        caches = {kind: cache for kind, cache in caches.items() if kind == "mamba"}
    yield from mixers(fields, layer, caches, states=traits.states, gate=traits.query_gate)
    if fields.model_type in WITHOUT_FEED_FORWARD | {"zamba2"}:
        return
    if fields.model_type == "dory":  # blocks of attention and of feed-forward in turn
        kinds = fields.listed("layer_types") or ()
        yield from dense(fields, layer, gated=True) if kinds[layer] == "mlp" else ()
        return
    if fields.model_type == "nemotron_h":
        kind = nemotron_kinds(fields)[layer]
        if kind in ("mlp", "moe"):
            yield from {"mlp": dense, "moe": experts}[kind](fields, layer, gated=traits.gated)
        return
    if layer in with_experts:
        yield from experts(fields, layer, gated=traits.gated)
    if layer not in with_experts or traits.both:
        yield from dense(fields, layer, gated=traits.gated)


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_quantization(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in QUANTIZATION
    }


def _caches(config: Mapping[str, Any], fields: Fields) -> dict[int, dict[str, tuple[Any, bool]]]:
    """Returns layer -> kind of cache -> its spec, and whether it is the layer's own."""
    config = _without_quantization(config)  # it changes no shape
    if fields.first("torch_dtype", "dtype") is None:
        config |= {"torch_dtype": "bfloat16"}
    specs, reader = read_layers(config)
    fields.read.update(reader.read)
    caches: dict[int, dict[str, tuple[Any, bool]]] = {}
    for name, spec in specs.items():
        if match := LAYER.search(name):
            own = not isinstance(spec, SharedKVSpec)
            owner = spec if own else specs[spec.layer]
            caches.setdefault(int(match[1]), {})[match[2]] = owner, own
    return caches
