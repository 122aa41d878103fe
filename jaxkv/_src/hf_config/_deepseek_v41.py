"""DeepSeek-V4.1: windows in every layer, and compressed latents of several layers. No jax."""

from collections.abc import Mapping, Sequence

from jaxkv._src.hf_config._build import MLA, Layers, Options
from jaxkv._src.hf_config._mla import (
    INDEXER,
    SLIDING_MLA,
    V4_ALIGNMENT,
    V4_BLOCK,
    V4_VECTOR_BYTES,
    check_fp8,
    check_v4_widths,
    index_keys,
)
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import LayerSpec, MLASpec, RingSpec, SharedKVSpec, SlidingWindowMLASpec

RING = "compressor_ring"
WINDOW_BLOCK, RING_ROWS = 32, 8


def deepseek_v41(reader: ConfigReader, options: Options) -> Layers:
    """DeepSeek-V4.1: latents of 1 or 2 tokens in the layers of ``kv_source_layer_ids``.

    vllm/models/deepseek_v41/attention.py, on Hopper. Other layers with a ``compress_ratio`` read
    the latents of the last source before them, and those of ``index_source_layer_ids`` its index
    keys. A source that compresses keeps float32 latents and gates in a ring: of the drafts, of the
    token before them and of one more, a power of two of at least 8 rows.
    """
    check_fp8(reader, options)
    check_v4_widths(reader)
    reader.ignore("num_key_value_heads", *ENGRAM)
    ratios, indexed = _ratios(reader), reader.listed("index_source_layer_ids")
    window = SlidingWindowMLASpec(
        block_size=WINDOW_BLOCK,
        sliding_window=reader.number("sliding_window"),
        head_size=reader.number("head_dim"),
        dtype="uint8",
        bytes_per_token=V4_VECTOR_BYTES,
        page_alignment_bytes=V4_ALIGNMENT,
    )
    layers: Layers = {}
    for layer, ratio in enumerate(ratios):
        source = _source(reader, ratios, layer)
        if source is not None:
            own = _own(reader, options, ratio) if source == layer else {}
            for kind in (MLA, INDEXER) if layer in indexed else (MLA,):
                shared = SharedKVSpec(f"layers.{source}.{kind}")
                layers[f"layers.{layer}.{kind}"] = own.get(kind, shared)
            if RING in own:
                layers[f"layers.{layer}.{RING}"] = own[RING]
        layers[f"layers.{layer}.{SLIDING_MLA}"] = window
    return layers


def _ratios(reader: ConfigReader) -> list[int]:
    ratios = reader.without_drafts(reader.listed("compress_ratios"))
    reader.check_layer_count("compress_ratios", len(ratios))
    if any(ratio not in (0, 1, 2) for ratio in ratios):
        raise reader.refusal("compress_ratios", "0, 1 and 2 are understood")
    return ratios


def _source(reader: ConfigReader, ratios: Sequence[int], layer: int) -> int | None:
    """Returns the layer whose latents a layer reads; None: it has a window alone."""
    if not ratios[layer]:
        return None
    sources = [s for s in reader.listed("kv_source_layer_ids") if s in range(layer + 1)]
    if not sources:
        raise reader.refusal("kv_source_layer_ids", f"no source for layer {layer}")
    if ratios[max(sources)] != ratios[layer]:
        raise reader.refusal("compress_ratios", f"layer {layer} and its source differ")
    return max(sources)


def _own(reader: ConfigReader, options: Options, ratio: int) -> Mapping[str, LayerSpec]:
    """Returns the caches of a source."""
    block = options.block_size or V4_BLOCK
    sizes = {"block_size": block, "compress_ratio": ratio, "page_alignment_bytes": V4_ALIGNMENT}
    latents = MLASpec(
        head_size=reader.number("head_dim"), dtype="uint8", bytes_per_token=V4_VECTOR_BYTES, **sizes
    )
    own: dict[str, LayerSpec] = {MLA: latents, INDEXER: index_keys(reader, options, **sizes)}
    return own if ratio == 1 else own | {RING: _ring(reader, options, ratio)}


# Embeddings of n-grams keep no cache.
ENGRAM = "engram_head_dim", "engram_compressed_vocab_size"


def _ring(reader: ConfigReader, options: Options, ratio: int) -> RingSpec:
    rows = options.speculative_tokens + 2
    return RingSpec(
        block_size=max(RING_ROWS, 1 << (rows - 1).bit_length()),
        group_size=ratio,
        head_size=2 * reader.number("head_dim"),
        dtype="float32",
    )
