"""The Mosaic GPU kernel of `write_token_heads`.

Some lanes of a warp have a key, and the same lanes the value of that head: 8 bytes of each, once it
is quantised. They find its largest magnitude among themselves, and store to the page of its token.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import TiledLayout, utils
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _capability, _mosaic
from pallas_kernels import _instructions as instructions
from pallas_kernels._mosaic import Layout, Ref, call_kernel, full_like, writable, written
from pallas_kernels._paged_attention.token_heads import BIAS, HIGHEST, LEAST, TokenHeadRow

ELEMENTS = 8  # of a thread, and bytes once they are quantised
WARPS, LANES = 4, 32
PASSES = 2  # of a thread block over heads, in one work item
THREAD_BLOCKS_PER_SM = 8
ROUNDER = 1.5 * 2**23  # its sum with a small float32 has the rounded number in its lowest bits


def write_pages(
    pages: Array, block_ids: Array, offsets: Array, keys: Array, values: Array, row: TokenHeadRow
) -> Array:
    """Writes keys and values into pages, in one launch; rows out of their page do nothing.

    Args:
      offsets: int32[T], multiples of 8 or negative.
      keys, values: [T, heads, width].
    """
    lanes = row.key_bytes // ELEMENTS
    together = WARPS * LANES // lanes  # heads
    short = max(0, -(-together // row.kv_heads) - len(block_ids))
    block_ids = jnp.pad(block_ids, (0, short), constant_values=-1)
    offsets = jnp.pad(offsets, (0, short))
    keys, values = (
        jnp.pad(array, ((0, short), (0, 0), (0, 0))).reshape(-1, array.shape[-1])
        for array in (keys, values)
    )
    num_heads = len(keys)
    together *= PASSES if num_heads >= PASSES * together else 1
    items = -(-num_heads // together)
    grid = min(items, _capability.max_thread_blocks(THREAD_BLOCKS_PER_SM))
    layout = layout_of(lanes)

    def kernel(
        ids_ref: Ref, offsets_ref: Ref, keys_ref: Ref, values_ref: Ref, pages_ref: Ref
    ) -> None:
        @pl.loop(lax.axis_index("cta"), items, step=grid)
        def _(item: Array) -> None:
            # The last item is shifted back, and writes some heads again.
            first = jnp.minimum(item * together, num_heads - together)
            heads = (
                plgpu.broadcasted_iota(jnp.int32, (together,), 0, layout=layout.reduce(1)) + first
            )
            slots = find_slots(ids_ref, offsets_ref, heads, layout, row.kv_heads)
            loaded = [
                load(ref, pl.ds(first, together), row, layout) for ref in (keys_ref, values_ref)
            ]
            parts = [quantize(halves, row, layout) for halves in loaded]
            store(pages_ref, heads, slots, parts, layout, row)

    ref = writable(pages)
    call_kernel(
        kernel,
        name="write_token_heads",
        num_thread_blocks=grid,
        operands=[block_ids, offsets, keys, values],
        refs=[ref],
    )
    return written(ref)


def layout_of(lanes: int) -> Layout:
    """Returns the layout of keys, [heads, 8 * lanes], in a warpgroup."""
    rows, width = LANES // lanes, ELEMENTS * lanes
    tiling = Tiling(((WARPS * rows, width), (rows, width), (1, ELEMENTS)))
    found = TiledLayout(tiling, (-6,), (-4, -3), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(
        found.tiling,
        warp_dims=found.warp_dims,
        lane_dims=found.lane_dims,
        vector_dim=found.vector_dim,
    )


def load(ref: Ref, heads: pl.Slice, row: TokenHeadRow, layout: Layout) -> list[Array]:
    """Returns keys, or values, as float32[heads, width]; of 4 bits their halves."""
    width = ref.shape[-1] // (1 + row.is_4_bit)
    starts = range(0, ref.shape[-1], width)
    parts = [ref.at[heads, pl.ds(start, width)] for start in starts]
    return [plgpu.load(part, layout=layout, optimized=False) for part in parts]


def quantize(halves: list[Array], row: TokenHeadRow, layout: Layout) -> tuple[Array, Array]:
    """Returns the bytes of keys, or of values, and their scales, as `TokenHeadRow.pack` has them.

    Args:
      halves: from `load`.

    Returns:
      int32[heads, bytes], of which the lowest 8 bits count, or fp8; and float32[heads].
    """
    halves, highest = [half.astype(jnp.float32) for half in halves], HIGHEST[row.packing]
    largest = [jnp.max(jnp.abs(half), axis=1) for half in halves]
    largest = jnp.maximum(*largest) if row.is_4_bit else largest[0]
    is_plain = (largest >= LEAST) & (largest < jnp.inf)
    zeros, ones, nans = (full_like(largest, value) for value in (0, 1, jnp.nan))
    factor = divide(highest, lax.select(is_plain, largest, ones), layout)
    factor = lax.select(is_plain, factor, zeros)
    scale = largest * jnp.float32(1 / highest)
    scale = lax.select(is_plain, scale, lax.select(largest < LEAST, zeros, nans))
    shape = halves[0].shape
    wide = plgpu.layout_cast(lax.broadcast_in_dim(factor, shape, (0,)), layout)
    if row.packing == "fp8_per_token_head":
        scaled = lax.select(wide > 0, halves[0] * wide, full_like(wide, 0))
        return scaled.astype(jnp.float8_e4m3fn), scale
    bias = BIAS * row.is_4_bit
    rounded = [round_products(half, wide, bias, layout) for half in halves]
    zeros = full_like(rounded[0], bias)
    rounded = [lax.select(wide > 0, one, zeros) for one in rounded]
    return (rounded[0] & 15) | (rounded[1] << 4) if row.is_4_bit else rounded[0], scale


def divide(numerator: float, denominators: Array, layout: Layout) -> Array:
    """Returns quotients, float32[heads], exactly rounded, as Mosaic's are not on GPUs."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return numerator / denominators
    code = f"div.rn.f32 $0, {_constant(numerator)}, $1;"
    return _compute(code, layout.reduce(1), denominators)


def round_products(left: Array, right: Array, more: int, layout: Layout) -> Array:
    """Returns rounded products plus an even number; their lowest 8 bits, in int32[heads, width]."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return jnp.round(left * right).astype(jnp.int32) + more
    # Else the sum would be of the product before it is rounded.
    code = f"""{{
        .reg .f32 product;
        mul.rn.f32 product, $1, $2;
        add.rn.f32 $0, product, {_constant(ROUNDER + more)};
    }}"""
    products = _compute(code, layout, left, right)
    return lax.bitcast_convert_type(products, jnp.int32)


def _constant(number: float) -> str:
    return f"0f{int(np.float32(number).view(np.uint32)):08X}"


def _compute(code: str, layout: Layout, *arrays: Array) -> Array:
    """Returns what instructions compute from the float32 of arrays, in their layout."""
    result = instructions.struct(arrays[0].shape, jnp.float32, layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=result)
    def compute(_: Any, *arrays: Any) -> Any:
        found = []
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            (count,) = ir.VectorType(registers[0].type).shape
            numbers = [
                llvm.inline_asm(
                    ir.F32Type.get(),
                    [instructions.extract(register, i) for register in registers],
                    code,
                    "=f" + ",f" * len(arrays),
                )
                for i in range(count)
            ]
            found.append(instructions.pack(numbers))
        return instructions.as_fragments(found, arrays[0].shape, jnp.float32, layout)

    return compute(*arrays)


def find_slots(
    ids: Ref, offsets: Ref, heads: Array, layout: Layout, kv_heads: int
) -> tuple[Array, Array]:
    """Returns the pages and the offsets of the tokens of heads, int32[heads] each.

    Args:
      ids, offsets: int32[T], in global memory.
      heads: int32[heads], of all tokens, numbered one token after the other.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        tokens = heads // kv_heads
        return ids[...][tokens], offsets[...][tokens]
    of_heads = layout.reduce(1)
    result = instructions.struct(heads.shape, jnp.int32, of_heads)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), of_heads), return_type=[result, result]
    )
    def find(_: Any, ids: Any, offsets: Any, heads: Any) -> Any:
        found: list[list[Any]] = [[], []]
        for register in heads.registers.flat:
            token = arith.divui(instructions.element(register), instructions.word(kv_heads))
            for numbers, ref in zip(found, (ids, offsets), strict=True):
                pointer = utils.getelementptr(
                    utils.memref_ptr(ref), [token], instructions.word_type()
                )
                number = llvm.load(instructions.word_type(), pointer)
                numbers.append(instructions.pack([number]))
        return [
            instructions.as_fragments(numbers, heads.shape, jnp.int32, of_heads)
            for numbers in found
        ]

    return find(ids, offsets, heads)


def store(
    pages: Ref,
    heads: Array,
    slots: tuple[Array, Array],
    parts: list[tuple[Array, Array]],
    layout: Layout,
    row: TokenHeadRow,
) -> None:
    """Stores keys and values and their scales, and with the last head the zeros behind them.

    Args:
      pages: uint8[pages, bytes], in global memory.
      heads, slots: int32[heads]; see `find_slots`.
      parts: of keys and of values, from `quantize`.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return _store_in_turn(pages, heads, slots, parts, row)
    of_heads = layout.reduce(1)
    arg_types = (plgpu.RefType(), of_heads, of_heads, of_heads, layout, of_heads, layout, of_heads)

    @plgpu.inline_mgpu(arg_types=arg_types)
    def write(_: Any, pages: Any, heads: Any, ids: Any, offsets: Any, *parts: Any) -> None:
        word, lane = instructions.word, instructions.mask(utils.thread_idx(), LANES - 1)
        lane = instructions.mask(lane, row.key_bytes // ELEMENTS - 1)  # of those of a head
        num_pages, page = ir.MemRefType(pages.type).shape
        zeros = (row.row_bytes - row.first_scale) // ELEMENTS - row.kv_heads
        given = (heads, ids, offsets, *parts)
        for registers in zip(*(array.registers.flat for array in given), strict=True):
            head, page_id, offset = map(instructions.element, registers[:3])
            head = arith.remui(head, word(row.kv_heads))
            is_inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, page_id, word(num_pages)),
                arith.cmpi(arith.CmpIPredicate.ule, offset, word(page - row.row_bytes)),
            )
            start = arith.addi(
                instructions.address(pages, 64), instructions.wide_product(page_id, page)
            )
            start = arith.addi(start, instructions.extend(offset))
            within = arith.addi(
                arith.muli(head, word(row.head_bytes)), arith.muli(lane, word(ELEMENTS))
            )
            where = arith.addi(start, instructions.extend(within))
            key, key_scale, value, value_scale = registers[3:]
            _store_two_words(is_inside, where, *_as_words(key))
            where = arith.addi(where, instructions.wide(row.key_bytes))
            _store_two_words(is_inside, where, *_as_words(value))
            is_scale = arith.cmpi(arith.CmpIPredicate.eq, lane, word(0))
            is_last = arith.cmpi(arith.CmpIPredicate.eq, head, word(row.kv_heads - 1))
            is_zero = arith.andi(is_last, arith.cmpi(arith.CmpIPredicate.ule, lane, word(zeros)))
            within = arith.muli(arith.addi(head, lane), word(ELEMENTS))
            within = arith.addi(within, word(row.first_scale))
            pair = [
                arith.select(
                    is_scale, utils.bitcast(instructions.element(one), word(0).type), word(0)
                )
                for one in (key_scale, value_scale)
            ]
            is_either = arith.andi(is_inside, arith.ori(is_scale, is_zero))
            _store_two_words(is_either, arith.addi(start, instructions.extend(within)), *pair)

    keys, values = parts
    write(pages, heads, *slots, *keys, *values)


def _as_words(register: Any) -> list[Any]:
    """Returns 8 bytes as two words: fp8, or the lowest bits of integers."""
    count, element = ir.VectorType(register.type).shape[0], register.type.element_type
    if element != instructions.word_type():
        words = utils.bitcast(register, ir.VectorType.get((2,), instructions.word_type()))
        return [instructions.extract(words, i) for i in range(2)]
    numbers = [instructions.extract(register, i) for i in range(count)]
    pairs = [_permute(*numbers[i : i + 2], 0x0040) for i in range(0, count, 2)]
    return [_permute(*pairs[i : i + 2], 0x5410) for i in range(0, count // 2, 2)]


def _permute(low: Any, high: Any, order: int) -> Any:
    kind = instructions.word_type()
    return llvm.inline_asm(kind, [low, high], f"prmt.b32 $0, $1, $2, {order};", "=r,r,r")


def _store_two_words(condition: Any, where: Any, low: Any, high: Any) -> None:
    code = """{
        .reg .pred p;
        setp.ne.b32 p, $0, 0;
        @p st.global.v2.b32 [$1], {$2, $3};
    }"""
    given = [arith.extui(instructions.word_type(), condition), where, low, high]
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), given, code, "r,l,r,r,~{memory}", has_side_effects=True
    )


def _store_in_turn(
    pages: Ref,
    heads: Array,
    slots: tuple[Array, Array],
    parts: list[tuple[Array, Array]],
    row: TokenHeadRow,
) -> None:
    """Does what `store` does, for interpret mode, which knows no single instructions."""
    num_pages, page = pages.shape
    zeros = row.row_bytes - row.first_scale - row.kv_heads * ELEMENTS
    stored = [
        part.astype(jnp.uint8)
        if part.dtype == jnp.int32
        else lax.bitcast_convert_type(part, jnp.uint8)
        for part, _ in parts
    ]
    elements = jnp.concatenate(stored, axis=1)
    scales = jnp.stack([scale for _, scale in parts], axis=1)
    scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(-1, ELEMENTS)
    for i in range(len(heads)):
        head, page_id, offset = heads[i] % row.kv_heads, slots[0][i], slots[1][i]
        is_inside = (page_id >= 0) & (page_id < num_pages)
        is_inside &= (offset >= 0) & (offset <= page - row.row_bytes)

        @pl.when(is_inside)
        def _(i=i, head=head, page_id=page_id, offset=offset) -> None:
            pages[page_id, pl.ds(offset + head * row.head_bytes, row.head_bytes)] = elements[i]
            first = offset + row.first_scale
            pages[page_id, pl.ds(first + head * ELEMENTS, ELEMENTS)] = scales[i]

            @pl.when((head == row.kv_heads - 1) & (zeros > 0))
            def _() -> None:
                first_zero = first + row.kv_heads * ELEMENTS
                pages[page_id, pl.ds(first_zero, max(zeros, 1))] = jnp.zeros(
                    max(zeros, 1), jnp.uint8
                )
