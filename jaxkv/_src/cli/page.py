"""A plan as one screen of text. No jax."""

import textwrap
from collections.abc import Iterable, Sequence

from jaxkv._src.cli.costs import (
    attention_dtypes,
    bytes_charged,
    bytes_per_request,
    replay_bytes,
    ring_tokens,
    state_bytes,
    token_bytes,
)
from jaxkv._src.cli.question import Question, layer_of
from jaxkv._src.cli.specs_file import SpecsFile
from jaxkv._src.cli.tries import Try
from jaxkv._src.gpu_memory import fullest_text
from jaxkv._src.hf_config import Weights, shipped_dtype
from jaxkv._src.internal.text import gib, readable
from jaxkv._src.planning import Plan

WIDTH, NAME_WIDTH = 100, 16


def page(question: Question, plan: Plan, tried: Sequence[Try]) -> str:
    """Returns the plan as text, with changes to try."""
    usual = question.request_len
    rows = {
        "layers": _layers_text(plan),
        "weights": _weights_text(question),
        "memory": _memory_text(question, plan),
        "dtype": _dtype_text(question),
        "a token": _token_text(question),
        "a state": _state_text(question),
        "longest request": _longest_text(question, plan),
        "usual requests": _requests_text(plan, usual) if usual else "",
        "grouping": _grouping_text(question, plan),
        "zero new blocks": _plan_row(plan, "zero new blocks"),
        "warning": plan.warning,
    }
    shown = ((name, text) for name, text in rows.items() if text)
    return "\n".join([*_wrapped(shown), *map(str, tried)])


def _wrapped(rows: Iterable[tuple[str, str]]) -> Iterable[str]:
    for name, text in rows:
        yield textwrap.fill(
            f"{name:<{NAME_WIDTH}} {text}",
            width=WIDTH,
            subsequent_indent=" " * (NAME_WIDTH + 1),
            break_on_hyphens=False,
        )


def _plan_row(plan: Plan, name: str) -> str:
    """Returns one row of the plan's own text."""
    rows = str(plan).splitlines()
    return next(row[NAME_WIDTH + 1 :] for row in rows if row.startswith(name))


def _layers_text(plan: Plan) -> str:
    caches = [name for group in plan.groups for name in group.layers]
    layers = len({layer_of(name) for name in caches})
    kept = "a cache" if layers == len(caches) else f"{len(caches)} caches"
    return f"{layers} with {kept}: {_plan_row(plan, 'groups')}"


def _weights_text(question: Question) -> str:
    budget = question.budget
    if budget.memory_bytes is not None:
        return ""
    text = gib(budget.weights_bytes)
    if isinstance(budget.weights, Weights):
        text += f", {budget.weights.parameters / 1e9:,.2f} billion in {budget.weights.stored}"
    if question.num_gpus > 1:
        ranks, stages = question.tensor_parallel, question.pipeline_parallel
        text += f"; {fullest_text(budget.weights_per_gpu(ranks, stages), ranks)}"
    return text


def _memory_text(question: Question, plan: Plan) -> str:
    budget, stage = question.budget, tightest_stage(plan)
    text, block = gib(plan.memory_bytes[stage]), plan.bytes_per_block[stage]
    if budget.memory_bytes is None:
        share = f"{budget.gpu} at {float(budget.utilization):g}"
        text += f" of {gib(budget.usable_bytes)} ({share})"
    if len(plan.memory_bytes) > 1:
        text += f" on stage {stage}"
    return f"{text}: {plan.usable_blocks:,} usable blocks of {block:,} bytes"


def _dtype_text(question: Question) -> str:
    """Returns a note on a dtype that the user may not expect, or ""."""
    if question.kv_dtype is not None or isinstance(question.model, SpecsFile):
        return ""
    if shipped := shipped_dtype(question.model):
        return f"{shipped}, as the family ships it; the configuration names none"
    if attention_dtypes(question.layers()) == ["float32"]:
        return "float32, as the configuration says; engines may serve it in bf16 (--kv-dtype bf16)"
    return ""


def _token_text(question: Question) -> str:
    parts, ranks = map(str, token_bytes(question.layers())), question.tensor_parallel
    return (" + ".join(parts) or "0 bytes") + (f", on each of {ranks} ranks" if ranks > 1 else "")


def _state_text(question: Question) -> str:
    count, size = state_bytes(question.layers())
    layers = f"{count} layer{'s' * (count != 1)}"
    text = f"{size:,} bytes ({readable(size)}) in {layers}, at any length" if count else ""
    if rings := replay_bytes(question.layers()):
        most = ring_tokens(question.layers())
        text += f"; {rings:,} of them inputs since a checkpoint, of up to {most} tokens"
    return text


def _longest_text(question: Question, plan: Plan) -> str:
    length = plan.max_model_len
    text = _requests_text(plan, length, note=f" ({what_binds(question, plan)})")
    return f"{text}; {plan.tokens_that_fit(length):,} in all"


def _requests_text(plan: Plan, length: int, note: str = "") -> str:
    """Returns a text on requests of a length: bytes of each, and the number that runs at once."""
    size, charged = bytes_per_request(plan, length), bytes_charged(plan, length)
    text = f"{length:,} tokens{note}: {gib(size)}"
    if charged != size:
        text += f" ({gib(charged)} in prefill)"
    return f"{text}, {plan.requests_that_fit(length):,} at once"


def _grouping_text(question: Question, plan: Plan) -> str:
    """Returns the requests that each grouping runs; "" if "auto" found no difference."""
    figures = plan.compared
    if question.grouping == "auto" and len({of.requests for of in figures}) < 2:
        return ""
    texts = [f"{of.requests:,} at once by {of.grouping} ({of.num_groups} groups)" for of in figures]
    return f"{', '.join(texts)}; {plan.compared_len:,} tokens each" if texts else ""


def what_binds(question: Question, plan: Plan) -> str:
    """Returns the bound of the longest request: the model, an argument, or memory."""
    if plan.max_model_len == question.own_len:
        return "the model's own length"
    if question.max_model_len is not None:
        return "the length asked for"
    if question.num_blocks_override is not None:
        return "the override"
    stage = tightest_stage(plan)
    return "memory" if len(plan.layouts) == 1 else f"memory of pipeline stage {stage}"


def tightest_stage(plan: Plan) -> int:
    """Returns the pipeline stage whose memory holds the fewest blocks."""
    pairs = list(zip(plan.memory_bytes, plan.bytes_per_block, strict=True))
    blocks = {stage: memory // size for stage, (memory, size) in enumerate(pairs) if size}
    return min(blocks, key=blocks.__getitem__)
