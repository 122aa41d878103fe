"""The text of a printed plan. No jax."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.planning._layout import Group


class GroupingFigures(NamedTuple):
    """A grouping, and the requests that it runs at once.

    grouping: "rule", "packed" or "least_waste", as for `jaxkv.planning.make_groups`.
    num_groups: block tables that each request has.
    requests: of one length, at once.
    longest_len: tokens of the longest request that fits.
    """

    grouping: str
    num_groups: int
    requests: int
    longest_len: int


def difference(num_bytes: int) -> str:
    return f"{num_bytes:,} left over" if num_bytes >= 0 else f"{-num_bytes:,} too few"


def describe_groups(groups: Sequence[Group]) -> str:
    counts: dict[str, int] = {}
    for group in groups:
        counts[str(group)] = counts.get(str(group), 0) + 1
    return " + ".join(f"{count} x ({name})" for name, count in counts.items())


def describe_zeroing(zero_policy: str, groups_to_zero: Sequence[bool]) -> str:
    if zero_policy != "when_needed":
        return f'{"yes" if zero_policy == "always" else "no"}: zero_policy="{zero_policy}"'
    if not any(groups_to_zero):
        return "no: every block keeps one meaning"
    listed = ", ".join(str(i) for i, needed in enumerate(groups_to_zero) if needed)
    return f"yes: groups {listed} overlay bytes of another meaning"


def describe_choice(compared: Sequence[GroupingFigures], num_tokens: int) -> str:
    """Returns a text on the grouping that was chosen, the first one, and on the others."""
    chosen, *others = compared
    texts = [
        f"{chosen.grouping} runs {chosen.requests:,} requests of {num_tokens:,} tokens at once in "
        f"{chosen.num_groups} groups"
    ]
    for other in others:
        shorter = other.longest_len < chosen.longest_len
        bound = f", of up to {other.longest_len:,} tokens" * shorter
        texts.append(f"{other.grouping} {other.requests:,} in {other.num_groups}{bound}")
    return "; ".join(texts)
