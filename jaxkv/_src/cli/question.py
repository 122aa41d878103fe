"""One planning question of the command line, and its answer. No jax."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from jaxkv._src.cli.specs_file import SpecsFile, change_specs
from jaxkv._src.gpu_memory import Budget
from jaxkv._src.hf_config import (
    encoder_len,
    layers_from_config,
    layers_per_stage,
    model_len,
    num_layers,
)
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.planning import Grouping, KVCacheCapacityError, Plan, plan_cache
from jaxkv._src.specs import CacheMode, EncoderOnlySpec, Limits

# Longest request, usual requests at once, longest requests at once, tokens at once.
Figures = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A planning question: the model, the memory and the options of the command.

    model: a configuration, or layers of one rank.
    budget: memory for the cache.
    max_model_len: tokens of the longest request; None: the longest that fits.
    request_len: tokens of a usual request; None: not given.
    max_encoder_tokens: tokens of the longest encoder input; None: the model's own.

    The other fields are as for `layers_from_config` and `plan_cache`.
    """

    model: Mapping[str, Any] | SpecsFile
    budget: Budget
    max_model_len: int | None = None
    request_len: int | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    num_blocks_override: int | None = None
    override_beyond_memory: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    max_in_flight_tokens: int = 8192
    max_encoder_tokens: int | None = None
    state_cache_mode: CacheMode = "none"
    speculative_tokens: int = 0
    replay: int | Literal["auto"] = 0
    grouping: Grouping = "auto"

    @property
    def own_len(self) -> int:
        """Tokens of the model's own longest request; if it names none, ``max_model_len``."""
        if isinstance(self.model, SpecsFile):
            return self.model.max_model_len
        try:
            return model_len(self.model)
        except ValueError:
            if self.max_model_len is None:
                raise
            return self.max_model_len

    @property
    def wanted_len(self) -> int:
        """Tokens of the longest request that is wanted: ``max_model_len``, else the model's own.

        Raises:
          ValueError: the longest request or a usual one is longer than the model's own.
        """
        own, wanted = self.own_len, self.max_model_len or self.own_len
        for flag, tokens in ("--max-model-len", wanted), ("--request-len", self.request_len or 1):
            if tokens > own:
                raise ValueError(f"{flag}={tokens:,} is beyond the model's {own:,}")
        return wanted

    @property
    def num_gpus(self) -> int:
        """GPUs among which the weights divide."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes for the cache on each GPU of each pipeline stage."""
        return self.budget.for_cache(self.tensor_parallel, self.pipeline_parallel)

    def layers(self) -> dict[str, Any]:
        """Returns the layers of one rank; raises as `layers_from_config` does."""
        if isinstance(self.model, SpecsFile):
            return change_specs(
                self.model.layers, kv_dtype=self.kv_dtype, block_size=self.block_size
            )
        return layers_from_config(
            self.model,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            tensor_parallel=self.tensor_parallel,
            state_cache_mode=self.state_cache_mode,
            speculative_tokens=self.speculative_tokens,
            replay=self.replay,
        )

    def _encoder_tokens(self) -> int:
        if self.max_encoder_tokens is not None:
            return self.max_encoder_tokens
        if isinstance(self.model, SpecsFile):
            return self.model.max_encoder_tokens
        return encoder_len(self.model)

    def plan(self) -> Plan:
        """Returns the plan; raises as `plan_cache` and `layers_from_config` do."""
        layers = self.layers()
        total = None if isinstance(self.model, SpecsFile) else num_layers(self.model)
        stages = split_stages(layers, self.pipeline_parallel, total)
        return plan_cache(
            stages,
            self.memory_bytes,
            max_model_len=self.wanted_len,
            fit_max_model_len=self.max_model_len is None,
            num_blocks_override=self.num_blocks_override,
            override_beyond_memory=self.override_beyond_memory,
            limits=Limits(
                max_in_flight_tokens=self.max_in_flight_tokens,
                max_encoder_tokens=self._encoder_tokens(),
            ),
            grouping=self.grouping,
            request_len=self.request_len,
            context_parallel=self.context_parallel,
        )


def split_stages(
    layers: Mapping[str, Any], stages: int, total: int | None = None
) -> list[dict[str, Any]]:
    """Cuts the layers that keep a cache into pipeline stages; see `layers_per_stage`.

    Args:
      layers: layer name -> spec.
      stages: number of stages. One of them may have no layer that keeps a cache.
      total: layers of the model, which the names count; None: those that keep a cache.

    Raises:
      ValueError: fewer stages than 1, or more than there are layers.
    """
    owners = [name for name, spec in layers.items() if not isinstance(spec, EncoderOnlySpec)]
    order = list(dict.fromkeys(map(layer_of, owners)))
    named = [int(layer.rpartition(".")[2]) for layer in order] if total else range(len(order))
    numbers = dict(zip(order, named, strict=True))
    counted = max(numbers.values(), default=0) + 1
    total = total or counted
    each = cdiv(counted, total)  # a layer of LongCat-Flash counts as two that keep a cache
    ends = list(itertools.accumulate(layers_per_stage(total, stages)))
    parts: list[dict[str, Any]] = [{} for _ in range(stages)]
    for name in owners:
        parts[bisect.bisect_right(ends, numbers[layer_of(name)] // each)][name] = layers[name]
    return parts


def layer_of(cache: str) -> str:
    """Returns the layer that a cache belongs to: ``layers.3`` of ``layers.3.mamba``."""
    layer, _, kind = cache.rpartition(".")
    return cache if kind.isdecimal() else layer


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question: a plan, admitted or not.

    plan: the plan; None if this model cannot have one with these options.
    admitted: whether the plan holds a request of the wanted length.
    longest: tokens of the longest request that fits.
    """

    plan: Plan | None
    admitted: bool
    longest: int

    @property
    def figures(self) -> Figures:
        """The figures to compare answers by; zeros for a refusal."""
        if self.plan is None or not self.admitted:
            return 0, 0, 0, 0
        length = self.plan.max_model_len
        usual = self.plan.requests_that_fit(self.plan.request_len or length)
        requests, tokens = self.plan.requests_that_fit(length), self.plan.tokens_that_fit(length)
        return length, usual, requests, tokens


def answer(question: Question) -> Answer:
    """Returns the answer to a question, refusals included."""
    try:
        plan = question.plan()
    except KVCacheCapacityError as error:
        return Answer(error.plan, False, error.longest_len)
    except ValueError:  # a dtype, block size or pool that this model cannot have
        return Answer(None, False, 0)
    return Answer(plan, True, plan.max_model_len)
