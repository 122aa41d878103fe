"""The calls of an engine's device, from packing to what they draw."""

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np
from jax import Array

from jaxkv._src.cache import CacheError
from jaxkv._src.engine._device import Device
from jaxkv._src.engine._packer import Packer, Step
from jaxkv._src.engine._samples import Sample
from jaxkv._src.engine._sampling import Stats

CALLS_AHEAD = 2  # one runs while the next one waits for it


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of the device: its steps, and what they draw (`run_steps`); None: not started yet."""

    steps: list[Step]
    out: Array | None = None


class Calls:
    """The calls that are packed or in flight, the oldest first."""

    def __init__(self, device: Device, packer: Packer, stats: Stats, *, decode_steps: int):
        self._device, self._packer, self._stats = device, packer, stats
        self._decode_steps = decode_steps
        self._of: collections.deque[_Call] = collections.deque()

    def __len__(self) -> int:
        return len(self._of)

    def start(self) -> int:
        """Starts one call if there is work for it. Returns how many may stay in flight."""
        # After an exception there may be calls that have to start, or as many as may run.
        if len(self._of) < CALLS_AHEAD and all(call.out is not None for call in self._of):
            steps = self._packer.pack(self._decode_steps)
            # Moves read what the steps of earlier calls have written.
            is_whole = len(steps) == self._decode_steps and not any(s.moves for s in steps[1:])
            self._of.extend(map(_Call, [steps] if is_whole else [[step] for step in steps]))
        return CALLS_AHEAD - 1 if self.start_packed() else len(self._of) - 1

    def start_packed(self) -> int:
        """Starts all calls that are packed, and counts them; after an exception they stay so."""
        packed = [call for call in self._of if call.out is None]
        for call in packed:
            call.out = self.run(call.steps)
            self._stats.calls += 1
        return len(packed)

    def run(self, steps: list[Step]) -> Array:
        """Moves blocks, and starts steps; a move that was made is not made again."""
        for at, step in enumerate(steps):
            if step.moves is not None:
                self._device.move(step.moves)
                steps[at] = step._replace(moves=None)
        return self._device.run(tuple([step.upload for step in steps]))

    def collect(self, num_left: int) -> Iterator[tuple[Step, list[Sample], list[int], np.ndarray]]:
        """Waits for the oldest calls, until ``num_left`` are in flight; yields what they drew.

        Yields:
          Each step with the samples that had not ended, their tokens and log-probabilities, f32[S].
        """
        while len(self._of) > max(0, num_left):
            outs = np.asarray(self._of[0].out)  # the call stays if this is interrupted
            for out, step in zip(outs, self._of.popleft().steps, strict=True):
                if out[-1]:
                    raise CacheError(int(out[-1]))
                samples, half = step.drawn.samples, out.size // 2
                tokens, logprobs = out[: len(samples)], out[half : half + len(samples)]
                at = [i for i, sample in enumerate(samples) if sample.reason is None]
                if len(at) < len(samples):  # some ended before these tokens
                    samples, tokens, logprobs = [samples[i] for i in at], tokens[at], logprobs[at]
                yield step, samples, tokens.tolist(), logprobs.view(np.float32)

    def clear(self) -> None:
        """Forgets all calls, whatever they do."""
        self._of.clear()
