"""A paged cache as somebody might write their first, in NumPy: one layer, a free list, a table.

The subclasses below each have a bug that such caches really had; more of them are in
`tests/test_testing_kit.py`.
"""

import numpy as np

BLOCK_SIZE = 4  # tokens
TOKEN_BYTES = 8


class ToyCache:
    """Rows of tokens in pages of four; block 0 stays empty. Requests can share whole blocks."""

    def __init__(self, num_blocks: int):
        self.pages = np.zeros((num_blocks, BLOCK_SIZE, TOKEN_BYTES), np.uint8)
        self.free = self.make_free(num_blocks)
        self.holders = [0] * num_blocks
        self.tables: dict[int, list[int]] = {}

    def make_free(self, num_blocks: int) -> list[int]:
        return list(range(1, num_blocks))

    def start(self, request: int) -> None:
        self.tables[request] = []

    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        table = self.tables[request]
        missing = max(0, -(-num_tokens // BLOCK_SIZE) - len(table))
        shared = self.shared_columns(table, num_computed_tokens)
        if missing + len(shared) > len(self.free):
            raise MemoryError(f"{missing + len(shared)} blocks wanted, {len(self.free)} free")
        for column in shared:
            table[column] = self.copy_block(table[column])
        for _ in range(missing):
            table.append(self.take_block())

    def shared_columns(self, table: list[int], num_computed_tokens: int) -> list[int]:
        """Blocks that are about to be written and that others hold, too."""
        first = num_computed_tokens // BLOCK_SIZE
        return [i for i in range(first, len(table)) if self.holders[table[i]] > 1]

    def take_block(self) -> int:
        block = self.free.pop(0)
        self.holders[block] = 1
        self.pages[block] = 0
        return block

    def copy_block(self, shared: int) -> int:
        block = self.take_block()
        self.pages[block] = self.pages[shared]
        self.give_back([shared])
        return block

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)

    def write(self, request: int, positions: np.ndarray, rows: np.ndarray) -> None:
        blocks = np.array(self.tables[request])[positions // BLOCK_SIZE]
        self.pages[blocks, positions % BLOCK_SIZE] = rows

    def read(self, request: int) -> np.ndarray:
        return self.pages[self.tables[request]]

    def fork(self, request: int, donor: int, num_tokens: int) -> bool:
        self.tables[request] = self.tables[donor][: -(-num_tokens // BLOCK_SIZE)]
        for block in self.tables[request]:
            self.holders[block] += 1
        return True

    def rewind(self, request: int, num_tokens: int) -> bool:
        return True  # the next tokens are written over the rejected ones

    def finish(self, request: int) -> None:
        self.give_back(self.tables.pop(request))


class ForgetsToZero(ToyCache):
    """Whoever gets a block can read what its last holder wrote."""

    def take_block(self) -> int:
        block = self.free.pop(0)
        self.holders[block] = 1
        return block


class FreesTwice(ToyCache):
    """Gives blocks back when they run out, and leaves them in the table, too."""

    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        try:
            super().grow(request, num_computed_tokens, num_tokens)
        except MemoryError:
            self.give_back(self.tables[request])
            raise


class WritesPadding(ToyCache):
    """Pads what it writes to an even number of rows, and the padding goes to block 0."""

    def write(self, request: int, positions: np.ndarray, rows: np.ndarray) -> None:
        super().write(request, positions, rows)
        if len(rows) % 2:
            self.pages[0, 0] = rows[-1]


class WritesIntoSharedBlocks(ToyCache):
    """Lets forked requests go on in the same block."""

    def shared_columns(self, table: list[int], num_computed_tokens: int) -> list[int]:
        return []
