"""`Engine`, which generates tokens with a model, over a paged cache."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.blocks import BlockManager, StepShape, Upload
from jaxkv._src.cache import CacheError, KVCache, make_cache
from jaxkv._src.engine._ladder import Ladder
from jaxkv._src.engine._samples import INDEX, LEFT, PLACE, POSITION, Sample, Samples
from jaxkv._src.engine._sampling import FinishReason, Kind, Output, Sampling, as_prompt
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


class _Drawn(NamedTuple):
    """The samples that a step draws a token for.

    slots: int64[S], see `Sample`.
    answers: to the scheduler, if all of them go on.
    """

    names: list[Hashable]
    samples: list[Sample]
    slots: np.ndarray
    answers: dict[Hashable, int]
    wants_logprobs: bool


class _Step(NamedTuple):
    """A step that is packed.

    last: samples of which it draws the last token.
    num_ended: `Samples.num_ended` when it was packed.
    """

    upload: Upload
    drawn: _Drawn
    last: list[Sample]
    num_ended: int


@dataclasses.dataclass(eq=False)
class _Call:
    """Steps that one call of the device runs."""

    steps: list[_Step]
    out: Array | None = None  # int32[steps, 2 * S + 1], once it runs


NONE_DRAWN = _Drawn([], [], np.zeros(0, np.int64), {}, False)


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
        self._samples, steps_ahead = Samples(), CALLS_AHEAD * decode_steps
        self._scheduler = Scheduler(
            self._manager,
            max_tokens=max_tokens,
            forks=min(max_requests, 32) if forks is None else forks,
            tokens=self._samples.tokens,
            chunk_tokens=chunk_tokens,
            steps_ahead=steps_ahead,
        )
        self._ladder = Ladder(self._scheduler, max_requests, max_tokens)
        self._plan, self._decode_steps = plan, decode_steps
        self._params, self._seeds = params, np.random.default_rng(seed)
        self._cache: KVCache | SleepingCache
        self._cache = make_cache(plan, max_requests=max_requests) if cache is None else cache
        # Read with the sharding of the cache, to which steps return it.
        size = (steps_ahead + 1) * max_requests  # tokens are in the host's memory after that
        self._on_device = jax.device_put(jnp.zeros(size, jnp.int32), self._cache.status.sharding)
        self._place = 0  # of the tokens that the newest step draws
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
        self._drawn = NONE_DRAWN  # by the newest step, if its tokens are on the device
        self._stops: set[int] = set()  # of all requests so far
        self._packed: collections.deque[_Call] = collections.deque()
        self._in_flight: collections.deque[_Call] = collections.deque()
        # With tokens or an end that no output has held, more than once perhaps; those with an end.
        self._changed: list[Sequence[Sample]] = []
        self._ended: list[Sample] = []
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
        return bool(self._samples.of or self._changed)

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
        if request not in self._samples.num_of:
            raise ValueError(f"request={request!r} is unknown, or has ended")
        for sample in [s for s in self._samples.of.values() if s.request == request]:
            self._end(sample, "abort")

    def step(self) -> list[Output]:
        """Sends the next step to the device, and returns what the one before has computed.

        Returns:
          An output for each sample with tokens, or an end, that no output has held: with these
          tokens only. Empty while the first step runs.

        Raises:
          CacheError: the device found an error; see `check_errors`.
        """
        self._advance()
        changed = self._changed[0] if len(self._changed) == 1 else _once(self._changed)
        outputs = [sample.output() for sample in changed]
        self._forget_changed()
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
        self._settle()
        self._kind = max([self._kind, *(sampling.kind for sampling in samplings)])
        counts = {shape: {1} for shape in self._ladder.shapes}
        for shape in self._ladder.decode.values():
            counts[shape].add(self._decode_steps)
        calls = [self._idle(shape, n) for shape, sizes in counts.items() for n in sorted(sizes)]
        state = State(self._awake(), self._on_device)
        # jax lowers one step after another; XLA compiles the others meanwhile, outside of the GIL.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiling = []
            for call in calls[::-1]:  # the largest take longest
                run, uploads = self._run_of(call)
                lowered = run.lower(self._params, state, uploads, kind=self._kind)
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
                ended = self._ended.copy()
                self._forget_changed()
                yield from [sample.output(sample.num_prompt) for sample in ended]
        finally:
            for request in list(self._samples.num_of):
                self.abort(request)
            self._forget_changed()

    def _advance(self) -> None:
        """Sends one call if there is work for it, and collects all but the newest ones."""
        if not self._packed:
            self._packed.extend(self._pack())
        is_busy = bool(self._packed)
        while self._packed:
            self._in_flight.append(self._send(self._packed[0]))
            self._packed.popleft()
        ahead = CALLS_AHEAD - 1 if is_busy else max(0, len(self._in_flight) - 1)
        if self._samples.of and not self._in_flight:
            raise RuntimeError(f"{self._scheduler!r} found no work, although requests wait")
        while len(self._in_flight) > ahead:
            self._collect(self._in_flight.popleft())

    def _pack(self) -> list[_Call]:
        """Packs the uploads of the next call: some decodes, or one other step."""
        steps: list[_Step] = []
        shape: StepShape | None = None
        while len(steps) < self._decode_steps and self._samples.of:
            schedule = self._scheduler.schedule(max_tokens=self._most_tokens())
            if not schedule.work:
                break
            num_tokens = sum(schedule.work.values())
            fitting = self._ladder.fitting(schedule, num_tokens)
            is_decode = fitting.max_query_len == 1
            if shape is not None and not (is_decode and fitting.max_tokens <= shape.max_tokens):
                break  # the schedule comes again
            shape = shape or fitting
            steps.append(self._pack_one(schedule, shape))
            self._count(schedule, num_tokens, shape.max_tokens - num_tokens)
            if not is_decode:
                break
        is_whole = len(steps) == self._decode_steps
        return [_Call(steps)] if is_whole else [_Call([step]) for step in steps]

    def _most_tokens(self) -> int | None:
        """Returns the most tokens of the next step, so that it fills its shape; None: any."""
        if len(self._samples.of) == len(self._drawn.names):
            return None  # all of them have drawn a token, and want one more
        return self._ladder.fill(self._scheduler.wanted_tokens)

    def _pack_one(self, schedule: Schedule, shape: StepShape) -> _Step:
        names, is_changed = list(schedule.samples), bool(schedule.hits or schedule.preempted)
        if is_changed or names != self._drawn.names:
            drawn, ids = self._samples_of(names), self._token_ids(schedule)
        elif names != list(schedule.work):
            drawn, ids = self._drawn, self._token_ids(schedule)
        else:
            drawn, ids = self._drawn, None
        numbers = self._samples.numbers.take(drawn.slots, axis=0)
        place = (self._place + self._manager.max_requests) % self._on_device.size
        extra = np.zeros(shape.extra, np.int32)
        count, tokens = len(names), shape.max_tokens
        if ids is None:  # the step goes on from the one before
            extra[:count] = -1 - numbers[:, PLACE]
        else:
            extra[: ids.size] = ids
        numbers[:, POSITION] += 1
        numbers[:, LEFT] -= 1
        in_order = np.arange(count)
        numbers[:, INDEX] = in_order if ids is None else list(schedule.samples.values())
        numbers[:, PLACE] = place + in_order
        extra[tokens] = place
        extra[tokens + 1 : tokens + 1 + count * LEFT] = numbers[:, :LEFT].reshape(-1)
        upload = self._manager.step(shape, schedule.work, extra=extra, ring=self._ring)
        self._samples.numbers[drawn.slots], self._place, self._drawn = numbers, place, drawn
        last = [drawn.samples[at] for at in np.flatnonzero(numbers[:, LEFT] == 0)]
        gone = {sample.name for sample in last}
        answers = {name: 1 for name in names if name not in gone} if gone else drawn.answers
        self._scheduler.append(answers)
        return _Step(upload, drawn, last, self._samples.num_ended)

    def _samples_of(self, names: list[Hashable]) -> _Drawn:
        samples = [self._samples.of[name] for name in names]
        slots = np.array([sample.slot for sample in samples], np.int64)
        wants_logprobs = any(sample.sampling.logprobs for sample in samples)
        return _Drawn(names, samples, slots, dict.fromkeys(names, 1), wants_logprobs)

    def _token_ids(self, schedule: Schedule) -> np.ndarray:
        """Returns the token ids of a step; ``-1 - i`` for the one in place i on the device."""
        ids, work = schedule.token_ids, schedule.work
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:  # the last of their requests
            names, ends = list(work), np.cumsum(list(work.values()))
            requests = [self._samples.of[names[at]] for at in ends.searchsorted(unknown, "right")]
            slots = [sample.slot for sample in requests]
            ids[unknown] = -1 - self._samples.numbers[slots, PLACE]
        return ids

    def _count(self, schedule: Schedule, num_tokens: int, num_padded: int) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += num_tokens
        stats.padded_tokens += num_padded
        stats.preemptions += len(schedule.preempted)
        stats.cached_tokens += sum(hit.num_cached_tokens for hit in schedule.hits.values())

    def _send(self, call: _Call) -> _Call:
        state, (run, uploads) = State(self._awake(), self._on_device), self._run_of(call)
        state, call.out = run(self._params, state, uploads, kind=self._kind)
        self._cache, self._on_device = state.cache, state.drawn
        call.out.copy_to_host_async()
        self.stats.calls += 1
        return call

    def _run_of(self, call: _Call) -> tuple[Any, tuple[Upload, ...]]:
        """Returns the jitted `run_steps` for a call, and its uploads."""
        is_small = call.steps[0].upload.shape.max_tokens <= FEW_TOKENS
        return self._run_few if is_small else self._run, tuple([s.upload for s in call.steps])

    def _collect(self, call: _Call) -> None:
        """Waits for a call, and gives the samples their tokens."""
        for out, step in zip(np.asarray(call.out), call.steps, strict=True):
            if out[-1]:
                raise CacheError(int(out[-1]))
            samples, half = step.drawn.samples, out.size // 2
            tokens, logprobs = out[: len(samples)], out[half : half + len(samples)]
            if step.num_ended != self._samples.num_ended:  # some ended before these tokens
                at = [i for i, sample in enumerate(samples) if sample.reason is None]
                samples, tokens, logprobs = [samples[i] for i in at], tokens[at], logprobs[at]
            self._note(step, samples, tokens.tolist(), logprobs.view(np.float32))

    def _note(
        self, step: _Step, samples: list[Sample], tokens: list[int], logprobs: np.ndarray
    ) -> None:
        """Adds a token to each sample, and ends those of which it is the last."""
        self.stats.sampled_tokens += len(samples)
        self.stats.nan_tokens += int(np.count_nonzero(np.isnan(logprobs)))
        for sample, token in zip(samples, tokens, strict=True):
            sample.tokens.append(token)
        if step.drawn.wants_logprobs:
            for sample, logprob in zip(samples, logprobs.tolist(), strict=True):
                sample.logprobs.append(logprob)
        self._changed.append(samples)
        if not self._stops.isdisjoint(tokens):
            for sample, token in zip(samples, tokens, strict=True):
                if token in sample.sampling.stop_token_ids:
                    self._end(sample, "stop")
        for sample in step.last:
            if sample.reason is None:
                self._end(sample, "length")

    def _settle(self) -> None:
        """Runs what is packed, and waits for all calls."""
        while self._packed:
            self._in_flight.append(self._send(self._packed.popleft()))
        while self._in_flight:
            self._collect(self._in_flight.popleft())
        self._drawn = NONE_DRAWN

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
        if request in self._samples.num_of:
            raise ValueError(f"request={request!r} has not ended; use another name")
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=int(self._seeds.integers(2**32)))
        return [
            Sample(request, index, sampling, ids.copy(), len(ids), end, len(ids))
            for index in range(sampling.n)
        ]

    def _add(self, samples: list[Sample], **options: Any) -> None:
        first, sampling = samples[0], samples[0].sampling
        for sample in samples:
            self._samples.add(sample)
        try:
            self._scheduler.add(
                first.request,
                first.num_prompt,
                samples=len(samples),
                max_tokens=first.end,
                **options,
            )
        except (TypeError, ValueError):
            for sample in samples:
                self._samples.remove(sample)
            raise
        self._kind = max(self._kind, sampling.kind)
        self._stops.update(sampling.stop_token_ids)
        self.stats.prompt_tokens += first.num_prompt

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        self._scheduler.finish(sample.name)
        self._samples.remove(sample)
        sample.reason = reason
        self._changed.append([sample])
        self._ended.append(sample)

    def _forget_changed(self) -> None:
        self._changed.clear()
        self._ended.clear()

    def _again(self, *, from_prompts: bool = False) -> None:
        """Lets all requests wait, to be computed again; nothing is in flight."""
        for sample in self._samples.of.values():
            if from_prompts:
                del sample.tokens[sample.num_prompt :]
                sample.logprobs.clear()
                sample.num_sent = sample.num_prompt
            self._samples.restart(sample)
        self._scheduler.restart()
        self._drawn = NONE_DRAWN

    def _idle(self, shape: StepShape, count: int) -> _Call:
        """Returns a call of steps without requests."""
        uploads = [
            shape.idle() if self._ring is None else self._manager.step(shape, {}, ring=self._ring)
            for _ in range(count)
        ]
        return _Call([_Step(upload, NONE_DRAWN, [], 0) for upload in uploads])

    def _trace_smallest(self) -> None:
        """Traces the step of the smallest shape, so that mistakes of a model are said now."""
        state = State(self._awake(), self._on_device)
        # Not of the ring: such an upload has a number, and nothing runs it.
        upload = self._ladder.shapes[0].idle()
        self._run.eval_shape(self._params, state, (upload,), kind=self._kind)

    def _note_vocab_size(self, size: int) -> None:
        self._vocab_size = size

    def _awake(self) -> KVCache:
        if isinstance(self._cache, SleepingCache):
            raise RuntimeError("the engine sleeps; call wake_up first")
        return self._cache

    def _check_idle(self) -> None:
        if self.has_work:
            raise ValueError(
                f"the engine has {len(self._samples.of)} samples that have not ended: generate "
                "needs it for itself; take their outputs with step, or add these prompts to them"
            )


def _once(samples: Sequence[Sequence[Sample]]) -> Iterable[Sample]:
    """Returns every sample of some lists, once."""
    return dict.fromkeys(itertools.chain.from_iterable(samples))


def _with_progress[T](done: Iterable[T], count: int) -> Iterable[T]:
    """Yields what is done, and shows how much it is if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return done
    return tqdm(done, desc="compiling", total=count, unit="shape", disable=None)
