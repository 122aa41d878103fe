"""Small pools in every physical order, steps with any block tables, and their bytes in NumPy."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.cache import KVCache, StepBatch
from jaxkv._src.layout import ORDERS
from jaxkv._src.planning import Plan
from jaxkv._src.specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv.testing import ReferenceTables
from tests.helpers import as_ids
from tests.reference_pool import ReferencePool
from tests.reference_token_heads import BY_HEADS, pack_by_heads, unpack_by_heads

BLOCKS, REQUESTS, EACH, LENGTH, ENCODER = 13, 3, 3, 12, 5
TOKENS = REQUESTS * EACH
NO_BLOCKS = (0, -1, BLOCKS, 2**31 - 1, -(2**31))  # ids that are no block's

Arguments = dict[str, Any]  # of `write`

# --- plans ----------------------------------------------------------------------------


def planned(layers: dict[str, Any], num_blocks: int = BLOCKS, **options: Any) -> Plan:
    limits = Limits(max_in_flight_tokens=8, max_encoder_tokens=ENCODER)
    sizes: dict[str, Any] = {"max_model_len": LENGTH, "num_blocks_override": num_blocks}
    return jaxkv.plan_cache(layers, 2**40, limits=limits, **sizes, **options)


def attention(block_size: int = 4, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **{"num_kv_heads": 2, "head_size": 4} | changes)


def window(**changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**dataclasses.asdict(attention(**changes)), sliding_window=3)


@functools.cache
def windows(num_blocks: int = BLOCKS, num_full: int = 2, num_windows: int = 2) -> Plan:
    """Two groups of attention on the same bytes."""
    layers = {f"full.{i}": attention(head_size_v=2) for i in range(num_full)}
    layers |= {f"window.{i}": window(head_size_v=2) for i in range(num_windows)}
    return planned(layers, num_blocks)


@functools.cache
def three(num_blocks: int = BLOCKS) -> Plan:
    """Three layers of each of two groups."""
    return windows(num_blocks, 3, 3)


@functools.cache
def hybrid(num_blocks: int = BLOCKS) -> Plan:
    """fp8 keys and values in padded pages, and states of two dtypes on the same bytes."""
    kv = attention(num_kv_heads=3, dtype="fp8", page_bytes_padded=120)
    state = StateSpec(
        block_size=4,
        shapes=((3, 8), (2, 3)),
        dtypes=("f32", "bf16"),
        speculative_blocks=1,
        page_bytes_padded=120,
    )
    return planned({"kv.0": kv, "kv.1": kv, "state.0": state, "state.1": state}, num_blocks)


@functools.cache
def states(num_blocks: int = BLOCKS) -> Plan:
    """States of every block, and of the newest block, on the bytes of keys and values."""
    common: dict[str, Any] = {"block_size": 4, "shapes": ((3,), (5,)), "dtypes": ("bf16", "f32")}
    layers = {mode: StateSpec(cache_mode=mode, **common) for mode in ("all", "align")}
    kv = attention(num_kv_heads=1, head_size=2, dtype="f16")
    return planned({**layers, "kv": kv}, num_blocks)


@functools.cache
def odd(num_blocks: int = BLOCKS) -> Plan:
    """States off the multiples of their elements, one as the layer ends on one and its page off."""
    common: dict[str, Any] = {"block_size": 4, "dtypes": ("bf16", "f32", "bf16")}
    even = StateSpec(shapes=((3,), (5,), (1,)), **common)
    page = StateSpec(shapes=((2,), (5,), (2,)), page_bytes_padded=30, **common)
    return planned({"even": even, "page": page}, num_blocks, grouping="packed")


@functools.cache
def latent(num_blocks: int = BLOCKS) -> Plan:
    """Latent rows of two tokens each."""
    spec = MLASpec(block_size=8, head_size=3, dtype="f32", compress_ratio=2)
    return planned({"mla.0": spec, "mla.1": spec}, num_blocks)


@functools.cache
def cross(num_blocks: int = BLOCKS) -> Plan:
    """The encoder's tokens, and the decoder's, on the same bytes."""
    own, other = (
        attention(dtype="f32"),
        CrossAttentionSpec(**dataclasses.asdict(attention(dtype="f32"))),
    )
    return planned({"own.0": own, "own.1": own, "cross.0": other, "cross.1": other}, num_blocks)


@functools.cache
def packed(num_blocks: int = BLOCKS) -> Plan:
    """Layers of several page sizes one after the other, one of them off its rows' multiples."""
    layers = {
        "a": attention(2, num_kv_heads=1, head_size=6, dtype="fp8"),
        "b": attention(2, num_kv_heads=1, head_size=8, dtype="fp8"),
        "window": window(block_size=2, num_kv_heads=1, head_size=3, dtype="fp8"),
    }
    plan = planned(layers, num_blocks, grouping="packed")
    assert plan.layout.placement_of("b").offset_bytes == 24 and layers["b"].token_bytes == 16
    return plan


@functools.cache
def every_dtype(num_blocks: int = BLOCKS) -> Plan:
    """A layer of each dtype, in pages of three sizes; one in twice its page, one in a fourth."""
    names = ("f32", "fp8_e4m3", "fp8_e5m2", "int8", "bf16", "f16")
    layers = {name: attention(head_size_v=2, dtype=name) for name in names}
    for padded in (96, 56):  # the first is in one buffer with those of two bytes
        layers[f"in {padded}"] = attention(head_size_v=2, dtype="fp8", page_bytes_padded=padded)
    return planned(layers, num_blocks)


@functools.cache
def by_heads(num_blocks: int = BLOCKS) -> Plan:
    """A layer of each dtype with a scale for each token and head, and windows of one of them."""
    layers: dict[str, Any] = {name: attention(head_size_v=6, dtype=name) for name in BY_HEADS}
    return planned(layers | {"window": window(dtype=BY_HEADS[0], num_kv_heads=3)}, num_blocks)


# --- caches ---------------------------------------------------------------------------


class Case(NamedTuple):
    """A plan, and how its cache is made."""

    make_plan: Callable[..., Plan]
    order: str = "LBNHC"
    stacked: bool | None = None
    kernel_block_sizes: tuple[int, ...] | None = None

    @property
    def plan(self) -> Plan:
        return self.make_plan()

    def cache(self, *num_blocks: int) -> KVCache:
        """A cache whose scales are powers of two, so that no device rounds."""
        options = self._asdict()
        plan = options.pop("make_plan")(*num_blocks)
        scales: Any = scales_of(plan)
        return jaxkv.make_cache(plan, max_requests=REQUESTS, scales=scales, **options)

    def reference(self) -> ReferencePool:
        """A pool of random bytes, NaN of every kind among them; the null block is zeroed."""
        sizes, plan = self.kernel_block_sizes, self.plan
        pool = ReferencePool(plan.layout, BLOCKS, order=self.order, kernel_block_sizes=sizes)
        pool.memory[:] = np.random.default_rng(1).integers(1, 256, pool.memory.size)
        for tensor in pool.tensors:
            tensor[0] = 0
        return pool

    def __str__(self) -> str:
        sizes = "".join(f"-{size}" for size in self.kernel_block_sizes or ())
        return f"{self.make_plan.__name__}-{self.order}{'-apart' * (self.stacked is False)}{sizes}"


# Blocks are cut into tiles where rows would not run on from one kernel block to the next.
WINDOWS = [
    *(Case(windows, order) for order in ORDERS),
    *(Case(windows, order, False) for order in ("LBNHC", "LHBNC")),
    *(Case(windows, order, None, (2, 2)) for order in ("LBHNC", "BLNHC", "BLHNC", "BHLNC")),
]
CASES = [
    *WINDOWS,
    Case(hybrid, "BLHNC", None, (2, 4)),
    Case(states, "BLNHC"),
    Case(latent, "LHBNC", False),
    Case(latent, "BLNHC", None, (4,)),
    Case(cross, "BHLNC"),
    Case(packed, "BLHNC"),
    Case(every_dtype),
    Case(by_heads),
    Case(by_heads, "BLHNC", None, (2, 2, 2, 2)),
]

empty = functools.cache(Case.cache)


def scales_of(plan: Plan) -> dict[str, tuple[float, float]]:
    names = [name for group in plan.layout.groups for name in group.layers]
    return {name: (0.5 ** (i % 3), 0.5 ** ((i + 1) % 3)) for i, name in enumerate(names)}


def layers_of(plan: Plan) -> list[str]:
    """Layers to write: all of a single group; else one of each, in other tensors."""
    first, *others = plan.layout.groups
    return [first.layers[-1], *(group.layers[0] for group in others)] if others else [*first.layers]


def memory_of(cache: KVCache) -> np.ndarray:
    """uint8[bytes], all buffers one after the other."""
    return np.concatenate([np.asarray(buffer).reshape(-1) for buffer in cache.buffers])


def with_memory(cache: KVCache, memory: np.ndarray) -> KVCache:
    ends = np.cumsum([buffer.size for buffer in cache.buffers])[:-1]
    pairs = zip(np.split(memory, ends), cache.buffers, strict=True)
    buffers = tuple(jnp.asarray(part.reshape(buffer.shape)) for part, buffer in pairs)
    return dataclasses.replace(cache, buffers=buffers)


# --- steps ----------------------------------------------------------------------------


class Step(NamedTuple):
    """The requests of a step as lists, and block tables of any ids.

    tables: per group int32[REQUESTS, W].
    """

    computed: list[int]
    new: list[int]
    encoder: list[int]
    tables: list[np.ndarray]
    rectangular: bool = False

    def batch(self, cache: KVCache, plan: Plan) -> StepBatch:
        shape = shape_of(plan, self.rectangular)
        upload = jaxkv.pack_step(
            shape,
            rows=list(range(len(self.new))),
            num_computed_tokens=self.computed,
            num_new_tokens=self.new,
            encoder_lens=self.encoder,
            accepted_tokens=[0] * len(self.new),
        )
        data = jnp.asarray(upload.data[shape.format.batch_fields])
        block_ids = jnp.asarray(np.concatenate(self.tables, axis=1))
        return StepBatch(
            block_ids=block_ids,
            data=data,
            status=jnp.copy(cache.status),
            shape=shape,
            layout=cache.layout,
        )

    @property
    def token_shape(self) -> tuple[int, ...]:
        return (REQUESTS, EACH) if self.rectangular else (TOKENS,)

    def tokens(self) -> Iterator[tuple[int, int, int]]:
        """Yields each token's request, place in the flattened token arrays, and position."""
        ends = np.cumsum([0, *self.new]).tolist()
        for request, (computed, new) in enumerate(zip(self.computed, self.new, strict=True)):
            start = EACH * request if self.rectangular else ends[request]
            for i in range(new):
                yield request, start + i, computed + i


@functools.cache
def shape_of(plan: Plan, rectangular: bool = False) -> jaxkv.StepShape:
    tokens = {"tokens_per_request": EACH} if rectangular else {"max_tokens": TOKENS}
    sizes = {"max_requests": REQUESTS, "max_query_len": EACH}
    return jaxkv.StepShape.for_plan(plan, **sizes, **tokens)


def fixed_step(plan: Plan, rectangular: bool = False) -> Step:
    """Three requests of blocks all over the pool; the last one's tables end in holes."""
    tables = []
    for group, width in enumerate(shape_of(plan).widths):
        ids = np.random.default_rng(group).permutation(as_ids(range(1, BLOCKS)))
        tables.append(np.resize(ids, (REQUESTS, width)))
        tables[-1][2, 1:] = 0
    return Step([0, 5, 3], [3, 2, 1], [ENCODER, 0, 2], tables, rectangular)


@st.composite
def any_tables(draw: st.DrawFn, plan: Plan, *, distinct: bool) -> list[np.ndarray]:
    """Per group int32[REQUESTS, W]: any ids, or blocks at most once each."""
    tables = []
    for width in shape_of(plan).widths:
        ids = draw(st.permutations([*range(1, BLOCKS), *NO_BLOCKS, *[-1] * TOKENS]))
        if not distinct:
            ids = draw(st.lists(st.sampled_from(ids), min_size=len(ids), max_size=len(ids)))
        tables.append(as_ids(ids[: REQUESTS * width]).reshape(REQUESTS, width))
    return tables


@st.composite
def steps(draw: st.DrawFn, plan: Plan, rectangular: bool = False) -> Step:
    """Steps of up to three requests that write no row twice."""
    new = draw(st.lists(st.integers(1, EACH), max_size=REQUESTS))
    computed = [draw(st.integers(0, LENGTH - n)) for n in new]
    encoder = [draw(st.integers(0, ENCODER)) for _ in new]
    return Step(computed, new, encoder, draw(any_tables(plan, distinct=True)), rectangular)


# --- writes and reads by a layer's kind -----------------------------------------------


def writes_for(plan: Plan, step: Step, seed: int = 0) -> dict[str, Arguments]:
    """Arguments of `write` for `layers_of` a plan."""
    rng = np.random.default_rng(seed)
    return {
        layer: _arguments(rng, plan.layout.placement_of(layer).spec, step)
        for layer in layers_of(plan)
    }


def _arguments(rng: np.random.Generator, spec: LayerSpec, step: Step) -> Arguments:
    if isinstance(spec, StateSpec):
        arrays = [rng.normal(size=(REQUESTS, *s)).astype(np.float32) for s in spec.shapes]
        at = rng.choice(as_ids([-1, 0, 1, 2, 2**31 - 1]), REQUESTS)
        return {"arrays": arrays} | ({"at": at} if spec.speculative_blocks else {})
    if isinstance(spec, MLASpec):
        rows = rng.normal(size=(*step.token_shape, spec.head_size)).astype(dtype_of(spec.dtype))
        ratio = spec.compress_ratio
        last = [i for _, i, position in step.tokens() if position % ratio == ratio - 1]
        return {"rows": rows, "mask": np.isin(np.arange(TOKENS), last).reshape(step.token_shape)}
    assert isinstance(spec, FullAttentionSpec)
    is_cross = isinstance(spec, CrossAttentionSpec)
    tokens = (REQUESTS, ENCODER + 1) if is_cross else step.token_shape
    keys, values = (
        (30 * rng.normal(size=(*tokens, spec.num_kv_heads, width))).astype(np.float32)
        for width in (spec.head_size, spec.value_size)
    )
    return {"keys": keys, "values": values}


def write(cache: KVCache, layer: str, batch: StepBatch, **arguments: Any) -> KVCache:
    names = {"arrays": jaxkv.write_state, "rows": jaxkv.write_rows, "keys": jaxkv.write_tokens}
    (function,) = (function for name, function in names.items() if name in arguments)
    return function(cache, layer, batch, **arguments)


def read(cache: KVCache, layer: str, batch: StepBatch, **options: Any) -> tuple[jax.Array, ...]:
    spec = cache.layout.placement_of(layer).spec
    if isinstance(spec, StateSpec):
        return jaxkv.read_state(cache, layer, batch, **options)
    if isinstance(spec, MLASpec):
        return (jaxkv.read_rows(cache, layer, batch, **options),)
    return jaxkv.read_tokens(cache, layer, batch, **options)


# --- the same by definition -----------------------------------------------------------


def reference_write(
    pool: ReferencePool, plan: Plan, layer: str, step: Step, arguments: Arguments
) -> None:
    """Writes rows one by one, each into the block that its position's column names."""
    place = plan.layout.placement_of(layer)
    spec, table = place.spec, step.tables[place.group]
    if isinstance(spec, StateSpec):
        for request, column in _state_places(plan, layer, step, arguments.get("at")):
            arrays = zip(arguments["arrays"], spec.dtypes, strict=True)
            raw = b"".join(a[request].astype(dtype_of(d)).tobytes() for a, d in arrays)
            pool.write(layer, table[request, column], 0, np.frombuffer(raw, np.uint8))
        return
    for request, index, column, offset in _token_places(plan, layer, step):
        if isinstance(spec, MLASpec):
            offset //= spec.compress_ratio
            row = arguments["rows"].reshape(TOKENS, -1)[index]
            if not arguments["mask"].reshape(TOKENS)[index]:
                continue
        elif spec.has_scales:
            parts = [arguments[name] for name in ("keys", "values")]
            parts = [array.reshape(-1, *array.shape[-2:])[index] for array in parts]
            row = pack_by_heads(spec.dtype, *parts)
        else:
            pairs = zip(
                (arguments["keys"], arguments["values"]), scales_of(plan)[layer], strict=True
            )
            parts = [
                _quantized(a.reshape(-1, *a.shape[-2:])[index], spec.dtype, s) for a, s in pairs
            ]
            row = np.concatenate(parts, axis=-1)
        pool.write(layer, table[request, column], offset * spec.token_bytes, row)


def _token_places(plan: Plan, layer: str, step: Step) -> Iterator[tuple[int, int, int, int]]:
    """Yields each token's request, place in the arrays, and column and offset in its table."""
    place = plan.layout.placement_of(layer)
    size = place.spec.block_size
    if isinstance(place.spec, CrossAttentionSpec):
        for request, encoder in enumerate(step.encoder):
            for i in range(encoder):
                yield request, request * (ENCODER + 1) + i, i // size, i % size
        return
    for request, index, position in step.tokens():
        columns = _columns(plan, place.group, step, request)
        yield request, index, columns.index(position // size), position % size


def _state_places(
    plan: Plan, layer: str, step: Step, at: np.ndarray | None
) -> Iterator[tuple[int, int]]:
    """Yields each request, and the column of its table that its state goes to."""
    place = plan.layout.placement_of(layer)
    assert isinstance(place.spec, StateSpec)
    for request, (computed, new) in enumerate(zip(step.computed, step.new, strict=True)):
        if at is None:
            newest = (computed + new - 1) // place.spec.block_size
            written = _columns(plan, place.group, step, request)[1:]
            yield request, 1 + written.index(newest * (place.spec.cache_mode != "none"))
        elif 0 <= at[request] < step.tables[place.group].shape[1] - 1:
            yield request, 1 + at[request]


def _columns(plan: Plan, group: int, step: Step, request: int) -> list[int | None]:
    computed, total = step.computed[request], step.computed[request] + step.new[request]
    return ReferenceTables(plan, max_requests=REQUESTS).logical_blocks(group, computed, total)


@np.errstate(all="ignore")  # NaN that signal
def reference_read(
    pool: ReferencePool, plan: Plan, layer: str, step: Step
) -> tuple[np.ndarray, ...]:
    """Returns the rows that `read` must give, from the bytes of the blocks that the tables name."""
    place = plan.layout.placement_of(layer)
    spec, table = place.spec, step.tables[place.group]
    if isinstance(spec, StateSpec):
        ids = [*table[: len(step.new), 0], *[0] * (REQUESTS - len(step.new))]
        pages = np.stack([pool.page(layer, int(i)) for i in ids])
        parts = np.split(pages, np.cumsum(spec.array_bytes)[:-1], axis=1)
        return tuple(
            np.ascontiguousarray(part).view(dtype_of(dtype)).reshape(-1, *shape)
            for part, shape, dtype in zip(parts, spec.shapes, spec.dtypes, strict=True)
        )
    pages = np.stack([[pool.page(layer, int(i)) for i in ids] for ids in table])
    if isinstance(spec, FullAttentionSpec) and spec.has_scales:
        widths = spec.num_kv_heads, spec.head_size, spec.value_size
        return unpack_by_heads(spec.dtype, pages.reshape(REQUESTS, -1, spec.token_bytes), *widths)
    rows = pages.view(dtype_of(spec.dtype))
    if isinstance(spec, MLASpec):
        return (rows.reshape(REQUESTS, -1, spec.head_size),)
    assert isinstance(spec, FullAttentionSpec)
    rows = rows.astype(np.float32)
    rows = rows.reshape(REQUESTS, -1, spec.num_kv_heads, spec.head_size + spec.value_size)
    key_scale, value_scale = map(np.float32, scales_of(plan)[layer])
    return rows[..., : spec.head_size] * key_scale, rows[..., spec.head_size :] * value_scale


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _quantized(values: np.ndarray, dtype: str, scale: float) -> np.ndarray:
    kind, scaled = dtype_of(dtype), values / np.float32(scale)
    info = np.iinfo(kind) if kind == np.int8 else ml_dtypes.finfo(kind)
    scaled = np.round(scaled) if kind == np.int8 else scaled
    return np.clip(scaled, float(info.min), float(info.max)).astype(kind)
