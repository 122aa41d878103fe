"""The choice and the packing of an engine's steps."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.engine._ladder import Ladder
from jaxkv._src.engine._samples import INDEX, LEFT, PLACE, POSITION, Sample, Samples
from jaxkv._src.engine._sampling import Stats
from jaxkv._src.internal.frozen import FrozenDict
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.step import UploadRing
from jaxkv._src.tier import Moves
from jaxkv._src.uploads import StepShape, Upload


class Drawn(NamedTuple):
    """The samples that a step draws a token for.

    slots: int64[S], see `Sample`.
    places: by name, `Schedule.samples` of the step that they were drawn in first.
    answers: to the scheduler, if all of them go on.
    """

    places: Mapping[Any, int]
    samples: list[Sample]
    slots: np.ndarray
    answers: Mapping[Any, int]


NONE_DRAWN = Drawn({}, [], np.zeros(0, np.int64), {})


class Step(NamedTuple):
    """A step that is packed.

    last: the samples of which it draws the last token.
    moves: of blocks between the memories, before it runs.
    """

    upload: Upload
    drawn: Drawn
    last: list[Sample]
    moves: Moves | None


@dataclasses.dataclass(eq=False)
class Packer:
    """Chooses the work of an engine's steps, and packs their uploads.

    ring: for page-locked uploads; None: NumPy arrays.
    num_drawn: tokens of the latest steps that the device keeps.
    place: on the device, of the tokens that the newest step draws.
    drawn: by the newest step, if its tokens are on the device.
    """

    manager: BlockManager
    ladder: Ladder
    scheduler: Scheduler
    samples: Samples
    stats: Stats
    ring: UploadRing | None
    num_drawn: int
    place: int = 0
    drawn: Drawn = NONE_DRAWN

    def pack(self, most_steps: int) -> list[list[Step]]:
        """Packs some decodes of one shape, or one other step; none if there is no work.

        Where more than half of the decodes have work, idle ones make them complete.

        Returns:
          The steps of each call: all of them if they are complete, else one.
        """
        steps: list[Step] = []
        while len(steps) < most_steps and self.samples.of:
            schedule = self.scheduler.schedule(max_tokens=self._most_tokens())
            if not schedule.work:
                if most_steps - len(steps) < len(steps):
                    steps += self.idle(steps[0].upload.shape, most_steps - len(steps))
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
        # Moves read what the steps of earlier calls have written.
        is_whole = len(steps) == most_steps and not any(step.moves for step in steps[1:])
        return [steps] if is_whole else [[step] for step in steps]

    def idle(self, shape: StepShape, count: int) -> list[Step]:
        """Returns steps without requests, whose uploads have no numbers: they may be lost."""
        return [Step(self._idle_upload(shape), NONE_DRAWN, [], None) for _ in range(count)]

    def _idle_upload(self, shape: StepShape) -> Upload:
        if self.ring is None:
            return shape.idle()
        self.ring.buffer(shape)[:] = shape.format.padding
        return Upload(data=self.ring.seal(), shape=shape)

    def forget(self) -> None:
        """Notes that the host knows all tokens."""
        self.drawn = NONE_DRAWN

    def _most_tokens(self) -> int | None:
        """Returns the most tokens of the next step, so that it fills its shape; None: any."""
        decodes = len(self.drawn.samples)  # have drawn a token, and want one more
        if decodes == len(self.samples.of):
            return None
        wanted = self.scheduler.wanted()
        return self.ladder.fill(wanted.tokens, decodes, has_backlog=wanted.has_backlog)

    def _pack(self, schedule: Schedule, shape: StepShape) -> Step:
        drawn, numbers = self.drawn, self.samples.numbers
        goes_on = schedule.samples is drawn.places  # those of all running requests
        if not goes_on:
            drawn = self._drawn_of(schedule)
        count = len(drawn.samples)
        table = numbers.take(drawn.slots, axis=1)
        ids = -1 - table[PLACE] if goes_on else self._token_ids(schedule)
        place = self.place % (self.num_drawn - self.manager.max_requests)
        place += self.manager.max_requests  # those before are of idle steps
        in_order = np.arange(count)
        table[INDEX] = in_order if goes_on else list(schedule.samples.values())
        table[POSITION] += 1
        table[LEFT] -= 1
        table[PLACE] = place + in_order
        extra, tokens = np.zeros(shape.extra, np.int32), shape.max_tokens
        extra[: ids.size], extra[tokens] = ids, place
        extra[tokens + 1 :].reshape(LEFT, -1)[:, :count] = table[:LEFT]
        upload = self.manager.step(shape, schedule.work, extra=extra, ring=self.ring)
        for number in (POSITION, LEFT, PLACE):
            numbers[number][drawn.slots] = table[number]
        self.place, self.drawn = place, drawn
        left, answers = table[LEFT], drawn.answers
        last: list[Sample] = []
        if np.count_nonzero(left) < count:
            last = [drawn.samples[at] for at in (left == 0).nonzero()[0]]
            ended = {sample.name for sample in last}
            answers = {name: 1 for name in drawn.places if name not in ended}
        self.scheduler.append(answers)
        return Step(upload, drawn, last, self.manager.take_moves())

    def _count(self, schedule: Schedule, num_tokens: int, num_padded: int) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += num_tokens
        stats.padded_tokens += num_padded
        stats.preemptions += len(schedule.preempted)
        stats.cached_tokens += sum(hit.num_cached_tokens for hit in schedule.hits.values())

    def _drawn_of(self, schedule: Schedule) -> Drawn:
        names, last = list(schedule.samples), self.drawn
        if names == list(last.places) and not schedule.hits:
            return last._replace(places=schedule.samples)
        samples = [self.samples.of[name] for name in names]
        slots = np.array([sample.slot for sample in samples], np.int64)
        answers = FrozenDict(dict.fromkeys(names, 1))
        return Drawn(schedule.samples, samples, slots, answers)

    def _token_ids(self, schedule: Schedule) -> np.ndarray:
        """Returns the token ids of a step; ``-1 - i`` for the one in place i on the device."""
        ids, work = schedule.token_ids, schedule.work
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:  # the last of their requests
            names, ends = list(work), np.cumsum(list(work.values()))
            at, of = ends.searchsorted(unknown, "right").tolist(), self.samples.of
            ids[unknown] = -1 - self.samples.numbers[PLACE, [of[names[i]].slot for i in at]]
        return ids
