"""The token ids of a scheduler's requests, and the lookup of their prefixes. No jax."""

import array
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import PrefixHit, PrefixMatch
from jaxkv._src.prefixes import as_tokens
from jaxkv._src.scheduler._options import Options
from jaxkv._src.scheduler._requests import ANYWHERE, Request, RequestTable
from jaxkv._src.scheduler._schedule import Schedule
from jaxkv._src.uploads import Batch

NO_ID = -1  # of a token that a step in flight samples


class Prompts:
    """The token ids of all requests, and their prefixes in the cache."""

    def __init__(self, options: Options):
        self._manager, self._chunk_tokens = options.manager, options.chunk_tokens
        self._tokens, self._lookahead_steps = options.tokens, options.lookahead_steps
        self._shares, self._swaps = options.shares, options.swaps

    # --- token ids ------------------------------------------------------------------

    def first_ids(self, name: Hashable, num_tokens: int, *, is_new: bool) -> np.ndarray | None:
        """Returns the ids of a request's first tokens, int32[num_tokens]; None without ``tokens``.

        Raises:
          TypeError, ValueError: too few of them, or something else. Of a request that is not new,
            ids may be missing that steps in flight sample.
        """
        if self._tokens is None:
            return None
        found = self._ids(name, end=num_tokens)
        if found.size < num_tokens - (0 if is_new else self._lookahead_steps):
            self._refuse_unknown(name, num_tokens)
        return found

    def check_known(self, names: Sequence[Hashable], wanted: np.ndarray) -> None:
        """Raises ValueError if ids of running requests are missing that the caller has to know.

        Args:
          wanted: int64[N], the tokens of each that have been scheduled.
        """
        if self._tokens is None:
            return
        try:
            known = np.fromiter(map(len, map(self._tokens.__getitem__, names)), np.int64)
        except (KeyError, TypeError):
            known = np.array([self._num_known(name) for name in names], np.int64)
        short = wanted - known > self._lookahead_steps
        if short.any():
            at = int(short.argmax())
            self._refuse_unknown(names[at], wanted.item(at))

    def is_known(self, name: Hashable, num_tokens: int) -> bool:
        """Returns whether the ids of a waiting request are known.

        Raises:
          ValueError: they are not, and no step is in flight that samples them.
        """
        if self._tokens is None or self._num_known(name) >= num_tokens:
            return True
        if not self._lookahead_steps:
            self._refuse_unknown(name, num_tokens)
        return False

    def _ids(self, name: Hashable, start: int = 0, end: int | None = None) -> np.ndarray:
        """Returns the token ids of a request from one position to another, int32[N]."""
        ids = () if self._tokens is None else self._tokens.get(name, ())
        if isinstance(ids, (list, tuple, array.array, np.ndarray)):  # others may have no slices
            return as_tokens(f"tokens[{name!r}]", ids[start:end], np.int32)
        return as_tokens(f"tokens[{name!r}]", ids, np.int32)[start:end]

    def _num_known(self, name: Hashable) -> int:
        ids = () if self._tokens is None else self._tokens.get(name, ())
        return len(ids) if hasattr(ids, "__len__") else 0

    def _refuse_unknown(self, name: Hashable, num_tokens: int) -> None:
        lookahead = self._lookahead_steps
        most = (
            f" (lookahead_steps={lookahead} lets the newest {lookahead} be missing)"
            if lookahead
            else ""
        )
        raise ValueError(
            f"request={name!r} has {num_tokens} tokens, and the scheduler's tokens hold "
            f"{self._num_known(name)} token ids of it{most}; put its prompt there before you add "
            "or fork it, and each sampled token before you append it"
        )

    def ids_of_step(self, schedule: Schedule) -> np.ndarray:
        """Returns the token ids of a step, int32[T]; see `Schedule.token_ids`."""
        if self._tokens is None:
            raise ValueError(
                "token_ids need the ids of all requests; pass tokens= when you make the Scheduler"
            )
        starts, names = schedule.num_computed, schedule.work.names.tolist()
        known, batch = list(map(self._tokens.__getitem__, names)), schedule.work.batch
        ends = (starts + batch.counts).tolist()
        try:
            ids = _ids_of_step(known, starts, batch)
        except (TypeError, ValueError):
            for name, start, end in zip(names, starts.tolist(), ends, strict=True):
                as_tokens(f"tokens[{name!r}]", self._tokens[name][start:end])
            raise
        if not self._lookahead_steps and (ids == NO_ID).any():
            for name, end in zip(names, ends, strict=True):
                self.is_known(name, end)
        return ids

    # --- prefixes -----------------------------------------------------------------

    def find(self, request: Request, num_tokens: int, most: int) -> tuple[int, int]:
        """Returns a waiting request's cached tokens, and how many of their blocks others hold."""
        found = self._look_up(request, num_tokens)
        if found is None or not found.num_cached_tokens:
            return 0, 0
        if found.num_cached_tokens > most:
            found = self._manager.find_prefix(found, max_cached_tokens=most)
        return found.num_cached_tokens, found.num_allocated_blocks

    def start(
        self, request: Request, num_tokens: int, *, draft_start: int, max_cached_tokens: int
    ) -> PrefixHit:
        """Starts a request, with the prefix that `find` has just found."""
        if self.num_swapped(request, max_cached_tokens):
            hit = self._manager.swap_in(request.name)
        else:
            is_known = request.found is not None
            hit = self._manager.start(
                request.name,
                request.found,
                boundaries=request.boundaries if is_known else (),
                max_cached_tokens=max_cached_tokens if is_known else None,
                encoder_tokens=request.encoder_tokens,
            )
        request.found = request.ids = None
        ends = set(hit.chunk_ends)
        if self._chunk_tokens is not None:
            ends.update(range(self._chunk_tokens, num_tokens, self._chunk_tokens))
        if num_tokens > draft_start + 1:
            ends.add(draft_start)  # drafts are verified in a step of their own
        request.chunk_ends = sorted(n for n in ends if hit.num_cached_tokens < n <= draft_start)
        return hit

    def fork(self, donor: Request, request: Request) -> PrefixHit:
        """Starts a waiting sample with all of its prompt but the last token, from another one."""
        manager, count = self._manager, request.prompt_tokens - 1
        options = {"num_tokens": count, "prompt_tokens": request.prompt_tokens}
        manager.fork(donor.name, [request.name], **options)
        request.found, request.ids, request.chunk_ends = None, None, ()
        row, shared = manager.requests[request.name], self.whole_blocks(count)
        return PrefixHit(row, count, shared, ("complete",) * len(shared), ())

    def whole_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Returns, per group, the blocks that first tokens fill."""
        plan = self._manager.plan
        return tuple([num_tokens // (g.block_size * plan.context_parallel) for g in plan.groups])

    def finish(self, request: Request) -> None:
        """Ends a request in the manager, which caches its blocks for later prompts."""
        self._manager.finish(request.name, self._ids_after_prompt(request))

    def swap_out(self, request: Request) -> None:
        """Ends a request that is preempted; with host memory, it goes on where it was."""
        end = self._manager.swap_out if self._swaps else self._manager.finish
        end(request.name, self._ids_after_prompt(request))

    def num_swapped(self, request: Request, most: int) -> int:
        """Returns the tokens with which a preempted request goes on; 0: it starts anew."""
        count = self._manager.num_swapped_tokens(request.name)
        return count if count <= most else 0

    def discard_swapped(self, request: Request) -> None:
        """Discards the swapped-out state of a request, if there is any."""
        self._manager.discard_swapped(request.name)

    def _ids_after_prompt(self, request: Request) -> np.ndarray | None:
        """Returns the ids after those that the manager knows; None: it wants none."""
        if not (known := self._manager.num_known_tokens(request.name)):
            return None
        most = max(0, self._manager.num_computed_tokens(request.name) + 1 - known)
        try:
            return self._ids(request.name, known)[:most]  # without drafts, if they are among them
        except (TypeError, ValueError):  # nothing of them is cached, but a request can always end
            return None

    def rewind(self, requests: Sequence[tuple[Request, int]]) -> None:
        """Shortens requests, in the manager as well, to numbers of tokens."""
        self._manager.rewind({x.name: n for x, n in requests if self._must_rewind(x, n)})
        for request, count in requests:
            self.discard_swapped(request)
            request.found = None
            request.chunk_ends = [end for end in request.chunk_ends if end <= count]

    def _must_rewind(self, request: Request, num_tokens: int) -> bool:
        """Returns whether the manager knows more tokens of a request."""
        if request.row < 0:
            return False
        known = self._manager.num_known_tokens(request.name)
        return num_tokens < max(self._manager.computed_by_row[request.row], known)

    def forget_unknown(self, request: Request, table: RequestTable) -> None:
        """Forgets the tokens of a waiting request whose ids are not known, and what it found."""
        request.found = request.ids = None
        if self._tokens is not None:
            known = max(request.prompt_tokens, self._num_known(request.name))
            if known < table.num_tokens[request.index]:
                table.num_tokens[request.index] = known
                table.draft_starts[request.index] = ANYWHERE

    def next_chunk_end(self, request: Request, computed: int) -> int:
        """Returns the number of tokens after which the next chunk has to end, or `ANYWHERE`."""
        request.chunk_ends = [end for end in request.chunk_ends if end > computed]
        return request.chunk_ends[0] if request.chunk_ends else ANYWHERE

    def _look_up(self, request: Request, num_tokens: int) -> PrefixMatch | None:
        """Returns the prefix of a waiting request; None if requests share nothing.

        An earlier result is used again unless the cache has changed since.
        """
        if not self._shares:
            return None
        find = self._manager.find_prefix
        if request.found is not None:
            request.found = find(request.found)
            return request.found
        ids = self._ids(request.name, end=num_tokens) if request.ids is None else request.ids
        request.found = find(ids, salt=request.salt, extra_keys=request.extra_keys)
        request.ids = None
        return request.found


def _ids_of_step(
    known: Sequence[Sequence[int] | np.ndarray], starts: np.ndarray, batch: Batch
) -> np.ndarray:
    """Returns the token ids of all tokens of a step, int32[T]; `NO_ID` for those not known."""
    counts, ends = batch.counts, batch.ends
    ids = np.full(batch.num_tokens, NO_ID, np.int32)
    has_ids = starts < np.fromiter(map(len, known), np.int64, len(known))
    alone = (has_ids & (counts == 1)).nonzero()[0]
    places = zip(alone.tolist(), starts[alone].tolist(), strict=True)
    ids[ends[alone] - 1] = as_tokens("tokens", [known[i][at] for i, at in places], np.int32)
    for i in (has_ids & (counts > 1)).nonzero()[0].tolist():
        start, count, end = starts.item(i), counts.item(i), ends.item(i)
        part = as_tokens("tokens", known[i][start : start + count], np.int32)
        ids[end - count :][: part.size] = part
    return ids
