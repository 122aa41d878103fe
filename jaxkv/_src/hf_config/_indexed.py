"""Families whose attention reads the tokens that an indexer chooses by keys of its own. No jax.

Each source is the module of vLLM 0.33 that holds the cache, or of transformers 5.24 where vLLM has
no such model. Rows and keys are of the model's dtype unless ``kv_dtype`` says otherwise.
"""

import dataclasses
import math

from jaxkv._src.hf_config._build import (
    ATTENTION_BLOCK,
    FULL,
    LINEAR,
    MLA,
    MLA_BLOCK,
    Layers,
    Options,
    full_attention,
    latent_attention,
    name_layers,
    state,
)
from jaxkv._src.hf_config._linear import CONV, delta_attention, qwen3_next_state
from jaxkv._src.hf_config._mla import (
    INDEXER,
    SLIDING_MLA,
    index_keys,
    latent_vectors,
    own_indexers,
)
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.specs import (
    LayerSpec,
    MLASpec,
    RingSpec,
    SharedKVSpec,
    SlidingWindowMLASpec,
)

INDEXED, RING, PLE = "indexed_attention", "indexer_ring", "embedding_convolution"
SPARSE_NAMES = INDEXED, "deepseek_sparse_attention", "sparse_attention", "sparse"


def minimax_m3(reader: ConfigReader, options: Options) -> Layers:
    """MiniMax-M3: grouped queries; a sparse layer keeps an index key per token.

    vllm/models/minimax_m3/common/indexer.py. Index keys have the model's dtype.
    ``sparse_attention_freq`` in ``sparse_attention_config`` has 1 for a sparse layer, or
    ``layer_types`` names them.
    """
    count = reader.layer_count()
    width, flags = reader.value("index_head_dim"), None
    reader.ignore("index_n_heads", "index_block_size", "index_topk_blocks", "index_local_blocks")
    if reader.value("sparse_attention_config") is not None:
        sparse = reader.inner("sparse_attention_config")
        width = sparse.value("sparse_index_dim", width)
        if sparse.expect("use_sparse_attention", True, False) is not False:
            flags = sparse.listed("sparse_attention_freq")
        else:
            flags = [0] * count
        sparse.check_all_read()
    elif reader.value("layer_types") is None:
        raise reader.lacks("sparse_attention_config")
    flagged = None if flags is None else ["minimax_m3_sparse" if flag else FULL for flag in flags]
    kinds = reader.layer_kinds({FULL: FULL, "minimax_m3_sparse": INDEXER}, flagged)
    if flagged is not None and [kind == INDEXER for kind in kinds] != [
        bool(flag) for flag in reader.without_drafts(flags or [])
    ]:
        raise reader.refusal("layer_types", "it contradicts sparse_attention_freq")
    specs: dict[str, LayerSpec] = {FULL: full_attention(reader, options)}
    if INDEXER in kinds:
        specs[INDEXER] = MLASpec(
            block_size=options.block_size or ATTENTION_BLOCK,
            head_size=width or reader.number("index_head_dim"),
            dtype=reader.dtype(),
        )
    return name_layers([(FULL, INDEXER) if k == INDEXER else (FULL,) for k in kinds], specs)


def indexed_latents(reader: ConfigReader, options: Options) -> Layers:
    """Hy4, A.X-K2 and Mistral-Large-4: latent attention over the tokens that an indexer picks.

    vllm/models/hy_v4/nvidia/attention.py; modeling_axk2.py and modeling_mistral_large4.py. An index
    key is fp8 with a scale, 132 bytes; ``kv_dtype="fp8"`` packs latents into 656 bytes.
    ``kv_source_layers`` has, per layer, the one whose latents it reads.
    """
    count = reader.layer_count()
    known = dict.fromkeys(SPARSE_NAMES, INDEXER) | {FULL: MLA}
    kinds = reader.layer_kinds(known, [INDEXED] * count)
    reader.ignore("no_rope_layers", "no_rope_layer_interval")
    if reader.model_type.startswith("hy_v4"):
        default = ["shared" if (i - 1) % 4 and i else "full" for i in range(count)]
        types = {"full": INDEXER, "shared": MLA}
        own = [t == INDEXER for t in reader.layer_kinds(types, default, field="indexer_types")]
    else:
        own = own_indexers(reader)
    pairs = zip(own, kinds, strict=True)
    layers = [(MLA, INDEXER) if has and kind == INDEXER else (MLA,) for has, kind in pairs]
    specs = {MLA: latent_vectors(reader, options, "bfloat16"), INDEXER: index_keys(reader, options)}
    return name_layers(layers, specs) | _of_sources(reader)


def _of_sources(reader: ConfigReader) -> dict[str, SharedKVSpec]:
    """Returns the layers that read the latents of an earlier one."""
    count = reader.layer_count()
    sources = reader.listed("kv_source_layers", list(range(count)))
    reader.check_layer_count("kv_source_layers", len(sources))
    shared: dict[str, SharedKVSpec] = {}
    for layer, source in enumerate(sources):
        is_known = isinstance(source, int) and 0 <= source <= layer
        if not is_known or sources[source] != source:
            raise reader.refusal(
                "kv_source_layers", "each source must own its cache, and be earlier"
            )
        if source != layer:
            shared[f"layers.{layer}.{MLA}"] = SharedKVSpec(f"layers.{source}.{MLA}")
    return shared


def glm5_next(reader: ConfigReader, options: Options) -> Layers:
    """GLM-5.3-Flash: Kimi delta attention, and indexed latents without a rotary part.

    vllm/models/glm5next/common/attention.py. An index key is of ``index_kpool`` tokens; a ring
    keeps the raw keys and gates of the pool that is not whole: as many pools as hold it and the
    drafts, rounded up to a power of two.
    """
    count = reader.layer_count()
    default = [INDEXED if i % 4 == 3 else LINEAR for i in range(count)]
    kinds = reader.layer_kinds({FULL: MLA, INDEXED: MLA, LINEAR: LINEAR}, default)
    if reader.value("linear_attn_config") is not None:
        linear = reader.inner("linear_attn_config")
        reader.default(
            linear_num_heads=linear.value("num_heads"),
            linear_head_dim=linear.value("head_dim"),
            linear_conv_kernel_dim=linear.value("short_conv_kernel_size"),
        )
        linear.ignore("full_attn_layers", "kda_layers")
        linear.check_all_read()
    reader.ignore("linear_lower_bound", "index_kpool_always_select_tail")
    pool, width = reader.number("index_kpool"), reader.number("index_head_dim")
    block = math.lcm(options.block_size or MLA_BLOCK, pool)
    rows = pool + options.speculative_tokens
    ring = pool * (1 << (cdiv(rows, pool) - 1).bit_length())
    specs: dict[str, LayerSpec] = {
        MLA: dataclasses.replace(latent_vectors(reader, options, "bfloat16"), block_size=block),
        INDEXER: index_keys(reader, options, block_size=block, compress_ratio=pool),
        RING: RingSpec(block_size=ring, group_size=pool, head_size=2 * width, dtype="bfloat16"),
        LINEAR: delta_attention(reader, options, "linear_num_heads", "linear_head_dim", CONV),
    }
    indexed = (MLA, INDEXER) if pool == 1 else (MLA, INDEXER, RING)
    own = own_indexers(reader)
    layers = [
        (LINEAR,) if kind == LINEAR else (indexed if own[i] else (MLA,))
        for i, kind in enumerate(kinds)
    ]
    return name_layers(layers, specs)


def dots3(reader: ConfigReader, options: Options) -> Layers:
    """dots3-note: indexed latents, stored as wide as those of the layers with a window.

    vllm/models/dots3_note/nvidia/model.py. The wider rows are vLLM's own, for pages of one size.
    """
    count = reader.layer_count()
    reader.expect("use_dsa", True)
    default = ["sliding_attention" if i > 1 and i % 4 != 1 else INDEXED for i in range(count)]
    if reader.expect("use_sliding_window", True, False) is False:
        default = [INDEXED] * count
    known = {FULL: MLA, INDEXED: MLA, "sliding_attention": SLIDING_MLA}
    kinds = reader.layer_kinds(known, default)
    own = latent_attention(reader, options)
    windowed = [i for i, kind in enumerate(kinds) if kind == SLIDING_MLA]
    specs: dict[str, LayerSpec] = {MLA: own, INDEXER: index_keys(reader, options)}
    if windowed:
        latent, rotary = _dots3_window(reader, windowed)
        specs[SLIDING_MLA] = wide = SlidingWindowMLASpec(
            block_size=own.block_size,
            head_size=latent + rotary,
            value_size=latent,
            dtype=own.dtype,
            sliding_window=reader.number("sliding_window", "sliding_window_size", default=512),
        )
        if wide.token_bytes > own.token_bytes:
            specs[MLA] = dataclasses.replace(own, bytes_per_token=wide.token_bytes)
    reader.ignore("sliding_window", "sliding_window_size", *DOTS3_QUERIES)
    return name_layers([(k,) if k == SLIDING_MLA else (MLA, INDEXER) for k in kinds], specs)


DOTS3_QUERIES = tuple(
    f"swa_{name}"
    for name in "num_key_value_heads qk_nope_head_dim v_head_dim head_dim q_lora_rank".split()
)


def _dots3_window(reader: ConfigReader, layers: list[int]) -> tuple[int, int]:
    """Returns the latent and the rotary width of layers with a window, which must agree."""
    if not reader.value("per_layer_config"):
        nope = reader.number("swa_qk_nope_head_dim", default=192)
        rotary = reader.number("swa_head_dim", default=256) - nope
        return (
            reader.number("swa_kv_lora_rank", default=1024),
            reader.number("swa_qk_rope_head_dim", default=rotary),
        )
    at = [reader.at_layer(i) for i in layers]
    widths = {(one.number("kv_lora_rank"), one.number("qk_rope_head_dim")) for one in at}
    if len(widths) > 1:
        raise reader.refusal("per_layer_config", "layers with a window must have one width")
    return next(iter(widths))


def qwen4_exp(reader: ConfigReader, options: Options) -> Layers:
    """Qwen3.8-Flash-Next: gated delta nets, attention over indexed tokens, embeddings of n-grams.

    vllm/models/qwen4_exp/common/qsa_cache.py, nvidia/model.py. An index key is of
    ``indexer_compress_ratio`` tokens; a ring keeps the raw keys of the group that is not whole,
    with the positions of images' tokens where a model has them. A layer of ``ple_layer_ids``, which
    begin at 1, keeps the inputs of a dilated convolution over all residual streams, whole on every
    rank.
    """
    count = reader.layer_count()
    interval = reader.number("full_attention_interval", default=4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    kinds = reader.layer_kinds({FULL: FULL, INDEXED: FULL, LINEAR: LINEAR}, default)
    reader.ignore("indexer_n_heads", "indexer_budget", "ple_embed_dim", "number_of_conv_states")
    reader.ignore("indexer_kv_heads", "indexer_compress_ratio", "ple_conv_kernel_size")
    attention = full_attention(reader, options)
    specs: dict[str, LayerSpec] = {FULL: attention, LINEAR: qwen3_next_state(reader, options)}
    full: tuple[str, ...] = (FULL,)
    if reader.value("indexer_head_dim") is not None:
        reader.expect("indexer_kv_heads", 1)
        ratio, width = reader.number("indexer_compress_ratio"), reader.number("indexer_head_dim")
        full = (FULL, INDEXER, RING)
        block = math.lcm(attention.block_size, ratio)
        specs[FULL] = dataclasses.replace(attention, block_size=block)
        specs[INDEXER] = MLASpec(
            block_size=block, head_size=width, dtype=reader.dtype(), compress_ratio=ratio
        )
        specs[RING] = RingSpec(
            block_size=cdiv(ratio + options.speculative_tokens, ratio) * ratio,
            group_size=ratio,
            head_size=cdiv(width, 4) * 4 + 12 if _has_mrope(reader) else width,
            dtype=reader.dtype(),
        )
    layers = [[LINEAR] if kind == LINEAR else [*full] for kind in kinds]
    numbers = reader.listed("ple_layer_ids", [])
    if any(not isinstance(number, int) or not 0 < number <= count for number in numbers):
        raise reader.refusal("ple_layer_ids", f"it must hold numbers of layers, 1 to {count}")
    if numbers:
        rows = (reader.number("ple_conv_kernel_size", default=4) - 1) * reader.number(
            "ngram_size", default=3
        )
        width = reader.number("hc_count", default=4) * reader.number("hidden_size")
        shapes = ((rows + options.speculative_tokens, width),)
        specs[PLE] = state(shapes, (reader.dtype(),), options)
    for number in set(numbers):
        layers[number - 1].append(PLE)
    return name_layers(layers, specs)


def _has_mrope(reader: ConfigReader) -> bool:
    """Returns whether tokens have a position for each axis of an image."""
    rope = reader.value("rope_parameters", reader.value("rope_scaling", {}))
    return isinstance(rope, dict) and rope.get("mrope_section") is not None
