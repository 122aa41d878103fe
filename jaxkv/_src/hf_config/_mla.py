"""Families with multi-head latent attention, indexers and compressors. No jax."""

import dataclasses
from collections.abc import Mapping

from jaxkv._src.hf_config._build import (
    MLA,
    MLA_BLOCK,
    Layers,
    Options,
    latent_attention,
    name_layers,
)
from jaxkv._src.hf_config._dense import dense
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import MLASpec, SlidingWindowMLASpec, canonical_dtype

INDEXER, SLIDING_MLA = "indexer", "sliding_mla"
COMPRESSOR, INDEXER_COMPRESSOR = "compressor_state", "indexer_compressor_state"
FP8 = "float8_e4m3fn"

SCALE_GROUP, SCALE_BYTES = 128, 4  # fp8 elements that share one float32 scale
V4_BLOCK, V4_WINDOW_BLOCK = 256, 64
V4_VECTOR_BYTES = 584  # 448 fp8, 64 bf16 of rotary part, 7 one-byte scales and a pad
V4_ALIGNMENT = 576
V4_STATE_BLOCKS = {4: 4, 128: 8}  # compress ratio -> tokens per block of compressor state
V4_KINDS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def deepseek_v3(reader: ConfigReader, options: Options) -> Layers:
    """DeepSeek-V3: latent attention in every layer; draft (MTP) layers are not included."""
    count = reader.layer_count()
    return name_layers([(MLA,)] * count, {MLA: latent_attention(reader, options)})


def deepseek_v2(reader: ConfigReader, options: Options) -> Layers:
    """DeepSeek-V2: latent attention, or full attention if ``use_mla`` is false (VL2-tiny, OCR)."""
    if reader.expect("use_mla", True, False) is not False:
        return deepseek_v3(reader, options)
    reader.ignore("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return dense(reader, options)


def longcat(reader: ConfigReader, options: Options) -> Layers:
    """LongCat-Flash and 2.0: each of ``num_layers`` layers attends twice, with a cache for each.

    Sparse attention (``attention_method`` "LSA") has an index at every ``cli_factor``-th of these,
    as in configs/model_config.py of SGLang 0.5.23.
    """
    count = 2 * reader.layer_count("num_layers")
    reader.expect("num_hidden_layers", count, count // 2)
    is_sparse = reader.value("attention_method") == "LSA"
    if not is_sparse and reader.value("index_head_dim") is None:
        return name_layers([(MLA,)] * count, {MLA: latent_attention(reader, options)})
    reader.expect("use_mla", True)
    reader.ignore("index_local_tokens", "index_init_tokens", "index_k_norm_type")
    every = reader.number("cli_factor")
    layers = [(MLA,) if i % every else (MLA, INDEXER) for i in range(count)]
    specs = {MLA: latent_vectors(reader, options, "bfloat16"), INDEXER: index_keys(reader, options)}
    return name_layers(layers, specs)


def deepseek_v32(reader: ConfigReader, options: Options) -> Layers:
    """DeepSeek-V3.2 and GLM-5: latent attention over the tokens that an indexer picks.

    A vector has fp8 latents with a float32 scale for every 128 and a bf16 rotary part,
    ``512 + 16 + 128 = 656`` bytes, unless ``kv_dtype`` is bfloat16. An indexer key is fp8 with a
    scale, ``128 + 4 = 132`` bytes.
    """
    count = reader.layer_count()
    reader.layer_kinds({"indexed_attention": MLA}, ["indexed_attention"] * count)
    layers = [(MLA, INDEXER) if own else (MLA,) for own in own_indexers(reader)]
    specs = {MLA: latent_vectors(reader, options, FP8), INDEXER: index_keys(reader, options)}
    return name_layers(layers, specs)


def own_indexers(reader: ConfigReader) -> list[bool]:
    """Returns, per layer, whether it has an indexer; the others reuse an earlier one's picks.

    ``indexer_types`` has an entry per layer, ``index_topk_pattern`` a letter per layer, and
    ``index_topk_freq`` is a period that begins at ``index_skip_topk_offset``.
    """
    count = reader.layer_count()
    period = reader.number("index_topk_freq", default=1)
    offset = reader.count("index_skip_topk_offset", 2)
    own = [max(i - offset + 1, 0) % period == 0 for i in range(count)]
    decided = "index_topk_freq" if period > 1 else None
    if reader.value("index_topk_pattern") is not None:
        letters = reader.letters("index_topk_pattern", {"F": INDEXER, "S": MLA})
        own, decided = [kind == INDEXER for kind in letters], "index_topk_pattern"
    if reader.value("indexer_types") is None:
        return own
    kinds = reader.layer_kinds({"full": INDEXER, "shared": MLA}, field="indexer_types")
    if decided and own != [kind == INDEXER for kind in kinds]:
        raise reader.refusal(decided, "it contradicts indexer_types")
    return [kind == INDEXER for kind in kinds]


def latent_vectors(reader: ConfigReader, options: Options, default: str) -> MLASpec:
    """Returns the spec of latents: plain ones in bfloat16, packed ones in fp8.

    Args:
      default: dtype where ``kv_dtype`` is not given.
    """
    asked = canonical_dtype(options.kv_dtype or default)
    if asked == "bfloat16":
        return latent_attention(reader, options)
    check_fp8(reader, options)
    latent, rotary = reader.number("kv_lora_rank"), reader.count("qk_rope_head_dim")
    row = latent + _scale_bytes(latent) + 2 * rotary
    plain = latent_attention(reader, dataclasses.replace(options, kv_dtype="uint8"))
    return dataclasses.replace(plain, bytes_per_token=row)


def index_keys(reader: ConfigReader, options: Options, **changes: int) -> MLASpec:
    reader.ignore("index_topk", "index_n_heads")
    width = reader.number("index_head_dim")
    return MLASpec(
        head_size=width,
        dtype="uint8",
        bytes_per_token=width + _scale_bytes(width),
        **{"block_size": options.block_size or MLA_BLOCK} | changes,
    )


def _scale_bytes(elements: int) -> int:
    return -(-elements // SCALE_GROUP) * SCALE_BYTES


def check_fp8(reader: ConfigReader, options: Options) -> None:
    """Raises ValueError for another dtype of keys than fp8."""
    if canonical_dtype(options.kv_dtype or FP8) != FP8:
        raise ValueError(
            f"kv_dtype={options.kv_dtype!r} is not understood for "
            f"model_type={reader.model_type!r}, which stores fp8; use fp8_e4m3 or leave it out"
        )


def deepseek_v4(reader: ConfigReader, options: Options) -> Layers:
    """DeepSeek-V4: a window of 128 tokens in every layer, and compressed vectors in most.

    ``compress_ratios`` has, per layer, the tokens that share a vector: 4 (with an indexer), 128, or
    0 for a layer without such vectors. Pages are multiples of 576 bytes. A compressor keeps float32
    keys and weights of the tokens that it has not folded yet: ``2 * width`` values per token, and
    twice as many at ratio 4, because its windows overlap.
    """
    check_fp8(reader, options)
    reader.ignore("num_key_value_heads", "qk_rope_head_dim")
    check_v4_widths(reader)
    by_ratio = {ratio: _v4_layer(reader, options, ratio) for ratio in (0, 4, 128)}
    layers: Layers = {}
    for i, ratio in enumerate(_v4_ratios(reader)):
        layers |= {f"layers.{i}.{kind}": spec for kind, spec in by_ratio[ratio].items()}
    return layers


def check_v4_widths(reader: ConfigReader) -> None:
    """Raises ValueError unless vectors have the widths that their bytes are for."""
    if reader.number("head_dim") != 512 or reader.value("qk_rope_head_dim", 64) != 64:
        name = "head_dim" if reader.number("head_dim") != 512 else "qk_rope_head_dim"
        raise reader.refusal(
            name, f"vectors of {V4_VECTOR_BYTES} bytes are 512 wide, 64 of it rotary"
        )


def _v4_ratios(reader: ConfigReader) -> list[int]:
    if reader.value("compress_ratios") is None:
        reader.expect("compress_rates", {k: v for k, v in V4_KINDS.items() if v})
        kinds = reader.layer_kinds({kind: kind for kind in V4_KINDS})
        return [V4_KINDS[kind] for kind in kinds]
    ratios = reader.without_drafts(reader.listed("compress_ratios"))
    reader.check_layer_count("compress_ratios", len(ratios))
    if any(ratio not in V4_KINDS.values() for ratio in ratios):
        raise reader.refusal("compress_ratios", "0, 4 and 128 are understood")
    return ratios


def _v4_layer(reader: ConfigReader, options: Options, ratio: int) -> Mapping[str, MLASpec]:
    """Returns the caches of one layer, in the order of their use."""
    rows = {"head_size": reader.number("head_dim"), "dtype": "uint8"}
    aligned = {"page_alignment_bytes": V4_ALIGNMENT}
    window = SlidingWindowMLASpec(
        block_size=V4_WINDOW_BLOCK,
        sliding_window=reader.number("sliding_window"),
        bytes_per_token=V4_VECTOR_BYTES,
        **rows,
        **aligned,
    )
    if not ratio:
        return {SLIDING_MLA: window}
    shape = {"block_size": options.block_size or V4_BLOCK, "compress_ratio": ratio}
    main = MLASpec(bytes_per_token=V4_VECTOR_BYTES, **shape, **rows, **aligned)
    layer = {MLA: main, COMPRESSOR: _compressor(reader.number("head_dim"), ratio)}
    if ratio == 4:
        layer[INDEXER] = index_keys(reader, options, **shape, **aligned)
        layer[INDEXER_COMPRESSOR] = _compressor(reader.number("index_head_dim"), ratio)
    return layer | {SLIDING_MLA: window}


def _compressor(width: int, ratio: int) -> SlidingWindowMLASpec:
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=V4_STATE_BLOCKS[ratio],
        sliding_window=overlap * ratio,
        head_size=2 * overlap * width,
        dtype="float32",
        page_alignment_bytes=V4_ALIGNMENT,
    )
