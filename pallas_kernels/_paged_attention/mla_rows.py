"""Latent vectors in pages of one token, which the Mosaic GPU kernel loads row by row.

They are rows of chosen tokens, and lie anywhere. The copy engine of a Hopper takes boxes of 8 rows
where products want them, so here each thread copies 16 bytes at a time by cp.async, and 8 threads
the 128 bytes of a row that are adjacent in shared memory.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, full_like, store
from pallas_kernels._paged_attention.packed import GROUP
from pallas_kernels._paged_attention.steps import Steps
from pallas_kernels._paged_attention.tasks import STEP
from pallas_kernels._warp_rows import WORDS

LINE = 128  # bytes that 8 threads copy at once
TILE = 8 * LINE  # bytes
AT_ONCE = 4  # rows that a warp copies at once, of 16
# Row 16 * warp + 4 * register + lane // 8.
OF_THREADS = plgpu.Layout.TILED(
    plgpu.Tiling(((STEP,), (STEP // 4,), (AT_ONCE,), (1,))),
    warp_dims=(-4,),
    lane_dims=(-2, plgpu.Replicated(8)),
    vector_dim=-1,
)
OF_KEYS = plgpu.Layout.WGMMA.reduce(0)
# Row r of this thread, its number in the pool, the bytes to copy and the thread's 16 of a line.
# A row that is not loaded becomes zeros.
BEGIN = """{{
    .reg .b32 t, r, c, row, n, x, at; .reg .b64 from; .reg .pred p;
    mov.u32 t, %tid.x;
    and.b32 c, t, 7;
    and.b32 r, t, 96;
    shr.u32 r, r, 1;
    bfe.u32 x, t, 3, 2;
    add.u32 r, r, x;
    add.u32 r, r, {first};
    shl.b32 x, r, 2;
    add.u32 x, x, $0;
    ld.shared.b32 row, [x];
    setp.ge.s32 p, row, 0;
    selp.b32 n, 16, 0, p;
    max.s32 row, row, 0;
    mad.wide.s32 from, row, {row_bytes}, $1;
    mad.wide.u32 from, c, 16, from;
"""
COPY = "    cp.async.cg.shared.global [{at} + {target}], [from + {source}], 16, n;\n"
# In tiles of 8 rows and 128 bytes, whose parts of 16 bytes are swizzled.
TILED = """
    shr.u32 x, r, 3;
    mad.lo.u32 at, x, {tiles}, {base};
    and.b32 x, r, 7;
    mad.lo.u32 at, x, 128, at;
    xor.b32 x, x, c;
    mad.lo.u32 at, x, 16, at;
"""
PADDED = "    mad.lo.u32 at, r, {stride}, {base};\n    mad.lo.u32 at, c, 16, at;\n"
COPY_SCALES = """
    setp.eq.u32 p, c, 0;
    mad.lo.u32 at, r, 16, $3;
    @p cp.async.cg.shared.global [at], [from + {source}], 16, n;
"""


def find_rows(
    steps: Steps, table: Ref, key: Array, seen: tuple[Array, Array], first_row: Array
) -> Array:
    """Returns int32[STEP], rows of the pool of the keys from ``key`` on; -1 for those not loaded.

    Args:
      table: int32[STEP], the pages of these keys.
      seen: first key that a query sees, and one past the last.
      first_row: row at which the first page begins.
    """
    ids = plgpu.load(table, layout=OF_THREADS, optimized=False)
    keys = plgpu.broadcasted_iota(jnp.int32, (STEP,), 0, layout=OF_THREADS) + key
    known = (ids >= 0) & (ids < steps.num_pages) & (keys >= seen[0]) & (keys < seen[1])
    return jnp.where(known, ids * steps.page_rows + first_row, full_like(ids, -1))


def start_tiled(source: Ref, rows: Ref, found: Array, target: Ref) -> None:
    """Starts to copy rows of 16-bit numbers into a tiled array, [STEP, width].

    Args:
      rows: int32[STEP], shared memory that takes the numbers of the rows, ``found``.
    """
    store(rows, found)
    width = 2 * source.shape[1]
    lines = range(width // LINE)
    copies = "".join(COPY.format(at="at", target=TILE * i, source=LINE * i) for i in lines)
    code = TILED.format(tiles=TILE * len(lines), base="$2") + copies
    _copy_each(code, width, source, rows, (target, _tiling(2)))


def start_packed(
    source: Ref, rows: Ref, found: Array, values: Ref, scales: Ref, rotary: Ref
) -> None:
    """Starts to copy packed rows: groups of values [4, STEP, 144], scales and rotary [STEP, 72]."""
    store(rows, found)
    groups, width = values.shape[0], source.shape[1]
    size = groups * GROUP
    stride = values.shape[2]
    code = PADDED.format(stride=stride, base="$2")
    for group in range(groups):
        code += COPY.format(at="at", target=group * STEP * stride, source=group * GROUP)
    code += PADDED.format(stride=2 * rotary.shape[1], base="$4")
    code += COPY.format(at="at", target=16, source=size + 16)
    code += COPY_SCALES.format(source=size)
    _copy_each(code, width, source, rows, (values, ()), (scales, ()), (rotary, ()))


def start_tiled_packed(
    source: Ref, rows: Ref, found: Array, values: Ref, scales: Ref, rotary: Ref
) -> None:
    """Does the same into tiles: values [STEP, 512], scales [STEP, 4] and rotary [STEP, 64]."""
    store(rows, found)
    size, width = values.shape[1], source.shape[1]
    lines = range(size // LINE)
    code = TILED.format(tiles=TILE * len(lines), base="$2")
    for i in lines:
        code += COPY.format(at="at", target=TILE * i, source=LINE * i)
    code += TILED.format(tiles=TILE, base="$4")
    code += COPY.format(at="at", target=0, source=size + 16)
    code += COPY_SCALES.format(source=size)
    _copy_each(code, width, source, rows, (values, _tiling(1)), (scales, ()), (rotary, _tiling(2)))


def _tiling(itemsize: int) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, LINE // itemsize)), plgpu.SwizzleTransform(LINE)


def _copy_each(
    code: str, row_bytes: int, source: Ref, rows: Ref, *targets: tuple[Ref, tuple[Any, ...]]
) -> None:
    types: list[Any] = [plgpu.RefType(transforms) for _, transforms in targets]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *types))
    def copy(_: object, rows: Ref, source: Ref, *targets: Ref) -> None:
        arguments = [utils.memref_ptr(ref) for ref in (rows, source, *targets)]
        utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)
        for first in range(0, STEP // 4, AT_ONCE):
            begin = BEGIN.format(first=first, row_bytes=row_bytes)
            utils.inline_ptx(begin + code + "}", *arguments, has_side_effects=True)
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(rows, source, *[target for target, _ in targets])


def finish(pending: int, by_wgmma: bool = True) -> None:
    """Waits for all rows but those of the last ``pending`` steps, and lets products read them."""

    @plgpu.inline_mgpu()
    def wait(_: object) -> None:
        utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)
        if by_wgmma:
            utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    wait()


def load_words(values: Ref, first: int) -> Array:
    """Loads 32 bytes of packed rows, from byte ``first`` on, that are in tiles; see `as_keys`."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return values.at[:, first : first + 32][...]
    tiles = values.shape[1] // LINE
    result = instructions.struct((STEP // 4 * 32,), jnp.int32, WORDS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_tiling(1)),), return_type=result)
    def load(_: object, values: Ref) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        octet = arith.addi(
            arith.muli(warp, instructions.word(2)),
            instructions.mask(instructions.shift(lane, 3), 1),
        )
        row, chunk = instructions.mask(lane, 7), instructions.shift(lane, 4)
        chunk = arith.addi(chunk, instructions.word(first % LINE // 16))
        where = arith.muli(octet, instructions.word(TILE * tiles))
        where = arith.addi(where, instructions.word(first // LINE * TILE))
        where = arith.addi(where, arith.muli(row, instructions.word(LINE)))
        where = arith.addi(where, arith.muli(arith.xori(row, chunk), instructions.word(16)))
        words = instructions.ldmatrix(arith.addi(instructions.address(values, 32), where), "")
        return instructions.as_fragments(words, result.shape, jnp.int32, WORDS)

    return load(values)


def load_scales(scales: Ref) -> list[Array]:
    """Loads the scales of the groups of packed rows from shared memory, float32[STEP] each."""
    groups = scales.shape[-1]
    if not _mosaic.OPERANDS_IN_REGISTERS:
        loaded = scales[...]
        return [loaded[:, group] for group in range(groups)]
    layout: Any = plgpu.Layout.WGMMA.reduce(1)
    results = [instructions.struct((STEP,), jnp.float32, layout)] * groups

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=results)
    def load(_: object, scales: Ref) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        row = arith.muli(warp, instructions.word(STEP // 4))
        row = arith.addi(row, instructions.shift(lane, 2))
        base, kind = utils.memref_ptr(scales), ir.VectorType.get((groups,), ir.F32Type.get())
        rows = [
            llvm.load(kind, instructions.at(base, arith.addi(row, instructions.word(below))))
            for below in (0, 8)
        ]
        return [
            instructions.as_fragments(
                [instructions.pack([instructions.extract(four, group)]) for four in rows],
                *((STEP,), jnp.float32, layout),
            )
            for group in range(groups)
        ]

    return load(scales)
