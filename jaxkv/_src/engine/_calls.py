"""The calls of an engine's device, from packing to the ends of samples."""

import dataclasses

import numpy as np
from jax import Array

from jaxkv._src.cache import CacheError
from jaxkv._src.engine._device import Device
from jaxkv._src.engine._packer import NONE_DRAWN, Packer, Step
from jaxkv._src.engine._samples import Sample
from jaxkv._src.engine._sampling import FinishReason

CALLS_AHEAD = 2  # one runs while the next one waits for it


@dataclasses.dataclass(eq=False)
class Calls:
    """Starts the calls of a device, and gives samples what these draw.

    packed: the steps of each call that has to start, the oldest first.
    in_flight: the steps of each that was started, and what they draw.
    changed: samples with tokens or an end that no output has held; some more than once.
    """

    device: Device
    packer: Packer
    decode_steps: int
    packed: list[list[Step]] = dataclasses.field(default_factory=list)
    in_flight: list[tuple[list[Step], Array]] = dataclasses.field(default_factory=list)
    changed: list[Sample] = dataclasses.field(default_factory=list)

    def advance(self) -> list[Sample]:
        """Starts one call if there is work for it, and collects all but the newest ones.

        Returns:
          The samples with tokens, or an end, that no output has held.
        """
        # After an exception there may be calls that have to start, or as many as may run.
        if not self.packed and len(self.in_flight) < CALLS_AHEAD:
            self.packer.pack(self.decode_steps, self.packed)
        if self.packer.samples.of and not (self.packed or self.in_flight):
            raise RuntimeError(f"{self.packer.scheduler!r} found no work, although requests wait")
        num_left = CALLS_AHEAD - 1 if self.packed else len(self.in_flight) - 1
        self._start()
        self._collect(num_left)
        changed = [sample for sample in dict.fromkeys(self.changed) if sample.new or sample.reason]
        self.changed.clear()
        return changed

    def settle(self) -> None:
        """Runs what is packed, and waits for all calls."""
        self._start()
        self._collect(0)
        self.forget()

    def forget(self) -> None:
        """Forgets all calls; the host knows all tokens then."""
        self.packed.clear()
        self.in_flight.clear()
        self.packer.drawn = NONE_DRAWN

    def _start(self) -> None:
        """Starts what is packed; after an exception it stays so, less the moves that were made."""
        while self.packed:
            steps = self.packed[0]
            if steps[0].moves is not None:  # no later step of a call has any
                self.device.move(steps[0].moves)
                steps[0] = steps[0]._replace(moves=None)
            out = self.device.run(tuple([step.upload for step in steps]))
            self.in_flight.append((self.packed.pop(0), out))
            self.packer.stats.calls += 1

    def _collect(self, num_left: int) -> None:
        """Takes what the oldest calls drew, until ``num_left`` are in flight."""
        while len(self.in_flight) > max(0, num_left):
            steps, out = self.in_flight[0]
            outs = np.asarray(out)  # the call stays if this is interrupted
            self.in_flight.pop(0)
            for drawn, step in zip(outs, steps, strict=True):
                if drawn[-1]:
                    raise CacheError(int(drawn[-1]))
                self._take(drawn, step.drawn.samples)

    def _take(self, out: np.ndarray, samples: list[Sample]) -> None:
        """Gives samples what a step drew for them, and ends those that are done."""
        stats, half, count = self.packer.stats, out.size // 2, len(samples)
        numbers = out[:count].tolist(), out[half:][:count].view(np.float32).tolist()
        # The others ended before these tokens.
        drawn = [one for one in zip(samples, *numbers, strict=True) if one[0].reason is None]
        self.changed += [sample for sample, _, _ in drawn]
        stats.sampled_tokens += len(drawn)
        stats.nan_tokens += sum([logprob != logprob for _, _, logprob in drawn])
        for sample, token, logprob in drawn:
            sampling = sample.sampling
            sample.tokens.append(token)
            sample.new.append(token)
            if sampling.logprobs:
                sample.logprobs.append(logprob)
            if token in sampling.stop_token_ids:
                if self.decode_steps > 1:  # a call does not compute what it has stopped at
                    sample.tokens.pop()
                self.end(sample, "stop")
            elif len(sample.tokens) == sample.end:
                self.end(sample, "length")

    def end(self, sample: Sample, reason: FinishReason) -> None:
        """Ends a sample, of which the next outputs tell."""
        self.packer.scheduler.finish(sample.name)
        self.packer.samples.remove(sample)
        sample.reason = reason
        self.changed.append(sample)
