"""Shapes of the kernels' arguments: those of real models, and small ones for the tests.

The real ones are what `tests.benchmarks` times and what the tests lower for CUDA.
"""

from typing import NamedTuple


class ZeroSpec(NamedTuple):
    """buffers x uint8[blocks, page], of which ``ids`` blocks each are zeroed."""

    name: str
    buffers: int
    blocks: int
    page: int
    ids: int
    stacked: bool = False  # one uint8[buffers, blocks, page]

    @property
    def num_bytes(self) -> int:
        return self.buffers * self.ids * self.page


class CopySpec(NamedTuple):
    """``pairs`` blocks of each of ``buffers`` x uint8[blocks, page]."""

    name: str
    buffers: int
    blocks: int
    page: int
    pairs: int


class WriteSpec(NamedTuple):
    """``tokens`` rows of ``row`` bytes into one buffer of uint8[blocks, page]."""

    name: str
    page: int
    tokens: int
    row: int
    blocks: int = 4096


ZERO_SPECS = (
    ZeroSpec("Llama-3.1-8B bf16, 32 buffers", 32, 2048, 65536, 256),
    ZeroSpec("Llama-3.1-8B bf16, stacked", 32, 2048, 65536, 256, stacked=True),
    ZeroSpec("Llama-3.1-8B bf16, 134 MB", 32, 2048, 65536, 64),
    ZeroSpec("Llama-3.1-8B bf16, 134 MB, stacked", 32, 2048, 65536, 64, stacked=True),
    ZeroSpec("Llama-3.1-70B fp8, 80 buffers", 80, 1024, 32768, 128),
    ZeroSpec("Qwen3-Next hybrid, 12 buffers", 12, 256, 1_114_112, 32),
    ZeroSpec("DeepSeek-V3 MLA, 61 buffers", 61, 512, 73_728, 64),
    ZeroSpec("DeepSeek-V3.2 indexer, 61 buffers", 61, 2048, 8448, 512),
    ZeroSpec("one block in 80 buffers", 80, 256, 32768, 1),
)
COPY_SPECS = (
    CopySpec("256 blocks of Llama-3.1-8B", 32, 2048, 65536, 256),
    CopySpec("64 blocks of Llama-3.1-70B fp8", 80, 1024, 32768, 64),
    CopySpec("2,048 blocks of one buffer", 1, 32768, 65536, 2048),
    CopySpec("one block in 80 buffers", 80, 256, 32768, 1),
)
WRITE_SPECS = (
    WriteSpec("decode, 256 rows of 4,096", 65536, 256, 4096),
    WriteSpec("prefill, 8,192 rows of 4,096", 65536, 8192, 4096),
    WriteSpec("decode, 256 MLA rows of 1,152", 73728, 256, 1152),
    WriteSpec("prefill, 8,192 MLA rows of 1,152", 73728, 8192, 1152),
    WriteSpec("prefill, 8,192 fp8 MLA rows of 656", 41984, 8192, 656),
    WriteSpec("prefill, 8,192 indexer rows of 132", 8448, 8192, 132),
)


class SmallBuffer(NamedTuple):
    """A buffer of the property tests: `BLOCKS` blocks along ``block_axis``."""

    shape: tuple[int, ...]
    block_axis: int


class SmallWrite(NamedTuple):
    """Pages and rows of the property tests: dtype[`PAGES`, page], dtype[`ROWS`, n]."""

    page: int
    n: int
    align: int
    dtype: str


BLOCKS = 9
# Pages from 1 element up, odd ones, several work items, and blocks behind other axes.
SMALL_BUFFERS = (
    SmallBuffer((BLOCKS, 1), 0),
    SmallBuffer((BLOCKS, 17), -2),
    SmallBuffer((BLOCKS, 256), 0),
    SmallBuffer((BLOCKS, 2, 1056), 0),
    SmallBuffer((2, BLOCKS, 515), 1),
    SmallBuffer((2, 2, BLOCKS, 4, 64), -3),
    SmallBuffer((2, BLOCKS), -1),
)
# One odd page, several work items, and blocks behind another axis: interpret mode takes seconds
# for each, and shapes differ by what XLA does around a kernel.
INTERPRETED_BUFFERS = (SMALL_BUFFERS[1], *SMALL_BUFFERS[3:5])
PAGES, ROWS = 5, 6
# Rows too short for a warpgroup, odd ones, what attention writes per token, a whole page,
# and pages that align worse than rows do. Rows of narrow elements are written as wider words.
SMALL_WRITES = (
    SmallWrite(60, 13, 4, "bfloat16"),  # pages of words, and rows of no whole ones
    SmallWrite(600, 132, 1, "uint8"),
    SmallWrite(2064, 1024, 4, "bfloat16"),  # a thread could store more than lies aligned
    SmallWrite(2336, 584, 8, "uint8"),
    SmallWrite(2624, 656, 16, "uint8"),
    SmallWrite(4608, 1152, 1152, "uint8"),
    SmallWrite(8200, 2048, 16, "bfloat16"),
    SmallWrite(4097, 4097, 1, "uint8"),
    SmallWrite(60, 12, 4, "float32"),
)
INTERPRETED_WRITES = (*SMALL_WRITES[:3], SmallWrite(515, 515, 1, "uint8"))
# Pages, and rows, of less than a warpgroup to several work items.
SMALL_PAGES = (20, 515, 1152, 4097, 20_000, 28_672)
# The last two have fewer work items than those have strips, and more.
INTERPRETED_PAGES = (20, 1152, 20_000, 28_672)
