"""The samples of an engine, and what the device is told of each. No jax."""

import array
import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxkv._src.engine._sampling import FinishReason, Output, Sampling
from jaxkv._src.internal.checks import check_kind, check_name
from jaxkv._src.prefixes import as_tokens

NUM_STOPS = 4  # stop tokens that the device knows; the host knows all
NAMES = "index position last place sample top_k temperature top_p min_p seed stops".split()
#: index: the sample's row of the logits. position: of the token that it draws, among those drawn;
#: last: of its last one. place: of the token on the device, see `State`. The others: its sampling.
#: `fields_of` finds a field by its number, because only the last is wider than an int32.
RECORD = np.dtype({"names": NAMES, "formats": [*"iiiiiifffI", (np.int32, NUM_STOPS)]})
RECORD_SIZE = RECORD.itemsize // 4  # int32s


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sample of a request, from its prompt to its end.

    name: in the scheduler.
    tokens: int32s, prompt and generated tokens that are known; the scheduler reads them.
    logprobs: f32s, of the generated ones, if the request asks for them.
    end: tokens that it may have, the prompt's included.
    seed: of its request's random numbers.
    slot: of its record in `Samples.records`; -1: none.
    """

    name: Hashable
    request: Hashable
    index: int
    sampling: Sampling
    tokens: array.array[int]
    num_prompt: int
    end: int
    seed: int
    slot: int = -1
    logprobs: array.array[float] = dataclasses.field(default_factory=lambda: array.array("f"))
    reason: FinishReason | None = None

    def add_logprob(self, logprob: float) -> None:
        """Adds the log-probability of the next token, in place of one of an interrupted call."""
        del self.logprobs[len(self.tokens) - self.num_prompt :]
        self.logprobs.append(logprob)

    def end_reason(self) -> FinishReason | None:
        """Returns the reason for which the sample ends after its last token, if there is one."""
        tokens = self.tokens
        if len(tokens) > self.num_prompt and tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(tokens) == self.end else None

    def output(self, start: int) -> Output:
        """Returns the tokens from position ``start`` on."""
        tokens, logprobs = self.tokens[start:].tolist(), None
        if self.sampling.logprobs:
            logprobs = self.logprobs[start - self.num_prompt :][: len(tokens)].tolist()
        return Output(self.request, self.index, tokens, logprobs, self.reason)


class Samples:
    """All samples that have not ended.

    of_request: by request. All else is derived from it, see `restart`.
    of: by name.
    tokens: token ids by name, for the scheduler.
    records: a `RECORD` of each, as it was sent last.
    """

    def __init__(self, max_model_len: int, seed: int):
        self._max_model_len, self._seeds = max_model_len, np.random.default_rng(seed)
        self.of: dict[Hashable, Sample] = {}
        self.tokens: dict[Hashable, array.array[int]] = {}
        self.of_request: dict[Hashable, list[Sample]] = {}
        self.records, self._free = np.zeros(64, RECORD), list(range(64))

    def made(
        self, request: Hashable, name: str, prompt: Any, sampling: Sampling | None, vocab_size: int
    ) -> list[Sample]:
        """Returns the samples of a new request, checked; ``name`` is that of the argument."""
        sampling = Sampling() if sampling is None else sampling
        check_kind(Sampling, "a jaxkv.Sampling(...)", sampling=sampling)
        check_name(request)
        ids, longest = as_tokens(name, prompt, np.int32), self._max_model_len
        if not ids.size:
            raise ValueError(f"{name} is empty; give at least one token id")
        last_stop = max(sampling.stop_token_ids, default=0)
        for what, largest in ((name, ids.max()), ("stop_token_ids", last_stop)):
            if largest >= vocab_size:
                raise ValueError(
                    f"{what} holds the token id {largest}; ids are from 0 to {vocab_size - 1:,}, "
                    "the columns of the logits"
                )
        end = longest if sampling.max_tokens is None else ids.size + sampling.max_tokens
        if not ids.size < end <= longest:
            raise ValueError(
                f"{name} of {ids.size} tokens and max_tokens={sampling.max_tokens} are more than "
                f"the plan's max_model_len={longest}; shorten one of them, or plan for more"
            )
        names = [request, *((request, index) for index in range(1, sampling.n))]
        for one in names:
            if one in self.of_request or one in self.of:
                raise ValueError(f"request={one!r} has not ended; use another name")
        seed = int(self._seeds.integers(2**32)) if sampling.seed is None else sampling.seed
        tokens, numbers = array.array("i", ids.tobytes()), (ids.size, end, seed)
        return [
            Sample(one, request, at, sampling, tokens[:], *numbers) for at, one in enumerate(names)
        ]

    def listed(self) -> list[Sample]:
        """Returns all samples."""
        return [sample for samples in self.of_request.values() for sample in samples]

    def add(self, sample: Sample) -> None:
        """Adds a sample to all but ``of_request``."""
        if not self._free:
            self._free = list(range(self.records.size, 2 * self.records.size))
            self.records = np.append(self.records, np.zeros_like(self.records))
        sample.slot = self._free.pop()
        self.of[sample.name], self.tokens[sample.name] = sample, sample.tokens
        last = sample.end - sample.num_prompt - 1
        self.records[sample.slot] = record_of(sample.sampling, sample.seed, sample.index, last)
        self.records["position"][sample.slot] = len(sample.tokens) - sample.num_prompt - 1

    def restart(self) -> None:
        """Derives all but ``of_request`` again, from the samples there that have not ended."""
        alive: dict[Hashable, list[Sample]] = {}
        for sample in self.listed():
            if sample.reason is None:
                alive.setdefault(sample.request, []).append(sample)
        self.of_request = alive
        self.of.clear()
        self.tokens.clear()
        self._free = list(range(self.records.size))
        for sample in self.listed():
            self.add(sample)

    def leave(self, sample: Sample) -> None:
        """Takes a sample out of all but ``of_request``."""
        del self.of[sample.name], self.tokens[sample.name]
        self._free.append(sample.slot)

    def remove(self, sample: Sample) -> None:
        """Removes a sample that ends."""
        self.leave(sample)
        others = self.of_request[sample.request]
        others.remove(sample)
        if not others:
            del self.of_request[sample.request]


def record_of(sampling: Sampling, seed: int, sample: int, last: int) -> tuple[Any, ...]:
    """Returns the `RECORD` of a sample that has drawn nothing."""
    numbers = sample, sampling.top_k or 0, sampling.temperature, sampling.top_p, sampling.min_p
    stops = [*sampling.stop_token_ids, *(-1,) * NUM_STOPS][:NUM_STOPS]
    return (0, -1, last, 0, *numbers, seed, stops)
