"""``python -m jaxkv plan``: does this model fit, how long, how many, what to change if not."""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv.groups import GROUPINGS
from jaxkv.models import encoder_len, layers_from_config, load_config, model_len
from jaxkv.planning import KVCacheCapacityError, Plan, plan_cache
from jaxkv.specs import EncoderOnlySpec, Limits

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_TRIES = 3


def parse_bytes(text: str) -> int:
    """``"80GiB"``, ``"141GB"`` or a plain number -> bytes.

    Raises:
      ValueError: no number, an unknown unit, or a fraction of a byte.
    """
    match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*", text)
    if not match or match[3] not in UNITS:
        units = ", ".join(filter(None, UNITS))
        raise ValueError(f"memory={text!r} is not understood; give a number and one of {units}")
    digits = match[2] or ""
    num_bytes, rest = divmod(int(match[1] + digits) * UNITS[match[3]], 10 ** len(digits))
    if rest:
        raise ValueError(f"memory={text!r} is not a whole number of bytes")
    return num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One planning question; changing a field asks the next one."""

    config: Mapping[str, Any]
    memory_bytes: int
    max_model_len: int | None  # None: the longest that fits
    kv_dtype: str | None = None
    block_size: int | None = None
    num_blocks_override: int | None = None
    override_beyond_memory: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    max_in_flight_tokens: int = 8192
    state_cache_mode: str = "none"
    speculative_tokens: int = 0
    grouping: str = "auto"

    @property
    def wanted_len(self) -> int:
        own = model_len(self.config)
        if self.max_model_len is not None and self.max_model_len > own:
            raise ValueError(f"max_model_len={self.max_model_len:,} is beyond the model's {own:,}")
        return own if self.max_model_len is None else self.max_model_len

    def plan(self) -> Plan:
        """The answer, or `KVCacheCapacityError`."""
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


@dataclasses.dataclass(frozen=True)
class Try:
    """A change that was planned, and what it gives."""

    option: str
    value: str
    gives: str

    def __str__(self) -> str:
        return f"try {self.option} {self.value}: {self.gives}"


def split_stages(layers: Mapping[str, Any], stages: int) -> list[dict[str, Any]]:
    """Cuts a model into pipeline stages of about equally many layers that keep a cache."""
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
class Attempt:
    """What became of a question: a plan, admitted or not; none where it was refused."""

    plan: Plan | None
    admitted: bool
    longest: int

    @property
    def figures(self) -> tuple[int, int, int]:
        """Longest request, how many of them, how many tokens: what makes a plan better."""
        if self.plan is None or not self.admitted:
            return 0, 0, 0
        length = self.plan.max_model_len
        return length, self.plan.requests_that_fit(length), self.plan.tokens_that_fit(length)


def _attempt(question: Question) -> Attempt:
    try:
        plan = question.plan()
    except KVCacheCapacityError as error:
        return Attempt(error.plan, False, error.longest_len)
    except ValueError:  # a dtype, block size or pool that this model cannot have
        return Attempt(None, False, 0)
    return Attempt(plan, True, plan.max_model_len)


def tries(question: Question) -> list[Try]:
    """What to change, most useful first, at most `MAX_TRIES`; each was planned and is true."""
    return list(itertools.islice(_tries(question), MAX_TRIES))


def _tries(question: Question) -> Iterator[Try]:
    now = _attempt(question)
    for changes, option in _changes(question, now):
        changed = dataclasses.replace(question, **changes)
        then = _attempt(changed)
        if then.figures > now.figures:
            (value,) = changes.values()
            yield Try(option, str(value), _gives(question, changed, then))


def _changes(question: Question, now: Attempt) -> Iterator[tuple[dict[str, Any], str]]:
    if not now.admitted and now.longest:
        yield {"max_model_len": now.longest}, "--max-model-len"
    if now.plan is None:
        return
    blocks = _blocks_for_more(question, now.plan, now.admitted)
    if question.num_blocks_override is not None:
        yield {"num_blocks_override": blocks}, "--num-blocks-override"
    else:
        yield {"memory_bytes": blocks * max(now.plan.bytes_per_block)}, "--memory"
    yield {"kv_dtype": "fp8_e4m3"}, "--kv-dtype"
    if question.num_blocks_override is None:  # else larger blocks are just more memory
        others = [{"block_size": size} for size in BLOCK_SIZES]
        best = max(others, key=lambda o: _attempt(dataclasses.replace(question, **o)).figures)
        yield best, "--block-size"


def _blocks_for_more(question: Question, plan: Plan, admitted: bool) -> int:
    """Blocks for the length wanted or, where it fits, for one request more."""
    length = question.wanted_len
    blocks = plan.admission_blocks(length) + plan.reserved_blocks
    if admitted and plan.max_model_len == length:
        blocks += plan.requests_that_fit(length) * plan.steady_blocks(length)
    return blocks


def _gives(question: Question, changed: Question, then: Attempt) -> str:
    length, requests, tokens = then.figures
    what = f"requests up to {length:,} tokens, {requests:,} at once, {tokens:,} tokens in all"
    more = changed.memory_bytes - question.memory_bytes
    return f"{more:,} bytes more, {what}" if more else what


def what_binds(question: Question, plan: Plan) -> str:
    """What keeps the longest request from being longer."""
    if plan.max_model_len == model_len(question.config):
        return "the model's own length"
    if question.max_model_len is not None:
        return "the length asked for"
    if question.num_blocks_override is not None:
        return "the override"
    sizes = plan.bytes_per_block
    tightest = max(range(len(sizes)), key=lambda worker: sizes[worker])
    return "memory" if len(sizes) == 1 else f"memory of pipeline stage {tightest}"


def as_data(question: Question, plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for ``--json``."""
    length = plan.max_model_len
    return {
        "groups": [
            {"layers": list(g.layers), "kind": g.spec.kind, "block_size": g.block_size}
            for g in plan.groups
        ],
        "bytes_per_block": list(plan.bytes_per_block),
        "unused_bytes_per_block": list(plan.unused_bytes_per_block),
        "memory_bytes": list(plan.memory_bytes),
        "num_blocks": plan.num_blocks,
        "usable_blocks": plan.usable_blocks,
        "max_model_len": length,
        "admission_blocks": plan.admission_blocks(length),
        "steady_blocks": plan.steady_blocks(length),
        "requests_that_fit": plan.requests_that_fit(length),
        "tokens_that_fit": plan.tokens_that_fit(length),
        "groups_to_zero": list(plan.groups_to_zero),
        "binds": what_binds(question, plan),
        "reserved_blocks": plan.reserved_blocks,
        "bytes_per_request": bytes_per_request(plan, length),
        "bytes_saved_against_rule": bytes_saved(question, plan),
        "try": [dataclasses.asdict(change) for change in tries(question)],
    }


def _parse_length(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f'max_model_len={text!r} is not understood; give tokens or "auto"')
    return int(text)


def bytes_per_request(plan: Plan, num_tokens: int) -> int:
    """What admission charges for a request of this length, over all workers."""
    return plan.admission_blocks(num_tokens) * sum(plan.bytes_per_block)


def bytes_saved(question: Question, plan: Plan) -> int | None:
    """What a request costs less than grouped by the rule; None where the rule cannot."""
    rule = _attempt(dataclasses.replace(question, grouping="rule")).plan
    if rule is None:
        return None
    length = plan.max_model_len
    return bytes_per_request(rule, length) - bytes_per_request(plan, length)


def describe_gain(question: Question, plan: Plan) -> str:
    charged, saved = bytes_per_request(plan, plan.max_model_len), bytes_saved(question, plan)
    if saved is None:
        return f"{charged:,} bytes; the rule cannot group this model"
    share = 100 * saved / (charged + saved)
    return f"{charged:,} bytes, {saved:,} ({share:.1f} %) fewer than by the rule"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="path to a config.json, or a preset")
    parser.add_argument(
        "--memory", required=True, help="for the cache, per GPU: 80GiB, 141GB, or bytes"
    )
    parser.add_argument("--max-model-len", default="auto", help="tokens, or auto (default)")
    parser.add_argument("--kv-dtype", help="of keys and values (default: the model's own)")
    parser.add_argument("--block-size", type=int, help="tokens (default: the family's usual)")
    parser.add_argument("--num-blocks-override", type=int, metavar="N")
    parser.add_argument("--override-beyond-memory", action="store_true")
    for name in ("tensor", "pipeline", "context"):
        parser.add_argument(f"--{name}-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--max-in-flight-tokens", type=int, default=8192, metavar="N")
    parser.add_argument(
        "--state-cache-mode",
        default="none",
        choices=("none", "align", "all"),
        help="of mamba layers",
    )
    parser.add_argument("--speculative-tokens", type=int, default=0, metavar="N")
    parser.add_argument("--grouping", default="auto", choices=GROUPINGS)
    parser.add_argument("--json", action="store_true", help="print the plan as data")


def run(options: argparse.Namespace) -> int:
    """Prints the plan and what could be changed. Returns 2 for a refusal."""
    given = vars(options) | {
        "config": load_config(options.config),
        "memory_bytes": parse_bytes(options.memory),
        "max_model_len": _parse_length(options.max_model_len),
    }
    names = [field.name for field in dataclasses.fields(Question)]
    question = Question(**{name: given[name] for name in names})
    try:
        plan = question.plan()
    except KVCacheCapacityError as error:
        changes = tries(question)
        if options.json:
            figures = {k: v for k, v in vars(error).items() if isinstance(v, int)}
            listed = [dataclasses.asdict(change) for change in changes]
            print(json.dumps({"error": str(error), **figures, "try": listed}, indent=2))
            return 2
        raise ValueError("\n".join([str(error), *map(str, changes)])) from error
    if options.json:
        print(json.dumps(as_data(question, plan), indent=2))
        return 0
    print(plan)
    print(f"{'what binds':<16} {what_binds(question, plan)}")
    if question.grouping != "auto":
        print(f"{'per request':<16} {describe_gain(question, plan)}")
    for change in tries(question):
        print(change)
    return 0
