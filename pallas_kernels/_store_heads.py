"""Stores of quantised heads from the registers of a warpgroup to the pages of their tokens."""

import functools
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Layout, Ref
from pallas_kernels._paged_attention.token_heads import TokenHeadRow
from pallas_kernels._quantize_heads import ELEMENTS


class Slots(NamedTuple):
    """Places of heads, int32[heads] each.

    heads: their numbers, of one token after the other.
    pages, offsets: of their tokens, whether such a page exists or not.
    """

    heads: Array
    pages: Array
    offsets: Array

    @classmethod
    def find(
        cls, block_ids: Ref, offsets: Ref, heads: Array, layout: Layout, kv_heads: int
    ) -> Self:
        """Loads pages and offsets of tokens from int32[T] each, in global memory."""
        if not _mosaic.OPERANDS_IN_REGISTERS:
            tokens = heads // kv_heads
            return cls(heads, block_ids[...][tokens], offsets[...][tokens])
        of_heads = layout.reduce(1)
        result = instructions.struct(heads.shape, jnp.int32, of_heads)
        plain = plgpu.RefType()

        @plgpu.inline_mgpu(arg_types=(plain, plain, of_heads), return_type=[result, result])
        def load(_: Any, block_ids: Any, offsets: Any, heads: Any) -> Any:
            word, found = instructions.word_type(), list[Any]()
            for ref in (block_ids, offsets):
                numbers = []
                for register in heads.registers.flat:
                    head = instructions.element(register)
                    token = arith.divui(head, instructions.word(kv_heads))
                    pointer = utils.getelementptr(utils.memref_ptr(ref), [token], word)
                    numbers.append(instructions.pack([llvm.load(word, pointer)]))
                found.append(instructions.as_fragments(numbers, heads.shape, jnp.int32, of_heads))
            return found

        return cls(heads, *load(block_ids, offsets, heads))


class Part(NamedTuple):
    """Keys, or values, of heads, from `quantize`.

    elements: int32[heads, bytes], of which the lowest 8 bits count, or fp8.
    scales: float32[heads].
    """

    elements: Array
    scales: Array


def store(
    pages: Ref, slots: Slots, keys: Part, values: Part, layout: Layout, row: TokenHeadRow
) -> None:
    """Stores keys, values and their scales, and with the last head the zeros behind them.

    Args:
      pages: uint8[pages, bytes], in global memory. Heads do nothing if their row is not within.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return _store_in_turn(pages, slots, keys, values, row)
    of_heads = layout.reduce(1)
    part = layout, of_heads

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[of_heads] * 3, *part, *part))
    def write(_: Any, pages: Any, *arrays: Any) -> None:
        lane = instructions.mask(utils.thread_idx(), row.key_bytes // ELEMENTS - 1)
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            head, page, offset = map(instructions.element, registers[:3])
            place = _Place(pages, head, page, offset, lane, row)
            place.store(*registers[3:])

    write(pages, *slots, *keys, *values)


class _Place:
    """The place of what a thread has of a head, by its lane among those of the head."""

    def __init__(self, pages: Any, head: Any, page: Any, offset: Any, lane: Any, row: TokenHeadRow):
        word = instructions.word
        num_pages, page_bytes = ir.MemRefType(pages.type).shape
        self.row, self.lane = row, lane
        self.head = arith.remui(head, word(row.kv_heads))
        self.is_inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.ult, page, word(num_pages)),
            arith.cmpi(arith.CmpIPredicate.ule, offset, word(page_bytes - row.row_bytes)),
        )
        start = instructions.wide_product(page, page_bytes)
        start = arith.addi(instructions.address(pages, 64), start)
        self.start = arith.addi(start, instructions.extend(offset))

    def store(self, key: Any, key_scale: Any, value: Any, value_scale: Any) -> None:
        word, row = instructions.word, self.row
        within = arith.muli(self.head, word(row.head_bytes))
        within = arith.addi(within, arith.muli(self.lane, word(ELEMENTS)))
        where = arith.addi(self.start, instructions.extend(within))
        _store_words(self.is_inside, where, _as_words(key))
        where = arith.addi(where, instructions.wide(row.key_bytes))
        _store_words(self.is_inside, where, _as_words(value))
        # The first lane has both scales, and the next ones of the last head the zeros.
        is_first = arith.cmpi(arith.CmpIPredicate.eq, self.lane, word(0))
        is_last = arith.cmpi(arith.CmpIPredicate.eq, self.head, word(row.kv_heads - 1))
        zeros = (row.row_bytes - row.first_scale) // ELEMENTS - row.kv_heads
        is_zero = arith.cmpi(arith.CmpIPredicate.ule, self.lane, word(zeros))
        stores = arith.ori(is_first, arith.andi(is_last, is_zero))
        within = arith.muli(arith.addi(self.head, self.lane), word(ELEMENTS))
        within = arith.addi(within, word(row.first_scale))
        bits = [
            utils.bitcast(instructions.element(scale), instructions.word_type())
            for scale in (key_scale, value_scale)
        ]
        pair = [arith.select(is_first, scale, word(0)) for scale in bits]
        where = arith.addi(self.start, instructions.extend(within))
        _store_words(arith.andi(self.is_inside, stores), where, pair)


def _as_words(register: Any) -> list[Any]:
    """Returns 8 bytes as two words: fp8, or the lowest bits of integers."""
    kind = ir.VectorType(register.type)
    if kind.element_type != instructions.word_type():
        words = utils.bitcast(register, ir.VectorType.get((2,), instructions.word_type()))
        return [instructions.extract(words, i) for i in range(2)]
    a, b, c, d, e, f, g, h = (instructions.extract(register, i) for i in range(ELEMENTS))
    pairs = [_permute(low, high, 0x0040) for low, high in ((a, b), (c, d), (e, f), (g, h))]
    return [_permute(*pairs[:2], order=0x5410), _permute(*pairs[2:], order=0x5410)]


def _permute(low: Any, high: Any, order: int) -> Any:
    code = f"prmt.b32 $0, $1, $2, {order};"
    return llvm.inline_asm(instructions.word_type(), [low, high], code, "=r,r,r")


def _store_words(condition: Any, where: Any, words: list[Any]) -> None:
    code = """{
        .reg .pred p;
        setp.ne.b32 p, $0, 0;
        @p st.global.v2.b32 [$1], {$2, $3};
    }"""
    given = [arith.extui(instructions.word_type(), condition), where, *words]
    _ = llvm.inline_asm(
        ir.Type.parse("!llvm.void"), given, code, "r,l,r,r,~{memory}", has_side_effects=True
    )


def _store_in_turn(pages: Ref, slots: Slots, keys: Part, values: Part, row: TokenHeadRow) -> None:
    """Does what `store` does, for interpret mode, which knows no single instructions."""
    num_pages, page_bytes = pages.shape
    elements = jnp.concatenate([_as_bytes(part.elements) for part in (keys, values)], axis=1)
    scales = jnp.stack([keys.scales, values.scales], axis=1)
    scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(-1, ELEMENTS)
    zeros = jnp.zeros(row.row_bytes - row.first_scale - row.kv_heads * ELEMENTS, jnp.uint8)

    def put(i: int, head: Array, page: Array, offset: Array) -> None:
        pages[page, pl.ds(offset + head * row.head_bytes, row.head_bytes)] = elements[i]
        first = offset + row.first_scale
        pages[page, pl.ds(first + head * ELEMENTS, ELEMENTS)] = scales[i]
        if zeros.size:

            @pl.when(head == row.kv_heads - 1)
            def _() -> None:
                pages[page, pl.ds(first + row.kv_heads * ELEMENTS, zeros.size)] = zeros

    for i in range(len(slots.heads)):
        head, page, offset = (array[i] for array in slots)
        is_inside = (page >= 0) & (page < num_pages)
        is_inside &= (offset >= 0) & (offset <= page_bytes - row.row_bytes)
        pl.when(is_inside)(functools.partial(put, i, head % row.kv_heads, page, offset))


def _as_bytes(elements: Array) -> Array:
    if elements.dtype == jnp.int32:
        return elements.astype(jnp.uint8)
    return lax.bitcast_convert_type(elements, jnp.uint8)
