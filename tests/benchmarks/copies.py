"""Block copies and writes of new tokens: our kernels, XLA's own way, a plain copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import copy_blocks, default_implementation, write_rows
from tests.benchmarks.timing import ON_GPU, Report, Times, by_size, measure
from tests.benchmarks.vllm_peer import VllmPeer
from tests.kernels.arg_specs import COPY_SPECS, WRITE_SPECS, CopySpec, WriteSpec


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # vLLM copies and writes with compiled code, which is not in its Python files
    report.title("Copies of blocks, bytes read and written counted")
    small = tuple(case._replace(blocks=16, pairs=4) for case in COPY_SPECS)
    for case in by_size(full=COPY_SPECS, small=small, smallest=small[-2:-1]):
        moved = 2 * case.buffers * case.pairs * case.page
        add = functools.partial(report.add, case.name, num_bytes=moved)
        fresh = functools.partial(copy_blocks, disjoint=True)
        xla = functools.partial(copy_blocks, implementation="xla")
        ours = add(f"{default_implementation('copy_blocks')}, fresh", time_copies(case, fresh))
        add("may overlap", time_copies(case, copy_blocks), base=ours)
        add("XLA", time_copies(case, xla), base=ours)
        add("XLA, uint32", time_copies(case, xla, "uint32"), base=ours)
        add("XLA plain copy", time_plain(moved // 2), base=ours)
    report.title("Writes of tokens, bytes read and written counted")
    rows = tuple(case._replace(blocks=64, tokens=64) for case in WRITE_SPECS)
    for case in by_size(full=WRITE_SPECS, small=rows, smallest=rows[:2]):
        for name in ("mosaic_gpu", "xla") if ON_GPU else ("xla",):
            times = time_writes(case, name)
            report.add(case.name, name, times, num_bytes=2 * case.tokens * case.row)


def time_copies(case: CopySpec, function, dtype: str = "uint8") -> Times:
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
    """Times the same bytes from one buffer into another, without ids."""
    copy, source = jax.jit(jnp.copy), jnp.ones(num_bytes // 4, jnp.uint32)
    return measure(lambda: copy(source))


def time_writes(case: WriteSpec, implementation: str) -> Times:
    rng = np.random.default_rng(0)
    tokens = rng.permutation(case.blocks * (case.page // case.row))[: case.tokens].astype(np.int32)
    per_page = case.page // case.row
    ids, offsets = jnp.asarray(tokens // per_page), jnp.asarray(tokens % per_page * case.row)
    write = jax.jit(
        functools.partial(write_rows, align=case.row, implementation=implementation),
        donate_argnums=0,
    )
    pages = jnp.zeros((case.blocks, case.page), jnp.uint8)
    rows = jnp.ones((case.tokens, case.row), jnp.uint8)

    def call():
        nonlocal pages
        pages = write(pages, ids, offsets, rows)
        return pages

    return measure(call)
