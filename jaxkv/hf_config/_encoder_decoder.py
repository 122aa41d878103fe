"""Families whose decoder attends to an encoder's output too. No jax."""

from jaxkv.hf_config._build import FULL, Layers, Options, full_attention
from jaxkv.hf_config._reader import ConfigReader
from jaxkv.specs import CrossAttentionSpec, EncoderOnlySpec


def whisper(reader: ConfigReader, options: Options) -> Layers:
    """Whisper: every decoder layer keeps its own tokens and, apart from them, the encoder's.

    Encoder layers attend within one pass and keep nothing.
    """
    reader.ignore("is_encoder_decoder")
    own = full_attention(
        reader,
        options,
        heads=reader.number("decoder_attention_heads"),
        width=reader.per_head("d_model", "decoder_attention_heads"),
    )
    cross = CrossAttentionSpec(
        block_size=own.block_size,
        num_kv_heads=own.num_kv_heads,
        head_size=own.head_size,
        dtype=own.dtype,
    )
    layers: Layers = {
        f"encoder.layers.{i}.encoder_only": EncoderOnlySpec()
        for i in range(reader.layer_count("encoder_layers"))
    }
    for i in range(reader.layer_count("decoder_layers")):
        layers[f"decoder.layers.{i}.{FULL}"] = own
        layers[f"decoder.layers.{i}.cross_attention"] = cross
    return layers


FAMILIES = {"whisper": whisper}
