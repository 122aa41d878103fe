"""The choice and the packing of an engine's steps."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.engine._details import Asked, Details
from jaxkv._src.engine._drafts import Drafting
from jaxkv._src.engine._outputs import PROMPT, SIDE, TOP, Stats
from jaxkv._src.engine._samples import RECORD, RECORD_SIZE, Sample, Samples
from jaxkv._src.engine._shape_buckets import ShapeBuckets
from jaxkv._src.offload import Transfers
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.uploads import Ring, StepShape, Upload


class Sampled(NamedTuple):
    """The samples that a step samples a token for.

    index: int64[S], of each in `Samples`.
    drafts: of each sample, after each of which the step samples a token, too; empty: of none.
    """

    samples: list[Sample]
    index: np.ndarray
    drafts: Sequence[Sequence[int]] = ()

    @property
    def tokens(self) -> Iterator[tuple[Sample, int]]:
        """Each token that is sampled, as its sample and its place after the known ones."""
        if not self.drafts:
            return ((sample, 0) for sample in self.samples)
        pairs = zip(self.samples, self.drafts, strict=True)
        return ((sample, at) for sample, drafts in pairs for at in range(1 + len(drafts)))


NONE_SAMPLED = Sampled([], np.zeros(0, np.int64))
NOTHING_ASKED = Asked()


class Step(NamedTuple):
    """A step that is packed.

    transfers: of blocks between the memories, before it runs.
    asked: that it computes besides.
    started: samples that get a state for logits processors, before it runs.
    """

    upload: Upload
    sampled: Sampled = NONE_SAMPLED
    transfers: Transfers | None = None
    asked: Asked = NOTHING_ASKED
    started: Sequence[Sample] = ()


@dataclasses.dataclass(eq=False)
class Packer:
    """Chooses the work of an engine's steps, and packs their uploads.

    ring: for page-locked uploads; None: NumPy arrays.
    num_sampled: tokens of the latest steps that the device keeps.
    offset: index on the device of the first of the tokens that the newest step samples.
    sampled: by the newest step, if its tokens are on the device.
    drafting: drafts, if the engine has any.
    waits: the latest answer of `awaits_tokens`.
    """

    manager: BlockManager
    buckets: ShapeBuckets
    scheduler: Scheduler
    samples: Samples
    stats: Stats
    ring: Ring | None
    num_sampled: int
    offset: int = 0
    sampled: Sampled = NONE_SAMPLED
    drafting: Drafting | None = None
    waits: bool = False

    def awaits_tokens(self) -> bool:
        """Returns whether the next step depends on the tokens of the newest one.

        That has drafts, or the next one may, unless the tokens before suggest none.
        """
        drafting, self.waits = self.drafting, bool(self.sampled.drafts and self._alive())
        if not self.waits and drafting is not None and self._may_draft:
            self.waits = bool(drafting.propose(self._alive()))
        return self.waits

    def pack(self, most_steps: int) -> list[list[Step]]:
        """Packs some decodes of one shape, or one other step; none if there is no work.

        Where more than half of the decodes have work, idle ones make them complete.

        Returns:
          The steps of each call: all of them if they are complete, else one.
        """
        if self.drafting is not None and (step := self._verify(self.drafting)) is not None:
            return [[step]]
        steps: list[Step] = []
        idle: list[Step] = []
        shape: StepShape | None = None  # of all of them
        while self.samples.tokens and len(steps) < most_steps:
            schedule = self.scheduler.schedule(max_tokens=self._most_tokens())
            if not schedule.work:
                if shape is not None and most_steps < 2 * len(steps):
                    idle = [Step(shape.idle(self.ring)) for _ in range(most_steps - len(steps))]
                break
            asked = self._asked(schedule)
            wanted = self.buckets.fitting(
                schedule,
                may_decode=not asked.wants & PROMPT,
                num_saved=0 if shape is not None else self._num_saved(schedule),
            )
            if shape is None:
                shape = wanted
            elif wanted.max_query_len > 1 or wanted.max_tokens > shape.max_tokens:
                break  # the schedule comes again
            steps.append(self._pack(schedule, shape, asked))
            self._count(schedule, shape.max_tokens - schedule.num_tokens)
            if shape.max_query_len > 1:
                break
        # Transfers read what the steps of earlier calls have written, and so do starts of states.
        may_join = not any(step.transfers or step.started for step in steps[1:])
        if len(steps + idle) == most_steps and may_join:
            return [steps + idle]
        return [[step] for step in steps]

    def _most_tokens(self) -> int | None:
        """Returns the most tokens of the next step, so that it fills its shape; None: any."""
        decodes = len(self.sampled.samples)  # have sampled a token, and want one more
        if decodes == len(self.samples.tokens):
            return None
        return self.buckets.fill(self.scheduler.wanted(), decodes)

    def _num_saved(self, schedule: Schedule) -> int:
        """Returns the tokens that groups of requests would save, if all of them decode."""
        shared = self.buckets.shared
        if not shared or schedule.num_tokens != len(schedule.work):
            return 0
        groups = next(reversed(shared.values())).shared_prefixes  # of the largest
        return self.manager.shared_tokens(schedule.work, groups=groups)

    def _asked(self, schedule: Schedule) -> Asked:
        """Returns what the requests of a step ask for."""
        samples, batch = self.samples, schedule.work.batch
        if not np.count_nonzero(samples.asks):
            return NOTHING_ASKED
        asks, rows = samples.asks[schedule.index] & ~TOP, list[tuple[Details, int, int, int]]()
        wants = int(np.bitwise_or.reduce(samples.asks[schedule.samples.index] & TOP, initial=0))
        for at in asks.nonzero()[0].tolist():
            details = samples.by_index[schedule.index[at]].details
            start, count = schedule.num_computed.item(at), batch.counts.item(at)
            of = asks.item(at) & (PROMPT | SIDE if start < details.num_prompt - 1 else SIDE)
            wants |= of
            if of:
                rows.append((details, start, batch.ends.item(at) - count, count))
        return Asked(wants, rows)

    # --- drafts -------------------------------------------------------------------

    @property
    def _may_draft(self) -> bool:
        """Whether the next step may verify drafts.

        All requests that run have to decode, in a step that none can enter.
        """
        drafting = self.drafting
        if drafting is None or not drafting.may_try:
            return False
        running = self.manager.requests
        if not drafting.has_room_for(len(running)):
            return False
        names = [sample.name for sample in self._alive()]
        entered = min(self.manager.max_requests, len(self.samples.tokens))
        return 0 < len(names) == len(running) == entered and all(x in running for x in names)

    def _alive(self) -> list[Sample]:
        return [sample for sample in self.sampled.samples if sample.reason is None]

    def _verify(self, drafting: Drafting) -> Step | None:
        """Packs a step that verifies drafts; None: there are none.

        The scheduler has the newest token of each request already, and gets it again with drafts.
        """
        drafting.begin_step(waits=self.waits)
        may_draft = self.waits and self._may_draft
        if not may_draft or not (drafts := drafting.propose(self._alive())):
            return None
        self.scheduler.rewind({sample.name: len(sample.tokens) - 1 for sample in drafts})
        self.scheduler.append({sample.name: 1 + len(of) for sample, of in drafts.items()})
        num_tokens = len(self._alive()) + sum(map(len, drafts.values()))
        schedule = self.scheduler.schedule(max_tokens=num_tokens)
        samples = self.samples.by_index[schedule.index].tolist()
        lists = [drafts.get(sample, []) for sample in samples]
        # A request that a rewind has preempted may start again, with other tokens.
        decode = schedule.num_computed == self.samples.num_known[schedule.index] - 1
        decode &= schedule.work.batch.counts == [1 + len(of) for of in lists]
        is_right = bool(samples) and decode.all()
        # No later step counts on the drafts of those that are left out.
        if late := [sample for sample in drafts if not is_right or sample not in samples]:
            self.scheduler.rewind({sample.name: len(sample.tokens) for sample in late})
        if not is_right:
            return None
        shape = self.buckets.fitting_drafts(schedule.num_tokens)
        self._count(schedule, shape.max_tokens - schedule.num_tokens)
        self.stats.drafted_tokens += sum(map(len, lists))
        return self._pack_drafts(schedule, shape, Sampled(samples, schedule.index, lists))

    def _pack_drafts(self, schedule: Schedule, shape: StepShape, sampled: Sampled) -> Step:
        """Packs a step that samples a token after each of its tokens, all of which are known."""
        index, lists = sampled.index, sampled.drafts
        parts = zip(sampled.samples, lists, strict=True)
        ids = [token for of, drafts in parts for token in (of.tokens[-1], *drafts)]
        counts = schedule.work.batch.counts
        ends = np.cumsum(counts)
        started = self.samples.take_rows(index, self.manager.requests)
        records, each = self.samples.records[np.repeat(index, counts)], np.arange(len(ids))
        records["index"] = each
        records["position"] += 1 + each - np.repeat(ends - counts, counts)
        records["offset"] = 0  # no later step takes these tokens from the device
        asked = self._asked(schedule)
        upload = self._upload(schedule, shape, np.array(ids, np.int32), records)
        return self._sent(upload, sampled, records[ends - 1], asked, started)

    def _pack(self, schedule: Schedule, shape: StepShape, asked: Asked) -> Step:
        index, ids = schedule.samples.index, self._token_ids(schedule)
        started = self.samples.take_rows(index, self.manager.requests)
        records, count = self.samples.records[index], index.size
        offset = self.offset % (self.num_sampled - self.manager.max_requests)
        offset += self.manager.max_requests  # those before are of idle steps
        places = schedule.samples.ints
        records["index"] = (
            schedule.work.batch.ends[places] - 1 if self.samples.model.has_head else places
        )
        records["position"] += 1
        records["offset"] = offset + np.arange(count)
        targets = self._targets(schedule) if asked.wants & PROMPT else ()
        upload = self._upload(schedule, shape, ids, records, targets)
        self.offset = offset
        sampled = Sampled(self.samples.by_index[index].tolist(), index)
        return self._sent(upload, sampled, records, asked, started)

    def _upload(
        self,
        schedule: Schedule,
        shape: StepShape,
        ids: np.ndarray,
        records: np.ndarray,
        targets: Sequence[int] = (),
    ) -> Upload:
        extra = np.zeros(shape.extra, np.int32)
        extra[: ids.size] = ids
        size = records.size * RECORD_SIZE
        extra[shape.max_tokens :][:size].view(RECORD)[:] = records
        if targets:
            extra[extra.size - shape.batch_size :][: len(targets)] = targets
        return self.manager.step(shape, schedule.work, extra=extra, ring=self.ring)

    def _sent(
        self,
        upload: Upload,
        sampled: Sampled,
        records: np.ndarray,
        asked: Asked,
        started: Sequence[Sample],
    ) -> Step:
        """Returns the step of an upload, and gives each request its next token to compute.

        Args:
          records: of the last token that each sample samples.
        """
        self.sampled, index = sampled, sampled.index
        self.samples.records[index] = records
        self.scheduler.append(index[records["position"] < records["last"]])
        return Step(upload, sampled, self.manager.take_transfers(), asked, started)

    def _targets(self, schedule: Schedule) -> list[int]:
        """Returns the token after each request's last one, if it is of the prompt; else 0."""
        ends = (schedule.num_computed + schedule.work.batch.counts).tolist()
        found = zip(self.samples.by_index[schedule.index].tolist(), ends, strict=True)
        return [of.tokens[end] if end < of.num_prompt else 0 for of, end in found]

    def _token_ids(self, schedule: Schedule) -> np.ndarray:
        """Returns the token ids of a step; ``-1 - i`` for the one at index i on the device."""
        batch, index, samples = schedule.work.batch, schedule.index, self.samples
        ids, ends = np.empty(batch.num_tokens, np.int32), schedule.num_computed + batch.counts
        is_late = ends > samples.num_known[index]  # the last token of a request, no other one
        ids[batch.ends - 1] = -1 - samples.records["offset"][index]
        if np.count_nonzero(is_late) == batch.num_tokens:
            return ids
        for at in (~is_late | (batch.counts > 1)).nonzero()[0].tolist():
            start, end = schedule.num_computed.item(at), ends.item(at)
            known = samples.by_index[index[at]].tokens[start:end]
            first = batch.ends.item(at) - batch.counts.item(at)
            ids[first : first + len(known)] = known
        return ids

    def _count(self, schedule: Schedule, num_padded: int) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += schedule.num_tokens
        stats.padded_tokens += num_padded
        stats.preemptions += len(schedule.preempted)
        stats.cached_tokens += sum(hit.num_cached_tokens for hit in schedule.hits.values())
