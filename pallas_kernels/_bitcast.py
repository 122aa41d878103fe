"""Arrays of pages in other dtypes, with the same bytes."""

import jax.numpy as jnp
from jax import Array, lax


def as_integers(pages: Array) -> Array:
    """Returns the same bytes in a dtype whose scatter keeps them.

    XLA's CPU backend scatters narrow floats by way of float32, which loses the NaN payloads
    of blocks that should stay.
    """
    dtype = pages.dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if narrow else dtype
    return lax.bitcast_convert_type(pages, bits)


def as_words(pages: Array, multiple: int = 0) -> Array:
    """Returns the same bytes as 32-bit words, or the pages themselves where those do not fit.

    Kernels that move bytes want words, because narrower elements travel through registers
    one by one.

    Args:
      multiple: a number of elements that must make whole words as well as the page.
    """
    ratio = 4 // pages.dtype.itemsize
    if ratio <= 1 or pages.shape[1] % ratio or multiple % ratio:
        return pages
    return lax.bitcast_convert_type(
        pages.reshape(pages.shape[0], pages.shape[1] // ratio, ratio), jnp.uint32
    )


def from_words(words: Array, like: Array) -> Array:
    """Returns words as pages of the dtype and shape of ``like``, undoing `as_words`."""
    return lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)
