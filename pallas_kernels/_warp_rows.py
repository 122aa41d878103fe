"""Rows that each warp of a warpgroup copies to shared memory for itself, and loads from there.

A warp has 16 of 64 rows, and waits for no other warp. In interpret mode rows are copied otherwise,
and loaded as arrays.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref

ROWS = 64
GROUP = 32  # bytes of a row that one ldmatrix loads
WORDS: Any = plgpu.Layout.WG_STRIDED((4 * 128,), vec_size=1)


def copy_rows(
    source: Ref,
    target: Ref,
    scales: Ref,
    rows: Array,
    head: Array,
    *,
    first: int,
    swizzle: int,
) -> None:
    """Starts copying 64 rows of a head and their scales by cp.async; each warp copies its own.

    Args:
      source: bytes[rows, n] in global memory; of a row those of head ``h`` begin at ``h`` times
        its bytes, and its two scales at byte ``first + 8 h``.
      target: bytes[64, width].
      scales: float32[64, 4], of which 64 x 2 are written.
      rows: int32[64]; 8 and 8 are adjacent.
      head: int32[64], all the same.
    """
    row_bytes, width = source.shape[-1], target.shape[-1]
    layout: Any = plgpu.Layout.WGMMA.reduce(1)
    plain = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(plain, _tiled(swizzle), plain, layout, layout))
    def copy(_: Any, source: Any, target: Any, scales: Any, rows: Any, head: Any) -> None:
        utils.warp_barrier()  # what was there is read
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        group = instructions.shift(lane, 2)
        bases = [arith.subi(instructions.element(row), group) for row in rows.registers.flat]
        head = instructions.element(head.registers.flat[0])
        start = instructions.address(source, 64)
        chunks = width // 16
        together = 32 // chunks  # rows
        row, chunk = (
            arith.divui(lane, instructions.word(chunks)),
            arith.remui(lane, instructions.word(chunks)),
        )
        within = arith.addi(
            arith.muli(row, instructions.word(row_bytes)), arith.muli(chunk, instructions.word(16))
        )
        within = arith.addi(within, arith.muli(head, instructions.word(width)))
        sources = [
            arith.addi(
                arith.addi(start, instructions.wide_product(base, row_bytes)),
                instructions.extend(within),
            )
            for base in bases
        ]
        begin = arith.addi(
            instructions.address(target, 32), arith.muli(warp, instructions.word(16 * width))
        )
        for first_row in range(0, 16, together):
            own = arith.ori(row, instructions.word(first_row))
            where = arith.addi(
                arith.muli(own, instructions.word(width)), _swizzled(own, chunk, width)
            )
            where = arith.addi(begin, where)
            ahead = first_row % 8 * row_bytes
            wide = arith.addi(sources[first_row // 8], instructions.wide(ahead))
            instructions.copy_async(where, wide, 16)
        own, which = instructions.shift(lane, 1), instructions.mask(lane, 1)
        is_upper = arith.cmpi(arith.CmpIPredicate.uge, own, instructions.word(8))
        base = arith.addi(arith.select(is_upper, bases[1], bases[0]), instructions.mask(own, 7))
        offset = arith.addi(arith.muli(head, instructions.word(8)), instructions.word(first))
        offset = arith.addi(offset, arith.muli(which, instructions.word(4)))
        wide = arith.addi(
            arith.addi(start, instructions.wide_product(base, row_bytes)),
            instructions.extend(offset),
        )
        where = arith.addi(
            arith.muli(warp, instructions.word(16 * 8)), arith.muli(lane, instructions.word(4))
        )
        instructions.copy_async(arith.addi(instructions.address(scales, 32), where), wide, 4)

    copy(source, target, scales, rows, head)


def commit_copies() -> None:
    """Makes a group of the copies that were started."""
    instructions.run_asm("cp.async.commit_group;")


def wait_for_copies(groups: int) -> None:
    """Waits for all copies of a warp but those of the last groups."""
    instructions.run_asm(f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff;")


def load_words(rows: Ref, first: int, *, swizzle: int, transposed: bool) -> Array:
    """Loads `GROUP` bytes of 64 rows, from byte ``first`` on, that `copy_rows` copied.

    Args:
      transposed: as the rows of an operand, by `as_values`; else as its columns, by `as_keys`.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return rows.at[:, first : first + GROUP][...]
    width = rows.shape[-1]

    @plgpu.inline_mgpu(
        arg_types=(_tiled(swizzle),),
        return_type=instructions.struct((4 * 128,), jnp.int32, WORDS),
    )
    def load(_: Any, rows: Any) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        row, chunk = (
            instructions.mask(lane, 15),
            arith.addi(instructions.shift(lane, 4), instructions.word(first // 16)),
        )
        where = arith.addi(
            arith.muli(warp, instructions.word(16 * width)),
            arith.muli(row, instructions.word(width)),
        )
        where = arith.addi(where, _swizzled(row, chunk, width))
        kind = ".trans" if transposed else ""
        words = instructions.ldmatrix(arith.addi(instructions.address(rows, 32), where), kind)
        return instructions.as_fragments(words, (4 * 128,), jnp.int32, WORDS)

    return load(rows)


def load_scales(scales: Ref, head: Array) -> list[Array]:
    """Loads the scales of the keys and of the values of a head, float32[64] each."""
    layout: Any = plgpu.Layout.WGMMA.reduce(1)
    if not _mosaic.OPERANDS_IN_REGISTERS:  # of two heads
        loaded, is_second = scales[...], lax.broadcast(lax.rem(head, 2) == 1, (ROWS,))
        return [lax.select(is_second, loaded[:, 2 + i], loaded[:, i]) for i in range(2)]
    results = [instructions.struct((ROWS,), jnp.float32, layout)] * 2

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=results)
    def load(_: Any, scales: Any) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        row, base = (
            arith.addi(arith.muli(warp, instructions.word(16)), instructions.shift(lane, 2)),
            utils.memref_ptr(scales),
        )
        kind = ir.VectorType.get((2,), ir.F32Type.get())
        pairs = [
            llvm.load(
                kind, utils.getelementptr(base, [arith.addi(row, instructions.word(8 * i))], kind)
            )
            for i in range(2)
        ]
        return [
            instructions.as_fragments(
                [instructions.pack([instructions.extract(pair, i)]) for pair in pairs],
                (ROWS,),
                jnp.float32,
                layout,
            )
            for i in range(2)
        ]

    return load(scales)


def _tiled(swizzle: int) -> Any:
    """Returns the type of bytes[64, width] in shared memory, whose order warps ignore."""
    return plgpu.RefType((plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle)))


def _swizzled(row: Any, chunk: Any, width: int) -> Any:
    """Returns the byte of 16 in a row, so that 8 rows have theirs in all banks."""
    turned = (
        instructions.mask(row, 7)
        if width >= 128
        else instructions.mask(instructions.shift(row, 1), 3)
    )
    return arith.muli(arith.xori(chunk, turned), instructions.word(16))
