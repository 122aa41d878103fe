"""A paged cache as somebody might write their first: one layer, a free list, block tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SIZE = 4


@functools.partial(jax.jit, donate_argnums=0)
def put(pages: jax.Array, blocks: jax.Array, offsets: jax.Array, rows: jax.Array) -> jax.Array:
    return pages.at[blocks, offsets].set(rows)


class ToyCache:
    """Keys and values, four numbers a token, in pages of four tokens; block 0 stays empty."""

    def __init__(self, num_blocks: int):
        self.pages = jnp.zeros((num_blocks, BLOCK_SIZE, 4), jnp.bfloat16)
        self.free = list(range(1, num_blocks))
        self.tables: dict[int, list[int]] = {}

    def start(self, request: int) -> None:
        self.tables[request] = []

    def grow(self, request: int, num_tokens: int) -> None:
        missing = -(-num_tokens // BLOCK_SIZE) - len(self.tables[request])
        if missing > len(self.free):
            raise MemoryError(f"{missing} blocks wanted, {len(self.free)} free")
        for _ in range(missing):
            self.tables[request].append(self.take_block())

    def take_block(self) -> int:
        block = self.free.pop()
        zeros = np.zeros((BLOCK_SIZE, 4), self.pages.dtype)
        self.pages = put(self.pages, np.int32(block), np.arange(BLOCK_SIZE), zeros)
        return block

    def write(self, request: int, positions: np.ndarray, rows: np.ndarray) -> None:
        blocks = np.array(self.tables[request], np.int32)[positions // BLOCK_SIZE]
        self.pages = put(self.pages, blocks, positions % BLOCK_SIZE, rows)

    def read(self, request: int) -> np.ndarray:
        return np.asarray(self.pages)[self.tables[request]]

    def finish(self, request: int) -> None:
        self.free += self.tables.pop(request)


class ForgetsToZero(ToyCache):
    """Whoever gets a block can read what its last holder wrote."""

    def take_block(self) -> int:
        return self.free.pop()


class FreesTwice(ToyCache):
    """When blocks run out, gives back those just taken, and leaves them in the table too."""

    def grow(self, request: int, num_tokens: int) -> None:
        taken: list[int] = []
        while len(self.tables[request]) * BLOCK_SIZE < num_tokens:
            if not self.free:
                self.free += taken
                raise MemoryError("no block is free")
            taken.append(self.take_block())
            self.tables[request].append(taken[-1])


class WritesPadding(ToyCache):
    """Pads what it writes to an even number of rows, and the padding goes to block 0."""

    def write(self, request: int, positions: np.ndarray, rows: np.ndarray) -> None:
        super().write(request, positions, rows)
        if len(rows) % 2:
            self.pages = put(self.pages, np.int32([0]), np.int32([0]), rows[-1:])
