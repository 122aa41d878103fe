"""Families that keep keys and values in every layer. No jax."""

from collections.abc import Callable

from jaxkv._src.hf_config._build import (
    FULL,
    SLIDING,
    Layers,
    Options,
    full_attention,
    head_size,
    sliding,
)
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._windows import (
    Rule,
    all_full,
    all_windowed,
    by_list,
    periodic,
    window_kinds,
)
from jaxkv._src.specs import FullAttentionSpec, LayerSpec

Attention = Callable[[ConfigReader, Options, str], FullAttentionSpec]


def given(reader: ConfigReader, options: Options, kind: str) -> FullAttentionSpec:
    """Returns the spec of a layer; the file must name ``head_dim``."""
    return full_attention(reader, options)


def derived(reader: ConfigReader, options: Options, kind: str) -> FullAttentionSpec:
    """Returns the spec of a layer; ``head_dim``, where absent, is hidden size over heads."""
    return full_attention(reader, options, width=head_size(reader))


def floored(reader: ConfigReader, options: Options, kind: str) -> FullAttentionSpec:
    """Returns the spec of a layer; hidden size over heads is rounded down to ``head_dim``."""
    width = reader.number("hidden_size") // reader.number("num_attention_heads")
    if reader.value("head_dim") is not None:
        width = reader.number("head_dim")
    return full_attention(reader, options, width=width)


def attention_layers(
    reader: ConfigReader,
    options: Options,
    kinds: list[str],
    attention: Attention,
    window: str = "sliding_window",
) -> Layers:
    """Returns a layer with keys and values for each kind; ``per_layer_config`` may change it."""
    layers: Layers = {}
    made: dict[tuple[str, int], LayerSpec] = {}
    for i, kind in enumerate(kinds):
        at = reader.at_layer(i)
        if (kind, id(at)) not in made:
            spec: LayerSpec = (full := attention(at, options, kind))
            if kind == SLIDING:
                spec = sliding(full, at.number(window))
            made[kind, id(at)] = spec
        layers[f"layers.{i}.{kind}"] = made[kind, id(at)]
    return layers


def dense(
    reader: ConfigReader,
    options: Options,
    *,
    rule: Rule = all_full,
    attention: Attention = derived,
) -> Layers:
    """Returns layers of full attention and of attention within a window, told apart by a rule."""
    kinds = window_kinds(reader, rule)
    return attention_layers(reader, options, kinds, attention)


def mistral(reader: ConfigReader, options: Options) -> Layers:
    """Mistral and Ministral: a window in every layer, or in none where the field is null.

    Where the field is absent (Mistral v0.1), the classes assume 4096.
    """
    reader.default(sliding_window=4096)
    return dense(reader, options, rule=all_windowed)


def cohere2(reader: ConfigReader, options: Options) -> Layers:
    """Cohere2 (Command A and R7B): three layers with a window, then a full one."""
    return dense(reader, options, rule=periodic(4, "sliding_window_pattern"))


def phi3(reader: ConfigReader, options: Options) -> Layers:
    """Phi-3 and Phi-4: a window in every layer, or in none where the field is null."""
    reader.expect("full_attn_mod", 1)  # of each so many layers one is full
    return dense(reader, options, rule=all_windowed)


def ernie_moe(reader: ConfigReader, options: Options) -> Layers:
    """ERNIE 4.5 with experts: full attention in every layer."""
    reader.expect("compression_ratio", 1)  # of lengths
    return dense(reader, options)


def listed_or_full(reader: ConfigReader, options: Options) -> Layers:
    """Cohere Compass: layers as ``layer_types`` lists them, or full attention in all."""
    reader.default(layer_types=[FULL] * reader.layer_count())
    return dense(reader, options, rule=by_list)


def cohere2_moe(reader: ConfigReader, options: Options) -> Layers:
    """Cohere2 with experts: ``layer_types`` only, because the first layers follow another rule."""
    if reader.value("layer_types") is None:
        raise reader.lacks("layer_types")
    reader.ignore("sliding_window_pattern", "prefix_dense_sliding_window_pattern")
    return dense(reader, options, rule=periodic(4), attention=given)


def minimax_m2(reader: ConfigReader, options: Options) -> Layers:
    """MiniMax-M2: full attention in every layer, which ``attn_type_list`` writes as 1."""
    reader.layer_kinds({"1": FULL}, ["1"] * reader.layer_count(), field="attn_type_list")
    return dense(reader, options, attention=given)
