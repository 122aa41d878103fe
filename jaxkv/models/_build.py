"""What families have in common: options of an import, specs from usual fields, names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.groups import hybrid_block_size
from jaxkv.models._reader import ConfigReader
from jaxkv.specs import (
    ChunkedAttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    SharedKVSpec,
    SlidingWindowSpec,
    StateSpec,
    heads_per_rank,
)

ImportedSpec = LayerSpec | SharedKVSpec | EncoderOnlySpec
Layers = dict[str, ImportedSpec]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
MAMBA, LINEAR, MLA = "mamba", "linear_attention", "mla"
ATTENTION_BLOCK, MLA_BLOCK = 16, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `layers_from_config`."""

    kv_dtype: str | None = None
    block_size: int | None = None
    tensor_parallel: int = 1
    state_cache_mode: str = "none"
    speculative_tokens: int = 0


def name_layers(layers: Sequence[Sequence[str]], specs: Mapping[str, LayerSpec]) -> Layers:
    """``layers.3.full_attention`` and so on, for the caches of every layer."""
    return {f"layers.{i}.{kind}": specs[kind] for i, kinds in enumerate(layers) for kind in kinds}


def head_size(reader: ConfigReader) -> int:
    """``head_dim``, or hidden size over heads where the family leaves it out."""
    if reader.value("head_dim") is not None:
        return reader.number("head_dim")
    return reader.per_head("hidden_size", "num_attention_heads")


def full_attention(
    reader: ConfigReader, options: Options, *, heads: int | None = None, width: int | None = None
) -> FullAttentionSpec:
    """Keys and values by the usual fields; ``heads`` (of all ranks) and ``width`` override."""
    heads = heads or reader.number("num_key_value_heads")
    return FullAttentionSpec(
        block_size=options.block_size or ATTENTION_BLOCK,
        num_kv_heads=heads_per_rank(heads, options.tensor_parallel),
        head_size=width or reader.number("head_dim"),
        dtype=reader.kv_dtype(options.kv_dtype),
    )


def sliding(full: FullAttentionSpec, window: int) -> SlidingWindowSpec:
    """The same keys and values of the last ``window`` tokens."""
    return SlidingWindowSpec(**_fields(full), sliding_window=window)


def chunked(full: FullAttentionSpec, chunk_size: int) -> ChunkedAttentionSpec:
    """The same keys and values within chunks."""
    return ChunkedAttentionSpec(**_fields(full), chunk_size=chunk_size)


def _fields(spec: FullAttentionSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def latent_attention(reader: ConfigReader, options: Options) -> MLASpec:
    """MLA: one row of ``kv_lora_rank + qk_rope_head_dim`` per token, whole on every rank.

    DeepSeek-V2, arXiv 2405.04434, section 2.1. Heads are made from the row when it is
    read, so their own widths do not matter.
    """
    reader.ignore("num_key_value_heads", "head_dim", "v_head_dim", "qk_nope_head_dim")
    reader.ignore("qk_head_dim")
    return MLASpec(
        block_size=options.block_size or MLA_BLOCK,
        head_size=reader.number("kv_lora_rank") + reader.number("qk_rope_head_dim"),
        dtype=reader.kv_dtype(options.kv_dtype),
    )


def state(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], options: Options
) -> StateSpec:
    """A state of these arrays; `hybrid_layers` sets its block."""
    return StateSpec(
        block_size=options.block_size or ATTENTION_BLOCK,
        shapes=shapes,
        dtypes=dtypes,
        cache_mode=options.state_cache_mode,
        speculative_blocks=options.speculative_tokens,
    )


def hybrid_layers(
    layers: Sequence[Sequence[str]],
    attention: Mapping[str, FullAttentionSpec | MLASpec],
    states: Mapping[str, StateSpec],
) -> Layers:
    """Names layers whose attention block is the one whose page holds a whole state.

    attention, states: one spec each, by the name of the kind.
    """
    present = {kind for kinds in layers for kind in kinds}
    ((attention_kind, spec),), ((state_kind, one_state),) = attention.items(), states.items()
    if state_kind not in present:
        return name_layers(layers, attention)
    tokens = hybrid_block_size(spec, one_state.page_bytes)
    specs = {
        attention_kind: dataclasses.replace(spec, block_size=tokens),
        state_kind: dataclasses.replace(one_state, block_size=tokens),
    }
    return name_layers(layers, specs)
