"""Gemma 1 to 4, gpt-oss and Llama 4: full layers and local ones in turn. No jax."""

from jaxkv._src.hf_config._build import (
    CHUNKED,
    FULL,
    SLIDING,
    Layers,
    Options,
    chunked,
    full_attention,
    name_layers,
)
from jaxkv._src.hf_config._dense import attention_layers, dense, given
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._windows import periodic, window_kinds
from jaxkv._src.specs import FullAttentionSpec, SharedKVSpec


def alternating(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 2 and gpt-oss: even layers have a window, odd ones are full.

    The attention sinks of gpt-oss are logits, so they keep no cache.
    """
    reader.expect("use_bidirectional_attention", False)
    layers = dense(reader, options, rule=periodic(2), attention=given)
    reader.ignore("sliding_window")
    # Older Gemma 2 files name it twice.
    reader.expect("sliding_window_size", reader.value("sliding_window"))
    return layers


def gemma(reader: ConfigReader, options: Options) -> Layers:
    """Gemma: full attention. PaliGemma's prompt attends both ways, which changes no cache."""
    reader.expect("use_bidirectional_attention", False, reader.wrapper == "paligemma")
    return dense(reader, options, attention=given)


def gemma3(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 3: five layers with a window, then a full one (``sliding_window_pattern`` 6)."""
    if reader.value("use_bidirectional_attention") is True:  # EmbeddingGemma
        reason = "an encoder, which attends in both directions, keeps no cache"
        raise reader.refusal("use_bidirectional_attention", reason)
    reader.expect("use_bidirectional_attention", False)
    rule = periodic(6, "_sliding_window_pattern", "sliding_window_pattern")
    return dense(reader, options, rule=rule, attention=given)


def gemma3n(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 3n: four layers with a window, then a full one; the last ones own no cache."""
    reader.count("num_kv_shared_layers")  # the class assumes 15
    kinds = window_kinds(reader, periodic(5, "_sliding_window_pattern"))
    return share_last(reader, kinds, attention_layers(reader, options, kinds, given))


def gemma4(reader: ConfigReader, options: Options) -> Layers:
    """Gemma 4: full layers and layers with a window have different heads.

    Their width always differs, their number only where ``attention_k_eq_v`` is true; even there, K
    and V are stored apart. The last ``num_kv_shared_layers`` layers read the cache of the last
    earlier layer of their kind. Files of transformers 5 may hold all this in
    ``per_layer_config``.
    """
    reader.expect("use_bidirectional_attention", False, "vision")
    reader.expect("attention_use_bidirectional", False, "vision")
    rule = periodic(6, "_sliding_window_pattern", "sliding_window_pattern")
    kinds = window_kinds(reader, rule)
    if kinds[-1] != FULL:
        raise reader.refusal("layer_types", "the last layer of Gemma 4 is full attention")
    by_layer = bool(reader.value("per_layer_config"))
    layers = attention_layers(reader, options, kinds, given if by_layer else _gemma4_attention)
    if by_layer:
        _check_global(reader, kinds.index(FULL))
    return share_last(reader, kinds, layers)


def _gemma4_attention(reader: ConfigReader, options: Options, kind: str) -> FullAttentionSpec:
    if kind == SLIDING:
        return full_attention(reader, options)
    heads = reader.number("num_global_key_value_heads", "num_key_value_heads")
    if not reader.expect("attention_k_eq_v", True, False):
        heads = None
    return full_attention(reader, options, heads=heads, width=reader.number("global_head_dim"))


def _check_global(reader: ConfigReader, full: int) -> None:
    """Refuses fields of full layers that contradict ``per_layer_config``."""
    at = reader.at_layer(full)
    reader.expect("global_head_dim", at.number("head_dim"))
    if reader.expect("attention_k_eq_v", True, False):
        reader.expect("num_global_key_value_heads", at.number("num_key_value_heads"))
    reader.ignore("num_global_key_value_heads")


def share_last(reader: ConfigReader, kinds: list[str], layers: Layers) -> Layers:
    """Makes the last ``num_kv_shared_layers`` layers read the caches of earlier ones."""
    names = list(layers)
    first = len(kinds) - reader.count("num_kv_shared_layers", 0)
    owners = dict(zip(kinds[: max(first, 0)], names, strict=False))  # the last of each kind
    if missing := set(kinds) - set(owners):
        raise reader.refusal("num_kv_shared_layers", f"no {sorted(missing)} layer is left to share")
    shared = {names[i]: SharedKVSpec(owners[kinds[i]]) for i in range(first, len(kinds))}
    return layers | shared


def llama4(reader: ConfigReader, options: Options) -> Layers:
    """Llama 4: layers with rotary positions attend within chunks; every fourth layer is full.

    ``no_rope_layers`` holds 1 for a layer with rotary positions, and 0 for one without.
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
