"""A plan as text, and as a table for Jupyter. No jax."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxkv._src.internal.html import html_table
from jaxkv._src.internal.text import describe_unused, readable
from jaxkv._src.planning._grouping import GroupingFigures
from jaxkv._src.planning._layout import Group

if TYPE_CHECKING:
    from jaxkv._src.planning._plan import Plan


def plan_text(plan: "Plan") -> str:
    """Returns a plan in eight lines, and a line each for usual requests, groupings, a warning."""
    length = plan.max_model_len
    need, steady = plan.admission_blocks(length), plan.steady_blocks(length)
    fit, given = plan.requests_that_fit(length), sum(plan.memory_bytes)
    used = plan.num_blocks * sum(plan.bytes_per_block)
    tensors = max(len(layout.tensors) for layout in plan.layouts)
    rows = {
        "layers": f"{sum(len(group.layers) for group in plan.groups)} with a cache",
        "groups": describe_groups(plan.groups),
        "block": f"{max(plan.bytes_per_block):,} bytes in {tensors} tensor{'s' * (tensors != 1)}, "
        f"{describe_unused(plan.unused_bytes_per_block)}",
        "memory": f"{given:,} bytes ({readable(given)}) given, {_difference(given - used)}",
        "blocks": f"{plan.num_blocks:,} of which {plan.usable_blocks:,} usable",
        "longest request": f"{length:,} tokens: admission charges {need:,} blocks",
        "such requests": f"{fit:,} run at once, {steady:,} blocks each once they decode; "
        f"{plan.tokens_that_fit(length):,} tokens in all",
        "zero new blocks": _describe_zeroing(plan.zero_policy, plan.groups_to_zero),
    }
    return "\n".join(f"{name:<16} {text}" for name, text in (rows | _more_rows(plan)).items())


def plan_html(plan: "Plan") -> str:
    """Returns a plan as an HTML table."""
    length, block = plan.max_model_len, sum(plan.bytes_per_block)
    charged, steady = plan.admission_blocks(length), plan.steady_blocks(length)
    workers = {"workers": f"{len(plan.layouts)}; bytes are of all together"}
    rows = {
        "groups": describe_groups(plan.groups),
        "block": f"{block:,} bytes, {describe_unused(plan.unused_bytes_per_block)}",
        "memory": readable(sum(plan.memory_bytes)),
        "blocks": f"{plan.num_blocks:,} of which {plan.usable_blocks:,} usable",
        "admission charges": f"{charged:,} blocks, {readable(charged * block)}",
        "while it decodes": f"{steady:,} blocks, {readable(steady * block)}",
        "run at once": f"{plan.requests_that_fit(length):,} requests",
        "tokens in all": f"{plan.tokens_that_fit(length):,}",
        "zero new blocks": _describe_zeroing(plan.zero_policy, plan.groups_to_zero),
    }
    rows = (workers if len(plan.layouts) > 1 else {}) | rows | _more_rows(plan)
    return html_table(rows.items(), caption=f"Plan for requests up to {length:,} tokens")


def _more_rows(plan: "Plan") -> dict[str, str]:
    rows: dict[str, str] = {}
    if plan.request_len is not None:
        fit = plan.requests_that_fit(plan.request_len)
        steady = plan.steady_blocks(plan.request_len)
        rows["usual requests"] = (
            f"{plan.request_len:,} tokens: {fit:,} run at once, {steady:,} blocks each once they "
            "decode"
        )
    if plan.compared:
        rows["grouping"] = _describe_choice(plan.compared, plan.compared_len)
    return rows | ({"warning": plan.warning} if plan.warning else {})


def describe_groups(groups: Sequence[Group]) -> str:
    """Returns groups as text, those that are alike counted together."""
    counts: dict[str, int] = {}
    for group in groups:
        counts[str(group)] = counts.get(str(group), 0) + 1
    return " + ".join(f"{count} x ({name})" for name, count in counts.items())


def _difference(num_bytes: int) -> str:
    return f"{num_bytes:,} left over" if num_bytes >= 0 else f"{-num_bytes:,} too few"


def _describe_zeroing(zero_policy: str, groups_to_zero: Sequence[bool]) -> str:
    if zero_policy != "when_needed":
        return f'{"yes" if zero_policy == "always" else "no"}: zero_policy="{zero_policy}"'
    if not any(groups_to_zero):
        return "no: every block keeps one meaning"
    listed = ", ".join(str(i) for i, needed in enumerate(groups_to_zero) if needed)
    return f"yes: groups {listed} reuse blocks of another format (needs no action)"


def _describe_choice(compared: Sequence[GroupingFigures], num_tokens: int) -> str:
    """Returns a text on the chosen grouping, which comes first, and on the others."""
    chosen, *others = compared
    texts = [
        f"{chosen.grouping} runs {chosen.requests:,} requests of {num_tokens:,} tokens at once in "
        f"{chosen.num_groups} groups"
    ]
    for other in others:
        shorter = other.longest_len < chosen.longest_len
        bound = f", of up to {other.longest_len:,} tokens" if shorter else ""
        texts.append(f"{other.grouping} {other.requests:,} in {other.num_groups}{bound}")
    return "; ".join(texts)
