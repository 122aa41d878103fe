"""Changes to try: each was planned, and gives a better plan. No jax."""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from jaxkv._src.cli.amounts import parse_bytes, round_up_gib
from jaxkv._src.cli.question import Answer, Figures, Question, answer
from jaxkv._src.gpu_memory import gpu_bytes
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.text import gib
from jaxkv._src.planning import Plan

BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_TRIES = 3
LEAST_GAIN = 100  # a figure must grow by at least 1 / LEAST_GAIN
MOST_UTILIZATION = Fraction(95, 100)  # the rest of a GPU is for activations
MOST_RANKS = 64

Change = tuple[dict[str, Any], str, str]  # changed fields of the question, the flag, its value


@dataclasses.dataclass(frozen=True)
class Try:
    """A change to try.

    option: the flag to change.
    value: its new value, as the command takes it.
    gives: the figures of the plan with this value.
    """

    option: str
    value: str
    gives: str

    def __str__(self) -> str:
        return f"try {self.option} {self.value}: {self.gives}"


def tries(question: Question) -> list[Try]:
    """Returns at most `MAX_TRIES` changes that are worth trying, the most useful first."""
    return list(itertools.islice(_tries(question), MAX_TRIES))


def _tries(question: Question) -> Iterator[Try]:
    now = answer(question)
    for fields, option, value in _changes(question, now):
        changed = dataclasses.replace(question, **fields)
        then = answer(changed)
        if is_worth_it(now.figures, then.figures):
            yield Try(option, value, _gives(question, changed, then))


def is_worth_it(now: Figures, then: Figures) -> bool:
    """Returns whether a figure grows by 1 % while no figure before it falls."""
    for before, after in zip(now, then, strict=True):
        if after < before:
            return False
        if after > before and LEAST_GAIN * (after - before) >= before:
            return True
    return False


def _changes(question: Question, now: Answer) -> Iterator[Change]:
    if not now.admitted and now.longest:
        yield {"max_model_len": now.longest}, "--max-model-len", str(now.longest)
    if now.plan is None:
        yield from _more_gpus(question)
        return
    blocks = _blocks_for_more(question, now.plan, now.admitted)
    if question.num_blocks_override is not None:
        yield {"num_blocks_override": blocks}, "--num-blocks-override", str(blocks)
    else:
        yield from _more_memory(question, [blocks * size for size in now.plan.bytes_per_block])
    yield {"kv_dtype": "fp8_e4m3"}, "--kv-dtype", "fp8_e4m3"
    if question.num_blocks_override is None:  # with it, larger blocks only mean more memory
        others = [{"block_size": size} for size in BLOCK_SIZES]
        best = max(others, key=lambda o: answer(dataclasses.replace(question, **o)).figures)
        yield best, "--block-size", str(best["block_size"])


def _more_memory(question: Question, num_bytes: Sequence[int]) -> Iterator[Change]:
    """Yields the change that gives a cache this memory on each GPU of each stage.

    It is more bytes, a larger share of the GPU, or more ranks.
    """
    budget = question.budget
    if budget.memory_bytes is not None:
        value = round_up_gib(max(num_bytes))
        changed = dataclasses.replace(budget, memory_bytes=parse_bytes(value))
        yield {"budget": changed}, "--memory", value
        return
    weights = budget.weights_per_gpu(question.tensor_parallel, question.pipeline_parallel)
    wanted = max(map(operator.add, num_bytes, weights))
    share = Fraction(cdiv(100 * wanted, gpu_bytes(budget.gpu)), 100)
    if budget.utilization < share <= MOST_UTILIZATION:
        changed = dataclasses.replace(budget, utilization=share)
        yield {"budget": changed}, "--utilization", f"{float(share):g}"
    else:
        yield from _more_gpus(question)


def _more_gpus(question: Question) -> Iterator[Change]:
    """Yields the smallest number of ranks that fits, doubling from the present one."""
    if question.budget.memory_bytes is not None:
        return
    ranks = question.tensor_parallel * 2
    while ranks <= MOST_RANKS:
        if answer(dataclasses.replace(question, tensor_parallel=ranks)).admitted:
            yield {"tensor_parallel": ranks}, "--tensor-parallel", str(ranks)
            return
        ranks *= 2


def _blocks_for_more(question: Question, plan: Plan, admitted: bool) -> int:
    """Returns the blocks for the wanted length or, if it fits, for 1 % more such requests."""
    length = question.wanted_len
    blocks = plan.admission_blocks(length) + plan.reserved_blocks
    if admitted and plan.max_model_len == length:
        fit = plan.requests_that_fit(length)
        blocks += (fit - 1 + cdiv(fit, LEAST_GAIN)) * plan.steady_blocks(length)
    return blocks


def _gives(question: Question, changed: Question, then: Answer) -> str:
    length, usual, requests, tokens = then.figures
    figures = f"{_requests(requests, length)}, {tokens:,} in all"
    if question.request_len is not None and question.request_len != length:
        figures = f"{_requests(usual, question.request_len)}, or {requests:,} of {length:,}"
    given, asked = question.budget.memory_bytes, changed.budget.memory_bytes
    return figures if given == asked else f"{gib((asked or 0) - (given or 0))} more, {figures}"


def _requests(count: int, num_tokens: int) -> str:
    return f"{count:,} request{'s' * (count != 1)} of {num_tokens:,} tokens at once"
