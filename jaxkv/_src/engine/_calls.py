"""The calls of an engine's device, from packing to the ends of samples."""

import collections
import dataclasses

import numpy as np
from jax import Array

from jaxkv._src.cache import CacheError
from jaxkv._src.engine._device import Device
from jaxkv._src.engine._packer import Packer, Step
from jaxkv._src.engine._samples import Sample, Samples
from jaxkv._src.engine._sampling import FinishReason, Stats
from jaxkv._src.scheduler import Scheduler

CALLS_AHEAD = 2  # one runs while the next one waits for it


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of the device: its steps, and what they draw; None: not started yet."""

    steps: list[Step]
    out: Array | None = None


@dataclasses.dataclass(eq=False)
class Calls:
    """Starts the calls of a device, and gives samples what these draw.

    of: the calls that are packed or in flight, the oldest first.
    changed: samples with tokens or an end that no output has held; some more than once.
    """

    device: Device
    packer: Packer
    scheduler: Scheduler
    samples: Samples
    stats: Stats
    decode_steps: int
    of: collections.deque[_Call] = dataclasses.field(default_factory=collections.deque)
    changed: list[Sample] = dataclasses.field(default_factory=list)

    def advance(self) -> list[Sample]:
        """Starts one call if there is work for it, and collects all but the newest ones.

        Returns:
          The samples with tokens, or an end, that no output has held.
        """
        # After an exception there may be calls that have to start, or as many as may run.
        if len(self.of) < CALLS_AHEAD and all(call.out is not None for call in self.of):
            self.of.extend(map(_Call, self.packer.pack(self.decode_steps)))
        if self.samples.of and not self.of:
            raise RuntimeError(f"{self.scheduler!r} found no work, although requests wait")
        self._collect(CALLS_AHEAD - 1 if self._start_packed() else len(self.of) - 1)
        changed = list(dict.fromkeys(self.changed))
        self.changed.clear()
        return changed

    def settle(self) -> None:
        """Runs what is packed, and waits for all calls."""
        self._start_packed()
        self._collect(0)
        self.packer.forget()

    def _start_packed(self) -> int:
        """Starts all calls that are packed, and counts them; after an exception they stay so."""
        packed = [call for call in self.of if call.out is None]
        for call in packed:
            call.out = self.run(call.steps)
            self.stats.calls += 1
        return len(packed)

    def run(self, steps: list[Step]) -> Array:
        """Moves blocks, and starts steps; a move that was made is not made again."""
        for at, step in enumerate(steps):
            if step.moves is not None:
                self.device.move(step.moves)
                steps[at] = step._replace(moves=None)
        return self.device.run(tuple([step.upload for step in steps]))

    def _collect(self, num_left: int) -> None:
        """Takes what the oldest calls drew, until ``num_left`` are in flight."""
        while len(self.of) > max(0, num_left):
            outs = np.asarray(self.of[0].out)  # the call stays if this is interrupted
            for out, step in zip(outs, self.of.popleft().steps, strict=True):
                if out[-1]:
                    raise CacheError(int(out[-1]))
                self._take(out, step)

    def _take(self, out: np.ndarray, step: Step) -> None:
        """Gives samples what a step drew for them, and ends those that are done."""
        samples, half = step.drawn.samples, out.size // 2
        ids, logprobs = out[: len(samples)], out[half : half + len(samples)].view(np.float32)
        at = [i for i, sample in enumerate(samples) if sample.reason is None]
        if len(at) < len(samples):  # some ended before these tokens
            samples, ids, logprobs = [samples[i] for i in at], ids[at], logprobs[at]
        tokens = ids.tolist()
        self.stats.sampled_tokens += len(samples)
        self.stats.nan_tokens += int(np.count_nonzero(np.isnan(logprobs)))
        for sample, token in zip(samples, tokens, strict=True):
            sample.tokens.append(token)
            sample.new.append(token)
        if self.samples.num_logprobs:
            for sample, logprob in zip(samples, logprobs.tolist(), strict=True):
                sample.logprobs.append(logprob)
        self.changed += samples
        if not self.samples.stops.isdisjoint(tokens):
            for sample, token in zip(samples, tokens, strict=True):
                if token in sample.sampling.stop_token_ids:
                    if self.decode_steps > 1:  # a call does not compute what it has stopped at
                        sample.tokens.pop()
                    self.end(sample, "stop")
        for sample in step.last:
            if sample.reason is None:
                self.end(sample, "length")

    def end(self, sample: Sample, reason: FinishReason) -> None:
        """Ends a sample, of which the next outputs tell."""
        self.scheduler.finish(sample.name)
        self.samples.remove(sample)
        sample.reason = reason
        self.changed.append(sample)
