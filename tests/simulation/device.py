"""A device of dictionaries: it knows only uploads, and what requests write.

Contents are numbers. `Stories` numbers the sequences of tokens that contents are computed from, and
a group adds its own index, so that equal numbers mean equal groups, namespaces and tokens.
"""

import itertools
from collections.abc import Hashable, Iterable

import numpy as np

from jaxkv import Plan
from jaxkv.blocks import Transfers, Upload

NO_WINDOW = 2**31 - 1


class Stories:
    """Numbers sequences: two sequences have one number only if they are equal."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.namespaces: list[int] = []  # by story, the story of its namespace

    def begin(self, namespace: Hashable) -> int:
        return self._number((None, namespace), None)

    def go_on(self, story: int, code: Hashable) -> int:
        return self._number((story, code), story)

    def of(self, namespace: Hashable, codes: Iterable[Hashable]) -> list[int]:
        """Returns the stories of the first 0, 1, ... tokens."""
        return list(itertools.accumulate(codes, self.go_on, initial=self.begin(namespace)))

    def _number(self, key: Hashable, before: int | None) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self.namespaces):
            self.namespaces.append(number if before is None else self.namespaces[before])
        return number


class Group:
    """The rule of one group, written from the definitions and not from `jaxkv.specs.Growth`."""

    def __init__(self, index: int, group, context_parallel: int):
        growth = group.growth
        self.index, self.kind, self.mode = index, growth.kind, growth.cache_mode
        self.block, self.drafts = growth.block_size * context_parallel, growth.speculative_blocks
        self.window, self.chunk = growth.window, growth.chunk
        self.open = growth.group_size if growth.kind == "ring" else 0  # tokens of a ring's group
        self.ratio = max(getattr(spec, "compress_ratio", 1) for spec in group.specs)

    @property
    def is_state(self) -> bool:
        return self.kind == "state"

    def ring_positions(self, num_tokens: int) -> range:
        """Returns the positions whose rows in a ring the token after ``num_tokens`` reads."""
        return range(num_tokens // self.open * self.open, num_tokens)

    @property
    def is_window(self) -> bool:
        """Whether a token does not attend to all that are before it."""
        return min(self.window, self.chunk) < NO_WINDOW

    def oldest_visible(self, position: int) -> int:
        """Returns the oldest position that the token at ``position`` attends to."""
        if self.window < NO_WINDOW:
            return max(position - self.window + 1, 0)
        return position // self.chunk * self.chunk if self.chunk < NO_WINDOW else 0

    def newest_block(self, num_tokens: int) -> int:
        """Returns the logical block of the state after ``num_tokens`` tokens."""
        return 0 if self.mode == "none" else max(-(-num_tokens // self.block) - 1, 0)

    def state_blocks(self, before: int, total: int) -> set[int]:
        """Returns the logical blocks of states that a step can read and write."""
        if self.mode == "none":
            return set(range(1 + self.drafts))
        last = self.newest_block(total)
        first = before // self.block if self.mode == "all" else last
        columns = set(range(first, last + 1 + self.drafts))
        return columns | ({self.newest_block(before)} if before else set())


class Device:
    """Tables and blocks, changed by uploads in the order of `jaxkv.apply_step`.

    rows: by group and row, block ids by logical block. Old cells stay, as on the device.
    blocks: by block, contents by place.
    host: by chunk, its group and the contents of its blocks.
    number, move_number: of the last upload, and of the last moves.
    ahead: chunks that the next moves have to load first.
    goes_on_anew: whether the next upload is the first one after `BlockManager.reset`.
    """

    def __init__(self, plan: Plan, max_requests: int):
        self.groups = [Group(i, g, plan.context_parallel) for i, g in enumerate(plan.groups)]
        self.rows: list[list[dict[int, int]]] = [
            [{} for _ in range(max_requests)] for _ in plan.groups
        ]
        self.lengths = [[0] * len(plan.groups) for _ in range(max_requests)]
        self.blocks: dict[int, dict[int, int]] = {}
        self.host: dict[int, tuple[int, list[dict[int, int]]]] = {}
        self.number, self.move_number, self.goes_on_anew = 0, 0, False
        self.lookahead: tuple[int, ...] = ()

    def apply(self, upload: Upload) -> dict[str, np.ndarray]:
        """Applies the changes of an upload; returns its parts."""
        parts = upload.parts()
        number, self.number = self.number + 1, abs(parts["number"].item())
        if self.goes_on_anew:  # the numbers may have a gap
            assert -parts["number"][0] >= number, "the device cannot go on"
        else:
            assert parts["number"][0] == number, "an upload was lost or repeated"
        self.goes_on_anew = False
        self._copy_rows(parts)
        self._write_entries(parts)
        self._copy_blocks(parts)
        zeroed = parts["zero_ids"].tolist()
        assert len(set(zeroed)) == len(zeroed), "a block is zeroed twice"
        copied = set(parts["copy_destinations"].tolist())
        assert not copied & set(zeroed), f"copies are zeroed: {copied & set(zeroed)}"
        for block in zeroed:
            self.blocks[block] = {}
        return parts

    def transfer(self, transfers: Transfers) -> None:
        """Carries out moves: all stores, then all loads, then host blocks are dropped."""
        if transfers.is_anew:
            self.host.clear()
        else:
            assert transfers.number == self.move_number + 1, "moves were lost or repeated"
            loads = tuple(chunk.number for chunk in transfers.loads)
            assert loads[: len(self.lookahead)] == self.lookahead, (
                "copies to the device are of no use"
            )
        self.move_number, self.lookahead = transfers.number, transfers.lookahead
        for number, group, blocks in transfers.stores:
            assert number not in self.host, "a chunk is stored over another"
            self.host[number] = group, [dict(self.blocks.get(i, {})) for i in blocks.tolist()]
        loaded: set[int] = set()
        for number, group, blocks in transfers.loads:
            of_group, contents = self.host[number]
            assert of_group == group, "a chunk of another group"
            for block, content in zip(blocks.tolist(), contents, strict=True):
                if block >= 0:
                    assert block not in loaded, "two loads into one block"
                    loaded.add(block)
                    self.blocks[block] = dict(content)
        for number in transfers.dropped:
            del self.host[number]
        assert self.host.keys() >= {*transfers.lookahead}, (
            "copies to the device have lost their source"
        )

    def poison(self, blocks: Iterable[int]) -> None:
        """Spoils the contents of blocks."""
        for block in blocks:
            self.blocks[block] = dict.fromkeys(self.blocks.get(block, {}), -1)

    def _copy_rows(self, parts) -> None:
        if "row_sources" not in parts:
            return
        pairs = list(
            zip(parts["row_sources"].tolist(), parts["row_destinations"].tolist(), strict=True)
        )
        for rows in self.rows:
            copies = [dict(rows[source]) for source, _ in pairs]
            for (_, row), copied in zip(pairs, copies, strict=True):
                rows[row] = copied
        lengths = [list(self.lengths[source]) for source, _ in pairs]
        for (_, row), length in zip(pairs, lengths, strict=True):
            self.lengths[row] = length

    def _write_entries(self, parts) -> None:
        names = "rows", "logical_blocks", "ids"
        cells = list(zip(*(parts[f"entry_{name}"].tolist() for name in names), strict=True))
        begin, seen = 0, set()
        for group, end in enumerate(parts["entry_ends"].tolist()):
            for row, column, block in cells[begin:end]:
                assert (group, row, column) not in seen, "a cell is written twice"
                seen.add((group, row, column))
                self.rows[group][row][column] = block
            begin = end
        for row, lengths in zip(
            parts["changed_rows"].tolist(), parts["row_lengths"].tolist(), strict=True
        ):
            self.lengths[row] = lengths

    def _copy_blocks(self, parts) -> None:
        pairs = list(
            zip(parts["copy_sources"].tolist(), parts["copy_destinations"].tolist(), strict=True)
        )
        assert len({into for _, into in pairs}) == len(pairs), "two copies into one block"
        assert all(into for _, into in pairs), "a copy into the null block"
        copies = [dict(self.blocks.get(source, {})) for source, _ in pairs]
        self.blocks.update(zip((into for _, into in pairs), copies, strict=True))

    def block(self, row: int, group: int, column: int) -> int:
        """Returns the block in a cell; 0 for none, and for cells past the row's length."""
        if column >= self.lengths[row][group]:
            return 0
        return self.rows[group][row].get(column, 0)

    def lose_all(self, blocks: Iterable[int]) -> None:
        """Empties blocks, as a sleep of level 2 does."""
        for block in blocks:
            self.blocks[block] = {}
