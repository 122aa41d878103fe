"""Families that keep keys and values in every layer. No jax."""

from jaxkv.hf_config._build import (
    CHUNKED,
    FULL,
    SLIDING,
    Layers,
    Options,
    chunked,
    full_attention,
    head_size,
    name_layers,
    sliding,
)
from jaxkv.hf_config._reader import ConfigReader
from jaxkv.specs import LayerSpec, SharedKVSpec

ONLY_FULL = {FULL: FULL}
WINDOWED = {FULL: FULL, SLIDING: SLIDING}


def llama(reader: ConfigReader, options: Options) -> Layers:
    """Llama 3: full attention; ``head_dim`` is hidden size over heads where absent."""
    kinds = reader.layer_kinds(ONLY_FULL, [FULL] * reader.layer_count())
    spec = full_attention(reader, options, width=head_size(reader))
    return name_layers([[kind] for kind in kinds], {FULL: spec})


def plain(reader: ConfigReader, options: Options) -> Layers:
    """GLM-4 and GLM-4.5: full attention, ``head_dim`` given."""
    kinds = reader.layer_kinds(ONLY_FULL, [FULL] * reader.layer_count())
    return name_layers([[kind] for kind in kinds], {FULL: full_attention(reader, options)})


def qwen3(reader: ConfigReader, options: Options) -> Layers:
    """Qwen3, dense and MoE: full attention.

    ``sliding_window`` and ``max_window_layers`` mean nothing while ``use_sliding_window``
    is false; true is refused.
    """
    reader.expect("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    return plain(reader, options)


def minimax_m2(reader: ConfigReader, options: Options) -> Layers:
    """MiniMax-M2: full attention in every layer, 1 in ``attn_type_list``."""
    reader.layer_kinds({"1": FULL}, ["1"] * reader.layer_count(), field="attn_type_list")
    return plain(reader, options)


def mistral(reader: ConfigReader, options: Options) -> Layers:
    """Mistral and Ministral 3: a window in every layer, or in none when it is null.

    Mistral's configuration class makes it 4096 where the field is absent (v0.1).
    """
    window = None
    if reader.has("sliding_window", null=False):
        window = reader.number("sliding_window")
    elif reader.model_type == "mistral" and not reader.has("sliding_window"):
        window = 4096
    default = [SLIDING if window else FULL] * reader.layer_count()
    return _windowed(reader, options, default, width=head_size(reader), window=window)


def ministral(reader: ConfigReader, options: Options) -> Layers:
    """Ministral: every layer has the window unless ``layer_types`` says otherwise."""
    default = [SLIDING] * reader.layer_count()
    return _windowed(reader, options, default, width=head_size(reader))


def alternating(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 2 and gpt-oss: even layers have a window, odd ones are full.

    The attention sinks of gpt-oss are logits, so they keep no cache.
    """
    reader.expect("use_bidirectional_attention", False)
    count = reader.layer_count()
    return _windowed(reader, options, [FULL if i % 2 else SLIDING for i in range(count)])


def gemma3(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 3: five layers with a window, then a full one (``sliding_window_pattern`` 6)."""
    reader.expect("use_bidirectional_attention", False)
    older = reader.number("_sliding_window_pattern", default=6)
    period = reader.number("sliding_window_pattern", default=older)
    count = reader.layer_count()
    default = [SLIDING if (i + 1) % period else FULL for i in range(count)]
    reader.default(num_key_value_heads=4, head_dim=256, sliding_window=4096)
    return _windowed(reader, options, default)


def _windowed(
    reader: ConfigReader,
    options: Options,
    default: list[str],
    *,
    width: int | None = None,
    window: int | None = None,
) -> Layers:
    """Builds layers with and without a window that are alike otherwise."""
    kinds = reader.layer_kinds(WINDOWED, default)
    specs: dict[str, LayerSpec] = {FULL: (full := full_attention(reader, options, width=width))}
    if SLIDING in kinds:
        window = window or reader.number("sliding_window")
        reader.expect("sliding_window_size", window)  # older Gemma 2 files name it twice
        specs[SLIDING] = sliding(full, window)
    reader.ignore("sliding_window")
    return name_layers([[kind] for kind in kinds], specs)


def gemma4(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 4: full layers have heads of their own number and width.

    The number differs only where ``attention_k_eq_v``; K and V are stored apart even
    there. The last ``num_kv_shared_layers`` layers read the cache of the last layer of
    their type before them.
    """
    reader.expect("use_bidirectional_attention", False, "vision")
    kinds = reader.layer_kinds(WINDOWED)
    if kinds[-1] != FULL:
        raise reader.refusal("layer_types", "the last layer of Gemma 4 is full attention")
    heads = reader.number("num_global_key_value_heads", "num_key_value_heads")
    if not reader.expect("attention_k_eq_v", True, False):
        heads = None
    local = full_attention(reader, options)
    specs = {
        FULL: full_attention(reader, options, heads=heads, width=reader.number("global_head_dim")),
        SLIDING: sliding(local, reader.number("sliding_window")),
    }
    return _share_last(reader, kinds, name_layers([[kind] for kind in kinds], specs))


def _share_last(reader: ConfigReader, kinds: list[str], layers: Layers) -> Layers:
    """Replaces the last ``num_kv_shared_layers`` layers by readers of earlier ones."""
    names = list(layers)
    first = len(kinds) - reader.count("num_kv_shared_layers", 0)
    owners = dict(zip(kinds[: max(first, 0)], names, strict=False))  # the last of each kind
    if missing := set(kinds) - set(owners):
        raise reader.refusal("num_kv_shared_layers", f"no {sorted(missing)} layer is left to share")
    shared = {names[i]: SharedKVSpec(owners[kinds[i]]) for i in range(first, len(kinds))}
    return layers | shared


def llama4(reader: ConfigReader, options: Options) -> Layers:
    """Llama 4: layers with rotary positions attend within chunks, every fourth is full.

    ``no_rope_layers`` holds 1 where a layer has rotary positions and 0 where not.
    """
    count = reader.layer_count()
    period = reader.number("no_rope_layer_interval", default=4)
    rope = reader.listed("no_rope_layers", [])  # older configurations hold an empty list
    rope = rope or [int((i + 1) % period != 0) for i in range(count)]
    default = [CHUNKED if with_rope else FULL for with_rope in rope]
    kinds = reader.layer_kinds({FULL: FULL, CHUNKED: CHUNKED}, default)
    full = full_attention(reader, options)
    specs = {FULL: full, CHUNKED: chunked(full, reader.number("attention_chunk_size"))}
    return name_layers([[kind] for kind in kinds], specs)


FAMILIES = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3,
    "glm4": plain,
    "glm4_moe": plain,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "ministral3": mistral,
    "ministral": ministral,
    "gemma2": alternating,
    "gpt_oss": alternating,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "llama4_text": llama4,
}
