"""Products of 64 keys and the queries of a warpgroup, whose columns pairs of warps divide.

A warp that had 16 keys to itself would load all queries for them: most of what shared memory moves
where a thread block has many queries. Here a pair of warps has 32 keys, and each of the two takes
half of the columns: it loads half of the queries, for twice as many keys. Then each gives the
other the sums of 16 keys.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels._mosaic import Ref
from pallas_kernels._paged_attention.tasks import STEP

TILE = 1024  # bytes of 8 rows and 128 bytes of each, whose parts of 16 bytes are swizzled
LINE, PART = 128, 16
FIRST_BARRIER = 8  # of named ones; Mosaic takes the first


def multiply_in_pairs(keys: Ref, query: Ref, exchanged: Ref) -> Array:
    """Returns the products of keys and queries, float32[STEP, rows].

    Args:
      keys: 16-bit [STEP, width], in tiles.
      query: [rows, width], likewise; rows are a multiple of 16, and the width of 64.
      exchanged: 16-bit [rows, STEP], memory for sums, which no warp reads any more.
    """
    (rows, width), dtype = query.shape, jnp.dtype(query.dtype)
    tiled = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(LINE)))
    result = instructions.struct((STEP, rows), jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(tiled, tiled, tiled), return_type=result)
    def run(_: Any, keys: Any, query: Any, exchanged: Any) -> Any:
        pair = _Pair(dtype, rows, width)
        sums = pair.multiply(instructions.address(keys, 32), instructions.address(query, 32))
        own = pair.exchange(sums, instructions.address(exchanged, 32))
        found = [instructions.pack(four[i : i + 2]) for four in own for i in (0, 2)]
        return instructions.as_fragments(found, result.shape, jnp.float32, plgpu.Layout.WGMMA)

    return run(keys, query, exchanged)


class _Pair:
    """The code of a warp. Of each line of 128 bytes one warp of a pair takes the first half."""

    def __init__(self, dtype: jnp.dtype, rows: int, width: int) -> None:
        self.blocks, self.lines = rows // 8, width * dtype.itemsize // LINE
        self.dtype = dtype
        thread = utils.thread_idx()
        self.lane = instructions.mask(thread, 31)
        self.warp = instructions.mask(instructions.shift(thread, 5), 3)
        self.side, self.pair = instructions.mask(self.warp, 1), instructions.shift(self.warp, 1)
        self.group = instructions.shift(thread, 7)

    def _start(self, base: Any, octet: Any, part: Any) -> Any:
        """Returns the address of a part of 16 bytes in the first line of a row of an octet."""
        row = instructions.mask(self.lane, 7)
        part = arith.addi(part, arith.muli(self.side, instructions.word(LINE // PART // 2)))
        where = arith.addi(base, arith.muli(octet, instructions.word(TILE * self.lines)))
        where = arith.addi(where, arith.muli(row, instructions.word(LINE)))
        return arith.addi(where, arith.muli(arith.xori(row, part), instructions.word(PART)))

    def multiply(self, keys: Any, query: Any) -> list[list[list[Any]]]:
        """Returns sums of 4 numbers of a thread, for twice 16 keys and 8 queries each."""
        low = instructions.mask(instructions.shift(self.lane, 3), 1)
        high = instructions.shift(self.lane, 4)
        octet = arith.addi(arith.muli(self.pair, instructions.word(4)), low)
        of_keys, of_query = list[Any](), list[Any]()
        for i in (0, 2):
            two = instructions.word(i)
            of_keys.append(self._start(keys, octet, arith.addi(high, two)))
            of_query.append(self._start(query, high, arith.addi(low, two)))
        zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        sums = [[[zero] * 4 for _ in range(self.blocks)] for _ in range(2)]

        def load(base: Any, octets: int, line: int) -> list[Any]:
            offset = instructions.word(TILE * (octets * self.lines + line))
            return instructions.ldmatrix(arith.addi(base, offset), "")

        for line in range(self.lines):
            for i in range(2):
                left = [load(of_keys[i], 2 * k, line) for k in range(2)]
                right = [load(of_query[i], 2 * j, line) for j in range(self.blocks // 2)]
                for j, two in enumerate(right):
                    for k in range(2):
                        for n in range(2):
                            given = sums[k][2 * j + n], left[k], two[2 * n : 2 * n + 2]
                            sums[k][2 * j + n] = instructions.mma(self.dtype, *given)
        return sums

    def exchange(self, sums: list[list[list[Any]]], memory: Any) -> list[list[Any]]:
        """Returns the sums of the 16 keys of this warp, with those of the other one added."""
        is_second = arith.cmpi(arith.CmpIPredicate.eq, self.side, instructions.word(1))
        own, others = list[list[Any]](), list[list[Any]]()
        for first, second in zip(*sums, strict=True):
            pairs = list(zip(first, second, strict=True))
            own.append([arith.select(is_second, b, a) for a, b in pairs])
            others.append([arith.select(is_second, a, b) for a, b in pairs])
        half = self.blocks // 2  # as many as there is memory for

        def place(warp: Any, block: int) -> Any:
            index = arith.addi(arith.muli(warp, instructions.word(32 * half)), self.lane)
            index = arith.addi(index, instructions.word(32 * block))
            return arith.addi(memory, arith.muli(index, instructions.word(PART)))

        other = arith.xori(self.warp, instructions.word(1))
        for first in (0, half):
            if first:
                self._wait()
            for block in range(half):
                _store(place(self.warp, block), others[first + block])
            self._wait()
            for block in range(half):
                found = _load(place(other, block))
                mine = own[first + block]
                own[first + block] = [arith.addf(a, b) for a, b in zip(mine, found, strict=True)]
        return own

    def _wait(self) -> None:
        """Waits for the other warp of the pair."""
        barrier = arith.addi(arith.muli(self.group, instructions.word(2)), self.pair)
        barrier = arith.addi(barrier, instructions.word(FIRST_BARRIER))
        kind = ir.Type.parse("!llvm.void")
        code = "bar.sync $0, 64;"
        llvm.inline_asm(kind, [barrier], code, "r,~{memory}", has_side_effects=True)


def _store(where: Any, numbers: list[Any]) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [where, *numbers],
        "st.shared.v4.f32 [$0], {$1, $2, $3, $4};",
        "r,f,f,f,f,~{memory}",
        has_side_effects=True,
    )


def _load(where: Any) -> list[Any]:
    kind = ir.F32Type.get()
    found: Any = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * 4),
        [where],
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,r,~{memory}",
        has_side_effects=True,
    )
    return [llvm.extractvalue(kind, found, [i]) for i in range(4)]
