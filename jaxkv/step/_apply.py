"""Device side: a step's table work, zeroing and copies, in one dispatch."""

import functools
from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.block_tables import PAD_ROW, BlockTables, TableEntries
from jaxkv.block_tables._read import find_slots, gather
from jaxkv.block_tables._state import report
from jaxkv.block_tables._update import append
from jaxkv.blocks import TableUpdate
from jaxkv.checks import check_int32
from jaxkv.jit_int32 import jit_int32
from jaxkv.pool import KVPool, copy_blocks, zero_new_blocks
from jaxkv.step._pack import pack_step
from jaxkv.step._ring import UploadRing
from jaxkv.step._shape import StepBatch, StepShape


@jit_int32("upload", static_argnames=("shape", "implementation"))
def apply_step[P: KVPool | None](
    tables: BlockTables,
    pool: P,
    upload: Array | np.ndarray,
    *,
    shape: StepShape,
    implementation: str | None = None,
    rank: Array | int = 0,
) -> tuple[BlockTables, P, StepBatch]:
    """Appends, expands, gathers, maps slots, zeroes and copies: all but the model.

    Args:
      tables: before the step; donate them in your ``jit``, or use `apply_step_donating`.
      pool: the blocks to zero and copy, likewise; None: the caller keeps its own buffers
        and sees to it, with `StepBatch.zero_ids`.
      upload: int32[shape.size], from `pack_step` or `UploadRing.pack`, not the update itself.
      shape: static, the one the upload was packed with.
      implementation: of the kernels, as in `pallas_kernels.zero_blocks`.
      rank: as in `map_slots`, with context parallelism.
    """
    if not isinstance(tables, BlockTables):
        raise TypeError(f"tables must be BlockTables, got {type(tables).__name__}")
    if upload.shape != (shape.size,):
        raise ValueError(f"upload has shape {upload.shape}; this step shape wants ({shape.size},)")
    if jax.typeof(upload).memory_space == jax.memory.Space.Host:
        upload = jax.device_put(upload, jax.memory.Space.Device)
    parts = shape.split(upload)
    tables, problems = append(tables, TableEntries(*(parts[n] for n in TableEntries._fields)))
    rows, first = parts["batch_rows"], parts["first_positions"]
    block_tables, bad_rows = gather(tables, rows, first, shape.widths)
    token_rows, positions = lay_out_tokens(
        rows, first, parts["token_ends"], num_tokens=shape.tokens
    )
    slots, bad_tokens = find_slots(tables, token_rows, positions, False, rank)
    tables = report(tables, jnp.concatenate([problems, bad_rows, bad_tokens]))
    if pool is not None:
        pool = cast(P, _zero_and_copy(pool, parts, shape, implementation))
    data = jnp.concatenate([upload, token_rows, positions, slots.reshape(-1)])
    return tables, pool, StepBatch(block_tables=block_tables, data=data, shape=shape)


def _zero_and_copy(
    pool: Any, parts: dict[str, Array], shape: StepShape, implementation: str | None
) -> KVPool:
    if not isinstance(pool, KVPool):
        raise TypeError(f"pool must be a KVPool, or None, got {type(pool).__name__}")
    pool = zero_new_blocks(pool, parts["zero_ids"], implementation=implementation)
    if not shape.copies:
        return pool
    pairs = parts["copy_sources"], parts["copy_destinations"]
    return copy_blocks(pool, *pairs, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=(0, 1))
def _donating[P: KVPool | None](
    tables: BlockTables,
    pool: P,
    upload: Array | np.ndarray,
    shape: StepShape,
    implementation: str | None,
) -> tuple[BlockTables, P, StepBatch]:
    return apply_step(tables, pool, upload, shape=shape, implementation=implementation)


def apply_step_donating[P: KVPool | None](
    tables: BlockTables,
    pool: P,
    upload: Array | np.ndarray,
    *,
    shape: StepShape,
    implementation: str | None = None,
) -> tuple[BlockTables, P, StepBatch]:
    """`apply_step` for use outside a ``jit``: the tables and the pool given are consumed."""
    check_int32(upload=upload)
    # By position: to jit, an argument left out and its default spelled out are two programs.
    return _donating(tables, pool, upload, shape, implementation)


def warm_up[P: KVPool | None](
    tables: BlockTables,
    pool: P,
    steps: Iterable[StepShape | UploadRing],
    *,
    implementation: str | None = None,
) -> tuple[BlockTables, P]:
    """Compiles `apply_step_donating` for every kind of step, by empty steps of each.

    Args:
      tables, pool: consumed, and returned with nothing changed once the device is done.
      steps: the shapes of steps whose uploads come from `pack_step`, and the rings that
        others come from: to jax, an upload of each is of another kind.
      implementation: the one that the steps will be called with.
    """
    nothing: dict[str, Any] = {"rows": (), "first_positions": (), "lengths": ()}
    steps = list(steps)
    # Twice: what a ring's step returns is bound to the device, and may not have been before.
    for step in [*steps, *steps]:
        shape = step.shape if isinstance(step, UploadRing) else step
        update = TableUpdate((), ((),) * len(shape.widths))
        if isinstance(step, UploadRing):
            upload = step.pack(update=update, **nothing)
        else:
            upload = pack_step(shape, update=update, **nothing)
        tables, pool, batch = apply_step_donating(
            tables, pool, upload, shape=shape, implementation=implementation
        )
        if isinstance(step, UploadRing):
            step.sent(batch)
    return jax.block_until_ready((tables, pool))


def lay_out_tokens(
    rows: Array, first_positions: Array, token_ends: Array, *, num_tokens: int
) -> tuple[Array, Array]:
    """Row and position of every token of a batch laid end to end, padded to num_tokens.

    Args:
      rows, first_positions, token_ends: int32[B]; the last counts the tokens of this and
        all earlier requests.
      num_tokens: static; at least the number of tokens.

    Returns:
      int32[num_tokens] each; `PAD_ROW` and -1 past the last token.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # A comparison with every end: a binary search would be a loop on the device.
    request = (token[:, None] >= token_ends[None]).sum(axis=1, dtype=jnp.int32)
    starts = jnp.pad(token_ends, (1, 0))[:-1]
    start = starts.at[request].get(mode="fill", fill_value=0)
    first = first_positions.at[request].get(mode="fill", fill_value=0)
    row = rows.at[request].get(mode="fill", fill_value=PAD_ROW)
    return row, jnp.where(row != PAD_ROW, first + token - start, -1)
