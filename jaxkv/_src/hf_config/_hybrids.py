"""Families that mix Kimi delta or lightning attention with full attention. No jax."""

import dataclasses
import math

from jaxkv._src.hf_config._build import (
    FULL,
    LINEAR,
    Layers,
    Options,
    full_attention,
    head_size,
    name_layers,
    state,
)
from jaxkv._src.hf_config._linear import CONV, by_interval, delta_attention
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import LayerSpec, MLASpec, linear_attention_state


def alice_ai(reader: ConfigReader, options: Options) -> Layers:
    """AliceAI: Kimi delta attention by the names of gated delta nets, and full attention.

    vllm/model_executor/models/alice_ai.py: matrices are float32, keys and values have the same
    heads. Every fourth layer is full, unless the file says otherwise.
    """
    reader.default(full_attention_interval=4)
    kinds = reader.layer_kinds({FULL: FULL, LINEAR: LINEAR}, by_interval(reader))
    heads, width = "linear_num_key_heads", "linear_key_head_dim"
    reader.expect("linear_num_value_heads", reader.number(heads))
    reader.expect("linear_value_head_dim", reader.number(width))
    reader.expect("mamba_ssm_dtype", "float32")
    reader.ignore("number_of_conv_states")
    delta = delta_attention(reader, options, heads, width, CONV)
    return name_layers(
        [(k,) for k in kinds], {FULL: full_attention(reader, options), LINEAR: delta}
    )


def solar_open2(reader: ConfigReader, options: Options) -> Layers:
    """Solar Open 2: Kimi delta attention, and the full attention of ``gqa_layers``, from 0.

    SolarOpen2Config of vLLM and transformers for upstage/Solar-Open2-250B: without that list, a
    full layer, then ``gqa_interval`` linear ones; ``layer_types`` goes before both.
    """
    count, full = reader.layer_count(), reader.value("gqa_layers")
    if full is None and reader.value("layer_types") is None:
        full = list(range(0, count, 1 + reader.number("gqa_interval")))
    reader.ignore("gqa_interval", "gqa_layers")
    full = reader.listed("gqa_layers", full or [])
    if any(not isinstance(i, int) or not 0 <= i < count for i in full):
        raise reader.refusal("gqa_layers", f"it must hold numbers of layers below {count}")
    default = [FULL if i in full else LINEAR for i in range(count)]
    kinds = reader.layer_kinds({FULL: FULL, LINEAR: LINEAR}, default)
    linear = reader.inner("linear_attn_config")
    names = "num_heads", "head_dim", "short_conv_kernel_size"
    linear.expect("num_kv_heads", linear.number("num_heads"))
    specs = {
        FULL: full_attention(reader, options),
        LINEAR: delta_attention(linear, options, *names, reader),
    }
    linear.check_all_read()
    return name_layers([(kind,) for kind in kinds], specs)


MIXERS = {
    **dict.fromkeys(("minicpm4", "minicpm", "standard", "attention", "attn"), FULL),
    **dict.fromkeys(("lightning", "lightning_attn", "lightning-attn"), LINEAR),
}
MEANS, COARSE_MEANS = "mean_keys", "coarse_mean_keys"


def minicpm_sala(reader: ConfigReader, options: Options) -> Layers:
    """MiniCPM-SALA: lightning attention, and attention to blocks that means of keys choose.

    configs/minicpm.py and layers/attention/minicpm/cache.py of SGLang 0.5.23: ``mixer_types`` are
    repeated; with a ``sparse_config`` a full layer keeps a mean key of each KV head per
    ``kernel_stride`` tokens, and one per four times as many, which SGLang takes from the rows of
    keys and values. A lightning layer keeps a float32 matrix for each head.
    """
    mixers = reader.listed("mixer_types") or ["minicpm4"]
    if unknown := {str(name) for name in mixers} - MIXERS.keys():
        raise reader.refusal("mixer_types", f"{sorted(unknown)} are none of {', '.join(MIXERS)}")
    count, width = reader.layer_count(), head_size(reader)
    kinds = [MIXERS[name] for name in (mixers * count)[:count]]
    full = full_attention(reader, options, width=width)
    layer, specs = (FULL,), dict[str, LayerSpec]()
    if reader.value("sparse_config") is not None:
        stride = reader.inner("sparse_config").number("kernel_stride")
        block = math.lcm(full.block_size, 4 * stride)
        full, keys = dataclasses.replace(full, block_size=block), full.num_kv_heads * width
        layer = (FULL, MEANS, COARSE_MEANS)
        for kind, ratio in ((MEANS, stride), (COARSE_MEANS, 4 * stride)):
            specs[kind] = MLASpec(
                block_size=block, head_size=keys, dtype=reader.dtype(), compress_ratio=ratio
            )
    specs[FULL] = full
    if LINEAR in kinds:
        heads = reader.number("lightning_nkv", default=reader.number("num_key_value_heads"))
        reader.expect("lightning_nh", heads)
        shapes = linear_attention_state(
            num_heads=heads,
            head_size=reader.number("lightning_head_dim", default=width),
            tensor_parallel=options.tensor_parallel,
        )
        specs[LINEAR] = state(shapes, ("float32",), options)
    return name_layers([layer if kind == FULL else (kind,) for kind in kinds], specs)
