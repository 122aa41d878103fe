"""The steps of a `BlockManager`: blocks for new tokens, and the uploads. No jax."""

from typing import Any, Protocol

import numpy as np

from jaxkv._src.blocks._cells import NO_IDS
from jaxkv._src.blocks._changes import plan_changes
from jaxkv._src.blocks._news import find_news, write_news
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.blocks._rows import RowAllocator, Work
from jaxkv._src.blocks._shape import StepShape, Upload
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.blocks._write import (
    Batch,
    Ints,
    Sizes,
    as_int32,
    check_batch,
    check_room,
    write_batch,
)
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.planning import Plan


class Ring(Protocol):
    """A source of upload buffers, such as `jaxkv.UploadRing`."""

    def buffer(self, shape: StepShape) -> np.ndarray:
        """Returns int32[shape.format.size] to write a step into."""
        ...

    def seal(self) -> Any:
        """Returns the buffer that was handed out last, as the array that a step reads."""
        ...


class Steps:
    """Takes steps: checks them, changes the state of the requests, and packs the uploads.

    num_uploads: number of uploads so far.
    """

    def __init__(self, plan: Plan, state: RequestState, rows: RowAllocator, prefixes: Prefixes):
        """Creates the steps of a manager, from its parts."""
        self._plan, self._state, self._rows, self._prefixes = plan, state, rows, prefixes
        self._shapes: set[StepShape] = set()  # shapes that passed `_check_shape`
        self._is_anew = False  # whether the next upload is the first one after a reset
        self.num_uploads = 0

    def step(self, shape: StepShape, work: Work, extra: Ints, ring: Ring | None) -> Upload:
        """Takes a step; see `BlockManager.step`."""
        if not isinstance(shape, StepShape) or shape not in self._shapes:
            self._check_shape(shape)
        state, batch = self._state, self._rows.batch(work)
        computed = state.computed[batch.rows]
        totals = computed + batch.counts
        check_batch(shape, batch, self._check_totals(batch, totals))
        own = _as_extra(extra)
        changes = plan_changes(state, batch.rows, computed, totals)
        news = find_news(state, batch.rows, totals, changes)
        check_room(shape, Sizes(extra=own.size) if news is None else news.sizes(own.size))
        data = np.empty(shape.format.size, np.int32) if ring is None else ring.buffer(shape)
        encoder_lens = state.encoder_tokens[batch.rows] if shape.format.has_encoder else NO_IDS
        write_batch(shape, data, batch, computed, encoder_lens, own)
        ids = None
        if changes is not None and news is not None:
            is_told = news.cells is changes.fresh
            taken = state.apply(changes, is_told=is_told)
            ids = taken if is_told else None
        if news is not None:
            write_news(state, shape, data, news, ids)
        state.advance(batch.rows, computed, totals)
        if self._prefixes.is_computing:
            self._prefixes.after_step(batch.rows.tolist())
        return self._numbered(shape, data, ring)

    def grow(self, work: Work) -> None:
        """Gives requests the blocks for their next tokens; see `BlockManager.grow`."""
        batch = self._rows.batch(work)
        computed = self._state.computed[batch.rows]
        totals = computed + batch.counts
        self._check_totals(batch, totals)
        changes = plan_changes(self._state, batch.rows, computed, totals)
        if changes is not None:
            self._state.apply(changes)
            self._state.note_unsent(changes)

    def reset(self) -> None:
        """Lets the next upload go on from any state of the device."""
        self._state.copies.clear()
        self._is_anew = True

    def _numbered(self, shape: StepShape, data: np.ndarray, ring: Ring | None) -> Upload:
        """Counts an upload, writes its number, and returns it."""
        self.num_uploads += 1
        number = (self.num_uploads - 1) % INT32_MAX + 1
        data[0], self._is_anew = -number if self._is_anew else number, False
        return Upload(data=data if ring is None else ring.seal(), shape=shape)

    # --- checks -----------------------------------------------------------------------

    def _check_totals(self, batch: Batch, totals: np.ndarray) -> int:
        """Raises ValueError for a request that grows too long; returns the longest total."""
        if totals.size == 1:
            longest = totals.item()
        else:
            longest = int(np.maximum.reduce(totals)) if totals.size else 0
        if longest > self._plan.max_model_len:
            name = self._rows.name(int(batch.rows[totals.argmax()]))
            raise ValueError(
                f"work: request {name!r} would have {longest} tokens, more than the plan's "
                f"max_model_len={self._plan.max_model_len}; finish the request, or plan for longer "
                "ones"
            )
        return longest

    def _check_shape(self, shape: StepShape) -> None:
        """Raises unless the shape belongs to this manager's plan."""
        if not isinstance(shape, StepShape):
            raise TypeError(f"shape must be a StepShape, got {type(shape).__name__}")
        difference = shape.first_difference(
            growths=self._state.growth.growths,
            num_blocks=self._plan.num_blocks,
            context_parallel=self._plan.context_parallel,
            max_requests=self._state.computed.size,
        )
        if difference is not None:
            name, given, wanted = difference
            raise ValueError(
                f"shape was made for another plan or manager: its {name} is {given!r} and this "
                f"manager's {wanted!r}; use StepShape.for_plan with the same plan and max_requests"
            )
        self._shapes.add(shape)


def _as_extra(extra: Ints) -> np.ndarray:
    return NO_IDS if isinstance(extra, tuple) and not extra else as_int32("extra", extra)
