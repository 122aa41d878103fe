"""The samples of an engine, and the numbers of all of them in one array. No jax."""

import array
import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxkv._src.engine._sampling import FinishReason, Output, Sampling
from jaxkv._src.internal.checks import check_kind, check_name
from jaxkv._src.prefixes import as_tokens

#: rows of a sampler's table, int32[len(NUMBERS), samples]; floats by their bits
NUMBERS = ("index", "position", "seed", "sample", "temperature", "top_k", "top_p", "min_p")
NUM_STOPS = 4  # stop tokens that the device knows; the host knows all
NUMBERS += ("stop",) * NUM_STOPS
INDEX, POSITION = 0, 1
LEFT, PLACE = len(NUMBERS), len(NUMBERS) + 1


def extra_size(tokens: int, samples: int) -> int:
    """Returns the integers of an upload: token ids, the place of what is drawn, and the table."""
    return tokens + 1 + samples * len(NUMBERS)


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sample of a request, from its prompt to its end.

    tokens: int32s, prompt and generated tokens that are known; the scheduler reads them.
    end: tokens that it may have, the prompt's included.
    seed: of its request's random numbers.
    new, logprobs: generated tokens that no output has held.
    slot: its column of `Samples.numbers`; -1: none.
    """

    request: Hashable
    index: int
    sampling: Sampling
    tokens: array.array[int]
    num_prompt: int
    end: int
    seed: int
    slot: int = -1
    new: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def name(self) -> Hashable:
        """Its name in the scheduler."""
        return (self.request, self.index) if self.index else self.request

    def output(self) -> Output:
        """Returns the tokens that no output has held."""
        tokens, logprobs = self.new, self.logprobs if self.sampling.logprobs else None
        self.new = []
        self.logprobs = []
        return Output(self.request, self.index, tokens, logprobs, self.reason)


class Samples:
    """All samples that have not ended.

    of: by name.
    tokens: token ids by name, for the scheduler.
    of_request: by request.
    num_logprobs: number of samples that want log-probabilities.
    stops: stop tokens of all samples so far.
    numbers: int32[len(NUMBERS) + 2, N], a column for each sample: `NUMBERS`, where the position is
      that of the last token that a step draws; ``LEFT``, the tokens that it may still draw;
      ``PLACE``, where the device keeps the last one, see `State`.
    """

    def __init__(self, max_model_len: int, seed: int):
        self._max_model_len, self._seeds = max_model_len, np.random.default_rng(seed)
        self.of: dict[Hashable, Sample] = {}
        self.tokens: dict[Hashable, array.array[int]] = {}
        self.of_request: dict[Hashable, list[Sample]] = {}
        self.num_logprobs, self.stops = 0, set[int]()
        self.numbers = np.zeros((len(NUMBERS) + 2, 64), np.int32)
        self._free = list(range(64))

    def made(
        self, request: Hashable, name: str, prompt: Any, sampling: Sampling, vocab_size: int
    ) -> list[Sample]:
        """Returns the samples of a new request, checked; ``name`` is that of the argument."""
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
        for taken in (request, *((request, index) for index in range(1, sampling.n))):
            if taken in self.of_request or taken in self.of:
                raise ValueError(f"request={taken!r} has not ended; use another name")
        seed = int(self._seeds.integers(2**32)) if sampling.seed is None else sampling.seed
        return [
            Sample(request, index, sampling, array.array("i", ids.tobytes()), ids.size, end, seed)
            for index in range(sampling.n)
        ]

    def add(self, sample: Sample) -> None:
        """Adds a sample."""
        if not self._free:
            size = self.numbers.shape[1]
            self._free = list(range(size, 2 * size))
            self.numbers = np.concatenate([self.numbers, np.zeros_like(self.numbers)], axis=1)
        sample.slot = self._free.pop()
        self.of[sample.name], self.tokens[sample.name] = sample, sample.tokens
        self.of_request.setdefault(sample.request, []).append(sample)
        self.num_logprobs += sample.sampling.logprobs
        self.stops.update(sample.sampling.stop_token_ids)
        column = numbers_of(sample.sampling, sample.seed, sample.index)
        self.numbers[:LEFT, sample.slot] = column
        self.restart(sample)

    def restart(self, sample: Sample, *, from_prompts: bool = False) -> None:
        """Forgets what steps in flight draw for a sample, or all that it has drawn."""
        if from_prompts:
            del sample.tokens[sample.num_prompt :]
            sample.new.clear()
            sample.logprobs.clear()
        known = len(sample.tokens)
        self.numbers[POSITION, sample.slot] = known - sample.num_prompt - 1
        self.numbers[LEFT, sample.slot] = sample.end - known

    def remove(self, sample: Sample) -> None:
        """Removes a sample that ends."""
        del self.of[sample.name], self.tokens[sample.name]
        self._free.append(sample.slot)
        self.num_logprobs -= sample.sampling.logprobs
        others = self.of_request[sample.request]
        others.remove(sample)
        if not others:
            del self.of_request[sample.request]


def numbers_of(sampling: Sampling, seed: int, sample: int) -> np.ndarray:
    """Returns a sample's column of the sampler's table, int32[len(NUMBERS)], for position 0."""
    floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32)
    temperature, top_p, min_p = floats.view(np.int32).tolist()
    seed = int(np.array(seed, np.uint32).view(np.int32))
    stops = [*sampling.stop_token_ids, *(-1,) * NUM_STOPS][:NUM_STOPS]
    limits = sampling.top_k or 0, top_p, min_p
    return np.array((0, 0, seed, sample, temperature, *limits, *stops), np.int32)
