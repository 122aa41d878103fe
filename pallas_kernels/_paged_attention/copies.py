"""Copies to the shared memory of a thread block: by TMA, or by cp.async."""

from typing import Protocol

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, Scratch
from pallas_kernels._paged_attention.decode_shape import DecodeShape


class Copies(Protocol):
    """Copies of the rows of steps and of the queries of a tile."""

    def barrier(self, count: int, copies: int) -> Scratch:
        """Returns barriers that so many copies each arrive at; None if none are needed."""

    def start(self, source: Ref, target: Ref, full: Ref, stage: Array | int) -> None:
        """Starts copying some rows of a step."""

    def wait(self, full: Ref, stage: Array | int, is_last: Array) -> None:
        """Waits for a step; ``is_last``: fewer steps than stages follow."""

    def start_query(self, source: Ref, target: Ref, full: Ref, index: Array | int) -> None:
        """Starts copying queries [rows, K], if that needs no waiting."""

    def finish_query(self, source: Ref, target: Ref, full: Ref, index: Array | int) -> None:
        """Ends copying queries, after copies of steps were started."""

    def store_weights(self, target: Ref, weights: Array) -> None:
        """Stores [keys, rows] to a transposed reference."""

    def commit(self) -> None:
        """Orders what was read and stored before copies that follow, and waits for all warps."""


class _Tma:
    """From compute capability 9.0 on: one thread starts a copy, and a barrier counts its bytes."""

    def barrier(self, count: int, copies: int) -> Scratch:
        return plgpu.Barrier(num_barriers=count, num_arrivals=copies)

    def start(self, source: Ref, target: Ref, full: Ref, stage: Array | int) -> None:
        plgpu.copy_gmem_to_smem(source, target, full.at[stage])

    def wait(self, full: Ref, stage: Array | int, is_last: Array) -> None:
        plgpu.barrier_wait(full.at[stage])

    def start_query(self, source: Ref, target: Ref, full: Ref, index: Array | int) -> None:
        plgpu.copy_gmem_to_smem(source, target, full.at[index])

    def finish_query(self, source: Ref, target: Ref, full: Ref, index: Array | int) -> None:
        plgpu.barrier_wait(full.at[index])

    def store_weights(self, target: Ref, weights: Array) -> None:
        target[...] = weights  # by stmatrix

    def commit(self) -> None:
        plgpu.commit_smem()


class _CpAsync:
    """Of compute capability 8.x: every thread copies 16 bytes at a time, and waits for its own.

    Mosaic adds barriers of all warps to waits, and around stores and copies.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def barrier(self, count: int, copies: int) -> Scratch:
        return None

    def start(self, source: Ref, target: Ref, full: Ref, stage: Array | int) -> None:
        promised = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(source, target, oob_mode=promised)

    def wait(self, full: Ref, stage: Array | int, is_last: Array) -> None:
        pl.when(is_last)(lambda: plgpu.wait_gmem_to_smem(0))
        pl.when(~is_last)(lambda: plgpu.wait_gmem_to_smem(self.ahead))

    def start_query(self, source: Ref, target: Ref, full: Ref, index: Array | int) -> None:
        pass

    def finish_query(self, source: Ref, target: Ref, full: Ref, index: Array | int) -> None:
        # 8 rows have too few tiles for cp.async.
        layout = plgpu.Layout.MMA_RHS(target.dtype)
        for row in range(0, target.shape[0], 8):
            rows = pl.ds(row, 8)
            loaded = plgpu.load(source.at[rows].T, layout=layout, optimized=False)
            target.at[rows].T[...] = loaded

    def store_weights(self, target: Ref, weights: Array) -> None:
        target[...] = plgpu.layout_cast(weights, plgpu.Layout.WGMMA_TRANSPOSED)

    def commit(self) -> None:
        pass


def copies_of(shape: DecodeShape) -> Copies:
    """Returns how a kernel that decodes copies."""
    return copies_ahead((shape.stages - 1) * shape.steps.granules, shape.by_tma)


def copies_ahead(ahead: int, by_tma: bool) -> Copies:
    """Returns how a kernel copies, given the copies that are started after those of a step."""
    return _Tma() if by_tma else _CpAsync(ahead)
