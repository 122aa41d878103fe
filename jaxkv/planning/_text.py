"""The text of a printed plan. No jax."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxkv._internal.html import html_table
from jaxkv._internal.text import describe_unused, readable
from jaxkv.planning._layout import Group

if TYPE_CHECKING:
    from jaxkv.planning._plan import Plan, ZeroPolicy


def difference(num_bytes: int) -> str:
    return f"{num_bytes:,} left over" if num_bytes >= 0 else f"{-num_bytes:,} too few"


def describe_groups(groups: Sequence[Group]) -> str:
    counts: dict[str, int] = {}
    for group in groups:
        counts[str(group)] = counts.get(str(group), 0) + 1
    return " + ".join(f"{count} x ({name})" for name, count in counts.items())


def describe_zeroing(zero_policy: "ZeroPolicy", groups_to_zero: Sequence[bool]) -> str:
    if zero_policy != "when_needed":
        return f'{"yes" if zero_policy == "always" else "no"}: zero_policy="{zero_policy}"'
    if not any(groups_to_zero):
        return "no: every block keeps one meaning"
    listed = ", ".join(str(i) for i, needed in enumerate(groups_to_zero) if needed)
    return f"yes: groups {listed} overlay bytes of another meaning"


def plan_html(plan: "Plan") -> str:
    length, block = plan.max_model_len, sum(plan.bytes_per_block)
    charged, steady = plan.admission_blocks(length), plan.steady_blocks(length)
    unused = describe_unused(plan.unused_bytes_per_block)
    rows = [
        ("groups", describe_groups(plan.groups)),
        ("block", f"{block:,} bytes, {unused}"),
        ("memory", readable(sum(plan.memory_bytes))),
        ("blocks", f"{plan.num_blocks:,} of which {plan.usable_blocks:,} usable"),
        ("admission charges", f"{charged:,} blocks, {readable(charged * block)}"),
        ("held while it decodes", f"{steady:,} blocks, {readable(steady * block)}"),
        ("run at once", f"{plan.requests_that_fit(length):,} requests"),
        ("tokens in all", f"{plan.tokens_that_fit(length):,}"),
        ("zero new blocks", describe_zeroing(plan.zero_policy, plan.groups_to_zero)),
    ]
    if len(plan.layouts) > 1:
        rows.insert(0, ("workers", f"{len(plan.layouts)}; bytes are of all together"))
    return html_table(rows, caption=f"Plan for requests up to {length:,} tokens")
