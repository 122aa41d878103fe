"""A trace served by `jaxkv.Engine`, and the course of it."""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.blocks import BlockUse
from jaxkv._src.demo.memory import KEY_SCALE, VALUE_SCALE, forward_step
from jaxkv._src.demo.model import Model, Params
from jaxkv._src.demo.reference import Answer
from jaxkv._src.demo.trace import Request
from jaxkv._src.internal.checks import check_positive
from jaxkv._src.layout import AcceptedSizes, select_kernel_block_sizes
from pallas_kernels import Implementation

MAX_REQUESTS, MAX_TOKENS, FORKS = 16, 64, 8
REQUESTS_BETWEEN_NAPS = 8
CONTEXT_AXIS = "context"  # of the mesh whose devices share out the positions of a request
INTERLEAVE_TOKENS = 4  # consecutive positions that a context-parallel rank holds


@dataclasses.dataclass
class Report:
    """Course of a serving run.

    answers: by request and sample.
    preemptions: the step of each.
    occupancy: per step, blocks held by each group.
    uses: per step, blocks with one holder, with several, warm ones and all others.
    """

    answers: dict[tuple[int, int], Answer] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    preemptions: list[int] = dataclasses.field(default_factory=list)
    occupancy: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    uses: list[BlockUse] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    naps: int = 0
    bytes_released: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(len(answer.logprobs) for answer in self.answers.values())

    @property
    def nan_requests(self) -> list[int]:
        """The request of each token that was picked from logits with a NaN."""
        counts = {n: int(np.isnan(a.logprobs).sum()) for n, a in self.answers.items()}
        return [request for (request, _), count in counts.items() for _ in range(count)]


def make_engine(
    model: Model,
    params: Params,
    plan: jaxkv.Plan,
    *,
    implementation: Implementation | None = None,
    kernel_block_size: int | None = None,
    own_attention: bool = False,
) -> jaxkv.Engine:
    """Returns an engine of the model over a cache of the plan."""
    mesh = _context_mesh(plan)
    cache = jaxkv.make_cache(
        plan,
        max_requests=MAX_REQUESTS,
        kernel_block_sizes=_kernel_block_sizes(plan, kernel_block_size),
        interleave_tokens=INTERLEAVE_TOKENS if mesh else 1,
        scales=(KEY_SCALE, VALUE_SCALE),
        mesh=mesh,
        axis=CONTEXT_AXIS if mesh else None,
    )
    return jaxkv.Engine(
        functools.partial(forward_step, model, own_attention, implementation),
        jax.device_put(params, NamedSharding(mesh, PartitionSpec()) if mesh else None),
        plan,
        max_requests=MAX_REQUESTS,
        max_tokens=MAX_TOKENS,
        forks=FORKS,
        cache=cache,
    )


def serve(
    engine: jaxkv.Engine,
    trace: Sequence[Request],
    on_finish: Callable[[], object],
    *,
    naps: bool = False,
) -> Report:
    """Runs every request of a trace to its end.

    Args:
      naps: whether to send the cache to the host and back after every 8 requests.
    """
    return _Course(engine, trace, on_finish).run(naps=naps)


class _Course:
    def __init__(self, engine, trace, on_finish):
        names = {request.name for request in trace}
        if any(request.after not in {None, *names} for request in trace):
            raise ValueError("trace: a request waits for one that is not in it")
        self.engine, self.on_finish = engine, on_finish
        self.arrivals = deque(trace)
        self.requests = {request.name: request for request in trace}
        self.waiting: dict[int, list[Request]] = {}  # for a request to end
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        self.report = Report()

    def run(self, *, naps: bool) -> Report:
        engine, report, before = self.engine, self.report, dataclasses.replace(self.engine.stats)
        started, steps, preempted = time.perf_counter(), 0, before.preemptions
        while self.arrivals or engine.has_work:
            while self.arrivals and self.arrivals[0].arrival_step <= steps:
                self._arrive(self.arrivals.popleft())
            for output in engine.step():
                self._note(output)
            report.preemptions += [steps] * (engine.stats.preemptions - preempted)
            steps, preempted = steps + 1, engine.stats.preemptions
            report.occupancy.append(engine.manager.held_blocks())
            report.uses.append(engine.manager.block_use)
            if naps and len(report.answers) // REQUESTS_BETWEEN_NAPS > report.naps:
                report.naps += 1
                report.bytes_released += engine.sleep()
                engine.wake_up()
        report.seconds = time.perf_counter() - started
        report.prompt_tokens = engine.stats.prompt_tokens - before.prompt_tokens
        report.cached_tokens = engine.stats.cached_tokens - before.cached_tokens
        return report

    def _arrive(self, request: Request) -> None:
        """Adds a request, or lets it wait for the one that it goes on from."""
        if request.after is None:
            self._add(request, list(request.prompt))
        elif answer := self.report.answers.get((request.after, 0)):
            self._add(request, [*answer.tokens, *request.prompt])
        else:
            self.waiting.setdefault(request.after, []).append(request)

    def _add(self, request: Request, prompt: list[int]) -> None:
        self.prompts[request.name] = prompt
        sampling = jaxkv.Sampling(
            max_tokens=request.max_new_tokens,
            n=request.samples,
            temperature=1.0 if request.samples > 1 else 0.0,
            seed=request.name,
            logprobs=True,
        )
        boundaries = [request.boundary] if request.boundary else []
        self.engine.add(request.name, prompt, sampling, boundaries=boundaries)

    def _note(self, output: jaxkv.engine.Output) -> None:
        name = output.request, output.sample
        tokens, logprobs = self.tokens.setdefault(name, ([], []))
        tokens += output.tokens
        logprobs += output.logprobs or []
        if output.finish_reason is None:
            return
        prompt, is_greedy = self.prompts[output.request], self.requests[output.request].samples == 1
        self.report.answers[name] = Answer([*prompt, *tokens], np.array(logprobs), is_greedy)
        self.on_finish()
        for request in self.waiting.pop(output.request, []):
            self._arrive(request)


def _context_mesh(plan: jaxkv.Plan) -> Mesh | None:
    if plan.context_parallel == 1:
        return None
    return Mesh(np.array(jax.devices()[: plan.context_parallel]), (CONTEXT_AXIS,))


def _kernel_block_sizes(plan: jaxkv.Plan, kernel_block_size: int | None) -> list[int] | None:
    if kernel_block_size is None:
        return None
    check_positive(kernel_block_size=kernel_block_size)
    backends = {"--kernel-block-size": AcceptedSizes(exact=(kernel_block_size,))}
    sizes = select_kernel_block_sizes(plan.groups, [backends] * len(plan.groups))
    return [size for size in sizes if size is not None]  # all groups of a plan keep a cache
