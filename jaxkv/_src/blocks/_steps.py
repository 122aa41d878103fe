"""The steps of a `BlockManager`: blocks for new tokens, and the uploads. No jax."""

from typing import Any, Protocol

import numpy as np

from jaxkv._src.blocks._books import Books, Changes
from jaxkv._src.blocks._changes import plan_changes
from jaxkv._src.blocks._pending import Pending
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.blocks._rows import Rows, Work
from jaxkv._src.blocks._runs import NO_IDS
from jaxkv._src.blocks._shape import StepShape, Upload
from jaxkv._src.blocks._small_steps import (
    SmallStep,
    plan_small_step,
    write_small_batch,
    write_small_changes,
)
from jaxkv._src.blocks._write import (
    Batch,
    Ints,
    as_int32,
    check_batch,
    check_room,
    write_batch,
    write_extra,
)
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.planning import Plan

NOTHING_ZEROED = np.zeros(0, bool)


class Ring(Protocol):
    """A source of upload buffers, such as `jaxkv.UploadRing`."""

    def buffer(self, shape: StepShape) -> np.ndarray:
        """Returns int32[shape.format.size] to write a step into."""
        ...

    def seal(self) -> Any:
        """Returns the buffer that was handed out last, as the array that a step reads."""
        ...


class Steps:
    """Takes steps: checks them, changes the books of the manager, and packs the uploads.

    Most steps of a few requests are taken in plain ints (`jaxkv.blocks._small_steps`), all others
    in arrays. Both have the same results.

    num_uploads: number of uploads so far.
    """

    def __init__(
        self,
        plan: Plan,
        books: Books,
        rows: Rows,
        pending: Pending,
        prefixes: Prefixes,
        encoder_tokens: np.ndarray,
    ):
        """Creates the steps of a manager.

        Args:
          plan: of the manager.
          books, rows, pending, prefixes: parts of the manager, which steps read and change.
          encoder_tokens: int64[R], encoder tokens of the request in each row.
        """
        self._plan, self._books, self._rows = plan, books, rows
        self._pending, self._prefixes, self._encoder_tokens = pending, prefixes, encoder_tokens
        self._takes_small_steps = not prefixes.has_encoder and pending.zeroes == pending.zeroes_all
        self._shapes: set[StepShape] = set()  # shapes that passed `_check_shape`
        self.num_uploads = 0

    def step(self, shape: StepShape, work: Work, extra: Ints, ring: Ring | None) -> Upload:
        """Takes a step; see `BlockManager.step`."""
        if not isinstance(shape, StepShape) or shape not in self._shapes:
            self._check_shape(shape)
        small = self._small(work)
        if small is not None and small.fits(shape, zeroes=self._pending.zeroes):
            return self._take_small(shape, small, extra, ring)
        return self._take(shape, self._rows.batch(work), extra, ring)

    def grow(self, work: Work) -> None:
        """Gives requests the blocks for their next tokens; see `BlockManager.grow`."""
        small = self._small(work)
        if small is not None:
            if small.changes.rows:
                self._pending.add_few(small.changes, self._books.apply_few(small.changes))
            return
        batch = self._rows.batch(work)
        computed = self._books.computed[batch.rows]
        totals = computed + batch.counts
        self._check_totals(batch, totals)
        changes = plan_changes(self._books, batch.rows, computed, totals)
        if changes is not None:
            self._apply(changes, self._pending.to_zero(changes))

    # --- steps in arrays ------------------------------------------------------------

    def _take(self, shape: StepShape, batch: Batch, extra: Ints, ring: Ring | None) -> Upload:
        books, pending = self._books, self._pending
        computed = books.computed[batch.rows]
        totals = computed + batch.counts
        check_batch(shape, batch, self._check_totals(batch, totals))
        own = _as_extra(extra)
        changes = plan_changes(books, batch.rows, computed, totals)
        zeroed = NOTHING_ZEROED if changes is None else pending.to_zero(changes)
        check_room(shape, pending.sizes(own.size, changes, zeroed))
        data = _buffer(shape, ring)
        encoder_lens = self._encoder_tokens[batch.rows] if shape.format.has_encoder else NO_IDS
        write_batch(shape, data, batch, computed, encoder_lens, own)
        if changes is not None:
            self._apply(changes, zeroed)
        if not pending.is_empty:
            pending.write(shape, data, books)
        books.advance(batch.rows, computed, totals)
        if self._prefixes.is_computing:
            self._prefixes.after_step(batch.rows.tolist())
        return self._numbered(shape, data, ring)

    def _apply(self, changes: Changes, zeroed: np.ndarray) -> None:
        ids, replaced = self._books.apply(changes)
        self._pending.add(changes, ids, zeroed, replaced)

    def _numbered(self, shape: StepShape, data: np.ndarray, ring: Ring | None) -> Upload:
        """Counts an upload, writes its number, and returns it."""
        self.num_uploads += 1
        data[0] = (self.num_uploads - 1) % INT32_MAX + 1
        return Upload(data=data if ring is None else ring.seal(), shape=shape)

    # --- steps in plain ints ----------------------------------------------------------

    def _small(self, work: Work) -> SmallStep | None:
        if not self._takes_small_steps:
            return None
        return plan_small_step(self._books, self._rows, work, self._plan.max_model_len)

    def _take_small(
        self, shape: StepShape, step: SmallStep, extra: Ints, ring: Ring | None
    ) -> Upload:
        """Takes a step that fits the shape by itself."""
        books, pending, own = self._books, self._pending, _as_extra(extra)
        if own.size or not pending.is_empty:
            check_room(shape, pending.sizes_with_few(own.size, step.changes, step.num_fresh))
        data = _buffer(shape, ring)
        write_small_batch(shape, data, step)
        if own.size:
            write_extra(shape, data, own)
        ids = books.apply_few(step.changes) if step.changes.rows else NO_IDS
        if not pending.is_empty:
            pending.add_few(step.changes, ids)
            pending.write(shape, data, books)
        elif step.changes.rows:
            write_small_changes(shape, data, step.changes, ids, zeroes=pending.zeroes)
        books.advance_few(step.requests)
        if self._prefixes.is_computing:
            self._prefixes.after_step([row for row, _, _ in step.requests])
        return self._numbered(shape, data, ring)

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
            growths=self._books.rules.growths,
            num_blocks=self._plan.num_blocks,
            context_parallel=self._plan.context_parallel,
            max_requests=self._encoder_tokens.size,
        )
        if difference is not None:
            name, given, wanted = difference
            raise ValueError(
                f"shape was made for another plan or manager: its {name} is {given!r} and this "
                f"manager's {wanted!r}; use StepShape.for_plan with the same plan and max_requests"
            )
        self._shapes.add(shape)


def _buffer(shape: StepShape, ring: Ring | None) -> np.ndarray:
    return np.empty(shape.format.size, np.int32) if ring is None else ring.buffer(shape)


def _as_extra(extra: Ints) -> np.ndarray:
    return NO_IDS if isinstance(extra, tuple) and not extra else as_int32("extra", extra)
