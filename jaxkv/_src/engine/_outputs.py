"""`Output`, and the options of steps. No jax."""

import dataclasses
import enum
from typing import Any, Literal, NamedTuple, Self

FinishReason = Literal["stop", "length", "abort"]


@enum.unique
class Kind(enum.IntEnum):
    """The work of a sampler, from the least to the most."""

    GREEDY = 0  # the most likely tokens
    SAMPLED = 1
    LIMITED = 2  # sampled, some with top_k, top_p or min_p


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The computations of a step. Static: each has a compiled step of its own.

    kind: of the sampler.
    """

    kind: Kind = Kind.GREEDY

    def __or__(self, other: Self) -> Self:
        """Returns what is enough for both."""
        return dataclasses.replace(self, kind=max(self.kind, other.kind))


class Output(NamedTuple):
    """Tokens of one sample.

    request: the name given to `Engine.add`, or the index of the prompt given to `Engine.generate`.
    sample: 0 to n - 1.
    tokens: from `Engine.generate` all of them, from `Engine.step` those since its last output.
    logprobs: of these tokens; None: the request did not ask for them.
    version: of the weights that each of these tokens was sampled with: calls of `Engine.update`
      before it.
    finish_reason: "stop", "length" or "abort"; None: it goes on.
    """

    request: Any
    sample: int
    tokens: list[int]
    logprobs: list[float] | None
    version: list[int]
    finish_reason: FinishReason | None


@dataclasses.dataclass
class Stats:
    """Counts of an engine since it was made.

    steps: steps, and calls of the device.
    prompt_tokens: of all prompts, each prompt once; cached_tokens: those of requests that started,
      which the cache held.
    computed_tokens, padded_tokens: tokens of steps that belong to requests, and that fill shapes.
    sampled_tokens: of all outputs.
    nan_tokens: those of them whose log-probability is NaN.
    preemptions: of running requests.
    """

    steps: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    sampled_tokens: int = 0
    nan_tokens: int = 0
    preemptions: int = 0
