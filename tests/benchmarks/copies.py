"""Block copies and writes of new tokens: our kernels, XLA's own way, a plain copy."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import copy_blocks, default_implementation, write_rows
from tests.benchmarks.timing import ON_GPU, Report, Times, measure
from tests.benchmarks.vllm_peer import VllmPeer


class Copies(NamedTuple):
    """``pairs`` blocks of each of ``buffers`` x uint8[blocks, page]."""

    name: str
    buffers: int
    blocks: int
    page: int
    pairs: int


class Writes(NamedTuple):
    """``tokens`` rows of ``row`` bytes into one buffer of uint8[4096, page]."""

    name: str
    page: int
    tokens: int
    row: int


COPIES = (
    Copies("256 blocks of Llama-3.1-8B", 32, 2048, 65536, 256),
    Copies("64 blocks of Llama-3.1-70B fp8", 80, 1024, 32768, 64),
    Copies("2,048 blocks of one buffer", 1, 32768, 65536, 2048),
    Copies("one block in 80 buffers", 80, 256, 32768, 1),
)
WRITES = (
    Writes("decode, 256 rows of 4,096", 65536, 256, 4096),
    Writes("prefill, 8,192 rows of 4,096", 65536, 8192, 4096),
    Writes("decode, 256 MLA rows of 1,152", 73728, 256, 1152),
    Writes("prefill, 8,192 MLA rows of 1,152", 73728, 8192, 1152),
    Writes("prefill, 8,192 fp8 MLA rows of 656", 41984, 8192, 656),
    Writes("prefill, 8,192 indexer rows of 132", 8448, 8192, 132),
)


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # vLLM copies and writes with compiled code, which is not in its Python files
    report.title("Copies of blocks, bytes read and written counted")
    for case in COPIES if ON_GPU else [c._replace(blocks=16, pairs=4) for c in COPIES]:
        moved = 2 * case.buffers * case.pairs * case.page
        add = functools.partial(report.add, case.name, num_bytes=moved)
        fresh = functools.partial(copy_blocks, disjoint=True)
        xla = functools.partial(copy_blocks, implementation="xla")
        ours = add(f"{default_implementation()}, fresh", time_copies(case, fresh))
        add("may overlap", time_copies(case, copy_blocks), base=ours)
        add("XLA", time_copies(case, xla), base=ours)
        add("XLA, uint32", time_copies(case, xla, "uint32"), base=ours)
        add("XLA plain copy", time_plain(moved // 2), base=ours)
    report.title("Writes of tokens, bytes read and written counted")
    for case in WRITES if ON_GPU else [w._replace(tokens=64) for w in WRITES]:
        for name in ("mosaic_gpu", "xla") if ON_GPU else ("xla",):
            times = time_writes(case, name)
            report.add(case.name, name, times, num_bytes=2 * case.tokens * case.row)


def time_copies(case: Copies, function, dtype: str = "uint8") -> Times:
    shape = (case.blocks, case.page // jnp.dtype(dtype).itemsize)
    buffers = jax.jit(lambda: [jnp.ones(shape, dtype) for _ in range(case.buffers)])()
    ids = np.random.default_rng(0).permutation(np.arange(1, case.blocks, dtype=np.int32))
    sources, destinations = jnp.asarray(ids[: case.pairs]), jnp.asarray(ids[-case.pairs :])
    copy = jax.jit(function, donate_argnums=0)

    def call():
        nonlocal buffers
        buffers = copy(buffers, sources, destinations)
        return buffers

    return measure(call)


def time_plain(num_bytes: int) -> Times:
    """The same bytes from one buffer into another, without ids."""
    copy, source = jax.jit(jnp.copy), jnp.ones(num_bytes // 4, jnp.uint32)
    return measure(lambda: copy(source))


def time_writes(case: Writes, implementation: str) -> Times:
    rng, blocks = np.random.default_rng(0), 4096 if ON_GPU else 64
    tokens = rng.permutation(blocks * (case.page // case.row))[: case.tokens].astype(np.int32)
    per_page = case.page // case.row
    ids, offsets = jnp.asarray(tokens // per_page), jnp.asarray(tokens % per_page * case.row)
    write = jax.jit(
        functools.partial(write_rows, align=case.row, implementation=implementation),
        donate_argnums=0,
    )
    pages = jnp.zeros((blocks, case.page), jnp.uint8)
    rows = jnp.ones((case.tokens, case.row), jnp.uint8)

    def call():
        nonlocal pages
        pages = write(pages, ids, offsets, rows)
        return pages

    return measure(call)
