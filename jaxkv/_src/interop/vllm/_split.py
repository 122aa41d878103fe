"""Splitting of table entries and blocks to zero over the uploads of a step. No jax."""

from collections.abc import Iterator, Sequence

from jaxkv._src.uploads import StepShape, TableEntry

Part = tuple[list[TableEntry], list[list[int]]]  # entries, and ids to zero per group


def split(
    shape: StepShape, entries: Sequence[TableEntry], zero_ids: Sequence[Sequence[int]]
) -> list[Part]:
    """Splits table entries and blocks to zero into parts that fit into one upload each."""
    tables = list(_split_entries(entries, shape.block_ids)) or [[]]
    zeroed = list(_split_ids(zero_ids, shape.zero_ids)) or [[[] for _ in zero_ids]]
    count = max(len(tables), len(zeroed))
    tables += [[] for _ in range(count - len(tables))]
    zeroed += [[[] for _ in zero_ids] for _ in range(count - len(zeroed))]
    return list(zip(tables, zeroed, strict=True))


def _split_entries(entries: Sequence[TableEntry], budget: int) -> Iterator[list[TableEntry]]:
    """Yields the entries in parts of at most ``budget`` ids."""
    part: list[TableEntry] = []
    left = budget
    for entry in entries:
        starts, ids = list(entry.starts or (0,) * len(entry.block_ids)), list(entry.block_ids)
        while True:
            sizes = [len(of_group) for of_group in ids]
            counts = _fill(sizes, left) if budget else sizes  # which `pack_step` refuses
            taken = [of_group[:n] for of_group, n in zip(ids, counts, strict=True)]
            part.append(TableEntry(entry.row, taken, tuple(starts)))
            left -= sum(counts)
            ids = [of_group[n:] for of_group, n in zip(ids, counts, strict=True)]
            starts = [start + n for start, n in zip(starts, counts, strict=True)]
            if not any(ids):
                break
            yield part
            part = []
            left = budget
    if part:
        yield part


def _split_ids(ids: Sequence[Sequence[int]], budget: int) -> Iterator[list[list[int]]]:
    rest = [list(of_group) for of_group in ids]
    while any(rest):
        counts = _fill([len(of_group) for of_group in rest], budget)
        counts = counts if any(counts) else [len(of_group) for of_group in rest]
        yield [of_group[:n] for of_group, n in zip(rest, counts, strict=True)]
        rest = [of_group[n:] for of_group, n in zip(rest, counts, strict=True)]


def _fill(sizes: Sequence[int], budget: int) -> list[int]:
    """Returns how much of each size fits into the budget, filled in order."""
    counts = []
    for size in sizes:
        counts.append(min(size, budget))
        budget -= counts[-1]
    return counts
