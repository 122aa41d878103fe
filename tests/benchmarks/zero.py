"""Zeroing of fresh blocks: the Mosaic kernel, XLA's scatter, a fill, and vLLM's kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import default_implementation, zero_blocks
from tests.benchmarks.timing import Report, Times, added, by_size, make_matrix, measure, work
from tests.benchmarks.vllm_peer import VllmPeer
from tests.kernels.arg_specs import ZERO_SPECS, ZeroSpec


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title("Zeroing blocks: GPU time of one call, in place")
    for case in by_size(full=ZERO_SPECS, small=ZERO_SPECS, smallest=ZERO_SPECS[-2:-1]):
        fewer = by_size(full=1, small=64, smallest=512)
        case = case._replace(blocks=max(8, case.blocks // fewer), ids=max(1, case.ids // fewer))
        ids = np.random.default_rng(0).permutation(np.arange(1, case.blocks))[: case.ids]
        add = functools.partial(report.add, case.name, num_bytes=case.num_bytes)
        ours = add(default_implementation("zero_blocks"), time_jax(case, ids, _ours))
        add("XLA, unique ids", time_jax(case, ids, _xla_unique, "uint32"), base=ours)  # its best
        add("XLA, raw bytes", time_jax(case, ids, _xla_unique), base=ours)
        add("XLA fill", time_fill(case), base=ours)
        if peer is not None and peer.has_tables:
            add("vLLM", time_vllm(case, ids, peer), base=ours)
    time_added(report)


def _ours(buffers, ids, axis):
    return zero_blocks(buffers, ids, block_axis=axis)


def _xla_unique(buffers, ids, axis):
    where = (slice(None),) * axis
    return [
        b.at[(*where, ids)].set(0, unique_indices=True, mode="promise_in_bounds") for b in buffers
    ]


def make_buffers(case: ZeroSpec, dtype: str = "uint8") -> list[jax.Array]:
    shape = (case.blocks, case.page // jnp.dtype(dtype).itemsize)
    shapes = [(case.buffers, *shape)] if case.stacked else [shape] * case.buffers
    return jax.jit(lambda: [jnp.ones(shape, dtype) for shape in shapes])()


def time_jax(case: ZeroSpec, ids: np.ndarray, function, dtype: str = "uint8") -> Times:
    step = jax.jit(functools.partial(function, axis=int(case.stacked)), donate_argnums=0)
    buffers, listed = make_buffers(case, dtype), jnp.asarray(ids, jnp.int32)

    def call():
        nonlocal buffers
        buffers = step(buffers, listed)
        return buffers

    return measure(call)


def time_fill(case: ZeroSpec) -> Times:
    """Times a fresh buffer of zeros as large as what is zeroed: XLA's memset."""
    fill = jax.jit(lambda: jnp.zeros(case.num_bytes // 4, jnp.uint32))
    return measure(fill)


def time_vllm(case: ZeroSpec, ids: np.ndarray, peer: VllmPeer) -> Times:
    import torch

    buffers = [
        torch.ones((case.blocks, case.page), dtype=torch.uint8, device="cuda")
        for _ in range(case.buffers)
    ]
    words = case.page // 4
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device="cuda")
    sizes = torch.full((case.buffers,), words, dtype=torch.int64, device="cuda")
    block = min(1 << (words - 1).bit_length(), 1024)
    grid = (len(ids), case.buffers, -(-words // block))
    listed = torch.tensor(ids, dtype=torch.int64, device="cuda")

    def call() -> None:
        peer.zero_kernel[grid](addresses, sizes, sizes, listed, BLOCK_SIZE=block)

    times = measure(call, lambda _: torch.cuda.synchronize())
    del buffers
    torch.cuda.empty_cache()
    return times


def time_added(report: Report) -> None:
    """Prints what zeroing one block in 80 buffers adds to a jitted step that runs anyway."""
    case = ZERO_SPECS[-1]
    case = case._replace(
        blocks=by_size(full=case.blocks, small=8, smallest=2),
        buffers=by_size(full=case.buffers, small=case.buffers, smallest=3),
    )
    ids = np.array([1], np.int32)

    def step(zeroing, buffers, matrix, ids):
        return (zero_blocks(buffers, ids) if zeroing else buffers), work(matrix)

    found = {}
    for zeroing in (False, True):
        jitted = jax.jit(functools.partial(step, zeroing), donate_argnums=(0, 1))
        state = make_buffers(case), make_matrix()

        def call(jitted=jitted):
            nonlocal state
            state = jitted(*state, ids)
            return state[1]

        name = f"a step {'with' if zeroing else 'without'} zeroing"
        found[zeroing] = report.add(name, f"{case.buffers} buffers", measure(call))
    more = added(found[True], found[False])
    report.note(f"one block in {case.buffers} buffers adds to a jitted step: {more}")
