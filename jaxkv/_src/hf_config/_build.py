"""Shared by model families: options, specs from the usual fields, names of layers. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import (
    CacheMode,
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
Replay = int | Literal["auto"]
# Where a decode with a ring took less time on an H200, with 16 to 256 requests.
RING, RING_KEYS, RING_VALUES, RING_DTYPES = 8, 128, (64, 128), ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `layers_from_config`."""

    kv_dtype: str | None = None
    block_size: int | None = None
    tensor_parallel: int = 1
    state_cache_mode: CacheMode = "none"
    speculative_tokens: int = 0
    replay: Replay = 0


def name_layers(layers: Sequence[Sequence[str]], specs: Mapping[str, LayerSpec]) -> Layers:
    """Names the caches of every layer: ``layers.3.full_attention`` and so on."""
    return {f"layers.{i}.{kind}": specs[kind] for i, kinds in enumerate(layers) for kind in kinds}


def head_size(reader: ConfigReader) -> int:
    """Returns ``head_dim``, or hidden size over heads where a file leaves it out."""
    if reader.value("head_dim") is not None:
        return reader.number("head_dim")
    return reader.per_head("hidden_size", "num_attention_heads")


def full_attention(
    reader: ConfigReader,
    options: Options,
    *,
    heads: int | None = None,
    width: int | None = None,
    value_width: int | None = None,
) -> FullAttentionSpec:
    """Returns the spec of full attention, by default from the usual fields.

    Args:
      reader: the configuration.
      options: the arguments of `layers_from_config`.
      heads: KV heads, summed over all ranks; None: ``num_key_value_heads``.
      width: elements of a key; None: ``head_dim``.
      value_width: elements of a value; None: ``width``.
    """
    heads = heads or reader.number("num_key_value_heads")
    width = width or reader.number("head_dim")
    _check_query_heads(reader, options, kv_heads=heads)
    return FullAttentionSpec(
        block_size=options.block_size or ATTENTION_BLOCK,
        num_kv_heads=heads_per_rank(heads, options.tensor_parallel),
        head_size=width,
        head_size_v=None if value_width == width else value_width,
        dtype=reader.kv_dtype(options.kv_dtype),
    )


def _check_query_heads(reader: ConfigReader, options: Options, kv_heads: int) -> None:
    """Raises ValueError unless query heads divide among KV heads, and among ranks."""
    heads, ranks = reader.number("num_attention_heads", default=kv_heads), options.tensor_parallel
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of the number of KV heads, {kv_heads}"
        )
    if heads % ranks:
        raise ValueError(
            f"tensor_parallel={ranks} does not divide num_attention_heads={heads}: give a divisor"
        )


def sliding(full: FullAttentionSpec, window: int) -> SlidingWindowSpec:
    """Returns the spec of the same keys and values within a window of tokens."""
    return SlidingWindowSpec(**_fields(full), sliding_window=window)


def chunked(full: FullAttentionSpec, chunk_size: int) -> ChunkedAttentionSpec:
    """Returns the spec of the same keys and values within chunks of tokens."""
    return ChunkedAttentionSpec(**_fields(full), chunk_size=chunk_size)


def _fields(spec: FullAttentionSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def latent_attention(reader: ConfigReader, options: Options) -> MLASpec:
    """Returns the spec of MLA: ``kv_lora_rank + qk_rope_head_dim`` per token, on every rank.

    DeepSeek-V2, arXiv 2405.04434, section 2.1. Heads are computed from the vector when it is
    read, so their own widths do not matter.
    """
    reader.ignore("num_key_value_heads", "head_dim", "v_head_dim", "qk_nope_head_dim")
    reader.ignore("qk_head_dim", "q_head_dim")
    _check_query_heads(reader, options, kv_heads=1)
    return MLASpec(
        block_size=options.block_size or MLA_BLOCK,
        head_size=reader.number("kv_lora_rank") + reader.count("qk_rope_head_dim"),
        value_size=reader.number("kv_lora_rank"),
        dtype=reader.kv_dtype(options.kv_dtype),
    )


def state(
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[str, ...],
    options: Options,
    *,
    block_size: int = ATTENTION_BLOCK,
) -> StateSpec:
    """Returns the spec of a state of these arrays; planning fits its block to attention's."""
    length = 0 if options.replay == "auto" else options.replay
    drafts = "speculative_tokens" if length else "speculative_blocks"
    spec = StateSpec(
        block_size=options.block_size or block_size,
        shapes=shapes,
        dtypes=dtypes,
        cache_mode=options.state_cache_mode,
        replay=length,
        **{drafts: options.speculative_tokens},
    )
    return _with_ring(spec) if options.replay == "auto" else spec


def _with_ring(spec: StateSpec) -> StateSpec:
    """Returns the spec of ``replay="auto"``: with a ring where kernels take it."""
    *_, (*shape, keys), dtype = *spec.shapes, spec.dtypes[-1]
    if keys != RING_KEYS or len(shape) != 2 or shape[1] not in RING_VALUES:
        return spec
    if dtype not in RING_DTYPES or spec.speculative_blocks:
        return spec
    try:
        return dataclasses.replace(spec, replay=RING)
    except ValueError:  # other arrays, or blocks that are no multiples of it
        return spec
