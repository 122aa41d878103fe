"""A plan as one screen of text. No jax."""

import textwrap
from collections.abc import Iterable, Sequence

from jaxkv._src.cli.amounts import gib
from jaxkv._src.cli.costs import (
    attention_dtypes,
    bytes_charged,
    bytes_per_request,
    state_bytes,
    token_bytes,
)
from jaxkv._src.cli.question import Question, layer_of
from jaxkv._src.cli.specs_file import SpecsFile
from jaxkv._src.cli.tries import Try
from jaxkv._src.hf_config import Weights, shipped_dtype
from jaxkv._src.internal.text import readable
from jaxkv._src.planning import Plan

WIDTH, NAME_WIDTH = 100, 16


def page(question: Question, plan: Plan, weights: Weights | None, tried: Sequence[Try]) -> str:
    """Returns the plan as text, with changes to try."""
    usual = question.request_len
    rows = {
        "layers": _layers_text(plan),
        "weights": _weights_text(question, weights),
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


def _weights_text(question: Question, weights: Weights | None) -> str:
    budget, gpus = question.budget, question.num_gpus
    if budget.memory_bytes is not None:
        return ""
    text = gib(budget.weights_bytes)
    if weights is not None:
        text += f", {weights.parameters / 1e9:,.2f} billion in {weights.stored}"
    if gpus > 1:
        text += f"; {gib(budget.weights_bytes / gpus)} on each of {gpus} GPUs"
    return text


def _memory_text(question: Question, plan: Plan) -> str:
    budget, block = question.budget, max(plan.bytes_per_block)
    text = gib(question.memory_bytes)
    if budget.memory_bytes is None:
        share = f"{budget.gpu} at {float(budget.utilization):g}"
        text += f" of {gib(budget.usable_bytes)} ({share})"
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
    return f"{size:,} bytes ({readable(size)}) in {layers}, at any length" if count else ""


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
    sizes = plan.bytes_per_block
    tightest = max(range(len(sizes)), key=lambda worker: sizes[worker])
    return "memory" if len(sizes) == 1 else f"memory of pipeline stage {tightest}"
