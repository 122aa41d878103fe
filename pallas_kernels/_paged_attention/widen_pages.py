"""The Mosaic GPU kernel that widens pages of keys and values with scales of heads to 16 bits.

Threads load 8 bytes each, whose bits become the last ones of a float32 with constant first ones,
and store the 8 or 16 numbers that they hold, times the scale of their token and head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _capability, _mosaic
from pallas_kernels import _instructions as instructions
from pallas_kernels._mosaic import Ref, call_unfused
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.steps import GRANULE
from pallas_kernels._paged_attention.token_heads import SCALE_BYTES, TokenHeadRow

THREADS, UNIT = 128, 8  # of a thread block; bytes that a thread loads at once
AT_ONCE = 4  # loads of a thread before it converts
PER_SM = 4
ZEROS_AND_43 = 0x00000043  # prmt makes the float32 128 of its bytes

Convert = Callable[[Any, Any], list[list[Any]]]  # of a word and its scale: parts of 4 float32


def widen_pages(
    pages: StridedPages, row: TokenHeadRow, ids: Array, count: Array, wide: StridedPages
) -> StridedPages:
    """Returns pages in 16 bits: those of the first ``count`` ids, and undefined ones after them.

    Args:
      row: the parts of a row of ``pages``.
      ids: int32[N], in range.
      wide: describes N pages, without data.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:  # interpret mode does not know its instructions
        elements, scales = row.split(pages.read(ids)[:, :, 0])
        parts = zip(jnp.split(elements, [row.key_width], axis=-1), (0, 1), strict=True)
        numbers = jnp.concatenate([part * scales[..., i, None] for part, i in parts], axis=-1)
        return wide._replace(data=numbers.astype(wide.dtype).reshape(wide.data.shape))
    work = jnp.concatenate([jnp.stack([count, pages.first_row()]), ids])
    items = ids.shape[0] * (pages.tokens // GRANULE)
    call = plgpu.kernel(
        lambda *refs: _widen(pages, row, *refs),
        out_type=[jax.ShapeDtypeStruct((ids.shape[0] * pages.tokens, wide.row_width), wide.dtype)],
        grid=(min(items, _capability.max_thread_blocks(PER_SM)),),
        grid_names=("block",),
        kernel_name="paged_attention_widen",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    (rows,) = call_unfused(call, [work, pages.rows_as("uint8")])
    return wide._replace(data=rows.reshape(wide.data.shape))


def _widen(pages: StridedPages, row: TokenHeadRow, work: Ref, source: Ref, target: Ref) -> None:
    """Widens every so many granules, the code of a thread block."""
    block, num_blocks = lax.axis_index("block"), lax.axis_size("block")
    per_page, layout = pages.tokens // GRANULE, plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    count, first_row = work[0] * per_page, work[1]
    rounds = lax.div(jnp.maximum(count - block, 0) + (num_blocks - 1), num_blocks)
    units = GRANULE * row.first_scale // UNIT
    together = THREADS * AT_ONCE

    def spread(number: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast(number, (THREADS,)), layout)

    @pl.loop(0, rounds)
    def _(turn: Array) -> None:
        item = turn * num_blocks + block
        place, granule = lax.div(item, per_page), lax.rem(item, per_page)
        first = first_row + work[2 + place] * pages.page_rows + granule * GRANULE

        @pl.loop(0, -(-units // together))
        def _(part: Array) -> None:
            starts = map(spread, (first, item * GRANULE, part * together))
            _widen_units(row, layout, source, target, *starts)


def _widen_units(
    row: TokenHeadRow,
    layout: Any,
    source: Ref,
    target: Ref,
    from_row: Array,
    to_row: Array,
    start: Array,
) -> None:
    """Widens some units of 8 rows, from a unit on; those past the end are the last one."""
    per_row, plain = row.first_scale // UNIT, plgpu.RefType()
    row_bytes, row_width, dtype = source.shape[-1], target.shape[-1], target.dtype
    widths, head_width = (row.key_width, row.value_width), row.key_width + row.value_width
    convert = _CONVERT[row.elements]

    @plgpu.inline_mgpu(arg_types=(plain, plain, layout, layout, layout))
    def run(_: Any, source: Any, target: Any, *starts: Any) -> None:
        from_row, to_row, start = [instructions.element(one.registers.flat[0]) for one in starts]
        thread = instructions.mask(utils.thread_idx(), THREADS - 1)
        read = _at(instructions.address(source, 64), from_row, row_bytes)
        write = _at(instructions.address(target, 64), to_row, 2 * row_width)
        loaded = []
        for i in range(AT_ONCE):
            unit = arith.addi(arith.addi(start, thread), instructions.word(i * THREADS))
            unit = arith.minui(unit, instructions.word(GRANULE * per_row - 1))
            own, byte = _divide(unit, per_row)
            byte = arith.muli(byte, instructions.word(UNIT))
            head, within = _divide(byte, row.head_bytes)
            is_value = arith.cmpi(arith.CmpIPredicate.uge, within, instructions.word(row.key_bytes))
            first = _at(read, own, row_bytes)
            which = arith.select(is_value, instructions.word(SCALE_BYTES), instructions.word(0))
            scale = arith.addi(arith.muli(head, instructions.word(2 * SCALE_BYTES)), which)
            scale = _at(first, arith.addi(scale, instructions.word(row.first_scale)), 1)
            within = arith.select(
                is_value, arith.subi(within, instructions.word(row.key_bytes)), within
            )
            column = arith.addi(arith.muli(head, instructions.word(head_width)), within)
            key_width = arith.select(
                is_value, instructions.word(row.key_width), instructions.word(0)
            )
            to = _at(_at(write, own, 2 * row_width), arith.addi(column, key_width), 2)
            half = arith.select(
                is_value, instructions.word(widths[1]), instructions.word(widths[0])
            )  # bytes of a half
            loaded.append((_load_pair(_at(first, byte, 1)), _load_float(scale), to, half))
        for words, scale, to, half in loaded:
            parts = [convert(word, scale) for word in words]
            for upper, numbers in enumerate(zip(*parts, strict=True)):
                to = _at(to, half, 1) if upper else to
                _store(to, _pack([number for four in numbers for number in four], dtype))

    run(source, target, from_row, to_row, start)


def _divide(number: Any, by: int) -> tuple[Any, Any]:
    return arith.divui(number, instructions.word(by)), arith.remui(number, instructions.word(by))


def _at(address: Any, index: Any, size: int) -> Any:
    return arith.addi(address, instructions.wide_product(index, size))


def _int8(word: Any, scale: Any) -> list[list[Any]]:
    word = arith.xori(word, instructions.word(0x80808080))  # the number plus 128, in units of 2**-8
    scale = arith.mulf(scale, _float(2.0**8))
    return [[_scale(_insert(word, 0x4505 | i << 4), -128.5, scale) for i in range(4)]]


def _int4(word: Any, scale: Any) -> list[list[Any]]:
    halves = [instructions.mask(bits, 0x0F0F0F0F) for bits in (word, instructions.shift(word, 4))]
    return [
        [_scale(_insert(half, 0x4055 | i << 8), -136.0, scale) for i in range(4)] for half in halves
    ]


def _fp8(word: Any, scale: Any) -> list[list[Any]]:
    half, pair = ir.IntegerType.get_signless(16), llvm.StructType.get_literal([_f32()] * 2)
    code = (
        "{ .reg .b32 p; .reg .b16 l, h; cvt.rn.f16x2.e4m3x2 p, $2; mov.b32 {l, h}, p; "
        "cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    )
    numbers = list[Any]()
    for part in (word, instructions.shift(word, 16)):
        found: Any = llvm.inline_asm(pair, [arith.trunci(half, part)], code, "=f,=f,h")
        numbers += [llvm.extractvalue(_f32(), found, [i]) for i in range(2)]
    return [[arith.mulf(number, scale) for number in numbers]]


_CONVERT: dict[str, Convert] = {"int8": _int8, "uint8": _int4, "float8_e4m3fn": _fp8}


def _f32() -> Any:
    return ir.F32Type.get()


def _float(value: float) -> Any:
    return arith.constant(_f32(), ir.FloatAttr.get(_f32(), value))


def _insert(word: Any, selector: int) -> Any:
    """Returns the float32 whose bytes are chosen from a word and `ZEROS_AND_43`."""
    code = f"prmt.b32 $0, $1, {ZEROS_AND_43:#x}, {selector:#06x};"
    bits: Any = llvm.inline_asm(instructions.word_type(), [word], code, "=r,r")
    return arith.bitcast(_f32(), bits)


def _scale(number: Any, bias: float, scale: Any) -> Any:
    return arith.mulf(arith.addf(number, _float(bias)), scale)


def _pack(numbers: list[Any], dtype: Any) -> list[Any]:
    """Returns pairs of float32 rounded to 16 bits."""
    code = f"cvt.rn.{'bf16x2' if dtype == jnp.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"
    return [
        llvm.inline_asm(instructions.word_type(), [low, high], code, "=r,f,f")
        for low, high in zip(numbers[::2], numbers[1::2], strict=True)
    ]


def _load_pair(address: Any) -> list[Any]:
    kind = llvm.StructType.get_literal([instructions.word_type()] * 2)
    code = "ld.global.v2.b32 {$0, $1}, [$2];"
    found: Any = llvm.inline_asm(kind, [address], code, "=r,=r,l,~{memory}", has_side_effects=True)
    return [llvm.extractvalue(instructions.word_type(), found, [i]) for i in range(2)]


def _load_float(address: Any) -> Any:
    code = "ld.global.f32 $0, [$1];"
    return llvm.inline_asm(_f32(), [address], code, "=f,l,~{memory}", has_side_effects=True)


def _store(address: Any, words: list[Any]) -> None:
    code, nothing = "st.global.v4.b32 [$0], {$1, $2, $3, $4};", ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [address, *words], code, "l,r,r,r,r,~{memory}", has_side_effects=True)
