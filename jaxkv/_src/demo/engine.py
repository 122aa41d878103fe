"""Continuous batching with chunked prefill over one paged cache.

Every step is one upload and one call of one jitted function, which brings the cache up to date,
runs the model and picks the next tokens. The cache is an argument, donated and returned; the
function closes over nothing but static sizes. That is also why the cache can sleep between two
steps without either being compiled again.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.blocks import BlockUse
from jaxkv._src.demo.memory import KEY_SCALE, VALUE_SCALE, PagedMemory, tokens_of
from jaxkv._src.demo.model import Model, Params, forward, logits
from jaxkv._src.demo.reference import Answer
from jaxkv._src.demo.trace import Request
from jaxkv._src.internal.checks import check_positive
from jaxkv._src.layout import AcceptedSizes, select_kernel_block_sizes
from pallas_kernels import Implementation, default_implementation

MAX_REQUESTS, MAX_TOKENS, FORKS = 16, 64, 8
REQUESTS_BETWEEN_NAPS = 8
CONTEXT_AXIS = "context"  # of the mesh whose devices share out the positions of a request
INTERLEAVE_TOKENS = 4  # consecutive positions that a context-parallel rank holds


@dataclasses.dataclass
class Report:
    """Course of a serving run.

    answers: by request.
    occupancy: per step, blocks held by each group.
    uses: per step, blocks with one holder, with several, warm ones and all others.
    prompt_tokens, cached_tokens: of all prompts, and those of them that were not computed.
    preemptions: the step of each.
    """

    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    preemptions: list[int] = dataclasses.field(default_factory=list)
    blocks_allocated: int = 0
    blocks_zeroed: int = 0
    bytes_zeroed: int = 0
    first_nan_request: int | None = None
    occupancy: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    uses: list[BlockUse] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    naps: int = 0
    bytes_released: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that were picked."""
        return sum(len(answer.logits) for answer in self.answers.values())

    @property
    def num_nan(self) -> int:
        """Tokens that were picked from logits with a NaN."""
        rows = (answer.logits for answer in self.answers.values())
        return sum(int(np.isnan(logits).any(axis=-1).sum()) for logits in rows)


def serve_step(
    model: Model,
    own_attention: bool,
    implementation: Implementation | None,
    params: Params,
    cache: jaxkv.KVCache,
    upload: jaxkv.blocks.Upload,
) -> tuple[jaxkv.KVCache, Array]:
    """Runs one step on the device. Returns the cache, and f32[B, vocab] of each last token."""
    cache, batch = jaxkv.apply_step(cache, upload, implementation=implementation)
    tokens = tokens_of(batch)
    kernels = implementation or default_implementation()
    memory = PagedMemory(cache, batch, tokens, own_attention, kernels)
    with jax.default_matmul_precision("highest"):
        memory, x = forward(model, params, tokens, memory)
        return memory.cache, logits(model, params, x[batch.last_tokens])


class Engine:
    """Serves one trace. Host state lives here; device state passes through the step."""

    def __init__(
        self,
        model: Model,
        params: Params,
        plan: jaxkv.Plan,
        *,
        implementation: Implementation | None = None,
        kernel_block_size: int | None = None,
        own_attention: bool = False,
        sleep_between_batches: bool = False,
        share_prefixes: bool = False,
    ):
        self.plan, self.naps = plan, sleep_between_batches
        self.manager = jaxkv.BlockManager(plan, max_requests=MAX_REQUESTS)
        self.tokens: dict[int, list[int]] = {}  # of running and waiting requests
        self.shares, forks = share_prefixes, FORKS if share_prefixes else 0
        self.scheduler = jaxkv.Scheduler(
            self.manager,
            max_tokens=MAX_TOKENS,
            forks=forks,
            tokens=self.tokens if share_prefixes else None,
        )
        mesh = _context_mesh(plan)
        self.params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()) if mesh else None)
        self.cache = jaxkv.make_cache(
            plan,
            max_requests=MAX_REQUESTS,
            kernel_block_sizes=_kernel_block_sizes(plan, kernel_block_size),
            interleave_tokens=INTERLEAVE_TOKENS if mesh else 1,
            scales=(KEY_SCALE, VALUE_SCALE),
            mesh=mesh,
            axis=CONTEXT_AXIS if mesh else None,
        )
        decode, mixed = (
            jaxkv.StepShape.for_plan(
                plan,
                max_requests=MAX_REQUESTS,
                max_tokens=n,
                max_query_len=longest,
                forks=forks,
                cached_tokens=plan.max_model_len if share_prefixes else 0,
                extra=n,
            )
            for n, longest in ((MAX_REQUESTS, 1), (MAX_TOKENS, MAX_TOKENS))
        )
        self.shapes = decode, mixed
        step = functools.partial(serve_step, model, own_attention, implementation)
        self.step = jax.jit(step, donate_argnums=1)
        self.waiting: dict[int, list[Request]] = {}  # for a request to end
        self.samples: dict[int, list[Request]] = {}  # of a request whose prompt is not computed
        self.ranks: dict[int, int] = {}  # of samples whose first token is still to be picked
        self.ends: dict[int, int] = {}  # the tokens that each will have
        self.rows: dict[int, list[np.ndarray]] = {}  # the logits of its new tokens
        self.report = Report()

    def serve(self, trace: Sequence[Request], on_finish: Callable[[], object]) -> Report:
        """Runs every request of the trace to its end."""
        names = {request.name for request in trace}
        if any(r.after not in {None, *names} or r.sample_of not in {None, *names} for r in trace):
            raise ValueError("trace: a request waits for one that is not in it")
        arrivals = deque(trace)
        started = time.perf_counter()
        while arrivals or self.tokens:
            while arrivals and arrivals[0].arrival_step <= self.report.steps:
                self._arrive(arrivals.popleft())
            for _ in range(self._step()):
                on_finish()
            if self.naps and len(self.report.answers) // REQUESTS_BETWEEN_NAPS > self.report.naps:
                self._nap()
        self.report.seconds = time.perf_counter() - started
        jaxkv.check_errors(self.cache)
        return self.report

    def warm_up(self) -> None:
        """Compiles the step for both shapes, so that serving never does."""
        for shape in self.shapes:
            self.cache, _ = self.step(self.params, self.cache, shape.idle())
        jaxkv.check_errors(self.cache)

    def _arrive(self, request: Request) -> None:
        """Queues a request, or lets it wait for the one that it goes on from."""
        if request.after is not None and request.after not in self.report.answers:
            self.waiting.setdefault(request.after, []).append(request)
        elif request.sample_of is not None and self.shares:
            self.samples.setdefault(request.sample_of, []).append(request)
        else:
            self._add(request)

    def _add(self, request: Request) -> None:
        before = [] if request.after is None else self.report.answers[request.after].tokens
        self._note(request, [*before, *request.prompt])
        prompt, total = len(self.tokens[request.name]), self.ends[request.name]
        if total > self.plan.max_model_len:
            raise ValueError(
                f"request {request.name} may reach {total} tokens; the plan admits "
                f"{self.plan.max_model_len}"
            )
        boundaries = [request.boundary] if request.boundary else []
        self.scheduler.add(request.name, prompt, max_tokens=total, boundaries=boundaries)

    def _note(self, request: Request, prompt: list[int]) -> None:
        self.tokens[request.name] = prompt
        self.ends[request.name] = len(prompt) + request.max_new_tokens
        self.ranks[request.name] = request.rank
        self.rows[request.name] = []
        self.report.prompt_tokens += len(prompt)

    def _fork(self, donor: int, row: np.ndarray) -> None:
        """Starts the samples of a request whose prompt has just been computed."""
        for sample in self.samples.pop(donor, []):
            self._note(sample, self.tokens[donor].copy())
            self.scheduler.fork(donor, [sample.name])
            if sample.name in self.scheduler.running:
                self.report.cached_tokens += len(self.tokens[donor])
            self._pick(sample.name, row)
            self.scheduler.append({sample.name: 1})

    def _step(self) -> int:
        """Runs one step; returns the requests that ended with it."""
        schedule = self.scheduler.schedule()
        self.report.preemptions += [self.report.steps] * len(schedule.preempted)
        self.report.cached_tokens += sum(h.num_cached_tokens for h in schedule.hits.values())
        if schedule.work:
            picked = self._run(schedule.work)
            for name, index in schedule.samples.items():
                if not self.rows[name] and self.shares:
                    self._fork(name, picked[index])
                self._pick(name, picked[index])
        self.report.steps += 1
        self.report.occupancy.append(self.manager.held_blocks())
        self.report.uses.append(self.manager.block_use)
        ended = [name for name in schedule.samples if len(self.tokens[name]) == self.ends[name]]
        for name in ended:
            self._end(name)
        self.scheduler.append({name: 1 for name in schedule.samples if name in self.tokens})
        return len(ended)

    def _end(self, name: int) -> None:
        self.scheduler.finish(name)
        self.report.answers[name] = Answer(self.tokens.pop(name), np.array(self.rows.pop(name)))
        del self.ends[name], self.ranks[name]
        for request in self.waiting.pop(name, []):
            self._add(request)

    def _run(self, work: dict[int, int]) -> np.ndarray:
        """Runs the model over new tokens; returns the logits of each request's last one."""
        ids: list[int] = []
        for name, count in work.items():
            start = self.manager.num_computed_tokens(name)
            ids += self.tokens[name][start : start + count]
        decode, mixed = self.shapes
        shape = decode if max(work.values()) == 1 else mixed
        upload = self.manager.step(shape, work, extra=ids)
        self._count_blocks(upload)
        self.cache, out = self.step(self.params, self.cache, upload)
        return np.asarray(out)

    def _pick(self, name: int, row: np.ndarray) -> None:
        rank = 0 if self.rows[name] else self.ranks[name]
        self.tokens[name].append(
            int(row.argsort(kind="stable")[-1 - rank] if rank else row.argmax())
        )
        self.rows[name].append(row)
        if self.report.first_nan_request is None and np.isnan(row).any():
            self.report.first_nan_request = name

    def _count_blocks(self, upload: jaxkv.blocks.Upload) -> None:
        parts, layout = upload.parts(), self.plan.layout
        self.report.blocks_allocated += parts["entry_ids"].size
        self.report.blocks_zeroed += parts["zero_ids"].size
        for group, count in enumerate(np.diff(parts["zero_ends"], prepend=0)):
            tensors = layout.tensors_of(group)
            page_bytes = sum(layout.tensors[tensor].page_bytes for tensor in tensors)
            self.report.bytes_zeroed += int(count) * page_bytes

    def _nap(self) -> None:
        """Sends the whole cache to the host and back, while requests run."""
        sleeping = jaxkv.sleep(self.cache)
        self.report.naps += 1
        self.report.bytes_released += sleeping.released_bytes
        self.cache = jaxkv.wake_up(sleeping)


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
