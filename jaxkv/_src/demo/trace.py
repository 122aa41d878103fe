"""Seeded traces: who asks when, with what prompt, for how many tokens."""

import dataclasses
import itertools
from typing import Literal

import numpy as np

TraceKind = Literal["random", "chat", "rl"]
VOCAB_SIZE = 256
SYSTEM_PROMPTS, TURNS, SAMPLES = 3, 3, 4
Range = tuple[int, int]
SYSTEM_PROMPT: Range = 80, 160  # tokens
LENGTHS: dict[TraceKind, tuple[Range, Range]] = {  # of prompts and of answers
    "random": ((16, 600), (8, 120)),
    "chat": ((10, 60), (8, 60)),
    "rl": ((200, 500), (30, 90)),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request of a trace.

    arrival_step: the engine step at which it arrives, at the earliest.
    prompt: byte tokens.
    after: a request that has to end first; its tokens stand before the prompt.
    samples: of its prompt; several are drawn, a single one is the most likely.
    boundary: tokens of the prompt that others begin with, too; 0: none.
    """

    name: int
    arrival_step: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    after: int | None = None
    samples: int = 1
    boundary: int = 0


def make_trace(
    num_requests: int,
    seed: int,
    kind: TraceKind = "random",
    *,
    prompt_tokens: Range | None = None,
    new_tokens: Range | None = None,
) -> list[Request]:
    """Returns requests in order of arrival.

    "random": requests of their own. "chat": conversations of three turns over three system
    prompts; a turn begins with all that was said. "rl": four samples of each prompt.

    Args:
      prompt_tokens, new_tokens: the least and the most of them; lengths are uniform between.
        A turn's prompt is what is new in it.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(4.0, num_requests)).astype(int).tolist()
    prompts, answers = LENGTHS[kind]
    prompts, answers = prompt_tokens or prompts, new_tokens or answers
    if kind == "chat":
        return _chat(rng, arrivals, prompts, answers)
    if kind == "rl":
        return _rl(rng, arrivals, prompts, answers)
    return [
        Request(name, arrival, _tokens(rng, prompts), _length(rng, answers))
        for name, arrival in enumerate(arrivals)
    ]


def _chat(
    rng: np.random.Generator, arrivals: list[int], prompts: Range, answers: Range
) -> list[Request]:
    systems = [_tokens(rng, SYSTEM_PROMPT) for _ in range(SYSTEM_PROMPTS)]
    trace = []
    for name, arrival in enumerate(arrivals):
        is_first = name % TURNS == 0
        system = systems[rng.integers(SYSTEM_PROMPTS)] if is_first else ()
        request = Request(
            name,
            arrival,
            system + _tokens(rng, prompts),
            _length(rng, answers),
            after=None if is_first else name - 1,
            boundary=len(system),
        )
        trace.append(request)
    return trace


def _rl(
    rng: np.random.Generator, arrivals: list[int], prompts: Range, answers: Range
) -> list[Request]:
    groups = itertools.batched(range(len(arrivals)), SAMPLES)
    return [
        Request(
            *(group[0], arrivals[group[0]], _tokens(rng, prompts), _length(rng, answers)),
            samples=len(group),
        )
        for group in groups
    ]


def _length(rng: np.random.Generator, bounds: Range) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def _tokens(rng: np.random.Generator, bounds: Range) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCAB_SIZE, _length(rng, bounds)).tolist())
