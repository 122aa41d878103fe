"""Bitcasts of pages to other dtypes and back."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def as_integers(pages: Array) -> Array:
    """Returns the same bytes in a dtype that XLA scatters without changing them.

    XLA's CPU backend converts narrow floats to float32 for a scatter, which changes NaN payloads,
    even in blocks that are not written.
    """
    dtype = pages.dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if narrow else dtype
    return lax.bitcast_convert_type(pages, bits)


def as_words(pages: Array, multiple: int = 0) -> Array:
    """Returns the same bytes as 32-bit words, or the pages unchanged if words do not fit.

    For kernels that move bytes, because narrower elements go through registers one by one.

    Args:
      multiple: a number of elements that must be whole words, like the page.
    """
    ratio = 4 // pages.dtype.itemsize
    if ratio <= 1 or pages.shape[1] % ratio or multiple % ratio:
        return pages
    return lax.bitcast_convert_type(
        pages.reshape(pages.shape[0], pages.shape[1] // ratio, ratio), jnp.uint32
    )


def from_words(words: Array, like: Array) -> Array:
    """Returns words, or elements of any dtype, as an array of the dtype and shape of ``like``."""
    if words.dtype == like.dtype:
        return words.reshape(like.shape)
    return lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)


def as_elements(data: Array, dtype: DTypeLike, shape: tuple[int, ...]) -> Array:
    """Returns bytes, or narrower elements, as an array of a dtype and shape; no copy on GPUs."""
    dtype, ratio = jnp.dtype(dtype), jnp.dtype(dtype).itemsize // data.dtype.itemsize
    if data.dtype == dtype:
        return data.reshape(shape)
    split = (*shape, ratio) if ratio > 1 else shape
    return lax.bitcast_convert_type(data.reshape(split), dtype)
