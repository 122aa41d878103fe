"""`Engine`, which generates tokens with a model, over a paged cache."""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.blocks import BlockManager, StepShape, Upload
from jaxkv._src.cache import CacheError, KVCache, make_cache
from jaxkv._src.engine._ladder import Ladder
from jaxkv._src.engine._sampling import ROWS, Kind, Output, Sample, Sampling, as_prompt
from jaxkv._src.engine._step import Forward, State, check_same, ring_for, run_steps
from jaxkv._src.internal.checks import check_choice, check_positive
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import ExtraKey
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.sleeping import SleepingCache, sleep, wake_up
from jaxkv._src.step import COMPILER_OPTIONS

InFlight = Literal["finish", "restart"]
CALLS_AHEAD = 2  # one runs while the next one waits for it
# Tokens of a step for which XLA's own matrix products in Triton read weights faster than cuBLAS.
FEW_TOKENS = 32
POSITION = ROWS.index("position")


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


@dataclasses.dataclass(eq=False)
class _Call:
    """A call of the device: some steps, and the samples that each draws a token for."""

    uploads: tuple[Upload, ...]
    tables: np.ndarray  # int32[steps, len(ROWS), S]
    samples: list[list[Sample]]
    out: Array | None = None  # int32[steps, 2 * S + 1], once it runs


class _DrawnFrom(NamedTuple):
    """The samples of a step, and the table row of each; -1: it waits for one."""

    names: list[Hashable]
    rows: np.ndarray  # int64[samples]
    without_row: list[int]


class Engine:
    """Generates tokens for many requests at a time, with a model of yours.

    Example::

        engine = jaxkv.Engine(forward, params, plan, max_requests=8, max_tokens=512)
        for output in engine.generate(prompts, jaxkv.Sampling(max_tokens=16)):
            print(output.request, output.tokens, output.finish_reason)

    ``forward(params, step)`` is the model: it computes the tokens of a `StepContext` and returns
    the logits of each request's last one, [B, vocab]; or ``(logits, step)``, if it carried the step
    through a scan or a jit of its own.

    Steps come in few shapes, each compiled once: at first use, or before by `warm_up`. The host is
    a step ahead of the device, to which tokens go on without passing through the host. Equal
    prefixes of prompts are computed once.

    Not thread-safe. After an exception the engine goes on with its next `step`: an upload that was
    packed is kept and runs first. If an upload was lost nevertheless, call `restart`.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        plan: Plan,
        *,
        max_requests: int,
        max_tokens: int,
        decode_steps: int = 1,
        chunk_tokens: int | None = None,
        forks: int | None = None,
        cache: KVCache | None = None,
        seed: int = 0,
    ):
        """Creates an engine without requests.

        Args:
          forward: the model, see above; traced once for each shape.
          params: its weights, any pytree of arrays.
          plan: from `plan_cache`.
          max_requests: samples that run at the same time.
          max_tokens: tokens of a step over all its requests.
          decode_steps: steps of one token for each request that one call of the device runs. More
            than 1 pays for small models, whose steps take no longer than a call; an end is noticed
            up to twice as many steps late.
          chunk_tokens: as for `Scheduler`.
          forks: samples of one prompt that may start in one step; None: up to 32.
          cache: from `make_cache`, for this plan and ``max_requests``: on a mesh, with scales or
            in another order. The engine donates it. None: ``make_cache(plan, max_requests=...)``.
          seed: of the requests that have none.

        Raises:
          TypeError, ValueError: arguments that contradict each other; what ``forward`` raises for
            the smallest step; logits that are not [B, vocab].
        """
        check_positive(decode_steps=decode_steps)
        self._manager = BlockManager(plan, max_requests=max_requests)
        self._tokens: dict[Hashable, list[int]] = {}  # by name of the sample
        self._scheduler = Scheduler(
            self._manager,
            max_tokens=max_tokens,
            forks=min(max_requests, 32) if forks is None else forks,
            tokens=self._tokens,
            chunk_tokens=chunk_tokens,
            steps_ahead=CALLS_AHEAD * decode_steps,
        )
        self._ladder = Ladder(self._scheduler, max_requests, max_tokens)
        self._plan, self._decode_steps = plan, decode_steps
        self._params, self._seeds = params, np.random.default_rng(seed)
        self._cache: KVCache | SleepingCache
        self._cache = make_cache(plan, max_requests=max_requests) if cache is None else cache
        # Read with the sharding of the cache, to which steps return it.
        self._newest = jax.device_put(
            jnp.zeros(max_requests, jnp.int32), self._cache.status.sharding
        )
        self._ring = ring_for(self._cache, depth=max(16, 4 * decode_steps))
        self._run, self._run_few = [
            jax.jit(
                functools.partial(run_steps, forward, self._note_vocab_size),
                donate_argnums=1,
                static_argnames="kind",
                compiler_options=COMPILER_OPTIONS | {"xla_gpu_enable_triton_gemm": is_small},
            )
            for is_small in (False, True)
        ]
        self._samples: dict[Hashable, Sample] = {}  # that have not ended, by name
        self._live: collections.Counter[Hashable] = collections.Counter()  # samples by request
        # By table row; the last column is for samples that wait for one.
        self._table = np.zeros((len(ROWS), max_requests + 1), np.int32)
        self._drawn_from = _DrawnFrom([], np.zeros(0, np.int64), [])
        # Of a step that goes on from the one before: every id is on the device.
        self._on_device = np.full(max_requests, -1, np.int32)
        self._in_order = np.arange(max_requests)
        self._holders: list[Sample | None] = [None] * max_requests
        self._packed: collections.deque[_Call] = collections.deque()
        self._in_flight: collections.deque[_Call] = collections.deque()
        self._changed: dict[Sample, None] = {}  # with tokens or an end that no output has held
        self._kind = Kind.GREEDY  # of the sampler that is compiled: the widest wanted so far
        self.stats = Stats()
        self._vocab_size: int | None = None  # known once a step is traced
        self._trace_smallest()

    def __repr__(self) -> str:
        return f"Engine({self._scheduler!r}, {len(self._ladder.shapes)} shapes)"

    # --- requests -----------------------------------------------------------------

    @property
    def manager(self) -> BlockManager:
        """The books of its blocks, to read from."""
        return self._manager

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._samples or self._changed)

    def generate(
        self, prompts: Sequence[Any], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Iterator[Output]:
        """Generates tokens for prompts, and yields every sample when it ends.

        Args:
          prompts: token ids of each prompt, sequences or arrays of ints.
          sampling: one for all prompts, or one for each; None: `Sampling()`.

        Returns:
          An iterator over outputs with all tokens of a sample, in the order of their ends. A loop
          that is left early aborts the rest.

        Raises:
          TypeError, ValueError: as `add`; the engine has other requests, or there is not one
            sampling for each prompt.
        """
        each = (
            sampling if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
        )
        if len(each) != len(prompts):
            raise ValueError(f"sampling holds {len(each)} for {len(prompts)} prompts")
        requests = [
            self._made(name, f"prompts[{name}]", prompt, one)
            for name, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]
        self._check_idle()
        return self._outputs(requests)

    def add(
        self,
        request: Hashable,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        """Queues a request, for `step` to compute.

        Args:
          request: any hashable name that no other request has.
          prompt: its token ids, a sequence or an array of ints.
          sampling: None: `Sampling()`.
          salt, extra_keys, boundaries: of its prefix, as for `BlockManager.start`.

        Raises:
          TypeError, ValueError: a prompt that is not token ids, or that is too long for the plan
            together with ``max_tokens``; a name in use.
        """
        samples = self._made(request, "prompt", prompt, sampling or Sampling())
        self._add(samples, salt=salt, extra_keys=extra_keys, boundaries=boundaries)

    def abort(self, request: Hashable) -> None:
        """Ends a request; the next outputs hold the tokens that it has.

        Raises:
          ValueError: an unknown request, or one that has ended.
        """
        if not self._live[request]:
            raise ValueError(f"request={request!r} is unknown, or has ended")
        for sample in [s for s in self._samples.values() if s.request == request]:
            sample.reason = "abort"
            self._end(sample)

    def step(self) -> list[Output]:
        """Sends the next step to the device, and returns what the one before has computed.

        Returns:
          An output for each sample with tokens, or an end, that no output has held: with these
          tokens only. Empty while the first step runs.

        Raises:
          CacheError: the device found an error; see `check_errors`.
        """
        self._advance()
        outputs = [sample.output() for sample in self._changed]
        self._changed.clear()
        return outputs

    # --- weights and memory -------------------------------------------------------

    def update(self, params: Any, *, in_flight: InFlight = "finish") -> None:
        """Takes new weights. No prompt shares what the old ones computed.

        Args:
          params: arrays of the same shapes and dtypes.
          in_flight: of requests that have not ended. "finish": they go on, over keys and values of
            the old weights. "restart": they start again, from their prompts; outputs of tokens that
            `step` has returned are void.

        Raises:
          ValueError: other arrays than the engine was made with.
        """
        check_choice(("finish", "restart"), in_flight=in_flight)
        check_same(self._params, params)
        self._settle()
        self._params = params
        self._manager.new_epoch()
        if in_flight == "restart":
            self._again(from_prompts=True)

    def sleep(self, level: int = 1) -> int:
        """Gives the memory of the cache back, until `wake_up`; see `jaxkv.sleep`.

        Args:
          level: 1: the content is kept on the host. 2: it is dropped, and requests that have not
            ended are computed again.

        Returns:
          The bytes of device memory that are free now.
        """
        self._settle()
        self._cache = sleep(self._awake(), level=level)
        if level == 2:
            self._again()
            self._manager.reset_prefixes()
        return self._cache.released_bytes

    def wake_up(self) -> None:
        """Takes the memory of the cache again."""
        if isinstance(self._cache, KVCache):
            raise RuntimeError("the engine is awake; call sleep first")
        self._cache = wake_up(self._cache)

    def restart(self) -> None:
        """Computes all requests again, with the tokens that they have.

        For a cache that lost its content or an upload, as `CacheError` says.
        """
        self._packed.clear()
        self._in_flight.clear()
        self._manager.reset()
        cache = self._awake()
        self._cache = dataclasses.replace(cache, status=cache.status.at[0].set(0))
        self._again()

    def warm_up(self, *samplings: Sampling) -> None:
        """Compiles the step for every shape, so that serving never does; shows its progress.

        jax keeps compiled steps for later processes, if it is told where:
        ``jax.config.update("jax_compilation_cache_dir", directory)``.

        Args:
          samplings: kinds of sampling that will come. A step that draws, or draws within limits
            (``top_k``, ``top_p``, ``min_p``), is compiled anew when the first request asks for it.
        """
        self._kind = max([self._kind, *(sampling.kind for sampling in samplings)])
        counts = {shape: {1} for shape in self._ladder.shapes}
        for shape in self._ladder.decode.values():
            counts[shape].add(self._decode_steps)
        calls = [self._idle(shape, n) for shape, sizes in counts.items() for n in sorted(sizes)]
        state = State(self._awake(), self._newest)
        # jax lowers one step after another; XLA compiles the others meanwhile, outside of the GIL.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiling = []
            for call in calls[::-1]:  # the largest take longest
                lowered = self._run_of(call).lower(
                    *(self._params, state, call.uploads, call.tables), kind=self._kind
                )
                compiling.append(pool.submit(lowered.compile))
            for done in _with_progress(concurrent.futures.as_completed(compiling), len(calls)):
                done.result()
        for call in calls:
            self._send(call)

    # --- steps --------------------------------------------------------------------

    def _outputs(self, requests: list[list[Sample]]) -> Iterator[Output]:
        self._check_idle()
        for samples in requests:
            self._add(samples)
        try:
            while self.has_work:
                self._advance()
                ended = [sample for sample in self._changed if sample.reason is not None]
                self._changed.clear()
                yield from [sample.output(sample.num_prompt) for sample in ended]
        finally:
            for request in list(self._live):
                self.abort(request)
            self._changed.clear()

    def _advance(self) -> None:
        """Sends one call if there is work for it, and collects all but the newest ones."""
        if not self._packed:
            self._packed.extend(self._pack())
        is_busy = bool(self._packed)
        while self._packed:
            self._in_flight.append(self._send(self._packed[0]))
            self._packed.popleft()
        ahead = CALLS_AHEAD - 1 if is_busy else max(0, len(self._in_flight) - 1)
        if self._samples and not self._in_flight:
            raise RuntimeError(f"{self._scheduler!r} found no work, although requests wait")
        while len(self._in_flight) > ahead:
            self._collect(self._in_flight.popleft())

    def _pack(self) -> list[_Call]:
        """Packs the uploads of the next call: some decodes, or one other step."""
        calls: list[_Call] = []
        shape: StepShape | None = None
        while len(calls) < self._decode_steps and self._samples:
            most = self._ladder.fill(self._scheduler.wanted_tokens)
            schedule = self._scheduler.schedule(max_tokens=most)
            if not schedule.work:
                break
            fitting = self._ladder.fitting(schedule)
            is_decode = fitting.max_query_len == 1
            if shape is not None and not (is_decode and fitting.max_tokens <= shape.max_tokens):
                break  # the schedule comes again
            shape = shape or fitting
            calls.append(self._pack_one(schedule, shape))
            if not is_decode:
                break
        if len(calls) < max(2, self._decode_steps):
            return calls
        uploads = tuple(upload for call in calls for upload in call.uploads)
        tables = np.concatenate([call.tables for call in calls])
        return [_Call(uploads, tables, [samples for call in calls for samples in call.samples])]

    def _pack_one(self, schedule: Schedule, shape: StepShape) -> _Call:
        names, is_changed = list(schedule.samples), bool(schedule.hits or schedule.preempted)
        if not is_changed and names == self._drawn_from.names == list(schedule.work):
            ids, indices = self._on_device[: len(names)], self._in_order[: len(names)]
        else:
            ids, indices = schedule.token_ids, list(schedule.samples.values())
        upload = self._manager.step(shape, schedule.work, extra=ids, ring=self._ring)
        self._count(schedule, shape, len(ids))
        samples = [self._samples[name] for name in names]
        answers = {}
        for name, sample in zip(names, samples, strict=True):
            sample.num_drawn += 1
            if sample.num_drawn < sample.end:
                answers[name] = 1
        self._scheduler.append(answers)
        if is_changed or names != self._drawn_from.names:
            self._drawn_from = self._hold(names, samples)
        rows, table = self._drawn_from.rows, _empty_table(shape)
        count = len(samples)
        table[:, :count] = self._table[:, rows]
        for at in self._drawn_from.without_row:  # they wait
            table[:, at] = samples[at].numbers
            table[POSITION, at] = samples[at].num_drawn - samples[at].num_prompt - 1
        self._table[POSITION, rows] += 1
        table[0, :count] = rows
        table[0, self._drawn_from.without_row] = -1
        table[1, :count] = indices
        return _Call((upload,), table[None], [samples])

    def _hold(self, names: list[Hashable], samples: list[Sample]) -> _DrawnFrom:
        """Finds the rows of samples, and writes the numbers of those new in theirs to the table."""
        rows_of = self._manager.requests
        rows = [rows_of.get(name, -1) for name in names]
        for sample, row in zip(samples, rows, strict=True):
            if row >= 0 and self._holders[row] is not sample:
                self._holders[row] = sample
                self._table[:, row] = sample.numbers
                self._table[POSITION, row] = sample.num_drawn - sample.num_prompt - 1
        without_row = [at for at, row in enumerate(rows) if row < 0]
        return _DrawnFrom(names, np.array(rows, np.int64), without_row)

    def _count(self, schedule: Schedule, shape: StepShape, num_tokens: int) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += num_tokens
        stats.padded_tokens += shape.max_tokens - num_tokens
        stats.preemptions += len(schedule.preempted)
        stats.cached_tokens += sum(hit.num_cached_tokens for hit in schedule.hits.values())

    def _send(self, call: _Call) -> _Call:
        state = State(self._awake(), self._newest)
        run = self._run_of(call)
        state, call.out = run(self._params, state, call.uploads, call.tables, kind=self._kind)
        self._cache, self._newest = state.cache, state.newest_tokens
        call.out.copy_to_host_async()
        self.stats.calls += 1
        return call

    def _run_of(self, call: _Call) -> Any:
        """Returns the jitted `run_steps` for a call."""
        return self._run_few if call.uploads[0].shape.max_tokens <= FEW_TOKENS else self._run

    def _collect(self, call: _Call) -> None:
        """Waits for a call, and gives the samples their tokens."""
        for out, samples in zip(np.asarray(call.out), call.samples, strict=True):
            if out[-1]:
                raise CacheError(int(out[-1]))
            size, count = out.size // 2, len(samples)
            logprobs = out[size : size + count].view(np.float32)
            self.stats.nan_tokens += int(np.isnan(logprobs).sum())
            for sample, token, logprob in zip(
                samples, out[:count].tolist(), logprobs.tolist(), strict=True
            ):
                if sample.reason is not None:  # it ended before this token
                    continue
                self._changed[sample] = None
                self.stats.sampled_tokens += 1
                if sample.note(token, logprob):
                    self._end(sample)

    def _settle(self) -> None:
        """Runs what is packed, and waits for all calls."""
        while self._packed:
            self._in_flight.append(self._send(self._packed.popleft()))
        while self._in_flight:
            self._collect(self._in_flight.popleft())

    # --- pieces -------------------------------------------------------------------

    def _made(self, request: Hashable, name: str, prompt: Any, sampling: Sampling) -> list[Sample]:
        """Returns the samples of a new request, checked."""
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, got {type(sampling).__name__}")
        ids, longest = as_prompt(name, prompt, self._vocab_size), self._plan.max_model_len
        end = longest if sampling.max_tokens is None else len(ids) + sampling.max_tokens
        if not len(ids) < end <= longest:
            raise ValueError(
                f"{name} of {len(ids)} tokens and max_tokens={sampling.max_tokens} are more than "
                f"the plan's max_model_len={longest}; shorten one of them, or plan for more"
            )
        if self._live[request]:
            raise ValueError(f"request={request!r} has not ended; use another name")
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=int(self._seeds.integers(2**32)))
        return [Sample(request, i, ids, end, sampling) for i in range(sampling.n)]

    def _add(self, samples: list[Sample], **options: Any) -> None:
        first, sizes = samples[0], {"samples": len(samples), "max_tokens": samples[0].end}
        self._tokens |= {sample.name: sample.tokens for sample in samples}
        try:
            self._scheduler.add(first.request, first.num_prompt, **sizes, **options)
        except (TypeError, ValueError):
            for sample in samples:
                del self._tokens[sample.name]
            raise
        self._samples |= {sample.name: sample for sample in samples}
        self._kind = max(self._kind, first.sampling.kind)
        self._live[first.request] = len(samples)
        self.stats.prompt_tokens += first.num_prompt

    def _end(self, sample: Sample) -> None:
        self._scheduler.finish(sample.name)
        del self._samples[sample.name], self._tokens[sample.name]
        self._live[sample.request] -= 1
        if not self._live[sample.request]:
            del self._live[sample.request]
        self._changed[sample] = None

    def _again(self, *, from_prompts: bool = False) -> None:
        """Lets all requests wait, to be computed again; nothing is in flight."""
        for sample in self._samples.values():
            sample.restart(from_prompts=from_prompts)
        self._scheduler.restart()
        self._holders = [None] * self._manager.max_requests
        self._drawn_from = self._drawn_from._replace(names=[])

    def _idle(self, shape: StepShape, count: int) -> _Call:
        """Returns a call of steps without requests."""
        if self._ring is None:
            uploads = tuple(shape.idle() for _ in range(count))
        else:
            uploads = tuple(self._manager.step(shape, {}, ring=self._ring) for _ in range(count))
        return _Call(uploads, np.stack([_empty_table(shape)] * count), [[]] * count)

    def _trace_smallest(self) -> None:
        """Traces the step of the smallest shape, so that mistakes of a model are said now."""
        shape, state = self._ladder.shapes[0], State(self._awake(), self._newest)
        # Not of the ring: such an upload has a number, and nothing runs it.
        tables = _empty_table(shape)[None]
        self._run.eval_shape(self._params, state, (shape.idle(),), tables, kind=self._kind)

    def _note_vocab_size(self, size: int) -> None:
        self._vocab_size = size

    def _awake(self) -> KVCache:
        if isinstance(self._cache, SleepingCache):
            raise RuntimeError("the engine sleeps; call wake_up first")
        return self._cache

    def _check_idle(self) -> None:
        if self.has_work:
            raise ValueError(
                f"the engine has {len(self._samples)} samples that have not ended: generate needs "
                "it for itself; take their outputs with step, or add these prompts to them"
            )


def _empty_table(shape: StepShape) -> np.ndarray:
    """Returns a table of samples without any, int32[len(ROWS), S]."""
    most = shape.batch_size if shape.max_query_len == 1 else shape.max_requests
    table = np.zeros((len(ROWS), most), np.int32)
    table[0] = -1
    return table


def _with_progress[T](done: Iterable[T], count: int) -> Iterable[T]:
    """Yields what is done, and shows how much it is if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return done
    return tqdm(done, desc="compiling", total=count, unit="shape", disable=None)
