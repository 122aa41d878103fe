"""The matrices of attention layers and of layers with a recurrent state. No jax."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix
from jaxkv._src.specs import FullAttentionSpec, StateSpec

HEADS = "num_attention_heads", "n_head", "n_heads", "num_heads"


def attention(
    fields: Fields, name: str, spec: FullAttentionSpec, *, layer: int, gate: bool, stores: bool
) -> Iterable[Matrix]:
    """Yields the query, key, value and output matrices of an attention layer.

    Args:
      fields: fields of the configuration.
      name: name of the layer.
      spec: spec of the layer's cache, or of the cache that it reads.
      layer: index of the layer.
      gate: whether the layer has a gate as large as its queries.
      stores: whether the layer computes keys and values; else it reads another layer's.
    """
    hidden, heads = fields.hidden, query_heads(fields, spec, layer)
    kv_heads = spec.num_kv_heads
    yield Matrix(f"{name}.q_proj", heads * spec.head_size * (1 + gate), hidden)
    if stores:
        yield Matrix(f"{name}.k_proj", kv_heads * spec.head_size, hidden, max_ranks=kv_heads)
    shares_values = fields.first("attention_k_eq_v") and spec.kind == "full"
    if stores and not shares_values:
        yield Matrix(f"{name}.v_proj", kv_heads * spec.value_size, hidden, max_ranks=kv_heads)
    yield Matrix(f"{name}.o_proj", hidden, heads * spec.value_size)
    if fields.first("use_head_wise_attn_gate"):  # Step 3.5
        yield Matrix(f"{name}.g_proj", heads, hidden)
    if rank := fields.number("d_rel", default=0):  # Inkling: relative positions
        yield Matrix(f"{name}.r_proj", rank * heads, hidden)
    if fields.model_type == "inkling2_text":
        yield Matrix(f"{name}.o_proj.gate_proj", heads * spec.value_size, hidden)
        yield Matrix(f"{name}.sink_proj", heads, hidden)


def query_heads(fields: Fields, spec: FullAttentionSpec, layer: int) -> int:
    """Returns the query heads of a layer, of which layers with a window may have others."""
    names: tuple[str, ...] = HEADS
    if spec.kind == "sliding":
        names = "num_sliding_attention_heads", "swa_num_attention_heads", *HEADS
        other = fields.first("attention_other_setting")
        if isinstance(other, Mapping):
            fields = Fields(fields.model_type, {**fields.values, **other})
    return fields.number(*names, layer=layer)


def latent_attention(
    fields: Fields, name: str, *, layer: int = 0, stores: bool = True
) -> Iterable[Matrix]:
    """Yields the matrices of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Args:
      fields: fields of the layer.
      name: name of the layer.
      layer: index of the layer.
      stores: whether the layer computes latents; else it reads another layer's.
    """
    hidden, heads = fields.hidden, fields.number(*HEADS)
    latent, rotary = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
    plain, value = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
    rotated = (fields.listed("no_rope_layers") or [1] * (layer + 1))[layer]  # Mistral-Large-4
    plain, rotary = (plain, rotary) if rotated else (plain + rotary, 0)
    rank, query = fields.number("q_lora_rank", default=0), heads * (plain + rotary)
    if rank:
        yield Matrix(f"{name}.q_a_proj", rank, hidden, max_ranks=WHOLE)
    if fields.model_type == "axk2":
        yield Matrix(f"{name}.q_gate_proj", query + heads * value, 2 * rank)
    else:
        yield Matrix(f"{name}.q_b_proj" if rank else f"{name}.q_proj", query, rank or hidden)
    if stores:
        yield Matrix(f"{name}.kv_a_proj_with_mqa", latent + rotary, hidden, max_ranks=WHOLE)
    yield Matrix(f"{name}.kv_b_proj", heads * (plain + value), latent)
    yield Matrix(f"{name}.o_proj", hidden, heads * value)
    yield from _output_gate(fields, name, heads, value)


def _output_gate(fields: Fields, name: str, heads: int, value: int) -> Iterable[Matrix]:
    """Yields the gate of the output of latent attention: of a head, of an element, or none."""
    gate = fields.first(
        "gated_attention_proj_granularity_type", "attention_gate_type", "gating_type"
    )
    if fields.first("mla_use_output_gate"):  # Kimi-K3
        gate = "elementwise"
    elif fields.model_type.startswith("hy_v4"):
        gate = "" if fields.first("gated_mla") is False else gate or "elementwise"
    elif fields.model_type == "dots3_note_text":
        gate = gate or "headwise"
    gate = str(gate or "").replace("_", "")
    if gate in ("headwise", "elementwise"):
        yield Matrix(
            f"{name}.g_proj", heads * (value if gate == "elementwise" else 1), fields.hidden
        )


def indexer(fields: Fields, name: str) -> Iterable[Matrix]:
    """Yields the matrices that pick tokens for attention (DeepSeek-V3.2)."""
    sparse = fields.first("sparse_attention_config")
    of_m3 = Fields(fields.model_type, sparse if isinstance(sparse, Mapping) else {})
    default = of_m3.number("sparse_num_index_heads", default=0)
    heads = fields.number("index_n_heads", "indexer_n_heads", default=default)
    default = of_m3.number("sparse_index_dim", default=0)
    width = fields.number("index_head_dim", "indexer_head_dim", default=default)
    rank, hidden = fields.number("q_lora_rank", default=0) or fields.hidden, fields.hidden
    whole = functools.partial(Matrix, max_ranks=WHOLE)
    yield whole(f"{name}.indexer.wq_b", heads * width, rank)
    yield whole(f"{name}.indexer.wk", width, hidden)
    if fields.first("index_kpool"):  # GLM-5.3-Flash: a gate of keys that share one
        yield whole(f"{name}.indexer.index_kpool_compress_gate", width, hidden, "other")
    without = fields.first("indexer_n_heads") or fields.model_type.startswith("minimax_m3")
    if not without:  # Qwen3.8 and MiniMax-M3 do not weigh heads
        yield whole(f"{name}.indexer.weights_proj", heads, hidden, "other")


def deepseek_v4(fields: Fields, name: str, ratio: int) -> Iterable[Matrix]:
    """Yields the attention matrices of a DeepSeek-V4 layer with ``ratio`` tokens per vector."""
    hidden, heads = fields.hidden, fields.number(*HEADS)
    width, rank = fields.number("head_dim"), fields.number("q_lora_rank")
    groups, low = fields.number("o_groups", least=1), fields.number("o_lora_rank")
    yield Matrix(f"{name}.q_a_proj", rank, hidden, max_ranks=WHOLE)
    yield Matrix(f"{name}.q_b_proj", heads * width, rank)
    yield Matrix(f"{name}.kv_proj", width, hidden, max_ranks=WHOLE)
    yield Matrix(f"{name}.o_a_proj", groups * low, heads * width // groups)
    yield Matrix(f"{name}.o_b_proj", hidden, groups * low)
    if not ratio:
        return
    overlap = 2 if ratio == 4 else 1
    whole = functools.partial(Matrix, max_ranks=WHOLE)
    yield whole(f"{name}.compressor", 2 * overlap * width, hidden, "other")
    if ratio == 4:
        key, index_heads = fields.number("index_head_dim"), fields.number("index_n_heads")
        yield whole(f"{name}.indexer.compressor", 2 * overlap * key, hidden, "other")
        yield whole(f"{name}.indexer.wq_b", index_heads * key, rank)
        yield whole(f"{name}.indexer.weights_proj", index_heads, hidden, "other")


def deepseek_v41(
    fields: Fields, name: str, caches: Mapping[str, tuple[Any, bool]], layer: int
) -> Iterable[Matrix]:
    """Yields the attention matrices of a DeepSeek-V4.1 layer, and its embeddings of n-grams."""
    yield from deepseek_v4(fields, name, 0)
    hidden, width = fields.hidden, fields.number("head_dim")
    whole = functools.partial(Matrix, max_ranks=WHOLE)
    if "mla" in caches and caches["mla"][1]:
        ratio = caches["mla"][0].compress_ratio
        yield whole(f"{name}.compressor", (2 if ratio > 1 else 1) * width, hidden, "other")
    if "indexer" in caches:
        key, heads = fields.number("index_head_dim"), fields.number("index_n_heads")
        yield whole(f"{name}.indexer.wq_b", heads * key, fields.number("q_lora_rank"))
        yield whole(f"{name}.indexer.weights_proj", heads, hidden, "other")
        if caches["indexer"][1]:
            yield whole(f"{name}.indexer.wk", key, width, "other")
    layers = list(fields.listed("engram_layer_ids") or ())
    if layer in layers:
        size, heads = fields.number("engram_head_dim"), fields.number("engram_n_heads")
        rows = fields.number("engram_num_embeddings", layer=layers.index(layer))
        yield Matrix(f"{name}.engram", rows, size, "table")
        columns = heads * (fields.number("engram_max_ngram_size") - 1)
        streams = fields.number("hc_mult", default=1) + 1
        yield Matrix(f"{name}.engram.wkv", streams * hidden, columns * size)


def mamba1(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of a mamba1 layer (arXiv 2312.00752)."""
    (rows, inner), (_, size) = spec.shapes
    rank = fields.first("mamba_dt_rank", "time_step_rank")
    rank = rank if isinstance(rank, int) else -(-fields.hidden // 16)
    yield Matrix(f"{name}.in_proj", 2 * inner, fields.hidden)
    yield Matrix(f"{name}.x_proj", rank + 2 * size, inner)
    yield Matrix(f"{name}.dt_proj", inner, rank)
    yield Matrix(f"{name}.out_proj", fields.hidden, inner)
    yield Matrix(f"{name}.conv1d", inner, rows + 1, "other")
    yield Matrix(f"{name}.A_log", inner, size, "other")


def mamba2(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of a mamba2 layer (arXiv 2405.21060)."""
    (rows, channels), (heads, width, size) = spec.shapes
    inner = heads * width
    of_groups = channels - inner  # B and C; a rank has a group of them at least
    groups = max(of_groups // (2 * size), 1)
    yield Matrix(f"{name}.in_proj", 2 * inner + heads, fields.hidden)
    yield Matrix(f"{name}.in_proj", of_groups, fields.hidden, max_ranks=groups)
    yield Matrix(f"{name}.out_proj", fields.hidden, inner)
    yield Matrix(f"{name}.conv1d", inner, rows + 1, "other")
    yield Matrix(f"{name}.conv1d", of_groups, rows + 1, "other", max_ranks=groups)


def gated_delta_net(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of a gated delta net (arXiv 2412.06464), output gate included."""
    (rows, channels), (heads, width, _) = spec.shapes
    yield Matrix(f"{name}.in_proj_qkvz", channels + heads * width, fields.hidden)
    yield Matrix(f"{name}.in_proj_ba", 2 * heads, fields.hidden)
    yield Matrix(f"{name}.out_proj", fields.hidden, heads * width)
    yield Matrix(f"{name}.conv1d", channels, rows + 1, "other")


def kimi_delta(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of Kimi delta attention (arXiv 2510.26692)."""
    (rows, channels), (heads, width, _) = spec.shapes
    yield Matrix(f"{name}.qkv_proj", channels, fields.hidden)
    yield Matrix(f"{name}.b_proj", heads, fields.hidden)
    linear = fields.first("linear_attn_config")
    whole = "g" if isinstance(linear, Mapping) and linear.get("use_full_rank_gate") else ""
    whole = "fg" if fields.model_type == "bailing_hybrid" else whole
    for gate in "fg":
        if gate in whole:
            yield Matrix(f"{name}.{gate}_proj", heads * width, fields.hidden)
        else:  # of low rank
            yield Matrix(f"{name}.{gate}_a_proj", width, fields.hidden, max_ranks=WHOLE)
            yield Matrix(f"{name}.{gate}_b_proj", heads * width, width)
    yield Matrix(f"{name}.o_proj", fields.hidden, heads * width)
    yield Matrix(f"{name}.conv1d", channels, rows + 1, "other")


def lightning(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of MiniMax's linear attention, output gate included."""
    ((heads, width, _),) = spec.shapes
    for matrix in ("q_proj", "k_proj", "v_proj", "output_gate"):
        yield Matrix(f"{name}.{matrix}", heads * width, fields.hidden)
    yield Matrix(f"{name}.out_proj", fields.hidden, heads * width)


def bailing(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of Ling 2.5's lightning attention, or of Ling 3's delta attention."""
    mixer = lightning if len(spec.shapes) == 1 else kimi_delta
    return mixer(fields, name, spec)


def short_convolution(fields: Fields, name: str, spec: StateSpec) -> Iterable[Matrix]:
    """Yields the matrices of an LFM2 convolution."""
    yield Matrix(f"{name}.in_proj", 3 * fields.hidden, fields.hidden)
    yield Matrix(f"{name}.out_proj", fields.hidden, fields.hidden)
    yield Matrix(f"{name}.conv", fields.hidden, spec.shapes[0][0] + 1, "other")


def _of_windows(fields: Fields) -> Fields:
    """Returns the fields of dots3's layers with a window, by their usual names."""
    own = {n.removeprefix("swa_"): v for n, v in fields.values.items() if n.startswith("swa_")}
    if not own and not fields.values.get("per_layer_config"):
        own = DOTS3_WINDOWS
    fields.read.update(f"swa_{name}" for name in own)
    if "head_dim" in own and "qk_rope_head_dim" not in own:
        own = {"qk_nope_head_dim": DOTS3_WINDOWS["qk_nope_head_dim"], **own}
        own["qk_rope_head_dim"] = own["head_dim"] - own["qk_nope_head_dim"]
    return dataclasses.replace(fields, values={**fields.values, **own})


DOTS3_WINDOWS = {
    **{"num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "v_head_dim": 128},
    **{"qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
}


def ngrams(fields: Fields, name: str) -> Iterable[Matrix]:
    """Yields the embeddings of n-grams of a layer of Qwen3.8-Flash-Next."""
    hidden, streams = fields.hidden, fields.number("hc_count", default=4)
    width = fields.number("ple_embed_dim", default=hidden)
    tables = fields.number("heads_per_ngram", default=8) * (
        fields.number("ngram_size", default=3) - 1
    )
    rows = fields.number("ngram_vocab_size_base", default=20_000_000)
    yield Matrix(f"{name}.ngram_embedding", tables * rows, width // tables, "other")
    yield Matrix(f"{name}.key_proj", streams * hidden, width)
    yield Matrix(f"{name}.value_proj", hidden, width)


States = Callable[[Fields, str, StateSpec], Iterable[Matrix]]


def mixers(
    fields: Fields,
    layer: int,
    caches: dict[str, tuple[Any, bool]],
    *,
    states: States | None,
    gate: bool,
) -> Iterable[Matrix]:
    """Yields the matrices of a layer's attention or recurrence, by the caches that it has.

    Args:
      fields: fields of the configuration.
      layer: index of the layer.
      caches: kind -> the spec of the cache, and whether it is the layer's own.
      states: yields the matrices of a layer with a recurrent state.
      gate: as for `attention`.

    Raises:
      ValueError: a cache whose layer has matrices that are not understood.
    """
    name = f"layers.{layer}.self_attn"
    if fields.model_type == "deepseek_v41_text":
        yield from deepseek_v41(fields, name, caches, layer)
        return
    if fields.model_type == "dots3_note_text" and "sliding_mla" in caches:
        yield from latent_attention(_of_windows(fields), name)
        return
    if "sliding_mla" in caches:  # every layer of DeepSeek-V4 has one, next to its other caches
        ratio = caches["mla"][0].compress_ratio if "mla" in caches else 0
        yield from deepseek_v4(fields, name, ratio)
        return
    for kind, (spec, own) in caches.items():
        if kind == "mla":
            yield from latent_attention(fields, name, layer=layer, stores=own)
        elif kind == "indexer":
            yield from indexer(fields, name)
        elif kind in ("indexer_ring", "short_convolution") and not states:
            pass  # GLM's and Inkling's: less than a thousandth, or counted with the indexer
        elif kind == "embedding_convolution":
            yield from ngrams(fields, f"layers.{layer}.ple")
        elif kind == "indexer_ring":
            pass
        elif isinstance(spec, FullAttentionSpec):
            yield from attention(fields, name, spec, layer=layer, gate=gate, stores=own)
        elif states:
            named = "self_attn" if fields.model_type == "kimi_linear" else "mixer"
            yield from states(fields, f"layers.{layer}.{named}", spec)
        else:
            raise ValueError(
                f"the weights of a {kind} layer of model_type={fields.model_type!r} are not "
                "understood"
            )
