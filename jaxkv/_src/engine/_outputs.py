"""`Output`, and the options of steps. No jax."""

import dataclasses
import enum
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Int32, PyTree

# Details that requests want of a step: the most likely tokens of samples, side outputs, and
# log-probabilities of prompts.
TOP, SIDE, PROMPT = 1, 2, 4
FinishReason = Literal["stop", "length", "abort"]
LogprobsMode = Literal["raw", "processed"]


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
    num_top: the most likely tokens of each sample.
    num_prompt_top: those after each token of a prompt; -1: nor the log-probability of the next one.
    has_side: whether it returns side outputs.
    """

    kind: Kind = Kind.GREEDY
    num_top: int = 0
    num_prompt_top: int = -1
    has_side: bool = False

    def __or__(self, other: Self) -> Self:
        """Returns what is enough for both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return type(self)(*map(max, pairs))

    def at(self, wants: int) -> Self:
        """Returns these for a step whose requests want no more than ``wants``.

        Args:
          wants: bits, of `TOP`, `SIDE` and `PROMPT`.
        """
        if wants & PROMPT:
            return self
        few = dataclasses.replace(self, num_prompt_top=-1)
        return few if wants else type(self)(self.kind)

    def variants(self) -> list[int]:
        """Returns a ``wants`` for each `at` that differs."""
        found: dict[StepOptions, int] = {}
        for wants in (0, TOP | SIDE, TOP | SIDE | PROMPT):
            found.setdefault(self.at(wants), wants)
        return list(found.values())


class TopLogprobs(NamedTuple):
    """The most likely tokens at N positions, the likeliest first.

    token_ids: int32[N, k].
    logprobs: f32[N, k], their log-probabilities.
    """

    token_ids: Int32[np.ndarray, "tokens k"]
    logprobs: Float32[np.ndarray, "tokens k"]


class Output(NamedTuple):
    """Tokens of one sample.

    request: the name given to `Engine.add`, or the index of the prompt given to `Engine.generate`.
    sample: 0 to n - 1.
    tokens: from `Engine.generate` all of them, from `Engine.step` those since its last output.
    logprobs: of these tokens, f32[N]; these and what follows the finish_reason
      are None if the request did not ask for them.
    version: of the weights that each of these tokens was sampled with: calls of `Engine.update`
      before it.
    finish_reason: "stop", "length" or "abort"; None: it goes on.
    prompt_logprobs: f32[P], of all tokens of the prompt, in the first output of each sample, then
      None; NaN of the first token, and of those that an abort has left.
    top_logprobs: of the k most likely tokens in the place of each of ``tokens``, [N, k].
    prompt_top_logprobs: in the place of each token of the prompt, [P, k], where ``prompt_logprobs``
      is; ids are -1 where that is NaN.
    side: arrays of ``forward``, [tokens, ...], in their pytree. Those of all outputs of a sample
      make up its prompt and its tokens but the last, which is not computed.
    """

    request: Any
    sample: int
    tokens: list[int]
    logprobs: Float32[np.ndarray, "tokens"] | None
    version: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_logprobs: Float32[np.ndarray, "prompt"] | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_top_logprobs: TopLogprobs | None = None
    side: PyTree[np.ndarray] | None = None


@dataclasses.dataclass
class Stats:
    """Counts of an engine since it was made.

    steps: steps, and calls of the device.
    prompt_tokens: of all prompts, each prompt once; cached_tokens: those of requests that started,
      which the cache held.
    computed_tokens, padded_tokens: tokens of steps that belong to requests, and that fill shapes.
    sampled_tokens: of all outputs.
    drafted_tokens, accepted_tokens: drafts that steps verified, and those that were right.
    nan_tokens: sampled tokens whose log-probability is NaN.
    preemptions: of running requests.
    """

    steps: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    nan_tokens: int = 0
    preemptions: int = 0
