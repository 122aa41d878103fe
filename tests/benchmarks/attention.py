"""Attention over pages: the Mosaic kernels, XLA, jax's own library, and vLLM's Triton and FA3.

Page ids are shuffled over a pool that is larger than the L2 cache. Times are of the whole
call, its task map included, which a model's layers share. Two bounds of the same device go with
them: the time that reading the bytes takes, and the rate of a plain product.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    AttentionRule,
    LatentPacking,
    PackedRow,
    RequestPages,
    TokenHeadRow,
    default_implementation,
    paged_attention,
)
from tests.benchmarks.attention_bounds import MAX_ROW_BYTES, time_product, time_reading
from tests.benchmarks.attention_peers import Tensors, as_tensors, fa3_call, triton_call, wait
from tests.benchmarks.timing import ON_GPU, Report, Times, by_size, measure
from tests.benchmarks.vllm_peer import VllmPeer

PACKED: LatentPacking = "fp8_ds_mla"


class AttentionSpec(NamedTuple):
    """Requests of these lengths, with this many queries, all or each; None: one, by themselves.

    pages: their dtype, `PACKED` for packed latent vectors, or one with a scale for each head.
    value: width of values that are the first elements of latent vectors; None: keys and values lie
      side by side.
    own_value: width of these values; None: as wide as keys.
    window: keys that a query sees; None: all up to its own.
    spread: pages of the pool for each that is read.
    """

    name: str
    lens: tuple[int, ...]
    heads: int
    kv_heads: int
    width: int
    page_tokens: int
    pages: str = "bfloat16"
    queries: int | tuple[int, ...] | None = None
    value: int | None = None
    own_value: int | None = None
    window: int | None = None
    spread: int = 1

    @property
    def row(self) -> int:
        """Elements that a token and KV head have; of packed rows bytes."""
        if self.pages == PACKED:
            return self.packed_row.row_bytes
        if self.by_heads is not None:
            return self.by_heads.row_bytes // self.kv_heads
        return self.width + (self.own_value or self.width) * (self.value is None)

    @property
    def counts(self) -> tuple[int, ...]:
        """Queries of each request."""
        if isinstance(self.queries, tuple):
            return self.queries
        return (self.queries or 1,) * len(self.lens)

    @property
    def packed_row(self) -> PackedRow:
        return PackedRow(self.value or self.width, self.width - (self.value or self.width))

    @property
    def by_heads(self) -> TokenHeadRow | None:
        if not self.pages.endswith("per_token_head"):
            return None
        packing: Any = self.pages
        return TokenHeadRow(packing, self.kv_heads, self.width, self.own_value or self.width)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, read once."""
        is_packed = self.pages == PACKED or self.by_heads is not None
        item = 1 if is_packed else jnp.dtype(self.pages).itemsize
        return sum(self.lens) * self.kv_heads * self.row * item

    @property
    def row_bytes(self) -> int:
        """Bytes of a token and KV head."""
        return self.num_bytes // sum(self.lens) // self.kv_heads

    @property
    def num_operations(self) -> int:
        """Additions and multiplications of what queries see."""
        pairs, window = 0, self.window or max(self.lens)
        for length, count in zip(self.lens, self.counts, strict=True):
            seen = np.arange(length - count, length) + 1
            pairs += int(np.minimum(seen, window).sum())
        return 2 * self.heads * (self.width + (self.value or self.own_value or self.width)) * pairs

    def shorter(self, times: int) -> "AttentionSpec":
        """Returns the same with fewer and shorter requests; itself for 1."""
        if times == 1:
            return self
        page = self.page_tokens
        lens = [-(-length // times // page) * page for length in self.lens[-4:]]
        counts = tuple(map(min, self.counts[-4:], lens))
        return self._replace(lens=tuple(lens), queries=self.queries and counts)


FP8 = "float8_e4m3fn"
BY_HEADS = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
# All of 2,048 tokens, and as many chosen ones of 32k.
CHOSEN = tuple(
    AttentionSpec(
        *(f"MLA {pages} {heads} x 576, {batch} x 2k, {name}", (2048,) * batch, heads, 1, 576),
        *(page_tokens, PACKED if pages == "packed" else "bfloat16"),
        value=512,
        spread=spread,
    )
    for batch, heads in ((8, 8), (64, 16), (64, 128))
    for pages in ("bf16", "packed")
    for name, page_tokens, spread in (("page 64", 64, 1), ("chosen", 1, 16))
)
UNLIKE = (300, 700, 1200, 1800, 2400, 3000)
SPECS = (
    AttentionSpec("bf16 32/8, 64 x 8k, page 16", (8192,) * 64, 32, 8, 128, 16),
    AttentionSpec("bf16 32/8, 32 x 4k, page 64", (4096,) * 32, 32, 8, 128, 64),
    AttentionSpec("bf16 32/8, 8 x 32k, page 64", (32_768,) * 8, 32, 8, 128, 64),
    AttentionSpec("bf16 64/8, 4 x 32k, page 64", (32_768,) * 4, 64, 8, 128, 64),
    AttentionSpec("bf16 32/4, 1 x 256k, page 64", (262_144,), 32, 4, 128, 64),
    AttentionSpec("bf16 8/1, 8 x 128k, page 64", (131_072,) * 8, 8, 1, 128, 64),
    AttentionSpec("bf16 32/8, 4 x 4k, page 16", (4096,) * 4, 32, 8, 128, 16),
    AttentionSpec("fp8 32/8, 64 x 8k, page 16", (8192,) * 64, 32, 8, 128, 16, FP8),
    AttentionSpec("fp8 32/8, 64 x 8k, page 64", (8192,) * 64, 32, 8, 128, 64, FP8),
    AttentionSpec("fp8 64/8, 128 x 2k, page 64", (2048,) * 128, 64, 8, 128, 64, FP8),
    AttentionSpec("fp8 16/2 x 256, 64 x 8k, page 16", (8192,) * 64, 16, 2, 256, 16, FP8),
    AttentionSpec("fp8 16/2 x 256, 64 x 8k, page 64", (8192,) * 64, 16, 2, 256, 64, FP8),
    *(
        AttentionSpec(
            f"{packing[:4]} by heads {heads}/{kv_heads} x {width}, 64 x 8k, page {page}",
            *((8192,) * 64, heads, kv_heads, width, page, packing),
        )
        for heads, kv_heads, width, page, packings in (
            (32, 8, 128, 16, BY_HEADS),
            (16, 2, 256, 64, BY_HEADS[2:]),
            (64, 8, 64, 16, BY_HEADS[2:]),
        )
        for packing in packings
    ),
    AttentionSpec("fp8 64/8 x 64, 64 x 8k, page 16", (8192,) * 64, 64, 8, 64, 16, FP8),
    AttentionSpec("fp8 32/4, 1 x 256k, page 64", (262_144,), 32, 4, 128, 64, FP8),
    AttentionSpec("fp8 8/1, 32 x 32k, page 64", (32_768,) * 32, 8, 1, 128, 64, FP8),
    AttentionSpec("bf16 32/8, 64k + 31 x 4k, page 16", (65_536, *(4096,) * 31), 32, 8, 128, 16),
    AttentionSpec("bf16 32/8, 4 each over 64 x 8k", (8192,) * 64, 32, 8, 128, 16, queries=4),
    AttentionSpec("MLA bf16 128 x 576, 64 x 8k, page 64", (8192,) * 64, 128, 1, 576, 64, value=512),
    AttentionSpec("MLA bf16 16 x 576, 64 x 8k, page 64", (8192,) * 64, 16, 1, 576, 64, value=512),
    AttentionSpec(
        "MLA fp8 128 x 576, 64 x 8k, page 64", (8192,) * 64, 128, 1, 576, 64, FP8, value=512
    ),
    AttentionSpec(
        "MLA packed 128 x 576, 64 x 8k, page 64", (8192,) * 64, 128, 1, 576, 64, PACKED, value=512
    ),
    *CHOSEN,
    AttentionSpec("bf16 32/8, prefill 2 x 8k, page 16", (8192,) * 2, 32, 8, 128, 16, queries=8192),
    AttentionSpec("bf16 32/8, prefill 2 x 8k, page 64", (8192,) * 2, 32, 8, 128, 64, queries=8192),
    AttentionSpec("bf16 32/8, 4 x 2k over 16k", (16_384,) * 4, 32, 8, 128, 16, queries=2048),
    AttentionSpec("bf16 32/8, 64 over 32k", (32_768,), 32, 8, 128, 16, queries=64),
    AttentionSpec("bf16 32/8, 256 over 32k", (32_768,), 32, 8, 128, 16, queries=256),
    AttentionSpec(
        *("bf16 32/8, 60 decodes of 1k, 100 of 8k", (*(1024,) * 60, 8192), 32, 8, 128, 16),
        queries=(*(1,) * 60, 100),
    ),
    AttentionSpec("bf16 32/8, prefill 1 x 32k", (32_768,), 32, 8, 128, 16, queries=32_768),
    AttentionSpec("bf16 32/8, prefill 8 x 1k", (1024,) * 8, 32, 8, 128, 16, queries=1024),
    AttentionSpec("bf16 32/8, prefill of 6, 300 to 3k", UNLIKE, 32, 8, 128, 16, queries=UNLIKE),
    AttentionSpec(
        "bf16 32/8, 4 x 4k, window 1k", (4096,) * 4, 32, 8, 128, 16, queries=4096, window=1024
    ),
    AttentionSpec("bf16 64/8 x 64, prefill 4 x 2k", (2048,) * 4, 64, 8, 64, 16, queries=2048),
    AttentionSpec("bf16 32/8 x 96, prefill 4 x 2k", (2048,) * 4, 32, 8, 96, 16, queries=2048),
    AttentionSpec("bf16 16/2 x 256, prefill 2 x 8k", (8192,) * 2, 16, 2, 256, 16, queries=8192),
    AttentionSpec(
        *("bf16 16/8 x 256, 4 x 4k, window 1k", (4096,) * 4, 16, 8, 256, 16),
        queries=4096,
        window=1024,
    ),
    AttentionSpec(
        *("bf16 128/128 x 192 + 128, prefill 2 x 4k", (4096,) * 2, 128, 128, 192, 16),
        queries=4096,
        own_value=128,
    ),
    AttentionSpec("fp8 32/8, prefill 2 x 8k, page 64", (8192,) * 2, 32, 8, 128, 64, FP8, 8192),
    AttentionSpec("fp8 16/2 x 256, prefill 2 x 8k", (8192,) * 2, 16, 2, 256, 16, FP8, 8192),
    *(
        AttentionSpec(
            f"{packing[:4]} by heads {heads}/{kv_heads} x {width}, prefill of {len(lens)}",
            *(lens, heads, kv_heads, width, 16, packing, lens[0]),
        )
        for heads, kv_heads, width, lens, packings in (
            (32, 8, 128, (8192,) * 2, BY_HEADS),
            (16, 2, 256, (8192,) * 2, BY_HEADS[2:]),
            (64, 8, 64, (2048,) * 4, BY_HEADS[2:]),
        )
        for packing in packings
    ),
    AttentionSpec(
        *("bf16 32/8, 64 over 4k and a chunk of 2k", (4096,) * 65, 32, 8, 128, 16),
        queries=(*(1,) * 64, 2048),
    ),
    AttentionSpec(
        *("bf16 32/8, 128 over 2k, 4 chunks of 224", (2048,) * 128 + (1024,) * 4, 32, 8, 128, 16),
        queries=(1,) * 128 + (224,) * 4,
    ),
    AttentionSpec("bf16 32/8, 4 each over 64 x 4k", (4096,) * 64, 32, 8, 128, 16, queries=4),
    AttentionSpec("fp8 32/8, 4 each over 64 x 4k", (4096,) * 64, 32, 8, 128, 16, FP8, 4),
)
# As requests would be decoded whose bits must not depend on the others.
REPRODUCIBLE = {
    "bf16 32/8, 64 x 8k, page 16",
    "bf16 32/8, 4 x 4k, page 16",
    "bf16 8/1, 8 x 128k, page 64",
    "bf16 32/8, prefill 2 x 8k, page 16",
}
SMALL = ("bf16 32/8, 4 x 4k, page 16", "bf16 32/8, prefill 2 x 8k, page 16")
LONGEST_OF_XLA = 64  # queries: prefills by XLA take too long to wait for


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title("Attention over pages: GPU time of one call")
    small = tuple(spec for spec in SPECS if spec.name in SMALL)
    for spec in by_size(full=SPECS, small=small, smallest=small[:1]):
        spec = spec.shorter(by_size(full=1, small=32, smallest=128))
        add = functools.partial(report.add, spec.name, num_bytes=spec.num_bytes)
        ours = add(default_implementation("decode"), time_ours(spec))
        if ours.kernels is not None:
            report.note(f"{spec.num_operations / ours.kernels / 1e12:.0f} TFLOP/s")
        if spec.name in REPRODUCIBLE:
            add("reproducible", time_ours(spec, reproducible=True), base=ours)
        if ON_GPU and max(spec.counts) <= LONGEST_OF_XLA:
            add("XLA", time_ours(spec, "xla"), base=ours)
            if spec.row_bytes <= MAX_ROW_BYTES:
                add("reading alone", time_bytes(spec), base=ours)
        others: dict[str, Callable[[], Times]] = {}
        if ON_GPU and spec.queries is None and spec.value is None and spec.pages == "bfloat16":
            others["jax's library"] = functools.partial(time_library, spec)
        if peer is not None and peer.has_tables and spec.value is None:
            others["vLLM, Triton"] = functools.partial(time_peer, spec, peer, triton_call)
            others["vLLM, FA3"] = functools.partial(time_peer, spec, peer, fa3_call)
            if spec.name in REPRODUCIBLE:
                one_split = functools.partial(fa3_call, splits=1)
                others["FA3, one split"] = functools.partial(time_peer, spec, peer, one_split)
        for name, time in others.items():
            try:
                add(name, time(), base=ours)
            except Exception as error:
                report.note(f"{name} fails: {type(error).__name__}: {str(error)[:80]}")
    size = by_size(full=8192, small=256, smallest=64)
    product = report.add(f"product, bf16, {size} x {size}", "jax", time_product(size))
    if product.kernels is not None:
        report.note(f"{2 * size**3 / product.kernels / 1e12:.0f} TFLOP/s")


class Arrays(NamedTuple):
    queries: jax.Array
    pages: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array | None


@functools.lru_cache(maxsize=1)
def make_arrays(spec: AttentionSpec) -> Arrays:
    counts = [-(-length // spec.page_tokens) for length in spec.lens]
    by_heads = spec.by_heads
    shape = (sum(counts) * spec.spread + 1, spec.page_tokens, spec.kv_heads, spec.row)
    ids = np.random.default_rng(0).permutation(np.arange(1, shape[0]))
    tables = np.zeros((len(counts), max(counts)), np.int32)
    for row, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
        row[:count] = ids[end - count : end]
    tokens = sum(spec.counts)
    loc = np.cumsum([0, *spec.counts], dtype=np.int32)

    @jax.jit
    def make() -> tuple[jax.Array, jax.Array]:
        queries, pages = jax.random.split(jax.random.key(0))
        elements = (*shape[:-1], spec.width) if spec.pages == PACKED else shape
        if by_heads is not None:
            elements = (*shape[:-1], by_heads.key_width + by_heads.value_width)
        pages = jax.random.normal(pages, elements, jnp.bfloat16)
        queries = jax.random.normal(queries, (tokens, spec.heads, spec.width), jnp.bfloat16)
        if spec.pages == PACKED:
            return queries, spec.packed_row.pack(pages)
        if by_heads is not None:
            keys, values = pages[..., : spec.width], pages[..., spec.width :]
            return queries, by_heads.pack(keys, values)[:, :, None]
        return queries, pages.astype(spec.pages)

    lens = jnp.asarray(spec.lens, jnp.int32)
    starts = None if spec.queries is None else jnp.asarray(loc)
    return Arrays(*make(), jnp.asarray(tables), lens, starts)


@functools.cache
def compiled(
    spec: AttentionSpec, implementation: str | None = None, reproducible: bool = False
) -> Callable[..., jax.Array]:
    rule = AttentionRule(
        reproducible=reproducible,
        value_width=spec.value or spec.own_value,
        row_packing=PACKED if spec.pages == PACKED else spec.by_heads,
        sliding_window=spec.window,
    )

    def attend(queries: jax.Array, pages: jax.Array, *lists: jax.Array) -> jax.Array:
        requests = RequestPages(*lists)
        return paged_attention(queries, pages, requests, rule, implementation=implementation)

    return jax.jit(attend)


def time_ours(
    spec: AttentionSpec, implementation: str | None = None, *, reproducible: bool = False
) -> Times:
    arrays = make_arrays(spec)
    attend = compiled(spec, implementation, reproducible)
    return measure(lambda: attend(*arrays))


def time_bytes(spec: AttentionSpec) -> Times:
    """Times reading the pages of all requests, and nothing else."""
    return time_reading(sum(spec.lens), spec.page_tokens, spec.kv_heads, spec.row_bytes)


def time_peer(
    spec: AttentionSpec,
    peer: VllmPeer,
    make_call: Callable[[VllmPeer, Tensors, int | None], Callable],
) -> Times:
    """Times code of vLLM, after a look at what it gives."""
    arrays = make_arrays(spec)
    call = make_call(peer, as_tensors(*arrays), spec.window)
    theirs, ours = call().float(), compiled(spec)(*arrays)
    ours = ours.astype(jnp.float32)
    off = abs(jnp.asarray(theirs.cpu().numpy()) - ours).max() / abs(ours).max()
    if not off < 0.2:  # 8-bit queries are off by some percent
        raise ValueError(f"its output differs from ours by {off:.0%} of the largest")
    return measure(call, wait)


def time_library(spec: AttentionSpec) -> Times:
    """Times the Triton kernel, which wants keys and values apart, by head."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as library

    arrays = make_arrays(spec)

    @jax.jit
    def split(pages: jax.Array) -> list[jax.Array]:
        return [jnp.moveaxis(half, 2, 0) for half in jnp.split(pages, 2, axis=-1)]

    keys, values = split(arrays.pages)
    attend = jax.jit(library)
    return measure(
        lambda: attend(arrays.queries, keys, values, arrays.block_tables, arrays.seq_lens)
    )
