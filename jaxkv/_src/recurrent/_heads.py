"""The channels of a recurrent layer's inputs, and how ranks divide their heads."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.internal.checks import check_array, check_positive
from jaxkv._src.pool import BoundLayer
from jaxkv._src.specs import StateSpec


class Heads(NamedTuple):
    """Heads side by side in the channels of inputs."""

    count: int
    size: int

    @property
    def channels(self) -> int:
        return self.count * self.size


def count_channels(parts: tuple[Heads, ...]) -> int:
    """Returns the channels of parts that lie side by side."""
    return sum(part.channels for part in parts)


def by_rank(array: Array, parts: tuple[Heads, ...], ranks: int) -> Array:
    """Sorts channels, [..., channels], by the rank that computes their heads.

    If there are fewer heads than ranks they are repeated, so that each rank has one.
    """
    if ranks == 1:
        return array
    ends = list(itertools.accumulate(part.channels for part in parts))
    leading = array.shape[:-1]
    sorted_parts: list[Array] = []
    for part, channels in zip(parts, jnp.split(array, ends[:-1], axis=-1), strict=True):
        channels = channels.reshape(*leading, *part)
        channels = jnp.repeat(channels, math.ceil(ranks / part.count), axis=-2)
        sorted_parts.append(channels.reshape(*leading, ranks, -1))
    return jnp.concatenate(sorted_parts, axis=-1).reshape(*leading, -1)


def check_heads(bound: BoundLayer, name: str, count: int, value_heads: int) -> None:
    """Raises ValueError unless heads of keys divide among heads of values, and among ranks."""
    check_positive(**{name: count})
    ranks = bound.ranks_of_heads
    if value_heads % count or (count % ranks and ranks % count):
        among = f", and a multiple or a divisor of the {ranks} ranks of the mesh" * (ranks > 1)
        raise ValueError(
            f"{name}={count!r} must be an int that divides the {value_heads} heads of states{among}"
        )


def check_convolution(
    layer: str, spec: StateSpec, channels: int, weights: Array, bias: Array | None
) -> None:
    """Raises ValueError unless a layer stores the inputs of this convolution."""
    check_array(conv_weights=weights)
    stored = spec.shapes[0][0]
    wanted = stored + 1 - spec.speculative_tokens
    # Others store the inputs of drafts in one window; here, the state in each block has a window.
    widths = {wanted, wanted - spec.speculative_blocks}
    if weights.ndim != 2 or weights.shape[0] not in widths or weights.shape[1] != channels:
        raise ValueError(
            f"conv_weights has shape {weights.shape}; layer {layer!r} stores the last {stored} "
            f"inputs of {channels} channels, and wants {(wanted, channels)}"
        )
    if bias is None:
        return
    check_array(conv_bias=bias)
    if bias.shape != (channels,):
        raise ValueError(f"conv_bias has shape {bias.shape}; wants {(channels,)}")
