"""The constants of the decode kernel, and the tiles that fit into shared memory. No Mosaic."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels import _capability
from pallas_kernels._paged_attention.rule import PART, Config
from pallas_kernels._paged_attention.steps import Steps
from pallas_kernels._paged_attention.tasks import STEP
from pallas_kernels._paged_attention.tiles import AttentionArrays
from pallas_kernels._paged_attention.token_heads import TokenHeadRow

LOOKAHEAD_BYTES = 128 * 1024  # in flight per SM; with more, thread blocks slow each other down
STAGES = 2  # steps that a thread block prefetches, if they fit
SHARED_ALIGN, BARRIER_BYTES = 1024, 64  # of arrays in shared memory, and of all barriers
SCALE, VALUE_SCALE, SINKS = range(3)  # columns of the numbers of a KV head
# Bytes of a row in a tile of shared memory, largest first; smaller ones are read with conflicts.
SWIZZLES = 128, 64, 32
TILE_ROWS = 8
WARPS = 4
MERGED = WARPS * STEP * 8  # float32; sums of warps that are added at once
SCALES = 4  # float32 of a key and a value of 2 heads, which a copy of 16 bytes brings
# mma is as fast as wgmma for few rows; with 64, each warp loads so many that it takes 1.1 times.
MAX_MMA_ROWS = 16
PREFILL_ROWS = 64  # queries of a warpgroup in the kernel for many; fewer tokens do not take it
MIN_QUERIES, MAX_QUERIES, MAX_ROWS = 4, 8, 64  # of a tile
MAX_SUMS = 64 * 256  # rows times the width of values, limited by registers, of which some spill
FEW_SUMS = MAX_SUMS // 2  # and of which none does
MAX_WARP_SUMS = 8 * 256  # rows times the width of values, if each warp has sums of its own


class DecodeShape(NamedTuple):
    """Constants of a compiled kernel.

    rows: query heads of a tile, a multiple of 8.
    page: dtype of the pages.
    compute: 16-bit dtype of the products with keys, and with values if these have no scales.
    by_tma: whether pages are copied by TMA; else by cp.async.
    by_wgmma: whether products are by wgmma; else by mma.
    finishes: whether a tile that one thread block serves whole is finished there.
    warpgroups: of a thread block, with the queries of a KV head each; they share latent vectors.
    """

    config: Config
    steps: Steps
    rows: int
    page: jnp.dtype
    compute: jnp.dtype
    by_tma: bool = True
    by_wgmma: bool = False
    finishes: bool = False
    warpgroups: int = 1

    @property
    def own(self) -> tuple[int, ...]:
        """Returns the leading axis of shared memory of which each warpgroup has a part."""
        return (self.warpgroups,) if self.warpgroups > 1 else ()

    @property
    def widens(self) -> bool:
        return self.page.itemsize == 1

    @property
    def is_4_bit(self) -> bool:
        """Returns whether a byte has two elements."""
        return self.config.token_head_row is not None and self.config.token_head_row.is_4_bit

    @property
    def is_packed(self) -> bool:
        """Returns whether rows are packed latent vectors, widened a part at a time."""
        return self.config.latent_row is not None

    @property
    def by_row(self) -> bool:
        """Returns whether threads copy rows by their numbers: of packed vectors, or chosen ones."""
        return self.is_packed or self.steps.by_row

    @property
    def hole_bits(self) -> int:
        """Returns the bits of a step that tell which of its granules are holes."""
        return 0 if self.by_row else self.steps.granules

    @property
    def by_warp(self) -> bool:
        """Returns whether each warp has keys of its own, which registers limit."""
        if self.config.token_head_row is None or self.config.reproducible:
            return False
        if self.width & (self.width - 1):  # warps copy rows in powers of two
            return False
        return self.rows * self.config.value_width <= MAX_WARP_SUMS

    @property
    def query_dtype(self) -> jnp.dtype:
        """Returns the dtype of queries; see `packed_queries`."""
        return jnp.dtype(jnp.float16) if self.is_packed else self.compute

    @property
    def value_compute(self) -> jnp.dtype:
        """Returns the 16-bit dtype of weights and values.

        In float16, weights times the scales of their values could be 0 or infinite.
        """
        by_heads = self.config.token_head_row is not None
        return jnp.dtype(jnp.bfloat16) if by_heads else self.compute

    @property
    def width(self) -> int:
        """Returns the stored elements of a key and its value."""
        return sum(self.config.stored_widths)

    @property
    def has_own_barriers(self) -> bool:
        """Returns whether warps wait for each other only where they must: Mosaic adds barriers."""
        return self.warpgroups > 1 or self.by_row

    @property
    def by_pairs(self) -> bool:
        """Returns whether pairs of warps divide the columns of keys; see `multiply_in_pairs`."""
        return self.warpgroups > 1 and self.rows % 16 == 0

    @property
    def reduced(self) -> int:
        """Returns the float32 that the warps of a warpgroup exchange; 0: Mosaic has memory."""
        return WARPS * self.rows if self.has_own_barriers else 0

    @property
    def widened_width(self) -> int:
        """Returns the columns of values that are widened at once."""
        return PART if self.is_packed else self.config.value_width

    @property
    def staged(self) -> int:
        """Returns the rows of the output that are written at once."""
        return math.gcd(self.rows, 32) if self.finishes else 0

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a key and its value."""
        row = self.config.latent_row
        if row is not None:
            return row.row_bytes
        return self.width * self.page.itemsize

    @property
    def swizzle(self) -> int:
        """Returns the bytes of a row in a tile of loaded pages; 0 if there is no tiling of them."""
        row = self.config.token_head_row
        align = math.gcd(*[width * self.page.itemsize for width in self.config.stored_widths])
        if self.by_row:
            return SWIZZLES[0]
        if row is not None:
            align = math.gcd(align, row.row_bytes)
        return swizzle_of(self.row_bytes, align, self.steps.granule, self.by_tma)

    @property
    def stages(self) -> int:
        """Returns the steps that are prefetched; 0 if shared memory is too small."""
        limit = _capability.shared_memory_bytes()
        if self.is_packed and 2 * (self._shared_bytes(1) + SHARED_ALIGN) <= limit + SHARED_ALIGN:
            return 1  # two thread blocks hide each other's latencies better than two stages
        return max(n for n in range(STAGES + 1) if n == 0 or self._shared_bytes(n) <= limit)

    @property
    def thread_blocks_per_sm(self) -> int:
        """Returns the thread blocks that fit on an SM and load `LOOKAHEAD_BYTES` at most."""
        lookahead = self.stages * STEP * self.row_bytes
        is_narrow = self.config.value_width <= (128 if self.widens else 64)
        by_registers = 4 if self.rows == 8 and (is_narrow or not self.widens) else 2
        if self.rows <= 16 and (is_narrow or self.widens):
            by_registers = max(by_registers, 3)
        by_registers //= self.warpgroups
        if self.by_warp:
            sums = self.rows * self.config.value_width
            # Wide rows of 8 bits take longer with three.
            by_registers = 3 if sums <= 8 * 128 and self.is_4_bit else 2
            by_registers = 4 if sums <= 8 * 64 else by_registers
        by_memory = _capability.shared_memory_bytes() // self._shared_bytes(self.stages)
        return max(1, min(by_registers, by_memory, LOOKAHEAD_BYTES // lookahead))

    @property
    def num_workers(self) -> int:
        blocks = _capability.max_thread_blocks(self.thread_blocks_per_sm)
        return max(1, blocks // (self.config.kv_heads // self.warpgroups))

    def _shared_bytes(self, stages: int) -> int:
        """Returns the shared memory of a thread block."""
        config, rows = self.config, self.rows
        arrays = [
            stages * STEP * self.row_bytes,
            self.warpgroups * rows * config.key_width * 2,  # queries
            self.warpgroups * rows * STEP * 2,  # weights
            self.warpgroups * self.reduced * 4,
            MERGED * 4 if self.by_warp else self.widens * STEP * self.widened_width * 2,
            self.by_row * stages * STEP * 4,
            (config.token_head_row is not None) * stages * STEP * SCALES * 4,
            *[self.staged * width * config.out_dtype.itemsize for _, width in config.value_parts],
        ]
        aligned = sum(-(-size // SHARED_ALIGN) * SHARED_ALIGN for size in arrays)
        return aligned + BARRIER_BYTES


def swizzle_of(row_bytes: int, align: int, granule: int, by_tma: bool) -> int:
    """Returns the bytes of a row in a tile of loaded rows; 0 if there is no tiling of them.

    The warps that copy a granule by cp.async need tiles for all of them.

    Args:
      align: bytes; slices of columns begin at multiples of it.
      granule: rows that are copied at once.
    """
    widest, rows = math.gcd(128, align), granule // TILE_ROWS
    if by_tma:
        return widest
    for swizzle in [width for width in SWIZZLES if width <= widest]:
        if rows % WARPS == 0 or row_bytes // swizzle % (WARPS // math.gcd(rows, 2)) == 0:
            return swizzle
    return 0


def decode_shape(
    arrays: AttentionArrays, config: Config, rows: int, finishes: bool = False
) -> DecodeShape:
    """Returns the constants of a call for tiles of so many query heads, rounded up."""
    page, compute = page_and_compute_dtype(arrays, config.token_head_row)
    # With 8-bit pages, finishing takes registers that one more thread block on an SM needs, and
    # without TMA it takes stores of single elements.
    instructions, rows = _capability.instructions_of("decode"), -(-rows // 8) * 8
    by_tma = instructions != "mma, cp.async"
    by_wgmma = instructions == "mma or wgmma, TMA" and page.itemsize > 1 and rows > MAX_MMA_ROWS
    by_wgmma &= not config.reproducible  # bits must not depend on the queries of a request
    shape = DecodeShape(
        config,
        step_sizes(arrays, STEP, config.token_head_row),
        rows,
        page,
        compute,
        by_tma=by_tma,
        by_wgmma=by_wgmma,
        finishes=finishes and by_tma and page.itemsize > 1 and arrays.pages.tokens > 1,
    )
    shares = config.values_in_keys and config.kv_heads % 2 == 0
    if shares and by_tma and page.itemsize > 1:
        # Widened values would need a buffer for each of the warpgroups.
        both = shape._replace(warpgroups=2, finishes=False)
        shape = both if both.stages >= shape._replace(finishes=False).stages else shape
    # Where shared memory is short, another kernel finishes.
    return shape if shape.stages else shape._replace(finishes=False)


def max_queries(arrays: AttentionArrays, config: Config) -> int:
    """Returns the most queries of a tile: what registers and shared memory hold."""
    rows = MAX_ROWS
    rows = min(rows, MAX_SUMS // config.value_width)
    while rows > config.group and not decode_shape(arrays, config, rows).stages:
        rows //= 2
    return max(1, rows // config.group)


def share_latents(arrays: AttentionArrays, config: Config) -> tuple[AttentionArrays, Config]:
    """Returns a call whose heads attend to latent vectors in groups, as if to KV heads of theirs.

    The largest ones of which two steps fit into shared memory, or else one.
    """
    most = min(MAX_ROWS, MAX_SUMS // config.value_width)
    groups = [n for n in range(most, 0, -1) if config.group % n == 0]
    stages = {n: decode_shape(arrays, config.replace(group=n), n).stages for n in groups}
    group = next((n for n in groups if stages[n] == max(stages.values())), 1)
    kv_heads = config.group // group
    scales = [jnp.repeat(scale, kv_heads) for scale in (arrays.key_scale, arrays.value_scale)]
    arrays = arrays._replace(key_scale=scales[0], value_scale=scales[1])
    return arrays, config.replace(kv_heads=kv_heads, group=group)


def decode_size(arrays: AttentionArrays, config: Config) -> int:
    """Returns the queries of a tile: about as many as the requests of the batch have.

    At least `MIN_QUERIES`, because with padding in the batch requests have more than the average.
    Among prompts, which have tiles of their own, only as many as no register is spilled for.
    """
    per_request = -(-arrays.queries.shape[0] // arrays.block_tables.shape[0])
    usual = min(config.max_queries, max(MIN_QUERIES, per_request))
    size = min(1 << (usual - 1).bit_length(), MAX_QUERIES, max_queries(arrays, config))
    if config.max_queries > MAX_QUERIES:
        size = min(size, max(1, FEW_SUMS // (config.value_width * config.group)))
    return size


def may_have_many(arrays: AttentionArrays, config: Config, size: int) -> bool:
    """Returns whether any request may have more queries than tiles of decoding, and enough."""
    may_have = arrays.query_start_loc is not None and config.max_queries > size
    return may_have and arrays.queries.shape[0] >= PREFILL_ROWS


def page_and_compute_dtype(
    arrays: AttentionArrays, row: TokenHeadRow | None = None
) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the dtype of pages and the 16-bit dtype of products.

    8-bit floats and numbers with scales need float16.
    """
    page = jnp.dtype(arrays.pages.dtype if row is None else row.elements)
    is_float8 = page.itemsize == 1 and jnp.issubdtype(page, jnp.floating)
    is_half = is_float8 or row is not None
    return page, jnp.dtype(jnp.float16) if is_half else arrays.queries.dtype


def step_sizes(arrays: AttentionArrays, size: int, row: TokenHeadRow | None = None) -> Steps:
    pages, width = arrays.pages, arrays.pages.width if row is None else row.head_bytes
    is_latent = row is None and pages.kv_heads == 1
    return Steps(
        size,
        page_tokens=pages.tokens,
        num_pages=pages.num_pages,
        width=arrays.block_tables.shape[1],
        page_rows=pages.page_rows,
        # Latent vectors are those of all heads.
        head_rows=0 if is_latent else pages.head_rows,
        head_columns=0 if pages.heads_first or is_latent else width,
    )
