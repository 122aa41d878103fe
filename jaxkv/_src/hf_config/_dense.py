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


def dory(reader: ConfigReader, options: Options) -> Layers:
    """Dory: full layers and windows between feed-forward ones, some of which run several times.

    vllm/model_executor/models/dory.py: each of the ``n_recurrent_loops`` passes through the
    ``n_recurrent_layers`` has a cache of its own, named like a layer behind the last one, unless
    ``recurrent_kv_cache_mode`` is "last_loop".
    """
    reader.default(n_input_layers=8, n_output_layers=8, n_recurrent_loops=2)
    count = reader.layer_count()
    kinds = reader.layer_kinds({FULL: FULL, SLIDING: SLIDING, "mlp": "mlp"})
    once = attention_layers(reader, options, [k if k != "mlp" else FULL for k in kinds], given)
    layers = {name: s for (name, s), k in zip(once.items(), kinds, strict=True) if k != "mlp"}
    first, last = reader.count("n_input_layers", 0), count - reader.count("n_output_layers", 0)
    last = first + reader.count("n_recurrent_layers", last - first)
    loops = reader.number("n_recurrent_loops", default=1)
    if reader.expect("recurrent_kv_cache_mode", "per_loop", "last_loop") == "last_loop":
        loops = 1
    for loop in range(1, min(loops, MAX_LOOPS)):
        for i in range(first, min(last, count)):
            if kinds[i] != "mlp":
                layers[f"layers.{loop * count + i}.{kinds[i]}"] = layers[f"layers.{i}.{kinds[i]}"]
    return layers


MAX_LOOPS = 100


def step3p5(reader: ConfigReader, options: Options) -> Layers:
    """Step 3.5 and 3.7: windows and full layers, which may differ in query heads, but not in KV.

    Files of its makers name the heads of layers with a window in ``attention_other_setting``.
    """
    reader.expect("att_impl_type", "GQA")
    if reader.value("attention_other_setting") is not None:
        other = reader.inner("attention_other_setting")
        other.expect("attention_type", SLIDING)
        other.expect("num_attention_groups", reader.number("num_key_value_heads"))
        other.expect("head_dim", reader.number("head_dim"))
        other.check_all_read()
    reader.default(layer_types=[FULL] * reader.layer_count())
    return dense(reader, options, rule=by_list, attention=given)
