"""The calls of an engine's device, from packing to the ends of samples, and after failures."""

import array
import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import CacheError
from jaxkv._src.engine._device import Arrays, Device
from jaxkv._src.engine._outputs import FinishReason, Output
from jaxkv._src.engine._packer import NONE_SAMPLED, Packer, Sampled, Step
from jaxkv._src.engine._samples import Sample

LOOKAHEAD_CALLS = 2  # one runs while the next one waits for it


@dataclasses.dataclass(eq=False)
class Calls:
    """Starts the calls of a device, and gives samples the tokens that these sample.

    An exception may end any of these methods anywhere, because a signal handler may raise one.
    Three things are right at any time: the tokens of each `Sample`, ``samples.of_request``, and
    ``changed``. Everything else (manager, scheduler, records, cache) is derived, and changes only
    while ``is_broken`` is set. If it is found set, `mend` derives all of it again.

    in_flight: the steps of each call that was started, and what they sample.
    changed: samples with tokens or an end that no output has held, and how many tokens of each
      outputs have held, those of the prompt included.
    is_broken: whether a change has begun, and not ended.
    starts_over: whether it forgets the tokens of all samples.
    is_void: whether all requests are to be aborted, without an output.
    """

    device: Device
    packer: Packer
    decode_steps: int
    in_flight: list[tuple[list[Step], Arrays]] = dataclasses.field(default_factory=list)
    changed: dict[Sample, int] = dataclasses.field(default_factory=dict)
    is_broken: bool = False
    starts_over: bool = False
    is_void: bool = False

    def advance(self) -> None:
        """Starts one call if there is work for it, and collects all but the newest ones."""
        self.mend()
        self.device.check_awake()
        self.device.restore()
        num_left = len(self.in_flight) - 1
        if self.packer.awaits_tokens():
            self._collect(0)
        if len(self.in_flight) < LOOKAHEAD_CALLS:  # or a wait for the oldest was interrupted
            self.is_broken = True
            calls = self.packer.pack(self.decode_steps)
            for steps in calls:
                self._start(steps)
            self.is_broken = False
            num_left = LOOKAHEAD_CALLS - 1 if calls else num_left
        if self.packer.samples.tokens and not self.in_flight:
            raise RuntimeError(f"{self.packer.scheduler!r} found no work, although requests wait")
        self._collect(num_left)

    def outputs(self) -> list[Output]:
        """Returns the outputs of all changed samples."""
        changed = self.changed.items()
        return [of.output(told) for of, told in changed if of.reason or len(of.tokens) > told]

    def settle(self) -> None:
        """Waits for all calls. What one of them fails to compute is computed again, later."""
        self.mend()
        with contextlib.suppress(Exception):
            self._collect(0)
        self.is_broken = self.is_broken or self.device.was_taken
        self.mend()
        self.packer.sampled = NONE_SAMPLED  # the host knows all tokens

    def abort(self, samples: Sequence[Sample]) -> None:
        """Ends samples."""
        self.is_broken = True
        for sample in samples:
            self._end(sample, "abort")
        self.is_broken = False

    # --- after failures -----------------------------------------------------------

    def mend(self) -> None:
        """Completes changes that an exception has ended. Runs nothing on the device."""
        if self.is_broken:
            self.device.may_be_lost = True
            self.packer.ring = self.device.ring(self.decode_steps)
            self.rebuild()
        if self.is_void:
            self.abort(self.packer.samples.listed())
            self.changed = {}
            self.is_void = False

    def rebuild(self) -> None:
        """Derives all bookkeeping from the samples, whose requests are then computed again."""
        self.is_broken = True
        packer, samples = self.packer, self.packer.samples
        self.in_flight.clear()
        packer.sampled = NONE_SAMPLED
        for sample in samples.listed():
            if sample.reason is None and (reason := sample.end_reason()) is not None:
                self._note(sample).reason = reason
            if sample.reason is None and self.starts_over:
                sample.forget_tokens()
                self.changed.pop(sample, None)
        self.starts_over = False
        samples.restart()
        packer.manager.reset()
        packer.scheduler.restart()
        for name in packer.scheduler.waiting:
            if name not in samples.tokens:
                packer.scheduler.finish(name)
        self.is_broken = False

    # --- one call -----------------------------------------------------------------

    def _start(self, steps: list[Step]) -> None:
        if steps[0].transfers is not None:  # no later step of a call has any
            self.device.transfer(steps[0].transfers)
        for sample in steps[0].started:
            row = self.packer.samples.records["row"].item(sample.index)
            self.device.start_state(sample, row)
        wants = functools.reduce(operator.or_, [step.asked.wants for step in steps])
        out = self.device.run(tuple([step.upload for step in steps]), wants)
        self.in_flight.append((steps, out))
        self.packer.stats.calls += 1

    def _collect(self, num_left: int) -> None:
        """Takes what the oldest calls sample, until ``num_left`` are in flight."""
        while len(self.in_flight) > max(0, num_left):
            steps, out = self.in_flight[0]
            try:
                of_call = jax.tree.map(np.asarray, out)  # it stays if this is interrupted
            except Exception:
                self.is_broken = True
                self.device.discard()  # the calls after it fail, too
                raise
            self.is_broken = True
            self.in_flight.pop(0)
            for at, step in enumerate(steps):
                sampled = of_call["sampled"][at]
                if flags := int(sampled[-1]):
                    raise CacheError(flags)
                if step.asked.wants:
                    _take_details(jax.tree.map(operator.itemgetter(at), of_call), step)
                self._take(sampled, step.sampled)
            self.is_broken = False

    def _take(self, out: np.ndarray, sampled: Sampled) -> None:
        """Gives samples what a step sampled for them, and ends those that are done."""
        if sampled.drafts:
            return self._take_drafted(out, sampled)
        half, (samples, index, _), of_all = out.size // 2, sampled, self.packer.samples
        tokens, logprobs = out[: index.size], out[half:][: index.size].view(np.float32)
        alive = [at for at, sample in enumerate(samples) if sample.reason is None]
        if len(alive) < len(samples):  # the others ended before these tokens
            index, tokens, logprobs = index[alive], tokens[alive], logprobs[alive]
            samples = [samples[at] for at in alive]
        self.packer.stats.sampled_tokens += len(samples)
        self.packer.stats.nan_tokens += int(np.count_nonzero(np.isnan(logprobs)))
        lists = [sample.tokens for sample in samples]
        for sample, known in zip(samples, lists, strict=True):
            self.changed.setdefault(sample, len(known))
        is_watched = of_all.is_watched[index] > 0
        for at in is_watched.nonzero()[0].tolist():
            if samples[at].sampling.logprobs is not None:
                samples[at].add_logprobs([logprobs.item(at)])
        # From here on the samples have them.
        collections.deque(map(array.array.append, lists, tokens.tolist()), maxlen=0)
        of_all.num_known[index] += 1
        may_end = is_watched | (of_all.num_known[index] == of_all.ends[index])
        for sample in [samples[at] for at in may_end.nonzero()[0].tolist()]:
            if (reason := sample.end_reason()) is not None:
                self._end(sample, reason)

    def _take_drafted(self, out: np.ndarray, sampled: Sampled) -> None:
        """Gives samples the tokens of a step up to the first one that is not as drafted."""
        packer, start, half = self.packer, 0, out.size // 2
        stay, taken, num_accepted = dict[Hashable, int](), list[Sample](), 0
        for sample, drafts in zip(sampled.samples, sampled.drafts, strict=True):
            rows = slice(start, start := start + 1 + len(drafts))
            if sample.reason is not None:
                continue
            tokens, logprobs = out[rows].tolist(), out[half:][rows].view(np.float32)
            pairs = zip(tokens, drafts, strict=False)
            count = next((at for at, (one, draft) in enumerate(pairs) if one != draft), len(drafts))
            if count < len(drafts):
                stay[sample.name] = len(sample.tokens) + count
            num_accepted += count
            stops = sample.sampling.stop_token_ids
            ends = (at for at, one in enumerate(tokens[:count]) if one in stops)
            self._give(sample, tokens[: 1 + next(ends, count)], logprobs)
            taken.append(sample)
        if packer.drafting is not None and taken:
            packer.drafting.verified(num_accepted, len(taken))
        packer.stats.accepted_tokens += num_accepted
        if stay:
            packer.scheduler.rewind(stay)
            goes_on = [one for one in taken if one.name in stay and one.end_reason() is None]
            packer.scheduler.append({one.name: 1 for one in goes_on})
        for sample in taken:
            if (reason := sample.end_reason()) is not None:
                self._end(sample, reason)

    def _give(self, sample: Sample, tokens: list[int], logprobs: np.ndarray) -> None:
        """Gives a sample tokens that follow those that it has."""
        of_all, stats, index = self.packer.samples, self.packer.stats, sample.index
        stats.sampled_tokens += len(tokens)
        stats.nan_tokens += int(np.count_nonzero(np.isnan(logprobs[: len(tokens)])))
        if sample.sampling.logprobs is not None:
            sample.add_logprobs(logprobs[: len(tokens)].tolist())
        self._note(sample).tokens.extend(tokens)  # at once, whatever interrupts this
        of_all.num_known[index] = len(sample.tokens)
        of_all.records["position"][index] = len(sample.tokens) - sample.num_prompt - 1

    def _note(self, sample: Sample) -> Sample:
        """Notes that a sample changes from here on. Returns it."""
        self.changed.setdefault(sample, len(sample.tokens))
        return sample

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        """Ends a sample, of which the next outputs tell."""
        self._note(sample).reason = reason
        if reason == "stop" and self.decode_steps > 1:
            # A call does not compute what it has stopped at, and the scheduler caches these.
            self.packer.samples.tokens[sample.name] = sample.tokens[:-1]
        self.packer.scheduler.finish(sample.name)
        self.packer.samples.remove(sample)


def _take_details(out: Mapping[str, Any], step: Step) -> None:
    """Gives samples the details that they asked for, before the tokens of the step."""
    if "top" in out:
        for (sample, place), top in zip(step.sampled.tokens, out["top"], strict=False):
            if sample.details is not None and sample.reason is None:
                sample.details.add_top(len(sample.tokens) + place, top)
    side, structure = jax.tree.flatten(out.get("side"))
    for details, position, first, count in step.asked.rows:
        if details.sampling.prompt_logprobs is not None and "prompt" in out:
            details.add_prompt(position, out["prompt"][first : first + count])
        if details.sampling.side:
            details.add_side(position, structure, [rows[first : first + count] for rows in side])
