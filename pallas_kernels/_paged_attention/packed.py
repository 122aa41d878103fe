"""Latent vectors packed into bytes: 8-bit values with scales, and a 16-bit rotary part."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._bitcast import as_elements

LatentPacking = Literal["fp8_ds_mla"]
GROUP = 128  # values that share a scale
HIGHEST, LEAST = 448.0, 2.0**-126  # the largest float8_e4m3fn; the least scale


class PackedRow(NamedTuple):
    """The parts of a row of ``"fp8_ds_mla"``, as vLLM stores the latents of DeepSeek-V3.2.

    latent: number of values, a multiple of 128. They are float8_e4m3fn, and a float32 scale for
      each 128 of them follows.
    rotary: number of elements after that, in bfloat16.
    """

    latent: int
    rotary: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row."""
        return sum(self._sizes())

    def pack(self, rows: Array) -> Array:
        """Packs rows, float[..., latent + rotary], into uint8[..., row_bytes]."""
        latent, rotary = lax.split(rows, (self.latent, self.rotary), axis=rows.ndim - 1)
        groups = latent.astype(jnp.float32).reshape(*latent.shape[:-1], -1, GROUP)
        highest = jnp.abs(groups).max(axis=-1, keepdims=True)
        scales = jnp.maximum(highest / HIGHEST, LEAST)
        values = jnp.clip(groups / scales, -HIGHEST, HIGHEST).astype(jnp.float8_e4m3fn)
        parts = values.reshape(latent.shape), scales[..., 0], rotary.astype(jnp.bfloat16)
        return jnp.concatenate([_as_bytes(part) for part in parts], axis=-1)

    def unpack(self, rows: Array) -> Array:
        """Unpacks rows, uint8[..., row_bytes], into float32[..., latent + rotary]."""
        # Where a program packs what it unpacks, XLA for GPUs leaves out the rounding to fp8.
        rows, leading = lax.optimization_barrier(rows), rows.shape[:-1]
        latent, scales, rotary = lax.split(rows, self._sizes(), axis=rows.ndim - 1)
        values = lax.bitcast_convert_type(latent, jnp.float8_e4m3fn).astype(jnp.float32)
        values = values * jnp.repeat(
            as_elements(scales, jnp.float32, (*leading, -1)), GROUP, axis=-1
        )
        rest = as_elements(rotary, jnp.bfloat16, (*leading, -1)).astype(jnp.float32)
        return jnp.concatenate([values, rest], axis=-1)

    def _sizes(self) -> tuple[int, int, int]:
        """Returns the bytes of values, of scales and of the rotary part."""
        return self.latent, 4 * (self.latent // GROUP), 2 * self.rotary


def _as_bytes(array: Array) -> Array:
    data = lax.bitcast_convert_type(array, jnp.uint8)
    return data.reshape(*array.shape[:-1], -1)
