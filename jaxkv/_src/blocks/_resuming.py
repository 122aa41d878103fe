"""Numbers of tokens at which requests go on: after forks, rewinds, and elsewhere. NumPy only."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._rows import RowAllocator
from jaxkv._src.blocks._state import RequestState, holds
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.prefixes import SharedBlocks
from jaxkv._src.uploads import Batch


def blocks_to_share(state: RequestState, row: int, num_tokens: int) -> list[SharedBlocks]:
    """Returns the logical blocks, per group, that the token after a row's first tokens reads.

    Raises:
      ValueError: the row no longer holds a block that the next token reads.
    """
    found: list[SharedBlocks] = []
    held = zip(*state.allocated_in(row), strict=True)
    for group, (growth, of_group) in enumerate(zip(state.growth.growths, held, strict=True)):
        source, first, end = growth.blocks_read(num_tokens, state.block_tokens[group])
        is_allocated = True
        if growth.stores == "encoder":
            end = of_group[2]
        elif growth.stores == "ring":  # newer tokens may have overwritten older ones
            is_allocated = end == 0 or num_tokens == state.computed[row]
        elif growth.stores == "state" and num_tokens:
            is_allocated = _holds_state(state, row, group, num_tokens)
            if growth.cache_mode == "all":
                # A row that shares a cached prefix holds only the last logical block of it.
                first = min(of_group[1], first)
        if not (is_allocated and _holds_all(of_group, first, end)):
            raise ValueError(
                f"num_tokens={num_tokens}: the request no longer holds the blocks of group "
                f"{group} that the next token reads; they left its window, or hold a newer "
                "state. Pass the number of tokens that the request has computed"
            )
        ids = state.logical_blocks_of(row, group)[first:end]
        found.append(SharedBlocks(source, first, end, ids))
    return found


def _holds_all(held: tuple[int, int, int], first: int, end: int) -> bool:
    """Returns whether held logical blocks (source, first, end) include ``first .. end - 1``."""
    source, allocated_first, allocated_end = held
    return (
        end <= first
        or (allocated_first <= first and end <= allocated_end)
        or first == source == end - 1
    )


def _holds_state(state: RequestState, row: int, group: int, num_tokens: int) -> bool:
    """Returns whether a row may hold the state after its first tokens in its own logical block.

    Raises:
      ValueError: the state is the newest, and may lie in the block of a draft.
    """
    if num_tokens != state.computed[row]:
        return bool(_keeps_state(state, group, np.array([row]), np.array([num_tokens]))[0])
    if _may_lie_elsewhere(state, row, group, cdiv(num_tokens, state.block_tokens[group]) - 1):
        drafts = state.growth.growths[group].speculative_blocks
        raise ValueError(
            f"num_tokens={num_tokens}: the last step may have verified drafts, so their state may "
            f"lie in the block of a draft (speculative_blocks={drafts}), which is not shared; fork "
            "after a step of one token"
        )
    return True


def _may_lie_elsewhere(state: RequestState, row: int, group: int, logical_block: int) -> bool:
    """Returns whether the newest state of a row may lie in another logical block than its own.

    A step of drafts writes the state after its first token into the logical block of its last one.
    """
    drafts = state.growth.growths[group].speculative_blocks
    start, end = state.step_start[row], state.max_computed[row]
    if not 1 < end - start <= 1 + drafts:
        return False
    running = cdiv(int(end), state.block_tokens[group]) - 1
    is_aligned = group in state.growth.aligned
    return bool(state.computed[row] > start + 1 or (is_aligned and logical_block != running))


def check_rewind(
    state: RequestState, names: Sequence[Hashable], rows: np.ndarray, num_tokens: np.ndarray
) -> None:
    """Raises ValueError if a request no longer holds a block that its next token reads."""
    lost = np.zeros((len(state.growth.growths), rows.size), bool)
    if state.growth.has_windows:
        lost = state.growth.first_block(num_tokens) < state.allocated(rows)[1]
    for group, growth in enumerate(state.growth.growths):
        if growth.stores == "state":
            lost[group] = _lost_states(state, group, rows, num_tokens)
        elif growth.stores == "ring":
            lost[group] = _lost_rows(state, group, rows, num_tokens)
    if lost.any():
        group, bad = (int(index[0]) for index in np.nonzero(lost))
        raise ValueError(
            f"num_tokens={num_tokens[bad]}: request {names[bad]!r} no longer holds a block of "
            f"group {group} that its next token reads: it left the window, or holds newer tokens "
            "or a newer state (the states of "
            f"{state.growth.growths[group].max_drafts} "
            "drafts are kept); finish the request and compute it again"
        )


def check_moved(state: RequestState, batch: Batch, rows: RowAllocator, totals: np.ndarray) -> None:
    """Raises ValueError if a step drops the only block that holds the state of a request.

    A step of drafts that began another block has left the accepted "align" state there, if the
    accepted tokens end in front of that block. A step beyond it would not read the state.
    """
    if not (state.growth.has_drafts and state.growth.aligned.size):
        return
    reached, computed = state.max_computed[batch.rows], state.computed[batch.rows]
    if not (computed < reached).any():
        return
    rejected = (computed < reached) & (computed > state.step_start[batch.rows])
    tokens = state.growth.block_tokens[state.growth.aligned]
    logical_block, moved, last = (cdiv(n, tokens) for n in (computed, reached, totals))
    lost = (rejected & (logical_block < moved) & (moved < last)).any(0)
    if lost.any():
        at = int(lost.argmax())
        raise ValueError(
            f"work: request {rows.name(int(batch.rows[at]))!r} computes {batch.counts[at]} tokens "
            "after its drafts were rejected at the end of a block; compute one token first"
        )


def _lost_states(
    state: RequestState, group: int, rows: np.ndarray, num_tokens: np.ndarray
) -> np.ndarray:
    """Returns whether no block holds the state after ``num_tokens`` tokens, bool[N].

    Blocks hold the newest state, those after each token of a last step that verified drafts, by
    themselves or in a ring, and those that are kept at the ends of blocks.
    """
    growth, starts = state.growth.growths[group], state.step_start[rows]
    drafted = state.max_computed[rows] - starts <= 1 + growth.max_drafts
    drafted &= num_tokens > starts  # the step wrote over the state that it began with
    drafted |= num_tokens == state.computed[rows]
    if growth.cache_mode == "none":
        return ~drafted & (num_tokens > 0)
    block = state.block_tokens[group]
    logical_block = cdiv(num_tokens, block) - 1
    spans = state.allocated(rows)[:, group]
    # The first token reads no state, but a row of "all" states begins with the logical block it
    # got first, and never gets an earlier one.
    starts_over = spans[1] == 0 if growth.cache_mode == "all" else np.True_
    held = np.where(num_tokens == 0, starts_over, holds(spans, logical_block))
    return ~(held & (drafted | _keeps_state(state, group, rows, num_tokens)))


def _lost_rows(
    state: RequestState, group: int, rows: np.ndarray, num_tokens: np.ndarray
) -> np.ndarray:
    """Returns whether a ring has lost rows of the group that is open after some tokens, bool[N].

    It has all that the last step began with, but for what this step has overwritten.
    """
    growth = state.growth.growths[group]
    first = num_tokens // growth.group_size * growth.group_size  # of the open group
    kept = num_tokens >= state.step_start[rows]
    kept &= first + growth.block_size >= state.max_computed[rows]
    return ~kept & (first < num_tokens) & (num_tokens != state.computed[rows])


def _keeps_state(
    state: RequestState, group: int, rows: np.ndarray, num_tokens: np.ndarray
) -> np.ndarray:
    """Returns whether the state after ``num_tokens`` tokens is held next to newer ones, bool[N].

    With ``cache_mode="align"`` only the state that the last step resumed from is kept: a step that
    crosses the end of a block does not write the state there. With drafts, not even that one is
    certain, because the step may have resumed from the block of a draft.
    """
    mode = state.growth.growths[group].cache_mode
    if mode == "none":
        return np.zeros(rows.size, bool)
    at_end = num_tokens % state.block_tokens[group] == 0
    if mode == "all":
        lost = state.lost_ends[group, rows]
        return at_end & ((lost == 0) | (num_tokens < lost))
    resumed = (num_tokens == state.step_start[rows]) & (
        state.growth.speculative_blocks[group, 0] == 0
    )
    return at_end & (resumed | (num_tokens == 0))


# --- other caches -----------------------------------------------------------------------


class ExportedBlocks(NamedTuple):
    """The blocks that the next token of a request reads.

    num_tokens: computed tokens of the request.
    first_logical_blocks: per group, the logical block of its first block.
    block_ids: per group, int32[...], the blocks of consecutive logical blocks.
    """

    num_tokens: int
    first_logical_blocks: tuple[int, ...]
    block_ids: tuple[np.ndarray, ...]


def export_blocks(state: RequestState, row: int) -> ExportedBlocks:
    """Returns the blocks of a row, which the device has as they are here.

    Raises:
      ValueError: the request has computed nothing, or its blocks get their content in its next
        step, or the plan stores encoder tokens.
    """
    count = state.computed.item(row)
    if not count or state.unsynced_tokens[row] or state.awaits_copy(row):
        raise ValueError(
            f"the request has computed {count} tokens, and none of them in a step since it was "
            "started, forked or resumed; export its blocks after its next step"
        )
    blocks_to_share(state, row, count)
    spans = _spans(state, count)
    ids = [
        state.logical_blocks_of(row, g)[first:end].copy() for g, (_, first, end) in enumerate(spans)
    ]
    return ExportedBlocks(count, tuple([first for _, first, _ in spans]), tuple(ids))


def import_blocks(state: RequestState, row: int, num_tokens: int) -> ExportedBlocks:
    """Gives a row that was just started blocks for tokens of another cache.

    Raises:
      OutOfBlocksError: too few blocks are free; none is taken.
      ValueError: the plan stores encoder tokens.
    """
    spans = _spans(state, num_tokens)
    sizes = [end - first for _, first, end in spans]
    ids = np.split(state.copies.allocate_to_load(sum(sizes)), np.cumsum(sizes)[:-1])
    shared = [SharedBlocks(*span, of_group) for span, of_group in zip(spans, ids, strict=True)]
    state.share(row, num_tokens, shared, are_allocated=True)
    return ExportedBlocks(num_tokens, tuple([first for _, first, _ in spans]), tuple(ids))


def _spans(state: RequestState, num_tokens: int) -> list[tuple[int, int, int]]:
    """Returns source, first and end of the logical blocks that the token after a prefix reads."""
    if state.growth.crossed.size:
        raise ValueError("a plan that stores encoder tokens exports no blocks")
    growths = zip(state.growth.growths, state.block_tokens, strict=True)
    return [growth.blocks_read(num_tokens, block) for growth, block in growths]
