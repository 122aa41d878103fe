"""Blocks of requests that go on in another cache. No jax."""

from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._resuming import columns_read, columns_to_share
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.prefixes import SharedColumns


class HandedBlocks(NamedTuple):
    """The blocks that the next token of a request reads.

    num_tokens: computed tokens of the request.
    first_columns: per group, the column of its first block.
    block_ids: per group, int32[...], the blocks of consecutive columns.
    """

    num_tokens: int
    first_columns: tuple[int, ...]
    block_ids: tuple[np.ndarray, ...]


def exported(state: RequestState, row: int) -> HandedBlocks:
    """Returns the blocks of a row, which the device has as they are here.

    Raises:
      ValueError: the request has computed nothing, or its blocks get their content in its next
        step, or the plan stores encoder tokens.
    """
    count = state.computed.item(row)
    if not count or state.unsent_tokens[row] or state.awaits_copy(row):
        raise ValueError(
            f"the request has computed {count} tokens, and none of them in a step since it was "
            "started, forked or resumed; export its blocks after its next step"
        )
    columns_to_share(state, row, count)
    spans = _columns(state, count)
    ids = [state.columns_of(row, g)[first:end].copy() for g, (_, first, end) in enumerate(spans)]
    return HandedBlocks(count, tuple([first for _, first, _ in spans]), tuple(ids))


def imported(state: RequestState, row: int, num_tokens: int) -> HandedBlocks:
    """Gives a row that was just started blocks for tokens of another cache.

    Raises:
      OutOfBlocksError: too few blocks are free; none is taken.
      ValueError: the plan stores encoder tokens.
    """
    spans = _columns(state, num_tokens)
    sizes = [end - first for _, first, end in spans]
    ids = np.split(state.allocate_to_load(sum(sizes)), np.cumsum(sizes)[:-1])
    columns = [SharedColumns(*span, of_group) for span, of_group in zip(spans, ids, strict=True)]
    state.share(row, num_tokens, columns, are_held=True)
    return HandedBlocks(num_tokens, tuple([first for _, first, _ in spans]), tuple(ids))


def _columns(state: RequestState, num_tokens: int) -> list[tuple[int, int, int]]:
    """Returns source, first and end of the columns that the token after a prefix reads."""
    if state.growth.crossed.size:
        raise ValueError("a plan that stores encoder tokens hands no blocks over")
    growths = zip(state.growth.growths, state.column_tokens, strict=True)
    return [columns_read(growth, block, num_tokens) for growth, block in growths]
