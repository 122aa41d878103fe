"""The device's side of an engine: weights, cache, and the steps compiled for them."""

import concurrent.futures
import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv._src.cache import KVCache, check_cache
from jaxkv._src.engine._logprobs import most_likely, next_tokens, prompt_logprobs
from jaxkv._src.engine._model import Model, apply_head
from jaxkv._src.engine._outputs import StepOptions
from jaxkv._src.engine._placement import check_devices, without_mesh
from jaxkv._src.engine._processing import Processing, States
from jaxkv._src.engine._progress import with_progress
from jaxkv._src.engine._sampler import draw, fields_of
from jaxkv._src.engine._samples import Sample
from jaxkv._src.internal.log import LOGGER
from jaxkv._src.internal.mesh import with_auto_axes
from jaxkv._src.internal.persistent_jit import folder_for, persist_in
from jaxkv._src.internal.text import shown
from jaxkv._src.offload import Transfers
from jaxkv._src.offload.host_blocks import HostBlocks, TransferError
from jaxkv._src.sleeping import CacheTemplate, SleepError, SleepingCache
from jaxkv._src.step import COMPILER_OPTIONS, StepContext, UploadRing
from jaxkv._src.uploads import Upload

Uploads = tuple[Upload, ...]  # of one shape
State = tuple[KVCache, Array, States]  # between two calls; the array is int32[N], see `Device`
Arrays = dict[str, Any]  # of a call by name; each array costs the host 2 to 5 us
# Tokens of a step for which XLA's own matrix products in Triton read weights faster than cuBLAS.
FEW_TOKENS = 32
# Of steps over several devices: NCCL adds up 512 KB on two H200s in 11 us, and a kernel of XLA's in
# 13, or 23 with a copy that pads its input. What is asynchronous divides a step into more CUDA
# graphs, each of which the host has to start.
OF_SEVERAL = {
    "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False,
    "xla_gpu_disable_async_collectives": "ALLREDUCE",
}
_OWNERS: "weakref.WeakSet[Device]" = weakref.WeakSet()  # engines' devices, by whose cache they have


class Device:
    """Weights and cache on the device, and the model's steps.

    options: of the step that is compiled: the widest wanted so far.
    vocab_size, has_side: columns of the logits, and whether the model returns side outputs, once a
      step was traced.
    cache: a `KVCache`, or a `SleepingCache`, which jax refuses; None: it is lost.
    host_blocks: those in host memory.
    may_be_lost: whether an exception has ended a call that may have taken the arrays along.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        cache: KVCache,
        num_sampled: int,
        processing: Callable[..., Processing],
    ):
        """Puts what is missing on the device.

        Args:
          cache: from `make_cache`, which is donated.
          num_sampled: tokens of the latest steps to keep for the steps that follow.
          processing: makes the logits processors, given the ``sharding`` of their states.
        """
        self._model, self.options = model, StepOptions()
        self.vocab_size, self.has_side, self.host_blocks = 0, False, HostBlocks()
        self._kinds = _kinds_of(params)
        check_cache(cache)
        _check_free(cache)
        self.cache: Any = cache
        self._template, self.may_be_lost = CacheTemplate.from_cache(cache), False
        first, *others = cache.status.devices()
        self._only = None if others else first
        check_devices(params, cache.status.devices())
        self.params = self.plain(params)
        # Tokens of the latest steps; each step says in its upload where its own begin. -1 in place
        # of one that no step shall go on from. They have the sharding of what steps return.
        self._num_sampled, self._sharding = num_sampled, cache.status.sharding
        self._sampled: Any = self._none_sampled()
        self._processing = processing(sharding=self._sharding)
        self._states: Any = self._processing.make()
        jit = functools.partial(jax.jit, donate_argnums=1, static_argnames="options")
        flags = COMPILER_OPTIONS | (OF_SEVERAL if others else {})
        both = [flags | {"xla_gpu_enable_triton_gemm": are_few} for are_few in (False, True)]
        self.steps = [jit(self._run_steps, compiler_options=one) for one in both]

    def run(self, uploads: Uploads, wants: int = 0) -> Arrays:
        """Starts steps, and returns what they will compute; see `_run_steps`.

        Args:
          wants: as for `StepOptions.at`.
        """
        if self.was_taken:
            raise RuntimeError(
                "the engine's cache was donated to another call, or deleted, outside of the "
                "engine, which owns it; the next step goes on with a new one"
            )
        try:
            step, given = self._step_of(uploads), self._arguments(uploads, wants)
            (self.cache, self._sampled, self._states), out = step(*given)
        except Exception as error:
            if _has_deleted(self.params):
                raise RuntimeError(
                    "arrays of the engine's params were deleted, or donated to another call; pass "
                    "the weights that there are now to update"
                ) from error
            raise
        for array in jax.tree.leaves(out):
            array.copy_to_host_async()
        return out

    def check_awake(self) -> None:
        """Raises SleepError if the cache sleeps."""
        if self._is_asleep and not self.was_waking:
            raise SleepError(f"the engine sleeps, {self.cache!r}; call wake_up first")

    @property
    def was_taken(self) -> bool:
        """Whether somebody else has deleted or donated arrays of the cache."""
        return isinstance(self.cache, KVCache) and _has_deleted(self.cache)

    @property
    def was_waking(self) -> bool:
        """Whether an interrupt has come between the end of `wake_up` and its caller."""
        return self._is_asleep and not self.cache.levels

    def discard(self) -> None:
        """Gives up all arrays that steps return, because one of them has failed."""
        self.cache = self._sampled = self._states = None

    def restore(self) -> None:
        """Allocates what failed or interrupted calls have lost, without the content."""
        if not self.may_be_lost:
            return
        if self.was_waking or not (self._is_asleep or _is_ready(self.cache)):
            LOGGER.warning("the cache was lost; all running requests are computed again")
            self.cache = None  # or there are two for a moment
            self.cache = self._template.make()
        if not _is_ready(self._sampled):
            self._sampled = self._none_sampled()
        if not _is_ready(self._states):
            self._states = self._processing.make()
        self.host_blocks = HostBlocks()
        self.may_be_lost = False

    def take_over(self) -> None:
        """Makes the cache this one's, so that no other engine takes it."""
        _OWNERS.add(self)

    def transfer(self, transfers: Transfers) -> None:
        """Transfers blocks between the memories, before the next steps."""
        try:
            self.cache = self.host_blocks.transfer(self.cache, transfers)
        except TransferError as error:
            self.cache = error.cache
            raise

    def start_state(self, sample: Sample, row: int) -> None:
        """Puts the state of a sample for logits processors into a row, before the next steps."""
        ids, at = np.array(sample.tokens, np.int32), sample.num_prompt
        self._states = self._processing.start(self._states, row, sample.sampling, ids, at)

    def trace(self, uploads: Uploads) -> None:
        """Traces steps, so that errors of the model surface early."""
        self._step_of(uploads).eval_shape(*self._arguments(uploads))

    def warm_up(self, calls: Sequence[tuple[Uploads, int]]) -> None:
        """Compiles steps, each with its ``wants``, and shows progress; then runs each once."""
        # jax lowers one step after another; XLA compiles the others meanwhile, outside of the GIL.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            # The largest take longest.
            lowered = (
                self._step_of(uploads).lower(*self._arguments(uploads, wants))
                for uploads, wants in calls[::-1]
            )
            compiling = [pool.submit(step.compile) for step in lowered]
            completed = concurrent.futures.as_completed(compiling)
            for done in with_progress(completed, len(calls), "compiling", "shape"):
                done.result()
        for uploads, wants in calls:
            self.run(uploads, wants)
        if self._processing:
            self._states = self._processing.warm_up(self._states)

    def check_like(self, params: Any) -> None:
        """Raises ValueError for weights of another structure, shape or dtype."""
        kinds = _kinds_of(params)
        if jax.tree.structure(self.params) != jax.tree.structure(params):
            other = [f"{name} is missing" for name in self._kinds if name not in kinds]
            other += [f"{name} is new" for name in kinds if name not in self._kinds]
            raise ValueError(
                "params has another tree structure than the engine was made with: "
                f"{', '.join(other[:3]) or shown(jax.tree.structure(params))}"
            )
        for name, kind in kinds.items():
            if kind != (was := self._kinds[name]):
                raise ValueError(f"{name} is {kind}; the engine was made with {was}")

    def plain(self, params: Any) -> Any:
        """Returns weights as steps take them; see `without_mesh`."""
        return without_mesh(params, self._only)

    def ring(self, decode_steps: int) -> UploadRing | None:
        """Returns a ring of page-locked uploads, for a cache on GPUs."""
        if next(iter(self._sharding.device_set)).platform != "gpu":
            return None
        return UploadRing(depth=max(16, 4 * decode_steps), device=self._sharding)

    @property
    def _is_asleep(self) -> bool:
        return isinstance(self.cache, SleepingCache)

    def _none_sampled(self) -> Array:
        return jax.device_put(jnp.zeros(self._num_sampled, jnp.int32), self._sharding)

    def _step_of(self, uploads: Uploads) -> Any:
        return self.steps[uploads[0].shape.max_tokens <= FEW_TOKENS]

    def _arguments(
        self, uploads: Uploads, wants: int = 0
    ) -> tuple[Any, State, Uploads, StepOptions]:
        state = self.cache, self._sampled, self._states
        return self.params, state, uploads, self.options.at(wants)

    def _run_steps(
        self, params: Any, state: State, uploads: Uploads, options: StepOptions
    ) -> tuple[State, Arrays]:
        """Runs steps of one shape, each over the tokens that those before it drew.

        Where they are several, a sample that gets a stop token writes nothing to the cache from
        there on, and what it samples is void.

        Args:
          uploads: their ``extra`` holds the token ids, a `RECORD` for each of S samples, and with a
            head the tokens after each request's.
          options: static.

        Returns:
          The state, and ``sampled``, int32[steps, 2 * S + 1]: tokens, the bits of their
          log-probabilities, and the error flags of the cache. If the options say so, ``top`` and
          ``prompt``, of `most_likely` and `prompt_logprobs`, and ``side``.
        """
        shape = uploads[0].shape
        LOGGER.info(
            "traces a step to compile: %d tokens of %d requests, %d to a request, %d in a call, %s",
            *(shape.max_tokens, shape.batch_size, shape.max_query_len, len(uploads), options),
        )
        with persist_in(self._only and folder_for(self._only)):
            if len(uploads) == 1:
                state, out = self._run_step(params, options, False, state, uploads[0])
                return state, jax.tree.map(lambda array: array[None], out)
            memory = jax.memory.Space.Device  # uploads of a ring are in the host's
            data = jnp.stack([jax.device_put(upload.data, memory) for upload in uploads])
            step = functools.partial(self._run_step, params, options, True)
            return lax.scan(step, state, Upload(data=data, shape=shape))

    def _run_step(
        self, params: Any, options: StepOptions, may_have_ended: bool, state: State, upload: Upload
    ) -> tuple[State, Arrays]:
        context = StepContext(state[0], upload, newest_tokens=state[1])
        has_ended = context.skip_ended() if may_have_ended else None
        shape, has_head = upload.shape, self._model.head is not None
        size = shape.extra - shape.max_tokens - has_head * shape.batch_size
        records, targets = jnp.split(context.batch.extra[shape.max_tokens :], [size])
        of = fields_of(records)
        index, draw_them = of["index"][:, 0], functools.partial(self._draw, options=options)
        computed = self._model.run(params, context, index)
        logits, cache = computed.logits, computed.step.done()
        self.vocab_size, self.has_side = logits.shape[-1], computed.side is not None
        if has_head:  # logits are of samples already
            of["index"] = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
        (tokens, logprobs, *top), states = with_auto_axes(draw_them, logits, of, state[2])
        sampled = tokens
        if has_ended is not None:
            is_last = (tokens[:, None] == of["stops"]).any(axis=1)
            sampled = jnp.where(is_last | has_ended[index], -1, tokens)
        sampled = lax.dynamic_update_slice(state[1], sampled, of["offset"][0])
        bits = lax.bitcast_convert_type(logprobs, jnp.int32)
        flags = cache.error_flags[None]
        out: dict[str, Any] = {"sampled": jnp.concatenate([tokens, bits, flags])}
        if options.num_top:
            out["top"] = top[0]
        if options.num_prompt_top >= 0 and (head := self._model.head) is not None:
            given = computed.hidden, next_tokens(context, targets), options.num_prompt_top
            out["prompt"] = prompt_logprobs(functools.partial(apply_head, head, params), *given)
        out |= {"side": computed.side} if options.has_side else {}
        return (cache, sampled, states), out

    def _draw(
        self, logits: Array, of: Mapping[str, Array], states: States, *, options: StepOptions
    ) -> tuple[list[Array], States]:
        """Returns tokens, their log-probabilities and `most_likely` ones; and the states after."""
        rows, are_processed = of["row"][:, 0], self._processing.logprobs_mode == "processed"
        process = functools.partial(self._processing.apply, states, rows)
        tokens, logprobs = draw(logits, of, options.kind, process, are_processed=are_processed)
        drawn = [tokens, logprobs]
        if options.num_top:
            told = logits.astype(jnp.float32)[of["index"][:, 0]]
            drawn.append(most_likely(process(told) if are_processed else told, options.num_top))
        return drawn, self._processing.advance(states, rows, tokens)


def _check_free(cache: KVCache) -> None:
    """Raises ValueError if another engine has the cache."""
    for turn in range(2):
        caches = [other.cache for other in list(_OWNERS)]
        if not any(isinstance(of, KVCache) and of.status is cache.status for of in caches):
            return
        if not turn:
            del caches
            gc.collect()  # it may be one that nobody refers to any more
    raise ValueError(
        "cache belongs to another engine, which donates it to its steps; make one for each engine"
    )


def _is_ready(arrays: Any) -> bool:
    """Returns whether arrays exist, and the calls that return them have not failed."""
    if arrays is None or _has_deleted(arrays):
        return False
    try:
        jax.block_until_ready(arrays)
    except Exception:
        return False
    return True


def _has_deleted(tree: Any) -> bool:
    """Returns whether an array of jax in a pytree was deleted or donated."""
    leaves = jax.tree.leaves(tree)
    return any([isinstance(leaf, Array) and leaf.is_deleted() for leaf in leaves])


def _kinds_of(params: Any) -> dict[str, str]:
    """Returns dtype and shape of each leaf; raises TypeError if it is no array and no number."""
    kinds: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = f"params{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, bool | int | float) and not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{name} is of type {type(leaf).__name__}; params is a pytree of arrays: bind what "
                "is none to forward, with functools.partial"
            )
        kinds[name] = f"{jnp.result_type(leaf)}{np.shape(leaf)}"
    return kinds
