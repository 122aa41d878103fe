"""The words of a printed plan."""

from collections.abc import Sequence

from jaxkv.groups import Group


def readable(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def difference(num_bytes: int) -> str:
    return f"{num_bytes:,} left over" if num_bytes >= 0 else f"{-num_bytes:,} too few"


def describe_unused(unused: Sequence[int]) -> str:
    least, most = min(unused), max(unused)
    if most == 0:
        return "all used"
    return f"{most:,} unused" if least == most else f"{least:,} to {most:,} unused by group"


def describe_groups(groups: Sequence[Group]) -> str:
    counts: dict[str, int] = {}
    for group in groups:
        counts[str(group)] = counts.get(str(group), 0) + 1
    return " + ".join(f"{count} x ({name})" for name, count in counts.items())


def describe_zeroing(groups_to_zero: Sequence[bool]) -> str:
    if not any(groups_to_zero):
        return "no: every block keeps one meaning"
    listed = ", ".join(str(i) for i, needed in enumerate(groups_to_zero) if needed)
    return f"yes: groups {listed} overlay bytes of another meaning"
