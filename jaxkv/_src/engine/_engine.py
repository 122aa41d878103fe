"""`Engine`, which generates tokens with a model, over a paged cache."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, get_args

from jaxtyping import PyTree

from jaxkv._src.blocks import BlockManager
from jaxkv._src.cache import KVCache, make_cache
from jaxkv._src.engine._calls import LOOKAHEAD_CALLS, Calls
from jaxkv._src.engine._device import Device
from jaxkv._src.engine._drafts import Drafter, Drafting, check_drafts
from jaxkv._src.engine._model import Forward, Head, Model
from jaxkv._src.engine._other_names import OF_ENGINE
from jaxkv._src.engine._outputs import PROMPT, SIDE, Kind, LogprobsMode, Output, Stats, StepOptions
from jaxkv._src.engine._packer import Packer
from jaxkv._src.engine._processing import Processing, check_distinct, check_processors
from jaxkv._src.engine._progress import with_progress
from jaxkv._src.engine._samples import ModelFacts, Sample, Samples
from jaxkv._src.engine._sampling import Sampling
from jaxkv._src.engine._shape_buckets import (
    ShapeBuckets,
    check_reproducible,
    count_prefix_groups,
)
from jaxkv._src.engine._states import InFlight, awake, fall_asleep, set_params, warm_up
from jaxkv._src.internal.checks import (
    check_at_most,
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_name,
    check_positive,
    plain_ints,
)
from jaxkv._src.internal.log import LOGGER
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.unique import Unique
from jaxkv._src.logits_processors import LogitsProcessor
from jaxkv._src.offload import HostMemory
from jaxkv._src.planning import Plan, stores_encoder_tokens
from jaxkv._src.prefixes import EventLog, ExtraKey, TokenIds, check_content
from jaxkv._src.scheduler import Scheduler
from pallas_kernels import default_implementation


class Engine(Unique):
    """Generates tokens for many requests at a time, with a model of yours.

    Example::

        engine = jaxkv.Engine(forward, params, plan, max_requests=8, max_tokens=512)
        for output in engine.generate(prompts, jaxkv.Sampling(max_tokens=16)):
            print(output.request, output.tokens, output.finish_reason)

    ``forward(params, step)`` is the model: it computes the tokens of a `StepContext` and returns
    the logits of each request's last one, [B, vocab]; or, with ``head``, the hidden states of all
    tokens. A `ModelOutput` holds more, such as a step that went through a scan or a jit.

    Steps come in few shapes, each compiled once: at first use, or before by `warm_up`. The host
    prepares the next step while the device runs this one; sampled tokens stay on the device. Equal
    prefixes of prompts are computed once. The logger ``jaxkv`` tells what the engine decides.

    Not thread-safe. After an exception or an interrupt, at any time, the engine goes on with its
    next `step`, and no token is lost: what failed is computed again, in a new cache if a call has
    taken the old one along.
    """

    why = "it owns a cache and compiled steps; make another from forward, params and a plan"

    @knows_remedies(OF_ENGINE)
    @plain_ints
    def __init__(
        self,
        forward: Forward,
        params: PyTree,
        plan: Plan,
        *,
        max_requests: int,
        max_tokens: int,
        head: Head | None = None,
        decode_steps: int = 1,
        drafts: Drafter | None = None,
        chunk_tokens: int | None = None,
        forks: int | None = None,
        shared_prefixes: int | None = None,
        reproducible: bool = False,
        cache: KVCache | None = None,
        host_memory: HostMemory | None = None,
        events: EventLog | None = None,
        logits_processors: Sequence[LogitsProcessor[Any, Any]] = (),
        logprobs_mode: LogprobsMode = "raw",
        seed: int = 0,
    ):
        """Creates an engine without requests.

        Args:
          forward: the model, see above; traced once for each shape.
          params: its weights, any pytree of arrays.
          plan: from `plan_cache`.
          head: ``head(params, hidden)`` returns the logits, [N, vocab], of N of the hidden states
            that ``forward`` returns then: those of last tokens, and of others where they are
            asked for. None: ``forward`` returns the logits of last tokens.
          max_requests: samples that run at the same time.
          max_tokens: tokens of a step over all its requests.
          decode_steps: steps of one token for each request that one call of the device runs. More
            than 1 pays for small models, whose steps take no longer than a call; an end is noticed
            up to twice as many steps late.
          drafts: an object of `jaxkv.drafts`, or your own, that proposes the next tokens of
            requests. A step verifies them together, and gives those that are right, and one more.
            Tokens are the same as without, also sampled ones. Steps of up to 128 requests, all of
            which decode, have drafts; the host waits for each before it prepares the next. Where
            that costs more than the tokens save, drafts are tried so rarely that it costs 1 % of
            the steps at most. Requests with logits processors get none.
            Drafts need ``head``, and states that can be set back (``speculative_blocks``, or
            ``speculative_tokens`` with ``replay``).
          chunk_tokens: as for `Scheduler`.
          forks: samples of one prompt that may start in one step; None: up to 32.
          shared_prefixes: groups of samples or prompts that read the blocks that they begin with
            together, in steps of one token for each that save enough by it; see
            `StepShape.for_plan`. None: 32 where the device's kernels can, and none with
            ``reproducible``, because it changes the last bits of logits; 0: each its own.
          reproducible: True: the tokens and log-probabilities of a request have the same bits
            whatever runs next to it, and after hits, preemptions and other chunks. This holds
            within one engine, for a ``forward`` that computes each token by itself but for
            `StepContext.attend`; a mixture of experts that drops tokens, say, is none. All steps
            have one shape then: a decode takes as long as ``max_tokens`` tokens.
          cache: from `make_cache`, for this plan and ``max_requests``: on a mesh, with scales or
            in another order. The engine donates it. None: ``make_cache(plan, max_requests=...)``.
          host_memory: for blocks that make room for others on the device: prefixes and preempted
            requests come back from there, when that is faster than computing them. None: they are
            computed.
          events: as for `BlockManager`.
          logits_processors: applied in this order to the logits of the requests that ask for them
            in `Sampling`; see `jaxkv.logits_processors`.
          logprobs_mode: log-probabilities of answers are those of the model ("raw"), or of the
            logits after the processors ("processed"); both before temperature and the rest.
          seed: of the requests that have none.

        Raises:
          TypeError, ValueError: arguments that contradict each other; a plan with cross attention,
            for which use a `Scheduler` and a loop of your own; what ``forward`` raises for
            the largest step; logits or hidden states of another shape.
        """
        _check_model(forward, head, plan)
        #: the engine's `BlockManager`; read-only
        self.manager = BlockManager(
            plan, max_requests=max_requests, host_memory=host_memory, events=events
        )
        check_count(seed=seed)
        check_choice(get_args(LogprobsMode), logprobs_mode=logprobs_mode)
        check_distinct(logits_processors)
        _check_steps(plan, decode_steps, shared_prefixes, reproducible)
        if drafts is not None:
            several = decode_steps if decode_steps > 1 else None
            others = {"reproducible": reproducible, "decode_steps": several}
            sizes = {"max_tokens": max_tokens, "has_head": head is not None}
            check_drafts(drafts, plan, others=others, **sizes)
        self._processors = tuple(logits_processors)
        num_rows = max_requests if self._processors else 0
        self._stats, self._samples = Stats(), Samples(plan.max_model_len, seed, num_rows)
        lookahead = LOOKAHEAD_CALLS * decode_steps
        self._scheduler = Scheduler(
            self.manager,
            max_tokens=max_tokens,
            forks=min(max_requests, 32) if forks is None else forks,
            tokens=self._samples.tokens,
            chunk_tokens=chunk_tokens,
            lookahead_steps=lookahead,
        )
        pays = default_implementation("decode", "prefill") == "mosaic_gpu"
        groups = count_prefix_groups(plan, shared_prefixes, reproducible=reproducible, pays=pays)
        self._buckets = ShapeBuckets(
            plan,
            self._scheduler,
            max_requests,
            max_tokens,
            prefix_groups=groups,
            reproducible=reproducible,
            has_targets=head is not None,
            drafts=0 if drafts is None else drafts.max_tokens,
        )
        cache = make_cache(plan, max_requests=max_requests) if cache is None else cache
        most_drafted = max(self._buckets.drafted, default=0)
        # Of idle steps, and of those not collected yet.
        num_sampled = max(lookahead + 2, cdiv(most_drafted, max_requests)) * max_requests
        model = Model(forward, head)
        self._device = self._make_device(
            model, params, cache, num_sampled, reproducible, logprobs_mode
        )
        parts = self._scheduler, self._samples, self._stats, self._device.ring(decode_steps)
        self._packer = Packer(self.manager, self._buckets, *parts, num_sampled)
        if drafts is not None:
            self._packer.drafting = Drafting(drafts, most_drafted, self._device.vocab_size)
        self._calls = Calls(self._device, self._packer, decode_steps)
        self._family = itertools.count()
        self._device.take_over()
        self._log_shapes(pays, host_memory)

    def _make_device(
        self,
        model: Model,
        params: PyTree,
        cache: KVCache,
        num_sampled: int,
        reproducible: bool,
        logprobs_mode: LogprobsMode,
    ) -> Device:
        """Creates the device, traces the model, and tells the samples what it returns."""
        processing = functools.partial(
            Processing,
            self._processors,
            num_rows=self.manager.max_requests if self._processors else 0,
            max_model_len=self.manager.plan.max_model_len,
            logprobs_mode=logprobs_mode,
        )
        device = Device(model, params, cache, num_sampled, processing)
        if reproducible:
            device.options = StepOptions(Kind.LIMITED)  # one compiled step for all samplings
        device.trace((self._buckets.to_trace.idle(),))
        has_head = model.head is not None
        self._samples.model = ModelFacts(device.vocab_size, has_head, device.has_side, reproducible)
        return device

    def __repr__(self) -> str:
        return f"Engine({self._scheduler!r}, {len(self._buckets.shapes)} shapes)"

    def _log_shapes(self, by_mosaic: bool, host_memory: HostMemory | None) -> None:
        LOGGER.info(
            "%r: steps of %s tokens, %s; groups that share prefixes: %d; host memory: %s",
            self,
            ", ".join(map(str, sorted({shape.max_tokens for shape in self._buckets.shapes}))),
            "by Mosaic kernels" if by_mosaic else "without Mosaic kernels for attention",
            max((shape.shared_prefixes for shape in self._buckets.shapes), default=0),
            "none, what is evicted is computed again" if host_memory is None else host_memory,
        )

    # --- requests -----------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._samples.of_request or self._calls.changed)

    def generate(
        self,
        prompts: Sequence[TokenIds],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        progress: bool = False,
    ) -> Iterator[Output]:
        """Generates tokens for prompts, and yields every sample when it ends.

        Prompts with the longest answers start first, so that few requests are left at the end.

        Args:
          prompts: token ids of each prompt, sequences or arrays of ints.
          sampling: one for all prompts, or one for each; None: `Sampling()`. One with a seed gives
            each prompt random numbers of its own.
          salt, extra_keys: of the prefix of each prompt, as for `BlockManager.start`.
          progress: whether it shows how many samples have ended, if tqdm is installed.

        Returns:
          An iterator over outputs with all tokens of a sample, in the order of their ends. A loop
          that is left early aborts the rest.

        Raises:
          TypeError, ValueError: as `add`; there is not one sampling for each prompt; or, when the
            first output is asked for, the engine has other requests.
        """
        is_list = isinstance(prompts, Collection) and getattr(prompts, "ndim", 1)
        if not is_list or isinstance(prompts, (str, Mapping, Set)):
            raise TypeError(
                f"prompts must be a list of prompts, each of them token ids; got "
                f"{type(prompts).__name__}"
            )
        if isinstance(first := next(iter(prompts), ()), Integral) or getattr(first, "ndim", 1) == 0:
            raise TypeError(
                "prompts must be a list of prompts, each of them token ids; got the token ids of "
                "one prompt: write [prompt]"
            )
        samplings = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if isinstance(sampling, Sampling):
            samplings = list(sampling.of_prompts(len(prompts)))
        if len(samplings) != len(prompts):
            raise ValueError(
                f"sampling holds {len(samplings)} for {len(prompts)} prompts; give one for each, "
                "or one Sampling for all"
            )
        requests = [
            self._create(name, f"prompts[{name}]", prompt, one)
            for name, (prompt, one) in enumerate(zip(prompts, samplings, strict=True))
        ]
        check_flag(progress=progress)
        check_content(salt, extra_keys)
        outputs = self._outputs(requests, salt=salt, extra_keys=extra_keys)
        total = sum(map(len, requests))
        return with_progress(outputs, total, "generating", "sample") if progress else outputs

    def add(
        self,
        request: Hashable,
        prompt: TokenIds,
        sampling: Sampling | None = None,
        *,
        priority: int = 0,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        """Queues a request, for `step` to compute.

        Args:
          request: any hashable name that no other request has.
          prompt: its token ids, a sequence or an array of ints.
          sampling: None: `Sampling()`.
          priority: as for `Scheduler.add`: lower ones come first.
          salt, extra_keys, boundaries: of its prefix, as for `BlockManager.start`.

        Raises:
          TypeError, ValueError: a prompt that is not token ids, or that is too long for the plan
            together with ``max_tokens``; a name in use.
        """
        self._calls.mend()
        check_content(salt, extra_keys)
        samples = self._create(request, "prompt", prompt, sampling)
        prefix: Any = {"salt": salt, "extra_keys": extra_keys, "boundaries": boundaries}
        self._add(samples, priority=priority, **prefix)

    @plain_ints
    def abort(self, request: Hashable, *, sample: int | None = None) -> None:
        """Ends a request; the next outputs hold the tokens that it has.

        Args:
          request: its name.
          sample: the number of the one to end, from 0 to n - 1; None: all samples.

        Raises:
          TypeError, ValueError: an unknown request or sample, or one that has ended.
        """
        check_name(request)
        check_count(sample=0 if sample is None else sample)
        self._calls.mend()
        ended = [
            one for one in self._samples.of_request.get(request, ()) if sample in (None, one.number)
        ]
        if not ended:
            given = f"request={request!r}" if sample is None else f"sample={sample} of {request!r}"
            raise ValueError(f"{given} is unknown, or has ended")
        self._calls.abort(ended)

    def step(self) -> list[Output]:
        """Sends the next step to the device, and returns what the one before has computed.

        Returns:
          An output for each sample with tokens, or an end, that no output has held: with these
          tokens only. Empty while the first step runs.

        Raises:
          CacheError: the device found an error; see `check_errors`.
          SleepError: the engine sleeps.
          RuntimeError: jax's own, as for weights that were deleted; call `update` then.
        """
        self._calls.advance()
        outputs = self._calls.outputs()
        self._calls.changed = {}  # no call, so that no interrupt, comes between this and the caller
        return outputs

    @property
    def stats(self) -> Stats:
        """Counts since the engine was made, as they are now."""
        return dataclasses.replace(self._stats)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes on their way to host memory and back; see also `BlockManager.offload_stats`."""
        return self._device.host_blocks.bytes_in_flight

    # --- weights and memory -------------------------------------------------------

    def update(self, params: PyTree, *, in_flight: InFlight = "finish") -> None:
        """Takes new weights. No prompt shares what the old ones computed.

        Args:
          params: arrays of the same shapes and dtypes; the old ones may be deleted by now. Those
            that are sharded otherwise are moved between the devices, not through the host.
          in_flight: of requests that have not ended. "finish": they go on, over keys and values of
            the old weights. "recompute": they keep their tokens, whose keys and values are computed
            again. "restart": they start again, from their prompts; outputs of tokens that `step`
            has returned are void. `Output.version` tells the weights of each token.

        Raises:
          ValueError: other arrays than the engine was made with.
        """
        set_params(self._calls, params, in_flight)

    def sleep(self, level: int = 1) -> int:
        """Gives the memory of the cache back, until `wake_up`; see `jaxkv.sleep`.

        Args:
          level: 1: the content is kept on the host. 2: it is dropped, and requests that have not
            ended are computed again.

        Returns:
          The bytes of device memory that are free now.

        Raises:
          SleepError: the engine sleeps already.
        """
        return fall_asleep(self._calls, level)

    def wake_up(self) -> None:
        """Takes the memory of the cache again.

        Raises:
          SleepError: the engine is awake.
        """
        awake(self._calls)

    def restart(self) -> None:
        """Computes all requests again, with the tokens that they have.

        For a cache whose content was changed by others. After an exception, as `CacheError`, the
        next `step` does this by itself.
        """
        self._calls.is_broken = True
        self._calls.mend()

    def warm_up(self, *samplings: Sampling) -> None:
        """Compiles the step for every shape, so that serving never does; shows its progress.

        With ``host_memory``, also takes that: some GB a second of page-locked memory.

        jax keeps compiled steps for later processes, if it is told where:
        ``jax.config.update("jax_compilation_cache_dir", directory)``. An engine on one GPU keeps
        what it has lowered of its layers there, too, if ``flatbuffers`` is installed.

        Args:
          samplings: kinds of sampling that will come. A step that draws, or draws within limits
            (``top_k``, ``top_p``, ``min_p``), that returns the most likely tokens, side outputs or
            log-probabilities of prompts, is compiled anew when the first request asks for it.
        """
        for sampling in samplings:
            check_kind(Sampling, "jaxkv.Sampling objects, one by one", samplings=sampling)
        warm_up(self._calls, samplings)

    # --- steps --------------------------------------------------------------------

    def _outputs(self, requests: list[list[Sample]], **prefix: Any) -> Iterator[Output]:
        calls = self._calls
        calls.mend()
        if self.has_work:
            raise ValueError(
                f"the engine has {len(self._samples.tokens)} samples that have not ended, or "
                "outputs that step has not returned: generate needs an idle engine; call step "
                "until has_work is False, or add these prompts to them"
            )
        requests.sort(key=lambda samples: samples[0].num_prompt - samples[0].end)
        try:
            for samples in requests:
                self._add(samples, **prefix)
            while self.has_work:
                calls.advance()
                changed = calls.changed
                calls.changed = {}
                ended = [sample for sample in changed if sample.reason is not None]
                yield from [sample.output(sample.num_prompt) for sample in ended]
        finally:
            calls.is_void = True  # whatever interrupts the next line, the next call does it then
            calls.mend()

    def _create(
        self, request: Hashable, name: str, prompt: TokenIds, sampling: Sampling | None
    ) -> list[Sample]:
        samples = self._samples.create(request, name, prompt, sampling)
        check_processors(self._processors, samples[0].sampling, samples[0].tokens)
        return samples

    def _add(self, samples: list[Sample], **options: Any) -> None:
        first, self._calls.is_broken = samples[0], True
        self._samples.tokens |= {sample.name: sample.tokens for sample in samples}
        sizes = {"samples": len(samples), "max_tokens": first.end}
        if first.sampling.asks & (PROMPT | SIDE):  # what others have computed, they have taken
            options["salt"] = f"{options['salt'] or ''}\0{next(self._family)}"
        try:
            self._scheduler.add(first.request, first.num_prompt, **sizes, **options)
        except (TypeError, ValueError):
            for sample in samples:
                del self._samples.tokens[sample.name]
            self._calls.is_broken = False
            raise
        for sample in samples:
            self._samples.add(sample, self._scheduler.index(sample.name))
        self._device.options |= first.sampling.step_options
        self._samples.of_request[first.request] = samples  # from here on it is there
        self._calls.is_broken = False
        self._stats.prompt_tokens += first.num_prompt


def _check_model(forward: Forward, head: Head | None, plan: Plan) -> None:
    """Raises TypeError or ValueError for what an engine cannot serve."""
    if not callable(forward):
        raise TypeError(
            f"forward must be a function of params and a step, got {type(forward).__name__}; "
            "the order is Engine(forward, params, plan)"
        )
    if head is not None and not callable(head):
        raise TypeError(
            "head must be a function of params and hidden states, or None; got "
            f"{type(head).__name__}"
        )
    check_kind(Plan, "what plan_cache returned", plan=plan)
    if stores_encoder_tokens(plan):
        raise ValueError(
            "the plan has cross attention, and an Engine takes no encoder input: serve it by "
            "a loop of your own, with BlockManager.start(encoder_tokens=), or a Scheduler and "
            "its add(encoder_tokens=)"
        )


def _check_steps(
    plan: Plan, decode_steps: int, shared_prefixes: int | None, reproducible: bool
) -> None:
    """Raises ValueError for steps of an engine that contradict each other."""
    check_positive(decode_steps=decode_steps)
    check_at_most(plan.max_model_len, decode_steps=decode_steps)
    check_count(shared_prefixes=shared_prefixes or 0)
    if reproducible:
        check_reproducible(plan, decode_steps=decode_steps, shared_prefixes=shared_prefixes)
