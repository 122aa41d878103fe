"""Tiles in rounds, so that the results of fixed splits take a bounded part of memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import FixedSplits
from pallas_kernels._paged_attention.tiles import QueryTiles

WORKSPACE = 2**28  # bytes of the results of splits


def in_rounds[T](
    run: Callable[[QueryTiles, Array], T],
    tiles: QueryTiles,
    queries: Array,
    config: Config,
    fixed: FixedSplits | None,
) -> T:
    """Attends from tiles, some at a time if they have more splits than fit into `WORKSPACE`.

    Args:
      run: attends from some of the tiles; returns arrays with one row per tile.
      queries: [N, kv_heads, rows, K] of all tiles.
      fixed: the splits of a tile; None: few, so that all tiles come together.

    Returns:
      What ``run`` returns, for all tiles.
    """
    if fixed is None:
        return run(tiles, queries)
    bytes_each = fixed.per_tile * 4 * queries.shape[1] * queries.shape[2] * (config.value_width + 2)
    count, most = tiles.requests.shape[0], max(1, WORKSPACE // bytes_each)
    if count <= most:
        return run(tiles, queries)
    rounds = -(-count // most)
    return in_parts(run, tiles, queries, -(-count // rounds))


def in_parts[T](
    run: Callable[[QueryTiles, Array], T], tiles: QueryTiles, queries: Array, size: int
) -> T:
    """Runs ``run`` over exactly ``size`` tiles at a time; see `in_rounds`."""
    count = tiles.requests.shape[0]
    rounds = -(-count // size)

    def cut(array: Array) -> Array:  # tiles of padding are empty: all 0
        padded = jnp.pad(array, ((0, rounds * size - count), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(rounds, size, *array.shape[1:])

    fields = {
        name: cut(array)
        for name, array in tiles._asdict().items()
        if name not in ("size", "token_tiles", "rows")
    }
    found = lax.map(lambda part: run(tiles._replace(**part[0]), part[1]), (fields, cut(queries)))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:count], found)
