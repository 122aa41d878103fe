"""The states that a step reads and writes, and their pages."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from jaxkv._src.internal.checks import check_array
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.pool import BoundLayer
from jaxkv._src.specs import StateSpec
from pallas_kernels import StatePages

AXES = {2: "(width - 1, channels)", 3: "(heads, V, K)"}  # of the arrays of a spec


class StepStates(NamedTuple):
    """The blocks of the states of a step, as the kernels of `pallas_kernels` take them.

    read_ids: blocks; -1: zeros.
    write_ids: blocks; -1: none.
    write_after: after how many tokens of the step each block gets the state; no number
      from 1 to the tokens of the step: never. None: after the last token.
    """

    read_ids: Int32[Array, "requests"]
    write_ids: Int32[Array, "requests blocks"]
    write_after: Int32[Array, "requests blocks"] | None


def step_states(bound: BoundLayer) -> StepStates:
    """Returns the states that a step reads and writes."""
    requests, exists = bound.requests, bound.first >= 0
    read_ids = requests.state_blocks(None, reading=True)
    has_drafts = requests.growth.has_drafts and bound.batch.shape.max_query_len > 1
    if requests.growth.cache_mode != "all" and not has_drafts:
        write_ids = requests.state_blocks(None, reading=False)[:, None]
        write_after = None
    else:
        blocks = range(requests.table.shape[1] - 1)
        indices = [jnp.full_like(read_ids, block) for block in blocks]
        write_ids = jnp.stack([requests.state_blocks(i, reading=False) for i in indices], axis=1)
        write_after = _written_after(bound, jnp.stack(indices, axis=1))
    return StepStates(
        jnp.where(exists, read_ids, -1), jnp.where(exists, write_ids, -1), write_after
    )


def _written_after(bound: BoundLayer, block: Array) -> Array:
    """Returns after how many tokens of the step each block's state is reached.

    A state that no token reaches has a number outside 1 to the count of tokens. All tokens but the
    first may be drafts, in a step that has a block for each of them.

    Args:
      block: int32[B, W], index among the blocks that the step writes.
    """
    requests, batch = bound.requests, bound.batch
    tokens = batch.query_lens
    are_few = tokens <= 1 + requests.growth.speculative_blocks
    certain = jnp.where(are_few, jnp.minimum(tokens, 1), tokens)[:, None]
    if requests.growth.cache_mode == "all":
        computed, size = batch.num_computed_tokens[:, None], requests.growth.block_size
        first = requests.first_blocks[:, None]
        running = jnp.maximum(cdiv(computed + certain, size), 1) - 1 - first
        full = (first + block + 1) * size - computed
    else:
        running, full = jnp.zeros_like(certain), certain
    return jnp.where(block < running, full, certain + block - running)


def state_pages(bound: BoundLayer) -> list[StatePages]:
    """Returns the pages of each array of a layer's states."""
    spec, extents = bound.form.spec, bound.form.extents
    data = bound.buffer.reshape(-1, extents.extent_bytes)
    starts = itertools.accumulate(spec.array_bytes, initial=extents.start_bytes)
    # Kernels take them together if they share the data and this array.
    first = jnp.maximum(bound.first, 0)
    pages = bound.layout.num_blocks, first, extents.tile_step
    return [
        StatePages(data, jnp.dtype(dtype), shape, *pages, start=start)
        for (shape, dtype), start in zip(spec.arrays, starts, strict=False)
    ]


def check_states(
    layer: str,
    bound: BoundLayer,
    wanted: tuple[int, ...],
) -> StateSpec:
    """Checks the states of a layer, and returns its spec.

    Args:
      wanted: axes of each array of the spec.

    Raises:
      TypeError, ValueError: a layer of another kind, or arguments that do not fit.
    """
    spec = bound.form.spec
    if not isinstance(spec, StateSpec):
        raise TypeError(f"layer={layer!r} stores tokens, not states; use attend")
    if tuple(map(len, spec.shapes)) != wanted:
        shapes = ", ".join(AXES[n] for n in wanted)
        raise ValueError(
            f"layer={layer!r} stores states of shapes {spec.shapes}; this function wants those of "
            f"{shapes}, in this order"
        )
    if spec.speculative_blocks and spec.cache_mode != "none":
        raise ValueError(
            f"layer={layer!r} has cache_mode={spec.cache_mode!r} and speculative_blocks="
            f"{spec.speculative_blocks}, whose states move to other blocks between the step that "
            'verifies drafts and the next one; plan it with cache_mode="none", or call read_state '
            "and write_state"
        )
    return spec


def flat_tokens(bound: BoundLayer, name: str, array: Array, inner: tuple[int, ...]) -> Array:
    """Returns a token array with the axes of tokens merged, [T, *inner]."""
    shape = bound.batch.token_shape
    check_array(**{name: array})
    if array.shape != (*shape, *inner):
        raise ValueError(f"{name} has shape {array.shape}; this batch wants {(*shape, *inner)}")
    return array.reshape(math.prod(shape), *inner)
