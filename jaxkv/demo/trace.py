"""A seeded trace: who asks when, with what prompt, for how many tokens."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """arrival_step: the engine step at which it arrives; prompt: byte tokens."""

    name: int
    arrival_step: int
    prompt: tuple[int, ...]
    max_new_tokens: int


def make_trace(
    num_requests: int,
    seed: int,
    *,
    prompt_tokens: tuple[int, int] = (16, 600),
    new_tokens: tuple[int, int] = (8, 120),
    vocab_size: int = 256,
) -> list[Request]:
    """Requests in order of arrival; lengths uniform in the (inclusive) ranges given."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(4.0, num_requests)).astype(int)
    return [
        Request(
            name=name,
            arrival_step=int(arrival),
            prompt=tuple(rng.integers(0, vocab_size, rng.integers(*_inclusive(prompt_tokens)))),
            max_new_tokens=int(rng.integers(*_inclusive(new_tokens))),
        )
        for name, arrival in enumerate(arrivals)
    ]


def _inclusive(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] + 1
