"""Texts about the groups of a plan. No jax."""

from collections.abc import Sequence

from jaxkv._src.planning._grouping import GroupingFigures
from jaxkv._src.planning._layout import Group


def describe_groups(groups: Sequence[Group]) -> str:
    """Returns groups as text, those that are alike counted together."""
    counts: dict[str, int] = {}
    for group in groups:
        counts[str(group)] = counts.get(str(group), 0) + 1
    return " + ".join(f"{count} x ({name})" for name, count in counts.items())


def describe_difference(num_bytes: int) -> str:
    """Returns a text on bytes that a plan leaves over, or lacks if negative."""
    return f"{num_bytes:,} left over" if num_bytes >= 0 else f"{-num_bytes:,} too few"


def describe_zeroing(zero_policy: str, groups_to_zero: Sequence[bool]) -> str:
    """Returns a text on the groups whose fresh blocks are zeroed."""
    if zero_policy != "when_needed":
        return f'{"yes" if zero_policy == "always" else "no"}: zero_policy="{zero_policy}"'
    if not any(groups_to_zero):
        return "no: every block keeps one meaning"
    listed = ", ".join(str(i) for i, needed in enumerate(groups_to_zero) if needed)
    return f"yes: groups {listed} reuse blocks of another format (needs no action)"


def describe_choice(compared: Sequence[GroupingFigures], num_tokens: int) -> str:
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
