"""A minimal engine over the demo's model, whose step tests wrap."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

import jaxkv
from jaxkv._src.demo.model import Model, Params, forward_step

MAX_REQUESTS, MAX_TOKENS = 16, 64
Range = tuple[int, int]  # the fewest and the most


class Request(NamedTuple):
    """A request of a trace, of byte tokens. It arrives at a step of the engine."""

    name: int
    arrival_step: int
    prompt: list[int]
    max_new_tokens: int


def make_trace(count: int, seed: int, *, prompt_tokens: Range, new_tokens: Range) -> list[Request]:
    """Returns random requests in order of arrival."""
    rng = np.random.default_rng(seed)
    trace = []
    for name, arrival in enumerate(np.cumsum(rng.exponential(4.0, count)).astype(int).tolist()):
        length, new = (int(rng.integers(a, b + 1)) for a, b in (prompt_tokens, new_tokens))
        trace.append(Request(name, arrival, rng.integers(0, 256, length).tolist(), new))
    return trace


@dataclasses.dataclass
class Report:
    """Results of a run.

    logits: by request f32[new tokens, vocab], of the tokens that were picked.
    """

    logits: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    steps: int = 0


def serve_step(
    model: Model, params: Params, cache: jaxkv.KVCache, upload: jaxkv.blocks.Upload
) -> tuple[jaxkv.KVCache, Array]:
    """Runs one step on the device. Returns the cache, and f32[B, vocab] of each last token."""
    step = jaxkv.StepContext(cache, upload)
    out = forward_step(model, params, step)
    return step.done(), out


class Engine:
    """Serves one trace. Host state lives here; device state passes through the step."""

    def __init__(
        self, params: Params, plan: jaxkv.Plan, cache: jaxkv.KVCache, step: Callable[..., Array]
    ):
        self.plan, self.params, self.cache = plan, params, cache
        self.manager = jaxkv.BlockManager(plan, max_requests=MAX_REQUESTS)
        self.tokens: dict[int, list[int]] = {}  # of running and waiting requests
        self.scheduler = jaxkv.Scheduler(
            self.manager, max_tokens=MAX_TOKENS, tokens=self.tokens, cached_tokens=0
        )
        self.shapes = (
            self.scheduler.shape(max_query_len=1),
            self.scheduler.shape(),
        )
        self.step = jax.jit(step, donate_argnums=1)
        self.ends: dict[int, int] = {}  # the tokens that each will have
        self.rows: dict[int, list[np.ndarray]] = {}  # the logits of its new tokens
        self.report = Report()

    def warm_up(self) -> None:
        """Compiles the step for both shapes, so that steps never do."""
        for shape in self.shapes:
            self.cache, _ = self.step(self.params, self.cache, shape.idle())
        jaxkv.check_errors(self.cache)

    def serve(self, trace: Sequence[Request]) -> Report:
        """Runs every request of the trace to its end."""
        arrivals = deque(trace)
        while arrivals or self.tokens:
            while arrivals and arrivals[0].arrival_step <= self.report.steps:
                self._add(arrivals.popleft())
            if self.tokens:
                self._step()
            self.report.steps += 1
        jaxkv.check_errors(self.cache)
        return self.report

    def _add(self, request: Request) -> None:
        self.tokens[request.name] = list(request.prompt)
        self.ends[request.name] = len(request.prompt) + request.max_new_tokens
        self.rows[request.name] = []
        self.scheduler.add(request.name, len(request.prompt), max_tokens=self.ends[request.name])

    def _step(self) -> None:
        schedule = self.scheduler.schedule()
        decode, mixed = self.shapes
        shape = decode if max(schedule.work.values()) == 1 else mixed
        upload = self.manager.step(shape, schedule.work, extra=schedule.token_ids)
        self.cache, out = self.step(self.params, self.cache, upload)
        picked = np.asarray(out)
        for name, index in schedule.samples.items():
            self.tokens[name].append(int(picked[index].argmax()))
            self.rows[name].append(picked[index])
            if len(self.tokens[name]) < self.ends[name]:
                self.scheduler.append({name: 1})
                continue
            self.scheduler.finish(name)
            self.report.logits[name] = np.array(self.rows.pop(name))
            del self.tokens[name]
