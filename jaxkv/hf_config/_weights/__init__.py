"""The bytes of a model's weights, from the shapes that its configuration implies. No jax.

Norms and biases are left out: less than a thousandth. An architecture that is not understood is
refused by name.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv.hf_config._families import open_config
from jaxkv.hf_config._weights._families import (
    ENCODER_DECODERS,
    WITHOUT_FEED_FORWARD,
    Family,
    family_of,
    nemotron_kinds,
    per_layer_embeddings,
    zamba2_blocks,
)
from jaxkv.hf_config._weights._feed_forward import dense, expert_layers, experts
from jaxkv.hf_config._weights._matrix import Fields, Matrix
from jaxkv.hf_config._weights._mixers import mixers
from jaxkv.hf_config._weights._quantization import read_scheme
from jaxkv.hf_config._weights._towers import towers
from jaxkv.specs import SharedKVSpec, canonical_dtype, packed_bytes

LAYER = re.compile(r"layers\.(\d+)\.(\w+)")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a model.

    parameters: their number.
    num_bytes: bytes as the checkpoint stores them.
    stored: the dtype, and the quantisation of a part of them.
    """

    parameters: int
    num_bytes: int
    stored: str


def count_weights(config: Mapping[str, Any], *, drafts: bool = False) -> Weights:
    """Counts the weights of a model, as its checkpoint stores them.

    Args:
      config: the content of a ``config.json``. One that names no dtype means bfloat16.
      drafts: count layers that draft tokens (``num_nextn_predict_layers``), too.

    Raises:
      ValueError: an architecture, a quantisation or a field that is not understood.
    """
    reader, _ = open_config(config)
    inner = reader.fields.get("ffn_config")  # DBRX
    nested = inner if isinstance(inner, Mapping) else {}
    fields = Fields(reader.model_type, {**reader.fields, **nested})
    dtype = canonical_dtype(str(reader.named_dtype() or "bfloat16"), "torch_dtype")
    scheme = read_scheme(fields.first("quantization_config"), fields.first("expert_dtype"))
    parameters = num_bytes = 0
    for matrix in _matrices(config, fields, drafts=drafts):
        parameters += matrix.parameters
        if scheme is not None and scheme.stores(matrix):
            num_bytes += scheme.num_bytes(matrix)
        else:
            num_bytes += packed_bytes(matrix.parameters, dtype)
    return Weights(parameters, num_bytes, dtype if scheme is None else f"{scheme.name}, {dtype}")


def _matrices(config: Mapping[str, Any], fields: Fields, *, drafts: bool) -> Iterable[Matrix]:
    if fields.model_type in ENCODER_DECODERS:
        yield from ENCODER_DECODERS[fields.model_type](fields)
        return
    family = family_of(fields.model_type)
    yield from _vocabulary(fields, family, config)
    yield from per_layer_embeddings(fields)
    if fields.model_type == "zamba2":
        yield from zamba2_blocks(fields)
    caches, with_experts = _caches(config, fields), expert_layers(fields)
    for layer in range(fields.num_layers):
        yield from _layer(fields, family, layer, caches.get(layer, {}), with_experts)
    if drafts:
        last, hidden = fields.num_layers - 1, fields.hidden
        for _ in range(fields.number("num_nextn_predict_layers", default=0)):
            yield Matrix("eh_proj", hidden, 2 * hidden, "other")
            yield from _layer(fields, family, last, caches.get(last, {}), with_experts)
            yield Matrix(
                "embed_tokens and lm_head", fields.number("vocab_size"), hidden, "other", 2
            )
    yield from towers(config, fields.hidden)


def _vocabulary(fields: Fields, family: Family, config: Mapping[str, Any]) -> Iterable[Matrix]:
    tokens = fields.number("vocab_size", "padded_vocab_size")
    width = fields.number("word_embed_proj_dim", default=fields.hidden)
    yield Matrix("embed_tokens", tokens, width, "other")
    if width != fields.hidden:
        yield Matrix("project", width, fields.hidden, count=2)
    if family.positions:
        yield Matrix("positions", fields.number(family.positions), fields.hidden, "other")
    tied = config.get("tie_word_embeddings")
    tied = fields.first("tie_word_embeddings") if tied is None else tied
    if not (family.tied if tied is None else tied):
        yield Matrix("lm_head", tokens, fields.hidden, "head")


def _layer(
    fields: Fields,
    family: Family,
    layer: int,
    caches: dict[str, tuple[Any, bool]],
    with_experts: frozenset[int],
) -> Iterable[Matrix]:
    if fields.model_type == "zamba2":  # its attention is shared by all layers
        caches = {kind: cache for kind, cache in caches.items() if kind == "mamba"}
    yield from mixers(fields, layer, caches, states=family.states, gate=family.query_gate)
    if fields.model_type in WITHOUT_FEED_FORWARD | {"zamba2"}:
        return
    if fields.model_type == "nemotron_h":
        kind = nemotron_kinds(fields)[layer]
        if kind in ("mlp", "moe"):
            yield from {"mlp": dense, "moe": experts}[kind](fields, layer, gated=family.gated)
        return
    if layer in with_experts:
        yield from experts(fields, layer, gated=family.gated)
    if layer not in with_experts or family.both:
        yield from dense(fields, layer, gated=family.gated)


def _caches(config: Mapping[str, Any], fields: Fields) -> dict[int, dict[str, tuple[Any, bool]]]:
    """Returns layer -> kind of cache -> its spec, and whether it is the layer's own."""
    from jaxkv.hf_config import layers_from_config  # which this module is a part of

    known = {"quantization_config": None}  # of no effect on shapes
    if fields.first("torch_dtype", "dtype") is None:
        known |= {"torch_dtype": "bfloat16"}
    specs = layers_from_config({**config, **known})
    caches: dict[int, dict[str, tuple[Any, bool]]] = {}
    for name, spec in specs.items():
        if match := LAYER.search(name):
            own = not isinstance(spec, SharedKVSpec)
            owner = spec if own else specs[spec.layer]
            caches.setdefault(int(match[1]), {})[match[2]] = owner, own
    return caches
