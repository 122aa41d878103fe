"""The Mosaic GPU kernels of `paged_attention` and their limits. Does not import Mosaic."""

import jax.numpy as jnp

from pallas_kernels import _capability
from pallas_kernels._paged_attention.decode_shape import (
    decode_shape,
    decode_size,
    may_have_many,
    page_and_compute_dtype,
    share_latents,
)
from pallas_kernels._paged_attention.prefill_mma_shape import MmaShape
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.steps import GRANULE
from pallas_kernels._paged_attention.tiles import AttentionArrays
from pallas_kernels._paged_attention.widened import describe_places

MIN_WIDTH, MAX_WIDTH = 64, 256  # of keys and of values
WIDTHS, WIDTHS_IN_8_BITS = 16, 64  # widths are multiples of these
MAX_GROUP = 64  # rows of the queries of one token
# Of latent vectors, whose value is a part of the key: what fits into shared memory.
MAX_LATENT_KEY, MAX_LATENT_VALUE, MAX_LATENT_GROUP = 576, 512, 128
INT32_MAX = 2**31 - 1


def by_latents_kernel(config: Config) -> bool:
    """Returns whether latent vectors take a kernel of their own, and not that of decodes."""
    return config.values_in_keys and _capability.instructions_of("latents") == "wgmma, TMA"


def list_kernels(arrays: AttentionArrays, config: Config) -> list[_capability.Kernel]:
    """Returns the kernels that a call launches on the default device."""
    if config.values_in_keys:
        own: _capability.Kernel = "latents" if config.row_packing is None else "packed_latents"
        own = "latent_rows" if config.page_tokens == 1 else own
        return [own, "combine_latents"] if by_latents_kernel(config) else [own, "decode", "combine"]
    has_many = may_have_many(arrays, config, decode_size(arrays, config))
    has_prefill = (has_many and not config.reproducible) or arrays.shared is not None
    if config.token_head_row is not None and has_prefill:
        has_prefill = arrays.shared is None
        arrays = arrays._replace(pages=describe_places(arrays, config, 1))
        config = config.replace(row_packing=None)
    by_wgmma = _capability.instructions_of("prefill") == "wgmma, TMA"
    if not has_prefill or not (by_wgmma or MmaShape.choose(arrays, config)):
        return ["decode", "combine"]  # prompts too, if need be
    return ["decode", "combine", "prefill"]


def why_not_paged_attention(arrays: AttentionArrays, config: Config) -> str | None:
    """Returns why the Mosaic kernels do not support a call, or None if they do."""
    queries, pages = arrays.queries.dtype, page_and_compute_dtype(arrays, config.token_head_row)[0]
    if queries.itemsize != 2:
        return f"queries are {queries}, and the kernels take bfloat16 and float16"
    if pages.itemsize != 1 and pages != queries:
        return f"pages are {pages} and queries {queries}: 16-bit pages must be as queries are"
    if config.latent_row is not None and queries != jnp.bfloat16:
        return f"queries are {queries}, and the kernel of packed vectors takes bfloat16"
    return (
        _why_not_shape(config, pages.itemsize)
        or _why_not_layout(arrays)
        or _why_not_decode(arrays, config)
    )


def _why_not_shape(config: Config, page_bytes: int) -> str | None:
    by_row = config.page_tokens == 1 and config.values_in_keys
    if by_row and page_bytes == 1 and config.row_packing is None:
        return "latent vectors of 8 bits lie in pages of one token, and the kernel takes 16 bits"
    if config.page_tokens % GRANULE and not by_row:
        return (
            f"pages have {config.page_tokens} tokens, and the kernels take multiples of {GRANULE}"
        )
    if config.values_in_keys:
        return _why_not_latents(config)
    unit = WIDTHS if page_bytes > 1 else WIDTHS_IN_8_BITS
    if config.key_width % unit or config.value_width % unit:
        return (
            f"keys are {config.key_width} wide and values {config.value_width}, and the kernels "
            f"take multiples of {unit} in pages of {8 * page_bytes} bits"
        )
    widths = config.key_width, config.value_width
    if not MIN_WIDTH <= min(widths) <= max(widths) <= MAX_WIDTH:
        return (
            f"keys are {config.key_width} wide and values {config.value_width}, and the kernels "
            f"take widths from {MIN_WIDTH} to {MAX_WIDTH}"
        )
    if config.group > MAX_GROUP:
        return f"a KV head has {config.group} query heads, and the kernels take at most {MAX_GROUP}"
    return None


def _why_not_decode(arrays: AttentionArrays, config: Config) -> str | None:
    """Returns why the decode kernel has no room for a tile of one query, or cannot load pages."""
    if config.values_in_keys and by_latents_kernel(config):
        return None
    if config.values_in_keys:
        arrays, config = share_latents(arrays, config)
    shape = decode_shape(arrays, config, config.group)
    if config.token_head_row is not None and not shape.by_tma:
        return (
            "pages that have a scale for each token and head need compute capability 9.0 or "
            "later, whose copies are not in pieces of 16 bytes"
        )
    if not shape.swizzle:
        return (
            f"keys are {config.key_width} wide, values {config.value_width} and pages have "
            f"{config.page_tokens} tokens, which cp.async does not copy by all warps"
        )
    if not shape.stages:
        return (
            f"{config.group} query heads of a KV head, keys {config.key_width} wide and values "
            f"{config.value_width} do not fit into the shared memory of this GPU"
        )
    return None


def _why_not_latents(config: Config) -> str | None:
    if config.kv_heads != 1:
        return f"latent vectors have {config.kv_heads} KV heads, and the kernel takes one"
    key, value = config.key_width, config.value_width
    if key % 64 or value % 128 or key > MAX_LATENT_KEY or value > MAX_LATENT_VALUE:
        return (
            f"latent vectors are {key} wide and their values {value}, and the kernel takes "
            f"multiples of 64 up to {MAX_LATENT_KEY} and of 128 up to {MAX_LATENT_VALUE}"
        )
    if config.latent_row is not None and (key, value) != (MAX_LATENT_KEY, MAX_LATENT_VALUE):
        return (
            f"packed vectors are {key} wide and their values {value}, and the kernel takes "
            f"{MAX_LATENT_KEY} and {MAX_LATENT_VALUE}"
        )
    if config.group > MAX_LATENT_GROUP:
        return (
            f"latent vectors have {config.group} query heads, and the kernel takes at most "
            f"{MAX_LATENT_GROUP}"
        )
    return None


def _why_not_layout(arrays: AttentionArrays) -> str | None:
    pages, rows = arrays.pages, arrays.pages.rows_per_extent
    unit = 1 if pages.tokens == 1 else GRANULE
    if not rows or rows % unit or pages.start_row % unit:
        return f"pages, or the bytes between them, are not multiples of {unit} rows"
    if rows * pages.data.shape[0] > INT32_MAX:
        return "pages have more rows than int32 counts"
    return None
