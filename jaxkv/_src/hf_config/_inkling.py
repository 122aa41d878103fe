"""Inkling: attention in turn with windows, and convolutions over what it computes. No jax."""

from jaxkv._src.hf_config._build import FULL, SLIDING, Layers, Options, full_attention, sliding
from jaxkv._src.hf_config._convolutions import CONV
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import FullAttentionSpec, SlidingWindowMLASpec


def inkling(reader: ConfigReader, options: Options) -> Layers:
    """Inkling: windows with heads of their own, and four streams of inputs of convolutions.

    vllm/models/inkling/nvidia/sconv_swa_attn.py: keys, values, and the outputs of attention and
    feed-forward of the last ``conv_kernel_size`` tokens lie side by side in one row, divided among
    the KV heads and padded to a power of two for each. Every sixth layer is full, unless
    ``layer_types`` or ``local_layer_ids`` say otherwise.
    """
    count = reader.layer_count()
    local = reader.listed("local_layer_ids", [i for i in range(count) if (i + 1) % 6])
    default = ["hybrid_sliding" if i in local else "hybrid" for i in range(count)]
    kinds = reader.layer_kinds({"hybrid": FULL, "hybrid_sliding": SLIDING}, default)
    if reader.value("local_layer_ids") is not None and kinds != [
        SLIDING if i in local else FULL for i in range(count)
    ]:
        raise reader.refusal("local_layer_ids", "it contradicts layer_types")
    reader.ignore("mtp_local_layer_ids", "number_of_conv_states", "shared_expert_sink")
    full = full_attention(reader, options)
    windowed = sliding(
        full_attention(
            reader,
            options,
            heads=reader.number("swa_num_key_value_heads"),
            width=reader.number("swa_head_dim"),
        ),
        reader.number("sliding_window_size"),
    )
    layers: Layers = {}
    for i, kind in enumerate(kinds):
        spec = windowed if kind == SLIDING else full
        layers[f"layers.{i}.{kind}"] = spec
        layers[f"layers.{i}.{CONV}"] = _streams(reader, spec, options)
    return layers


def inkling2_loop(reader: ConfigReader, options: Options) -> Layers:
    """Inkling-2-Mini: some layers run several times, each time with caches of their own.

    modeling_inkling2_loop.py of transformers 5.24: those of later passes follow the last layer.
    """
    layers, count = inkling(reader, options), reader.layer_count()
    if reader.value("loop_config") is not None:
        loops = reader.inner("loop_config")
        own = {"loop_layer_index_start": "core_start", "loop_layer_index_end": "core_end"}
        for name, short in (own | {"loop_num_passes": "num_passes"}).items():
            reader.default(**{name: loops.value(short)})
        loops.check_all_read()
    first = reader.count("loop_layer_index_start", 6)
    last = reader.count("loop_layer_index_end", 18)
    passes = reader.number("loop_num_passes", default=3)
    if not first <= last <= count or passes > MAX_PASSES:
        raise reader.refusal("loop_layer_index_end", f"it must be {first} to {count}")
    for i in range((passes - 1) * (last - first)):
        prefix = f"layers.{first + i % (last - first)}."
        for name in [name for name in layers if name.startswith(prefix)]:
            layers[f"layers.{count + i}.{name.removeprefix(prefix)}"] = layers[name]
    return layers


MAX_PASSES = 100


def _streams(
    reader: ConfigReader, spec: FullAttentionSpec, options: Options
) -> SlidingWindowMLASpec:
    """Returns the spec of the inputs of a layer's convolutions, beside its keys and values."""
    heads, hidden = spec.num_kv_heads * options.tensor_parallel, reader.number("hidden_size")
    if hidden % heads:
        raise reader.refusal("hidden_size", f"it must divide among {heads} KV heads")
    width = 2 * spec.head_size + 2 * (hidden // heads)
    kernel = reader.number("conv_kernel_size")
    return SlidingWindowMLASpec(
        block_size=kernel,
        sliding_window=kernel,
        head_size=spec.num_kv_heads * (1 << (width - 1).bit_length()),
        dtype=reader.dtype(),
    )
