"""Zeroing throughput: the Mosaic kernel against XLA's scatter, side by side.

Times chains of calls inside one jit, so that Python and dispatch stay out.
Run: python -m tests.benchmarks.zero_blocks
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import default_implementation, zero_blocks

# name -> (buffer shapes, ids to zero); blocks are axis 0, one byte per element
CASES = {
    "256 MiB in 32 buffers": ([(1024, 65536)] * 32, 128),
    "256 MiB in 1 buffer": ([(32768, 65536)], 4096),
    "1 block in 80 buffers": ([(256, 32768)] * 80, 1),
}
REPEATS = 5


def measure(shapes: list[tuple[int, int]], count: int, implementation: str, chain: int) -> float:
    """Median seconds of one call."""
    run = jax.jit(
        lambda buffers, ids: jax.lax.fori_loop(
            0, chain, lambda _, b: zero_blocks(b, ids, implementation=implementation), buffers
        ),
        donate_argnums=0,
    )
    ids = np.random.default_rng(0).permutation(np.arange(1, shapes[0][0]))[:count]
    ids = jnp.asarray(ids, jnp.int32)
    buffers = jax.jit(lambda: [jnp.ones(shape, jnp.uint8) for shape in shapes])()
    buffers = jax.block_until_ready(run(buffers, ids))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        buffers = jax.block_until_ready(run(buffers, ids))
        times.append((time.perf_counter() - start) / chain)
    return statistics.median(times)


def main() -> None:
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, median of {REPEATS}")
    for name, (shapes, count) in CASES.items():
        num_bytes = len(shapes) * count * shapes[0][1]
        time_of = functools.partial(measure, shapes, count)
        row = f"{name:<24} xla {_show(num_bytes, xla := time_of('xla', 5))}"
        if default_implementation() == "mosaic_gpu":
            row += f"   mosaic_gpu {_show(num_bytes, ours := time_of('mosaic_gpu', 100))}"
            row += f"   {xla / ours:.1f}x"
        print(row, flush=True)


def _show(num_bytes: int, seconds: float) -> str:
    return f"{seconds * 1e6:8.1f} us {num_bytes / seconds / 1e12:5.2f} TB/s"


if __name__ == "__main__":
    main()
