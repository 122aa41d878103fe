"""The samples of an engine, and what the device is told of each. No jax."""

import array
import dataclasses
import functools
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._src.engine._details import Details
from jaxkv._src.engine._outputs import FinishReason, Output
from jaxkv._src.engine._sampling import Sampling
from jaxkv._src.internal.checks import check_kind, check_name
from jaxkv._src.prefixes import TokenIds, as_tokens

NUM_STOPS = 4  # stop tokens that the device knows; the host knows all
NAMES = "index position last offset sample row top_k temperature top_p min_p seed stops".split()
#: index: the request of the step that the sample follows; with a head, the token. position: of the
#: token that it samples, among all that it samples; last: of its last one. offset: of the token on
#: the device, see `State`. row: of its state for logits processors; 0: it has none, -1: it needs
#: one. The others: its sampling.
#: `fields_of` finds a field by its number, because only the last is wider than an int32.
RECORD = np.dtype({"names": NAMES, "formats": [*"iiiiiiifffI", (np.int32, NUM_STOPS)]})
RECORD_SIZE = RECORD.itemsize // 4  # int32s
_new_output = functools.partial(tuple.__new__, Output)  # in half the time


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One sample of a request, from its prompt to its end.

    name: in the scheduler.
    tokens: int32s, prompt and generated tokens that are known; the scheduler reads them.
    logprobs: f32s, of the generated ones, if the request asks for them.
    end: tokens that it may have, the prompt's included.
    seed: of its request's random numbers.
    index: in the scheduler and in `Samples`; -1: none.
    number: of its request's samples.
    details: that the request asks for.
    version_starts: for each version of the weights, how many tokens were there when it came.
    version: that of the weights of all its tokens, in a tuple; empty if there are several.
    """

    name: Hashable
    request: Hashable
    number: int
    sampling: Sampling
    tokens: array.array[int]
    num_prompt: int
    end: int
    seed: int
    index: int = -1
    details: Details | None = None
    logprobs: array.array[float] = dataclasses.field(default_factory=lambda: array.array("f"))
    reason: FinishReason | None = None
    version_starts: dict[int, int] = dataclasses.field(default_factory=dict)
    version: tuple[int, ...] = ()

    def add_logprobs(self, logprobs: Sequence[float]) -> None:
        """Adds log-probabilities of the next tokens, in place of those of an interrupted call."""
        del self.logprobs[len(self.tokens) - self.num_prompt :]
        self.logprobs.extend(logprobs)

    def end_reason(self) -> FinishReason | None:
        """Returns the reason for which the sample ends after its last token, if there is one."""
        tokens = self.tokens
        if len(tokens) > self.num_prompt and tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(tokens) == self.end else None

    def output(self, start: int) -> Output:
        """Returns the tokens from position ``start`` on."""
        tokens, logprobs = self.tokens[start:].tolist(), None
        count = len(tokens)
        # One tuple for all samples, if it is of one token.
        version = self.version * count if self.version else self._versions(start, count)
        if self.sampling.logprobs is not None:
            found = self.logprobs[start - self.num_prompt :][:count]
            logprobs = np.array(found, np.float32)
        of, at, end = self.request, self.number, self.reason
        if self.details is None:  # without starred expressions, which take as long as all else
            none = None
            return _new_output((of, at, tokens, logprobs, version, end, none, none, none, none))
        details = self.details.output(start, len(self.tokens))
        return _new_output((of, at, tokens, logprobs, version, end, *details))

    def note_version(self, version: tuple[int]) -> None:
        """Notes that the weights of the tokens to come are of this version."""
        self.version_starts.setdefault(version[0], len(self.tokens))
        self.version = version if len(self.version_starts) == 1 else ()

    def _versions(self, start: int, count: int) -> tuple[int, ...]:
        """Returns the version of the weights of each token from position ``start`` on."""
        (version, _), *later = self.version_starts.items()
        versions = [version] * count
        for version, first in later:
            at = max(0, first - start)
            versions[at:] = [version] * (count - at)
        return tuple(versions)

    def forget_tokens(self) -> None:
        """Forgets all but the prompt."""
        del self.tokens[self.num_prompt :]
        self.version_starts.clear()
        if self.details is not None:
            self.details.forget()


class ModelFacts(NamedTuple):
    """The parts of a model that samplings may ask for.

    vocab_size: columns of its logits.
    is_reproducible: whether all its steps are one compiled step.
    """

    vocab_size: int
    has_head: bool
    has_side: bool
    is_reproducible: bool

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError for details that it does not have."""
        asked = sampling.prompt_logprobs
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", asked)):
            if (count or 0) > self.vocab_size:
                raise ValueError(f"{name}={count} is more than the {self.vocab_size:,} tokens")
        if asked is not None and not self.has_head:
            raise ValueError(
                "prompt_logprobs needs logits of all tokens of a prompt, and the Engine has no "
                "head: return hidden states from forward, and pass Engine(head=), or leave "
                "prompt_logprobs out"
            )
        if sampling.side and not self.has_side:
            raise ValueError(
                "side=True, and forward returns no side outputs: return "
                "jaxkv.ModelOutput(result, side=...) from it"
            )
        if sampling.asks and self.is_reproducible:
            raise ValueError(
                "Engine(reproducible=True) has one compiled step, without side outputs, "
                "prompt_logprobs and the most likely tokens of logprobs=k; leave them out, or make "
                "another engine for them"
            )


class Samples:
    """All samples that have not ended.

    of_request: by request. All else is derived from it, see `restart`.
    tokens: token ids by name, for the scheduler.
    by_index: object[N], by `Scheduler.index`.
    records: a `RECORD` of each, as it was sent last.
    num_known, ends: int64[N], tokens of each that the host knows, and those that it may have.
    is_watched: whether each has stop tokens or asks for log-probabilities, int64[N].
    asks: bits of the details that each asks for, int64[N].
    model: that serves them.
    version: of the weights of the tokens to come.
    free_rows: of states for logits processors, those that no sample has.
    """

    model: ModelFacts

    def __init__(self, max_model_len: int, seed: int, num_rows: int):
        self._max_model_len, self._seeds = max_model_len, np.random.default_rng(seed)
        self._num_rows, self.free_rows = num_rows, list(range(num_rows, 0, -1))
        self.version, self.tokens = 0, dict[Hashable, array.array[int]]()
        self.of_request: dict[Hashable, list[Sample]] = {}
        self._reserve(64)

    def _reserve(self, size: int) -> None:
        """Makes arrays for samples of indices below ``size``, without any."""
        self.by_index, self.records = np.empty(size, object), np.zeros(size, RECORD)
        self.num_known, self.ends, self.is_watched, self.asks = np.zeros((4, size), np.int64)

    def create(
        self, request: Hashable, name: str, prompt: TokenIds, sampling: Sampling | None
    ) -> list[Sample]:
        """Returns the samples of a new request, checked; ``name`` is that of the argument."""
        sampling = Sampling() if sampling is None else sampling
        check_kind(Sampling, "a jaxkv.Sampling(...)", sampling=sampling)
        check_name(request)
        self.model.check(sampling)
        vocab_size = self.model.vocab_size
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
            most = sampling.max_tokens
            answer = "one token to generate" if most is None else f"max_tokens={most}"
            raise ValueError(
                f"{name} of {ids.size} tokens and {answer} are more than "
                f"the plan's max_model_len={longest}; shorten one of them, or plan for more"
            )
        names = [request, *((request, index) for index in range(1, sampling.n))]
        for one in names:
            if one in self.of_request or one in self.tokens:
                raise ValueError(f"request={one!r} has not ended; use another name")
        seed = int(self._seeds.integers(2**32)) if sampling.seed is None else sampling.seed
        tokens, numbers = array.array("i", ids.tobytes()), (ids.size, end, seed)
        details = Details.of_samples(sampling, ids.size)
        return [
            Sample(one, request, at, sampling, tokens[:], *numbers, details=details[at])
            for at, one in enumerate(names)
        ]

    def listed(self) -> list[Sample]:
        """Returns all samples."""
        return [sample for samples in self.of_request.values() for sample in samples]

    def add(self, sample: Sample, index: int) -> None:
        """Adds a sample, whose tokens the scheduler knows already, to all but ``of_request``."""
        if index >= self.records.size:
            names = "by_index", "records", "num_known", "ends", "is_watched", "asks"
            parts = [getattr(self, name) for name in names]
            self._reserve(2 * index)
            for name, part in zip(names, parts, strict=True):
                getattr(self, name)[: part.size] = part
        sample.index = index
        sample.note_version((self.version,))
        self.by_index[index], self.tokens[sample.name] = sample, sample.tokens
        last = sample.end - sample.num_prompt - 1
        self.records[index] = record_of(sample.sampling, sample.seed, sample.number, last)
        self.records["position"][index] = len(sample.tokens) - sample.num_prompt - 1
        self.num_known[index], self.ends[index] = len(sample.tokens), sample.end
        has_logprobs = sample.sampling.logprobs is not None
        self.is_watched[index] = bool(sample.sampling.stop_token_ids) or has_logprobs
        self.asks[index] = sample.sampling.asks

    def restart(self) -> None:
        """Derives all but ``of_request`` again, from the samples there that have not ended."""
        alive: dict[Hashable, list[Sample]] = {}
        for sample in self.listed():
            if sample.reason is None:
                alive.setdefault(sample.request, []).append(sample)
        self.of_request = alive
        self.tokens.clear()
        self._reserve(64)
        self.free_rows = list(range(self._num_rows, 0, -1))
        for sample in self.listed():
            self.add(sample, sample.index)

    def note_version(self) -> None:
        """Notes which tokens of each sample came before the present weights."""
        for sample in self.listed():
            sample.note_version((self.version,))

    def remove(self, sample: Sample) -> None:
        """Removes a sample that ends."""
        del self.tokens[sample.name]
        if (row := self.records["row"].item(sample.index)) > 0:
            self.free_rows.append(row)
        self.by_index[sample.index], self.asks[sample.index] = None, 0
        others = self.of_request[sample.request]
        others.remove(sample)
        if not others:
            del self.of_request[sample.request]

    def take_rows(self, index: np.ndarray, running: Collection[Hashable]) -> list[Sample]:
        """Returns the samples of a step that had no row of states, and have one now.

        A sample that waits keeps its row while there are others, because no step changes its state.

        Args:
          index: int64[S], of the samples of the step.
          running: the samples that run. Those that wait start once the host knows all their tokens.
        """
        if not self._num_rows:
            return []
        rows = self.records["row"]
        new = index[rows[index] < 0]
        if new.size > len(self.free_rows):
            in_step = {*index.tolist()}
            for sample in self.listed():
                waits = sample.name not in running and sample.index not in in_step
                if waits and rows[sample.index] > 0:
                    self.free_rows.append(rows.item(sample.index))
                    rows[sample.index] = -1
        rows[new] = [self.free_rows.pop() for _ in range(new.size)]
        return self.by_index[new].tolist()


def record_of(sampling: Sampling, seed: int, number: int, last: int) -> tuple[Any, ...]:
    """Returns the `RECORD` of a sample without tokens."""
    numbers = sampling.top_k or 0, sampling.temperature, sampling.top_p, sampling.min_p
    stops = [*sampling.stop_token_ids, *(-1,) * NUM_STOPS][:NUM_STOPS]
    row = -1 if sampling.processors else 0
    return (0, -1, last, 0, number, row, *numbers, seed, stops)
