"""The columns of a recurrent layer's inputs, and how ranks divide their heads."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.internal.checks import check_array, check_positive
from jaxkv._src.pool import BoundLayer
from jaxkv._src.specs import StateSpec


class Heads(NamedTuple):
    """Heads side by side in the columns of inputs: so many, each so wide."""

    count: int
    size: int

    @property
    def columns(self) -> int:
        return self.count * self.size


def columns_of(parts: tuple[Heads, ...]) -> int:
    """Returns the columns of parts that lie side by side."""
    return sum(part.columns for part in parts)


def by_rank(array: Array, parts: tuple[Heads, ...], ranks: int) -> Array:
    """Sorts columns, [..., columns], by the rank that computes their heads.

    Heads that are fewer than the ranks are repeated, so that each rank has one.
    """
    if ranks == 1:
        return array
    ends = list(itertools.accumulate(part.columns for part in parts))
    leading = array.shape[:-1]
    sorted_parts: list[Array] = []
    for part, columns in zip(parts, jnp.split(array, ends[:-1], axis=-1), strict=True):
        columns = columns.reshape(*leading, *part)
        columns = jnp.repeat(columns, math.ceil(ranks / part.count), axis=-2)
        sorted_parts.append(columns.reshape(*leading, ranks, -1))
    return jnp.concatenate(sorted_parts, axis=-1).reshape(*leading, -1)


def check_heads(bound: BoundLayer, name: str, count: int, value_heads: int) -> None:
    """Raises ValueError unless these heads of keys divide among those of values, and ranks."""
    check_positive(**{name: count})
    ranks = bound.ranks_of_heads
    if value_heads % count or (count % ranks and ranks % count):
        among = f", and a multiple or a divisor of the {ranks} ranks of the mesh" * (ranks > 1)
        raise ValueError(
            f"{name}={count!r} must be an int that divides the {value_heads} heads of states{among}"
        )


def check_convolution(
    layer: str, spec: StateSpec, columns: int, weights: Array, bias: Array | None
) -> None:
    """Raises ValueError unless a layer keeps the inputs of this convolution."""
    check_array(conv_weights=weights)
    kept = spec.shapes[0][0]
    # Others keep the inputs of drafts in one window; here, the state after each has a window.
    widths = {kept + 1, kept + 1 - spec.speculative_blocks}
    if weights.ndim != 2 or weights.shape[0] not in widths or weights.shape[1] != columns:
        raise ValueError(
            f"conv_weights has shape {weights.shape}; layer {layer!r} keeps the last {kept} inputs "
            f"of {columns} channels, and wants {(kept + 1, columns)}"
        )
    if bias is None:
        return
    check_array(conv_bias=bias)
    if bias.shape != (columns,):
        raise ValueError(f"conv_bias has shape {bias.shape}; wants {(columns,)}")
