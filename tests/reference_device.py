"""A device on which requests compute sequences, written to be obviously right, not fast."""

from collections.abc import Sequence

from tests.simulation.device import Device, Group


class Content(Device):
    """Checks what requests of plain layers read, by the stories of their tokens."""

    def compute(self, row: int, story: Sequence[int], before: int, total: int) -> None:
        """Checks the content that a request's next tokens read, and writes their own."""
        for group in self.groups:
            compute = self._compute_state if group.is_state else self._compute_tokens
            compute(group, row, story, before, total)

    def _compute_tokens(self, group: Group, row: int, story, before: int, total: int) -> None:
        for position in range(group.oldest_visible(before), total):
            block = self.block(row, group.index, position // group.block)
            content = self.blocks.setdefault(block, {})
            if position >= before:
                content[position % group.block] = story[position + 1]
            found = content.get(position % group.block)
            assert block and found == story[position + 1], (
                f"position {position} holds another sequence's token"
            )

    def _compute_state(self, group: Group, row: int, story, before: int, total: int) -> None:
        if before:
            found = self.blocks[self.block(row, group.index, group.newest_column(before))].get(0)
            assert found == story[before], f"the state after {before} tokens is another sequence's"
        ends = {total}
        if group.mode == "all":
            first = (before // group.block + 1) * group.block
            ends |= set(range(first, total, group.block))
        for end in sorted(ends):
            block = self.block(row, group.index, group.newest_column(end))
            assert block > 0
            self.blocks[block] = {0: story[end]}
