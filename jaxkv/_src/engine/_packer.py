"""The choice and the packing of an engine's steps. No jax."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager, StepShape, Upload
from jaxkv._src.engine._ladder import Ladder
from jaxkv._src.engine._samples import INDEX, LEFT, PLACE, POSITION, Sample, Samples
from jaxkv._src.engine._sampling import Stats
from jaxkv._src.planning import Plan
from jaxkv._src.scheduler import Schedule, Scheduler

if TYPE_CHECKING:
    from jaxkv._src.step import UploadRing


class Drawn(NamedTuple):
    """The samples that a step draws a token for.

    slots: int64[S], see `Sample`.
    answers: to the scheduler, if all of them go on.
    """

    names: list[Hashable]
    samples: list[Sample]
    slots: np.ndarray
    answers: dict[Hashable, int]
    wants_logprobs: bool


NONE_DRAWN = Drawn([], [], np.zeros(0, np.int64), {}, False)


class Step(NamedTuple):
    """A step that is packed.

    last: samples of which it draws the last token.
    num_ended: `Samples.num_ended` when it was packed.
    """

    upload: Upload
    drawn: Drawn
    last: list[Sample]
    num_ended: int


class Packer:
    """Chooses the work of steps, and packs their uploads.

    samples, scheduler, ladder: of the engine.
    num_drawn: tokens of the latest steps that the device has to keep.
    """

    def __init__(
        self,
        plan: Plan,
        stats: Stats,
        *,
        max_requests: int,
        max_tokens: int,
        steps_ahead: int,
        chunk_tokens: int | None,
        forks: int | None,
        shared_prefixes: int,
    ):
        self.manager, self.samples = BlockManager(plan, max_requests=max_requests), Samples()
        self.scheduler = Scheduler(
            self.manager,
            max_tokens=max_tokens,
            forks=min(max_requests, 32) if forks is None else forks,
            tokens=self.samples.tokens,
            chunk_tokens=chunk_tokens,
            steps_ahead=steps_ahead,
        )
        self.ladder = Ladder(self.scheduler, max_requests, max_tokens, shared_prefixes)
        # Those of idle steps, and of steps that the host does not know yet.
        self.num_drawn = (steps_ahead + 2) * max_requests
        self.ring: UploadRing | None = None
        self._stats = stats
        self._place = 0  # on the device, of the tokens that the newest step draws
        self._drawn = NONE_DRAWN  # by the newest step, if its tokens are on the device

    def pack(self, most_steps: int) -> list[Step]:
        """Packs some decodes of one shape, or one other step; none if there is no work.

        Where more than half of the decodes have work, idle ones make them complete.
        """
        steps: list[Step] = []
        while len(steps) < most_steps and self.samples.of:
            schedule = self.scheduler.schedule(max_tokens=self._most_tokens())
            if not schedule.work:
                if most_steps - len(steps) < len(steps):
                    idle = self.idle(steps[0].upload.shape, most_steps - len(steps))
                    steps += [Step(upload, NONE_DRAWN, [], 0) for upload in idle]
                break
            num_tokens = sum(schedule.work.values())
            shape = self.ladder.fitting(schedule, num_tokens)
            if steps:
                first = steps[0].upload.shape
                if shape.max_query_len > 1 or shape.max_tokens > first.max_tokens:
                    break  # the schedule comes again
                shape = first
            steps.append(self._pack(schedule, shape))
            self._count(schedule, num_tokens, shape.max_tokens - num_tokens)
            if shape.max_query_len > 1:
                break
        return steps

    def idle(self, shape: StepShape, count: int) -> tuple[Upload, ...]:
        """Returns the uploads of steps without requests, which must run."""
        if self.ring is None:
            return (shape.idle(),) * count
        return tuple(self.manager.step(shape, {}, ring=self.ring) for _ in range(count))

    def forget(self) -> None:
        """Notes that the host knows all tokens."""
        self._drawn = NONE_DRAWN

    def restart(self, *, from_prompts: bool) -> None:
        """Lets all requests wait, to be computed again; nothing is in flight."""
        for sample in self.samples.of.values():
            self.samples.restart(sample, from_prompts=from_prompts)
        self.scheduler.restart()
        self.forget()

    def _most_tokens(self) -> int | None:
        """Returns the most tokens of the next step, so that it fills its shape; None: any."""
        if len(self.samples.of) == len(self._drawn.names):
            return None  # all of them have drawn a token, and want one more
        return self.ladder.fill(self.scheduler.wanted_tokens)

    def _pack(self, schedule: Schedule, shape: StepShape) -> Step:
        names, drawn = list(schedule.samples), self._drawn
        is_same = names == drawn.names and not (schedule.hits or schedule.preempted)
        goes_on = is_same and names == list(schedule.work)
        drawn = drawn if is_same else self._drawn_of(names)
        numbers, count = self.samples.numbers.take(drawn.slots, axis=0), len(names)
        ids = -1 - numbers[:, PLACE] if goes_on else self._token_ids(schedule)
        place = self._place % (self.num_drawn - self.manager.max_requests)
        place += self.manager.max_requests  # those before are of idle steps
        in_order = np.arange(count)
        numbers[:, INDEX] = in_order if goes_on else list(schedule.samples.values())
        numbers[:, POSITION] += 1
        numbers[:, LEFT] -= 1
        numbers[:, PLACE] = place + in_order
        extra, tokens = np.zeros(shape.extra, np.int32), shape.max_tokens
        extra[: ids.size], extra[tokens] = ids, place
        extra[tokens + 1 : tokens + 1 + count * LEFT] = numbers[:, :LEFT].reshape(-1)
        upload = self.manager.step(shape, schedule.work, extra=extra, ring=self.ring)
        self.samples.numbers[drawn.slots], self._place, self._drawn = numbers, place, drawn
        last = [drawn.samples[at] for at in (numbers[:, LEFT] == 0).nonzero()[0]]
        ended = {sample.name for sample in last}
        answers = {name: 1 for name in names if name not in ended} if ended else drawn.answers
        self.scheduler.append(answers)
        return Step(upload, drawn, last, self.samples.num_ended)

    def _count(self, schedule: Schedule, num_tokens: int, num_padded: int) -> None:
        stats = self._stats
        stats.steps += 1
        stats.computed_tokens += num_tokens
        stats.padded_tokens += num_padded
        stats.preemptions += len(schedule.preempted)
        stats.cached_tokens += sum(hit.num_cached_tokens for hit in schedule.hits.values())

    def _drawn_of(self, names: list[Hashable]) -> Drawn:
        samples = [self.samples.of[name] for name in names]
        slots = np.array([sample.slot for sample in samples], np.int64)
        wants_logprobs = any(sample.sampling.logprobs for sample in samples)
        return Drawn(names, samples, slots, dict.fromkeys(names, 1), wants_logprobs)

    def _token_ids(self, schedule: Schedule) -> np.ndarray:
        """Returns the token ids of a step; ``-1 - i`` for the one in place i on the device."""
        ids, work = schedule.token_ids, schedule.work
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:  # the last of their requests
            names, ends = list(work), np.cumsum(list(work.values()))
            of = [self.samples.of[names[at]] for at in ends.searchsorted(unknown, "right")]
            ids[unknown] = -1 - self.samples.numbers[[sample.slot for sample in of], PLACE]
        return ids
