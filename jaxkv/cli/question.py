"""One planning question of the command line, and its answer. No jax."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxkv.hf_config import encoder_len, layers_from_config, model_len
from jaxkv.planning import Grouping, KVCacheCapacityError, Plan, plan_cache
from jaxkv.specs import CacheMode, EncoderOnlySpec, Limits

Figures = tuple[int, int, int]  # longest request, such requests at once, tokens at once

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """Returns the bytes of ``"80GiB"``, ``"141GB"`` or a plain number.

    Raises:
      ValueError: not a number, an unknown unit, or a fraction of a byte.
    """
    match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*", text)
    if not match or match[3] not in UNITS:
        units = ", ".join(filter(None, UNITS))
        raise ValueError(f"--memory={text!r} is not understood; give a number and one of {units}")
    digits = match[2] or ""
    num_bytes, rest = divmod(int(match[1] + digits) * UNITS[match[3]], 10 ** len(digits))
    if rest:
        raise ValueError(f"--memory={text!r} is not a whole number of bytes")
    return num_bytes


def parse_length(text: str) -> int | None:
    """Returns the tokens of a length; None for ``"auto"``.

    Raises:
      ValueError: neither a number nor "auto".
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f'--max-model-len={text!r} is not understood; give tokens or "auto"')
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A planning question by the options of the command; a changed field asks another one.

    max_model_len: tokens; None: the longest that fits.
    """

    config: Mapping[str, Any]
    memory_bytes: int
    max_model_len: int | None
    kv_dtype: str | None = None
    block_size: int | None = None
    num_blocks_override: int | None = None
    override_beyond_memory: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    max_in_flight_tokens: int = 8192
    state_cache_mode: CacheMode = "none"
    speculative_tokens: int = 0
    grouping: Grouping = "auto"

    @property
    def wanted_len(self) -> int:
        """Tokens of the longest request that is wanted: as asked for, else the model's own.

        Raises:
          ValueError: more than the model's own.
        """
        own = model_len(self.config)
        if self.max_model_len is not None and self.max_model_len > own:
            raise ValueError(f"max_model_len={self.max_model_len:,} is beyond the model's {own:,}")
        return own if self.max_model_len is None else self.max_model_len

    def plan(self) -> Plan:
        """Returns the plan; raises as `plan_cache` and `layers_from_config` do."""
        layers = layers_from_config(
            self.config,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            tensor_parallel=self.tensor_parallel,
            state_cache_mode=self.state_cache_mode,
            speculative_tokens=self.speculative_tokens,
        )
        stages = split_stages(layers, self.pipeline_parallel)
        return plan_cache(
            stages,
            [self.memory_bytes] * len(stages),
            max_model_len=self.wanted_len,
            fit_max_model_len=self.max_model_len is None,
            num_blocks_override=self.num_blocks_override,
            override_beyond_memory=self.override_beyond_memory,
            limits=Limits(
                max_in_flight_tokens=self.max_in_flight_tokens,
                max_encoder_tokens=encoder_len(self.config),
            ),
            grouping=self.grouping,
            context_parallel=self.context_parallel,
        )


def split_stages(layers: Mapping[str, Any], stages: int) -> list[dict[str, Any]]:
    """Cuts a model into pipeline stages of about equally many layers that keep a cache.

    Raises:
      ValueError: fewer stages than 1, or more than such layers.
    """
    owners = [name for name, spec in layers.items() if not isinstance(spec, EncoderOnlySpec)]
    numbers: dict[str, int] = {}
    for name in owners:
        numbers.setdefault(name.rsplit(".", 1)[0], len(numbers))
    if not 1 <= stages <= max(len(numbers), 1):
        raise ValueError(f"pipeline_parallel={stages} must lie in 1..{len(numbers)} (layers)")
    parts: list[dict[str, Any]] = [{} for _ in range(stages)]
    for name in owners:
        number = numbers[name.rsplit(".", 1)[0]]
        parts[number * stages // len(numbers)][name] = layers[name]
    return parts


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question: a plan, admitted or not.

    plan: None where the question makes no sense.
    admitted: whether the plan holds a request of the length that was asked for.
    longest: tokens of the longest request that fits.
    """

    plan: Plan | None
    admitted: bool
    longest: int

    @property
    def figures(self) -> Figures:
        """The figures that make a plan better; zeros for a refusal."""
        if self.plan is None or not self.admitted:
            return 0, 0, 0
        length = self.plan.max_model_len
        return length, self.plan.requests_that_fit(length), self.plan.tokens_that_fit(length)


def answer(question: Question) -> Answer:
    """Returns the answer to a question, refusals included."""
    try:
        plan = question.plan()
    except KVCacheCapacityError as error:
        return Answer(error.plan, False, error.longest_len)
    except ValueError:  # a dtype, block size or pool that this model cannot have
        return Answer(None, False, 0)
    return Answer(plan, True, plan.max_model_len)
