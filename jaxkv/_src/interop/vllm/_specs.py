"""Layer specs from vLLM's specs. No jax."""

from collections.abc import Callable
from typing import Any

from jaxkv._src.interop.vllm._fields import SpecFields
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    RingSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
    canonical_dtype,
    packed_bytes,
)

# KVQuantMode of vLLM 0.33, by number.
QUANT_MODES = (
    "NONE",
    "FP8_PER_TENSOR",
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
    "NVFP4",
)
PER_TOKEN_HEAD = {"INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"}
# Fields that do not change the bytes of a block.
NO_BYTES = """
    is_draft dcp_sharded max_tp_shards block_stride_alignment topk_buffer_width alignment
    model_version is_index_group_leader non_causal_multi_token_decode
""".split()
KEEPS_ALL = "keeps the blocks of all tokens, although attention reads some of them only"


def convert_spec(
    layer: str, given: Any, *, kv_dtype: str | None, value_size: int | None
) -> LayerSpec:
    """Returns the spec of a layer.

    Args:
      layer: name of the layer, for errors.
      given: vLLM's spec of the layer, an object or a mapping.
      kv_dtype, value_size: as for `layer_specs`.

    Raises:
      ValueError: a spec or a field without a counterpart.
    """
    fields = SpecFields(layer, given)
    if fields.type not in CONVERTERS:
        raise ValueError(
            f"{fields.what} has no counterpart here; use one of {', '.join(CONVERTERS)}"
        )
    spec = CONVERTERS[fields.type](fields, kv_dtype, value_size)
    fields.check_all_read()
    return spec


def _full(fields: SpecFields, kv_dtype: str | None, _: int | None) -> LayerSpec:
    for name in ("sliding_window", "attention_chunk_size"):
        fields.refuse(name, f"{KEEPS_ALL}; set disable_hybrid_kv_cache_manager=False in vLLM")
    fields.refuse("non_causal", "attends to later tokens, which jaxkv.attend does not")
    return FullAttentionSpec(**_keys_and_values(fields, kv_dtype))


def _sliding(fields: SpecFields, kv_dtype: str | None, _: int | None) -> LayerSpec:
    _refuse_retained(fields)
    window = fields.count("sliding_window")
    return SlidingWindowSpec(sliding_window=window, **_keys_and_values(fields, kv_dtype))


def _chunked(fields: SpecFields, kv_dtype: str | None, _: int | None) -> LayerSpec:
    chunk = fields.count("attention_chunk_size")
    return ChunkedAttentionSpec(chunk_size=chunk, **_keys_and_values(fields, kv_dtype))


def _cross(fields: SpecFields, kv_dtype: str | None, _: int | None) -> LayerSpec:
    return CrossAttentionSpec(**_keys_and_values(fields, kv_dtype))


def _mla(fields: SpecFields, kv_dtype: str | None, value_size: int | None) -> LayerSpec:
    for name in ("sliding_window", "attention_chunk_size"):
        fields.refuse(name, KEEPS_ALL)
    fields.refuse("non_causal", "attends to later tokens, which jaxkv.attend does not")
    return MLASpec(**_latent_vectors(fields, kv_dtype, value_size))


def _sliding_mla(fields: SpecFields, kv_dtype: str | None, value_size: int | None) -> LayerSpec:
    _refuse_retained(fields)
    fields.refuse("bounded_replay", "computes a window again after a prefix hit; plan without it")
    window = fields.count("sliding_window")
    rows = _latent_vectors(fields, kv_dtype, value_size)
    return SlidingWindowMLASpec(sliding_window=window, **rows)


def _mamba(fields: SpecFields, _: str | None, __: int | None) -> LayerSpec:
    if fields.get("num_prefill_checkpoint_blocks", 0):
        raise ValueError(
            f"{fields.what}: num_prefill_checkpoint_blocks keep states inside of a chunk, which "
            "jaxkv does not write; plan without them"
        )
    fields.ignore("mamba_type", "prefill_checkpoint_alignment", "tp_replicated", "num_heads")
    fields.ignore("tokens_per_state", *NO_BYTES)
    return StateSpec(
        block_size=fields.count("block_size"),
        page_bytes_padded=fields.get("page_size_padded", None),
        shapes=tuple(tuple(shape) for shape in fields.get("shapes")),
        dtypes=tuple(_dtype_name(dtype) for dtype in fields.get("dtypes")),
        cache_mode=fields.get("mamba_cache_mode", "none"),
        speculative_blocks=fields.get("num_speculative_blocks", 0),
    )


def _ring(fields: SpecFields, kv_dtype: str | None, _: int | None) -> LayerSpec:
    """Returns a ring; vLLM does not name its groups, so they are as large as the ring."""
    heads = fields.count("num_kv_heads")
    if fields.get("head_size_v", 0):
        raise ValueError(f"{fields.what} has values, and a ring stores one row per token")
    _check_layout(fields, heads)
    page = _page(fields)
    return RingSpec(
        **page,
        group_size=page["block_size"],
        head_size=heads * fields.count("head_size"),
        dtype=_element_dtype(fields, _quant_mode(fields), kv_dtype),
    )


CONVERTERS: dict[str, Callable[[SpecFields, str | None, int | None], LayerSpec]] = {
    "FullAttentionSpec": _full,
    "SlidingWindowSpec": _sliding,
    "ChunkedLocalAttentionSpec": _chunked,
    "CrossAttentionSpec": _cross,
    "MLAAttentionSpec": _mla,
    "SlidingWindowMLASpec": _sliding_mla,
    "CircularBufferSpec": _ring,
    "MambaSpec": _mamba,
}


def _refuse_retained(fields: SpecFields) -> None:
    if fields.get("extra_retained_tokens", 0):
        raise ValueError(
            f"{fields.what}: extra_retained_tokens keep blocks below the window, which jaxkv gives "
            "back; plan without them"
        )


def _keys_and_values(fields: SpecFields, kv_dtype: str | None) -> dict[str, Any]:
    """Returns the fields of `FullAttentionSpec`."""
    heads, key = fields.count("num_kv_heads"), fields.count("head_size")
    value = fields.get("head_size_v", None)
    value = key if value is None else value
    _check_layout(fields, heads)
    if fields.get("tokens_per_state", 1) != 1:
        raise ValueError(
            f"{fields.what}: tokens_per_state={fields.get('tokens_per_state')} is not 1, and every "
            "key and value in jaxkv is of one token"
        )
    mode = _quant_mode(fields)
    dtype = "nvfp4" if mode == "NVFP4" else _element_dtype(fields, mode, kv_dtype)
    content = fields.get("state_content_bytes", None)
    plain = packed_bytes(key, dtype) + packed_bytes(value, dtype)
    scales = 0 if content is None else content - plain
    if scales < 0 or scales % 2 or (scales and mode not in PER_TOKEN_HEAD):
        raise ValueError(
            f"{fields.what}: state_content_bytes={content} is not a key and a value of {dtype}, "
            f"{plain} bytes{' and a scale each' * (mode in PER_TOKEN_HEAD)}"
        )
    return {
        **_page(fields),
        "num_kv_heads": heads,
        "head_size": key,
        "head_size_v": None if value == key else value,
        "dtype": dtype,
        "scale_bytes": scales // 2,
    }


def _latent_vectors(
    fields: SpecFields, kv_dtype: str | None, value_size: int | None
) -> dict[str, Any]:
    """Returns the fields of `MLASpec`."""
    if fields.count("num_kv_heads") != 1 or fields.get("head_size_v", 0):
        raise ValueError(
            f"{fields.what} has several heads or values; latent attention stores one vector"
        )
    _check_layout(fields, 1)
    ratio, head_size = fields.get("tokens_per_state", 1), fields.count("head_size")
    if not isinstance(ratio, int):
        raise ValueError(f"{fields.what}: tokens_per_state={ratio!r} is not a whole number")
    is_indexer = str(fields.get("cache_role", "sparse")).rpartition(".")[2].lower() == "indexer"
    packed = str(fields.get("cache_dtype_str", None)).endswith("ds_mla")
    stored = canonical_dtype(_dtype_name(fields.get("dtype")), f"{fields.what}: dtype")
    plain = packed_bytes(head_size, stored)
    row = fields.get("state_content_bytes", None) or plain
    if packed or row != plain:
        fields.ignore("kv_quant_mode")  # opaque bytes, which only the kernel reads
        dtype, bytes_per_token = "uint8", row
    else:
        dtype, bytes_per_token = _element_dtype(fields, _quant_mode(fields), kv_dtype), None
    has_value = value_size is not None and value_size < head_size and not is_indexer
    return {
        **_page(fields),
        "head_size": head_size,
        "value_size": value_size if has_value else None,
        "dtype": dtype,
        "bytes_per_token": bytes_per_token,
        "compress_ratio": ratio,
    }


def _page(fields: SpecFields) -> dict[str, Any]:
    fields.ignore(*NO_BYTES)
    block_size, padded = fields.count("block_size"), fields.get("page_size_padded", None)
    return {"block_size": block_size, "page_bytes_padded": padded}


def _check_layout(fields: SpecFields, heads: int) -> None:
    if fields.get("num_head_slots", None) not in (None, heads):
        raise ValueError(
            f"{fields.what}: num_head_slots={fields.get('num_head_slots')} packs its {heads} heads "
            "unlike jaxkv, where they lie one after the other; plan without it"
        )


def _dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, which may be one of torch."""
    return str(dtype).removeprefix("torch.")


def _quant_mode(fields: SpecFields) -> str:
    given = fields.get("kv_quant_mode", 0)
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if name is None and isinstance(given, int) and 0 <= given < len(QUANT_MODES):
        name = QUANT_MODES[given]
    if name not in QUANT_MODES or name == "INT4_PER_TOKEN_HEAD":
        raise ValueError(f"{fields.what}: kv_quant_mode={given!r} has no counterpart here")
    return name


def _element_dtype(fields: SpecFields, mode: str, kv_dtype: str | None) -> str:
    """Returns the dtype of elements; vLLM stores fp8 of both kinds as uint8."""
    stored = _dtype_name(fields.get("dtype"))
    if stored != "uint8" or not mode.startswith("FP8"):
        return canonical_dtype(stored, f"{fields.what}: dtype")
    if kv_dtype is None:
        raise ValueError(
            f"{fields.what} stores fp8 as bytes and does not name its kind; pass "
            'kv_dtype="fp8_e4m3" (vLLM\'s "fp8") or "fp8_e5m2"'
        )
    name = canonical_dtype(kv_dtype, "kv_dtype")
    if not name.startswith("float8"):
        raise ValueError(f'kv_dtype={kv_dtype!r} is not fp8; use "fp8_e4m3" or "fp8_e5m2"')
    return name
