"""Families with a decoder that also attends to an encoder's output. No jax."""

from jaxkv._src.hf_config._build import FULL, Layers, Options, full_attention, head_size
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import CrossAttentionSpec, EncoderOnlySpec, FullAttentionSpec

CROSS = "cross_attention"


def bart(reader: ConfigReader, options: Options) -> Layers:
    """BART, its relatives and Whisper: every decoder head has keys and values of its own."""
    heads = reader.number("decoder_attention_heads")
    width = reader.per_head("d_model", "decoder_attention_heads")
    own = full_attention(reader, options, heads=heads, width=width)
    return _both(reader, "encoder_layers", "decoder_layers", own)


def t5(reader: ConfigReader, options: Options) -> Layers:
    """T5 and its relatives: heads of ``d_kv``; by default as many decoder as encoder layers."""
    own = full_attention(
        reader, options, heads=reader.number("num_heads"), width=reader.number("d_kv")
    )
    reader.default(num_decoder_layers=reader.value("num_layers"))
    return _both(reader, "num_layers", "num_decoder_layers", own)


def _both(reader: ConfigReader, encoder: str, decoder: str, own: FullAttentionSpec) -> Layers:
    """Returns encoder layers, which keep nothing, and decoder layers with two caches each.

    A decoder layer keeps its own tokens in one cache and the encoder's in the other.
    """
    reader.expect("is_encoder_decoder", True)
    layers: Layers = {
        f"encoder.layers.{i}.encoder_only": EncoderOnlySpec()
        for i in range(reader.layer_count(encoder))
    }
    cross = _cross(own)
    for i in range(reader.layer_count(decoder)):
        layers[f"decoder.layers.{i}.{FULL}"] = own
        layers[f"decoder.layers.{i}.{CROSS}"] = cross
    return layers


def _cross(own: FullAttentionSpec) -> CrossAttentionSpec:
    """Returns the spec of the same keys and values, of the encoder's tokens."""
    return CrossAttentionSpec(
        block_size=own.block_size,
        num_kv_heads=own.num_kv_heads,
        head_size=own.head_size,
        dtype=own.dtype,
    )


def mllama(reader: ConfigReader, options: Options) -> Layers:
    """Llama 3.2 Vision: ``cross_attention_layers`` keep the image's tokens and no others."""
    own = full_attention(reader, options, width=head_size(reader))
    cross, count = reader.listed("cross_attention_layers"), reader.layer_count()
    if any(not isinstance(i, int) or not 0 <= i < count for i in cross):
        raise reader.refusal("cross_attention_layers", f"numbers of the {count} layers")
    kinds = [CROSS if i in cross else FULL for i in range(count)]
    specs = {FULL: own, CROSS: _cross(own)}
    return {f"layers.{i}.{kind}": specs[kind] for i, kind in enumerate(kinds)}
