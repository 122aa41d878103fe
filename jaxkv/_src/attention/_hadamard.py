"""The rotation that spreads large elements of heads, before they are stored in few bits."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jaxkv._src.internal.checks import check_array


def hadamard(heads: Float[Array, "*shape width"]) -> Float[Array, "*shape width"]:
    """Returns heads rotated by an orthonormal Hadamard matrix, which is its own inverse.

    It spreads elements that are much larger than the others of their head, of which keys have
    some. Keys and values in 4 bits lose less then::

        cache, batch = jaxkv.apply_step(cache, upload)
        rotated = [hadamard(array) for array in (queries, keys, values)]
        cache, out = jaxkv.attend(cache, "layer", batch, *rotated)
        out = hadamard(out)

    Products of rotated queries and keys are those of the queries and keys themselves.

    Args:
      heads: floats; ``width`` is a power of two.

    Returns:
      The same shape and dtype, computed in float32.

    Raises:
      ValueError: a width that is no power of two.
      TypeError: an array that is not of floats.
    """
    check_array(heads=heads)
    width = heads.shape[-1] if heads.ndim else 0
    if width < 1 or width & (width - 1):
        raise ValueError(f"heads has shape {heads.shape}; the last axis must be a power of two")
    if not jnp.issubdtype(heads.dtype, jnp.floating):
        raise TypeError(f"heads has dtype {heads.dtype}; wants floats")
    matrix = jnp.asarray(_matrix(width))
    highest = lax.Precision.HIGHEST
    rotated = jnp.matmul(heads.astype(jnp.float32), matrix, precision=highest)
    return rotated.astype(heads.dtype)


@functools.lru_cache
def _matrix(width: int) -> np.ndarray:
    """Returns float32[width, width], by Sylvester's construction."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * np.float32(width**-0.5)
