"""Workloads of served models, the same for every engine. No jax and no torch."""

from typing import NamedTuple

import numpy as np


class Decode(NamedTuple):
    """Requests that all decode; each has ``length`` tokens after some steps."""

    requests: int
    length: int
    steps: int = 96


class Prefill(NamedTuple):
    """Prompts that are computed at once, and one token for each."""

    requests: int
    length: int
    repeats: int = 3


class Trace(NamedTuple):
    """Requests with prompts and answers of random lengths.

    rate: requests that arrive in a second, at random times; None: all at once.
    """

    requests: int
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    rate: float | None = None


class Request(NamedTuple):
    """prompt: int32[N]. arrival: seconds after the first."""

    prompt: np.ndarray
    answer_tokens: int
    arrival: float


Workload = Decode | Prefill | Trace
FULL: tuple[Workload, ...] = (
    *(Decode(1, 8192), Decode(16, 2048), Decode(64, 2048), Decode(256, 1024)),
    *(Prefill(4, 2048), Prefill(1, 16384)),
    Trace(512, (256, 768), (128, 384)),
    Trace(512, (256, 768), (128, 384), rate=24.0),
)
SMALLEST: tuple[Workload, ...] = (
    Decode(2, 24, steps=4),
    Prefill(2, 16, repeats=1),
    Trace(4, (8, 24), (2, 6)),
    Trace(4, (8, 24), (2, 6), rate=200.0),
)


def name_of(workload: Workload) -> str:
    """Returns a workload's name in tables, such as ``decode 64 x 2048``."""
    if isinstance(workload, Trace):
        return f"trace of {workload.requests}" + (" with arrivals" if workload.rate else "")
    return f"{type(workload).__name__.lower()} {workload.requests} x {workload.length}"


def prompts(workload: Decode | Prefill, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Returns random prompts; those that decode reach the length in the middle of their steps."""
    shorter = workload.steps // 2 if isinstance(workload, Decode) else 0
    size = workload.requests, workload.length - shorter
    return list(np.random.default_rng(seed).integers(0, vocab, size, dtype=np.int32))


def requests(trace: Trace, vocab: int, seed: int = 0) -> list[Request]:
    """Returns the requests of a trace, by arrival."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(*trace.prompt_tokens, trace.requests)
    answers = rng.integers(*trace.answer_tokens, trace.requests)
    gaps = rng.exponential(1 / trace.rate, trace.requests) if trace.rate else np.zeros(len(sizes))
    arrivals = np.cumsum(gaps) - gaps[0]
    return [
        Request(rng.integers(0, vocab, size, dtype=np.int32), int(count), float(at))
        for size, count, at in zip(sizes, answers, arrivals, strict=True)
    ]


class Figures(NamedTuple):
    """What one engine reached in one workload.

    seconds: of a decode step, of a prefill, or of a whole trace.
    tokens: that the engine made in these seconds.
    first: seconds from arrival to the first token of each request, p50 and p99; a trace only.
    between: seconds between two tokens of a request, p50 and p99; a trace only.
    """

    seconds: float
    tokens: int
    first: tuple[float, float] = (0.0, 0.0)
    between: tuple[float, float] = (0.0, 0.0)


def trace_figures(
    seconds: float, arrivals: dict[int, float], times: dict[int, list[float]]
) -> Figures:
    """Returns the figures of a trace.

    Args:
      seconds: of the whole trace.
      arrivals: request -> second at which it came.
      times: request -> second at which each of its tokens was there.
    """
    first = [stamps[0] - arrivals[name] for name, stamps in times.items()]
    between = np.concatenate([np.diff(stamps) for stamps in times.values()])

    def ends(values: object) -> tuple[float, float]:
        p50, p99 = np.percentile(values, (50, 99))
        return float(p50), float(p99)

    return Figures(seconds, sum(map(len, times.values())), ends(first), ends(between))
