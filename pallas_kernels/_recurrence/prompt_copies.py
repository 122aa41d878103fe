"""Copies to and from the shared memory of the kernels of prompts: by TMA, or by cp.async."""

from typing import Protocol

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, Scratch, store, sync_warps
from pallas_kernels._recurrence.prompt_shape import TILE


class Copies(Protocol):
    """Copies of a warpgroup, which computes, too."""

    def barrier(self, count: int, copies: int) -> Scratch:
        """Returns barriers that so many copies each arrive at; None if none are needed."""

    def start(self, source: Ref, target: Ref, loaded: Ref) -> None:
        """Starts a copy to shared memory, of two-dimensional parts by 64 x 64 numbers."""

    def wait(self, loaded: Ref, stage: Array | int, ahead: int, is_last: Array | bool) -> None:
        """Waits for copies.

        Args:
          loaded: barriers.
          ahead: how many copies were started after those, unless ``is_last``.
        """

    def commit(self) -> None:
        """Lets all warps, and copies, see what was stored; waits for all warps."""

    def write(self, part: Array, staged: Ref, out: Ref) -> None:
        """Writes a matrix to global memory; may keep it in shared memory until `end_writes`."""

    def write_transposed(self, part: Array, staged: Ref, out: Ref) -> None:
        """Writes the transpose of a matrix of 16-bit numbers, when writes before have ended."""

    def write_rows(
        self, part: Array, staged: Ref, out: Ref, first: Array, begin: Array, end: Array
    ) -> None:
        """Writes some rows of it, to rows of ``out`` after ``first``; ``staged`` is not tiled."""

    def end_writes(self, only_reads: bool = False) -> None:
        """Waits until writes have ended, or have read what was staged."""


class _Tma:
    """From compute capability 9.0 on: one thread starts a copy, and a barrier counts its bytes."""

    def barrier(self, count: int, copies: int) -> Scratch:
        return plgpu.Barrier(num_barriers=count, num_arrivals=copies)

    def start(self, source: Ref, target: Ref, loaded: Ref) -> None:
        plgpu.copy_gmem_to_smem(source, target, loaded)

    def wait(self, loaded: Ref, stage: Array | int, ahead: int, is_last: Array | bool) -> None:
        plgpu.barrier_wait(loaded.at[stage])

    def commit(self) -> None:
        plgpu.commit_smem()

    def write(self, part: Array, staged: Ref, out: Ref) -> None:
        staged[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out)

    def write_transposed(self, part: Array, staged: Ref, out: Ref) -> None:
        staged.T[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out)

    def write_rows(
        self, part: Array, staged: Ref, out: Ref, first: Array, begin: Array, end: Array
    ) -> None:
        store(staged.T, part)
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _(row: Array) -> None:
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(row, 1)], out.at[pl.ds(first + row, 1)])

    def end_writes(self, only_reads: bool = False) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=only_reads)


class _CpAsync:
    """Of compute capability 8.x: every thread copies 16 bytes at a time, and waits for its own.

    Threads write to global memory themselves.
    """

    def barrier(self, count: int, copies: int) -> Scratch:
        return None

    def start(self, source: Ref, target: Ref, loaded: Ref) -> None:
        promised = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(source, target, oob_mode=promised)

    def wait(self, loaded: Ref, stage: Array | int, ahead: int, is_last: Array | bool) -> None:
        if is_last is True:
            return plgpu.wait_gmem_to_smem(0)
        pl.when(is_last)(lambda: plgpu.wait_gmem_to_smem(0))
        pl.when(~is_last)(lambda: plgpu.wait_gmem_to_smem(ahead))

    def commit(self) -> None:
        sync_warps()

    def write(self, part: Array, staged: Ref, out: Ref) -> None:
        store(out, part)
        sync_warps()  # as others do

    def write_transposed(self, part: Array, staged: Ref, out: Ref) -> None:
        sync_warps()  # all have read what was staged
        staged.T[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        sync_warps()
        store(out, plgpu.load(staged, layout=TILE))

    def write_rows(
        self, part: Array, staged: Ref, out: Ref, first: Array, begin: Array, end: Array
    ) -> None:
        sync_warps()
        store(staged.T, plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED))
        sync_warps()

        @pl.loop(begin, end)
        def _(row: Array) -> None:
            loaded = plgpu.load(staged.at[row], layout=TILE.reduce(0), optimized=False)
            store(out.at[first + row], loaded)

    def end_writes(self, only_reads: bool = False) -> None:
        pass


def copies_of(by_tma: bool) -> Copies:
    """Returns how a kernel copies."""
    return _Tma() if by_tma else _CpAsync()
