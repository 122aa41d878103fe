"""Workloads of served models, the same for every engine. No jax and no torch."""

import json
import statistics
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

MEMORY_SHARE = 0.85  # of the device, for an engine


class Decode(NamedTuple):
    """Requests that all decode; each has ``length`` tokens after some steps."""

    requests: int
    length: int
    steps: int = 96


class Prefill(NamedTuple):
    """Prompts that are computed at once, and one token for each.

    prompt_logprobs: whether the log-probabilities of their tokens are asked for.
    """

    requests: int
    length: int
    repeats: int = 3
    prompt_logprobs: bool = False


class Trace(NamedTuple):
    """Requests with prompts and answers of random lengths, queued in the order given.

    rate: requests that arrive in a second, at random times; None: all at once.
    samples: of each prompt; several are sampled at temperature 1, as for RL, one greedily.
    by_generate: whether jaxkv's `generate` serves them, which starts the longest answers first.
      Not like for like: vLLM's engine keeps the order given, and RL does not know the lengths.
    """

    requests: int
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    rate: float | None = None
    samples: int = 1
    by_generate: bool = False


class Request(NamedTuple):
    """prompt: int32[N]. arrival: seconds after the first."""

    prompt: np.ndarray
    answer_tokens: int
    arrival: float
    samples: int


Workload = Decode | Prefill | Trace
AT_ONCE = Trace(512, (256, 768), (128, 384))
FULL: tuple[Workload, ...] = (
    *(Decode(1, 8192), Decode(16, 2048), Decode(64, 2048), Decode(256, 1024)),
    *(Prefill(4, 2048), Prefill(1, 16384)),
    *(AT_ONCE, AT_ONCE._replace(by_generate=True), AT_ONCE._replace(rate=24.0)),
)
DECODES: tuple[Workload, ...] = (Decode(256, 1024), Decode(256, 4096))
GROUPS = Trace(64, (512, 1536), (256, 1024), samples=8)
ROLLOUTS: tuple[Workload, ...] = (
    *(GROUPS, GROUPS._replace(by_generate=True)),
    *(Prefill(64, 2048, repeats=1), Prefill(64, 2048, repeats=1, prompt_logprobs=True)),
)
DIVIDED: tuple[Workload, ...] = (
    *(Decode(64, 2048), Decode(256, 1024), Decode(1, 2048), Prefill(4, 2048), AT_ONCE, GROUPS),
)
SMALLEST: tuple[Workload, ...] = (
    Trace(1, (8, 24), (2, 6), samples=2),  # first, so that steps are compiled for sampling only
    *(Decode(2, 4, steps=4), Prefill(2, 16, repeats=1)),
    Prefill(2, 12, repeats=1, prompt_logprobs=True),
    *(Trace(4, (8, 24), (2, 6), rate=200.0), Trace(4, (8, 24), (2, 6), by_generate=True)),
)


def dump(chosen: Sequence[Workload]) -> str:
    """Returns workloads as text, for a process of its own."""
    return json.dumps([[type(workload).__name__, list(workload)] for workload in chosen])


def load(text: str) -> list[Workload]:
    """Returns the workloads of `dump`."""
    kinds = {kind.__name__: kind for kind in (Decode, Prefill, Trace)}
    return [
        kinds[name](*(tuple(v) if isinstance(v, list) else v for v in fields))
        for name, fields in json.loads(text)
    ]


def name_of(workload: Workload) -> str:
    """Returns a workload's name in tables, such as ``decode 64 x 2048``."""
    if isinstance(workload, Trace):
        many = workload.samples > 1
        text = f"rollouts {workload.requests} x {workload.samples}" if many else ""
        text = text or f"trace of {workload.requests}"
        text += " with arrivals" if workload.rate else ""
        return text + (" by generate, longest first" if workload.by_generate else "")
    has_logprobs = isinstance(workload, Prefill) and workload.prompt_logprobs
    text = f"{type(workload).__name__.lower()} {workload.requests} x {workload.length}"
    return text + (" with its logprobs" if has_logprobs else "")


def prompts(workload: Decode | Prefill, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Returns random prompts; those that decode reach the length in the middle of their steps."""
    shorter = workload.steps // 2 if isinstance(workload, Decode) else 0
    size = workload.requests, workload.length - shorter
    rng = np.random.default_rng([seed, *size])  # no prompt is the beginning of another
    return list(rng.integers(0, vocab, size, dtype=np.int32))


def requests(trace: Trace, vocab: int) -> list[Request]:
    """Returns the requests of a trace, by arrival.

    Traces of other kinds have other prompts, so that no prefix is cached by an earlier one.
    """
    rng = np.random.default_rng(int(trace.rate or 0))
    sizes = rng.integers(*trace.prompt_tokens, trace.requests)
    answers = rng.integers(*trace.answer_tokens, trace.requests)
    gaps = rng.exponential(1 / trace.rate, trace.requests) if trace.rate else np.zeros(len(sizes))
    arrivals = np.cumsum(gaps) - gaps[0]
    ids = np.random.default_rng([int(trace.rate or 0), trace.samples, trace.by_generate])
    return [
        Request(ids.integers(0, vocab, size, dtype=np.int32), int(count), float(at), trace.samples)
        for size, count, at in zip(sizes, answers, arrivals, strict=True)
    ]


class Figures(NamedTuple):
    """Figures of one engine in one workload.

    seconds: of a decode step, of a prefill, or of a whole trace.
    tokens: that the engine made in these seconds.
    first: seconds from arrival to the first token of each request, p50 and p99; arrivals only.
    between: seconds between two tokens of a request, p50 and p99; arrivals only.
    """

    seconds: float
    tokens: int
    first: tuple[float, float] = (0.0, 0.0)
    between: tuple[float, float] = (0.0, 0.0)


class Server(Protocol):
    """An engine, driven one step at a time.

    vocab: token ids below it are in prompts.
    """

    vocab: int

    @property
    def has_work(self) -> bool: ...

    def add(
        self, prompt: np.ndarray, tokens: int, samples: int = 1, prompt_logprobs: bool = False
    ) -> Hashable:
        """Queues a request for samples of these numbers of tokens. Returns its name.

        One sample is greedy, several are sampled at temperature 1, with their log-probabilities.
        """

    def step(self) -> dict[Any, int]:
        """Runs a step. Returns the number of new tokens of each request."""


def run(server: Any, workload: Workload) -> Figures:
    """Runs a workload once.

    Args:
      server: a `Server`; for ``by_generate`` one that has ``generate``, too.
    """
    if isinstance(workload, Decode):
        return _decode(server, workload)
    if isinstance(workload, Prefill):
        return _prefill(server, workload)
    return _by_generate(server, workload) if workload.by_generate else _in_order(server, workload)


def _decode(server: Server, workload: Decode) -> Figures:
    for prompt in prompts(workload, server.vocab):
        server.add(prompt, workload.steps)
    seconds, last, was_full = [], 0.0, False
    while server.has_work:
        made = sum(server.step().values())
        if not made:  # an engine that is ahead of its device has nothing to return at first
            continue
        now, is_full = time.perf_counter(), made == workload.requests
        if is_full and was_full:
            seconds.append(now - last)
        last, was_full = now, is_full
    if not seconds:
        raise RuntimeError(f"{name_of(workload)}: the cache does not fit all at once")
    return Figures(statistics.median(seconds), workload.requests)


def _prefill(server: Server, workload: Prefill) -> Figures:
    seconds = []
    for repeat in range(workload.repeats + 1):
        for prompt in prompts(workload, server.vocab, seed=repeat):
            server.add(prompt, 1, prompt_logprobs=workload.prompt_logprobs)
        started = time.perf_counter()
        while server.has_work:
            server.step()
        seconds.append(time.perf_counter() - started)
    return Figures(statistics.median(seconds[1:]), workload.requests * workload.length)


def _by_generate(server: Any, workload: Trace) -> Figures:
    chosen = requests(workload, server.vocab)
    started = time.perf_counter()
    answers = server.generate(chosen)
    return Figures(time.perf_counter() - started, sum(map(len, answers)))


def _in_order(server: Server, workload: Trace) -> Figures:
    waiting = requests(workload, server.vocab)[::-1]
    arrivals: dict[Hashable, float] = {}
    times: dict[Hashable, list[float]] = {}
    started = time.perf_counter()
    while waiting or server.has_work:
        while waiting and waiting[-1].arrival <= time.perf_counter() - started:
            request = waiting.pop()
            name = server.add(request.prompt, request.answer_tokens, request.samples)
            arrivals[name] = request.arrival
        made = server.step() if server.has_work else {}
        now = time.perf_counter() - started
        for name, count in made.items():
            times.setdefault(name, []).extend([now] * count)
    found = trace_figures(time.perf_counter() - started, arrivals, times)
    return found if workload.rate else Figures(found.seconds, found.tokens)


def trace_figures(
    seconds: float, arrivals: dict[Hashable, float], times: dict[Hashable, list[float]]
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
