"""Changes to a planning question that were planned and are worth it. No jax."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxkv._internal.numbers import cdiv
from jaxkv._internal.text import readable
from jaxkv.cli.question import Answer, Figures, Question, answer
from jaxkv.planning import Plan

BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_TRIES = 3
LEAST_GAIN = 100  # a figure must grow by at least one part in this many


@dataclasses.dataclass(frozen=True)
class Try:
    """A change that was planned.

    option: the flag to change.
    value: its new value, exactly as the command takes it.
    gives: the figures of the plan with it.
    """

    option: str
    value: str
    gives: str

    def __str__(self) -> str:
        value = self.value
        if self.option == "--memory":
            value += f" ({readable(int(value))})"
        return f"try {self.option} {value}: {self.gives}"


def tries(question: Question) -> list[Try]:
    """Returns at most `MAX_TRIES` changes, most useful first; each was planned."""
    return list(itertools.islice(_tries(question), MAX_TRIES))


def _tries(question: Question) -> Iterator[Try]:
    now = answer(question)
    for changes, option in _changes(question, now):
        changed = dataclasses.replace(question, **changes)
        then = answer(changed)
        if is_worth_it(now.figures, then.figures):
            (value,) = changes.values()
            yield Try(option, str(value), _gives(question, changed, then))


def is_worth_it(now: Figures, then: Figures) -> bool:
    """Returns whether a figure grows by 1 % and none before it falls."""
    for before, after in zip(now, then, strict=True):
        if after < before:
            return False
        if after > before and LEAST_GAIN * (after - before) >= before:
            return True
    return False


def _changes(question: Question, now: Answer) -> Iterator[tuple[dict[str, Any], str]]:
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
        best = max(others, key=lambda o: answer(dataclasses.replace(question, **o)).figures)
        yield best, "--block-size"


def _blocks_for_more(question: Question, plan: Plan, admitted: bool) -> int:
    """Returns the blocks for the length wanted or, where it fits, for 1 % more such requests."""
    length = question.wanted_len
    blocks = plan.admission_blocks(length) + plan.reserved_blocks
    if admitted and plan.max_model_len == length:
        fit = plan.requests_that_fit(length)
        blocks += (fit - 1 + cdiv(fit, LEAST_GAIN)) * plan.steady_blocks(length)
    return blocks


def _gives(question: Question, changed: Question, then: Answer) -> str:
    length, requests, tokens = then.figures
    figures = f"requests up to {length:,} tokens, {requests:,} at once, {tokens:,} tokens in all"
    more = changed.memory_bytes - question.memory_bytes
    return f"{more:,} bytes ({readable(more)}) more, {figures}" if more else figures
