"""Hypothesis strategies: layer specs, models, plans, table entries, ids, NaN.

Everything is Python ints, named tuples and NumPy. Shapes are drawn from small fixed sets, so
that a suite compiles each program once; values are drawn freely. Every strategy shrinks to one
plain thing (one layer of full attention, no entries) and takes the sets that it draws
from as arguments.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._src.internal.checks import check_positive
from jaxkv._src.planning import Plan, WorkerLayers, make_groups, plan_cache
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    RingSpec,
    SharedKVSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
    canonical_dtype,
)
from jaxkv._src.testing._extra import extra
from jaxkv._src.uploads import TableEntry

with extra():
    from hypothesis import strategies as st
    from hypothesis.extra import numpy as hnp

KINDS = ("full", "sliding", "chunked", "cross", "mla", "sliding_mla", "ring", "state")
RINGS = ((4, 3), (1, 1), (2, 2), (8, 4))  # rows, and tokens of a group
LIMITS = Limits(max_in_flight_tokens=7, max_encoder_tokens=9)
EXTREMES = (-1, -(2**31), 2**31 - 1)  # -1 may wrap, the others overflow
FIRST_NAN = {  # bits of the least NaN without sign; all larger ones are NaN too
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7D,
    "float16": 0x7C01,
    "bfloat16": 0x7F81,
    "float32": 0x7F800001,
}


def layer_specs(
    kinds: Sequence[str] = KINDS,
    *,
    block_sizes: Sequence[int] = (4, 2, 1),
    kv_heads: Sequence[int] = (2, 1),
    windows: Sequence[int] = (1, 3, 6, 13),
    kv_dtypes: Sequence[str] = ("bf16", "fp8_e4m3", "fp8_e5m2", "int4_per_token_head"),
) -> st.SearchStrategy[LayerSpec]:
    """Specs of one layer: a head or two of four elements, or as small a thing of another kind.

    Args:
      kinds: as ``spec.kind`` names them.
      block_sizes: tokens.
      kv_heads: KV heads of layers that have any.
      windows: tokens of sliding windows and of chunks.
      kv_dtypes: of keys and values.
    """
    size = {"block_size": st.sampled_from(block_sizes)}
    window = {"sliding_window": st.sampled_from(windows)}
    heads = {
        **size,
        "num_kv_heads": st.sampled_from(kv_heads),
        "head_size": st.just(4),
        "dtype": st.sampled_from(kv_dtypes),
    }

    def latents(spec: Any, **more: Any) -> st.SearchStrategy[LayerSpec]:
        def of_size(block_size: int) -> st.SearchStrategy[LayerSpec]:
            ratios = st.sampled_from([1] if block_size % 2 else [1, 2])
            fixed = {"block_size": st.just(block_size), "head_size": st.just(8)}
            return st.builds(spec, compress_ratio=ratios, **fixed, **more)

        return st.sampled_from(block_sizes).flatmap(of_size)

    builds: dict[str, st.SearchStrategy[LayerSpec]] = {
        "full": st.builds(FullAttentionSpec, **heads),
        "sliding": st.builds(SlidingWindowSpec, **heads, **window),
        "chunked": st.builds(ChunkedAttentionSpec, **heads, chunk_size=st.sampled_from(windows)),
        "cross": st.builds(CrossAttentionSpec, **heads),
        "mla": latents(MLASpec),
        "sliding_mla": latents(SlidingWindowMLASpec, **window),
        "ring": st.sampled_from(RINGS).map(
            lambda sizes: RingSpec(block_size=sizes[0], group_size=sizes[1], head_size=4)
        ),
        "state": st.builds(
            StateSpec,
            **size,
            shapes=st.just(((2,), (2,))),
            dtypes=st.just(("bf16", "f32")),
            cache_mode=st.sampled_from(["none", "align", "all"]),
            speculative_blocks=st.integers(0, 2),
        ),
    }
    unknown = set(kinds) - set(builds)
    if unknown or not kinds:
        raise ValueError(f"kinds={list(kinds)}; use some of {KINDS}")
    return st.one_of([builds[kind] for kind in kinds])


@st.composite
def models(
    draw: st.DrawFn,
    specs: st.SearchStrategy[LayerSpec] | None = None,
    *,
    min_layers: int = 1,
    max_layers: int = 5,
    max_kinds: int = 3,
    without_cache: bool = False,
) -> dict[str, LayerSpec | SharedKVSpec | EncoderOnlySpec]:
    """Layer name -> spec: uniform models, and hybrids of a few kinds in any order.

    Args:
      specs: of one layer; None: `layer_specs` of every kind.
      min_layers, max_layers: that own a cache.
      max_kinds: different specs among them; 1: uniform models only.
      without_cache: also draw layers that own none (shared keys and values, encoder only).
    """
    kinds = draw(
        st.lists(layer_specs() if specs is None else specs, min_size=1, max_size=max_kinds)
    )
    which = st.integers(0, len(kinds) - 1)
    order = draw(st.lists(which, min_size=min_layers, max_size=max_layers))
    layers: dict[str, LayerSpec | SharedKVSpec | EncoderOnlySpec] = {
        f"layer.{i}": kinds[kind] for i, kind in enumerate(order)
    }
    if without_cache and draw(st.booleans()):
        owner = draw(st.sampled_from(list(layers)))
        layers |= {"shared": SharedKVSpec(owner), "encoder": EncoderOnlySpec()}
    return layers


@st.composite
def plans(
    draw: st.DrawFn,
    layers: st.SearchStrategy[WorkerLayers] | None = None,
    *,
    lengths: Sequence[int] = range(1, 37),
    max_spare: float = 1,
    limits: Limits = LIMITS,
) -> Plan:
    """Pools that hold one longest request, and some blocks to spare.

    Args:
      layers: of one worker; None: `models`.
      lengths: ``max_model_len`` in tokens. A sequence of one for plans of one shape.
      max_spare: blocks to spare, as a part of what admission charges. 0: none.
      limits: what the scheduler promises.
    """
    if layers is not None and not isinstance(layers, st.SearchStrategy):
        raise TypeError("layers must be a strategy; wrap one fixed model in st.just(...)")
    model = draw(models() if layers is None else layers)
    length = draw(st.sampled_from(lengths))
    owned = {name: spec for name, spec in model.items() if isinstance(spec, LayerSpec)}
    groups = make_groups(owned)
    sizes = limits.max_in_flight_tokens, limits.max_encoder_tokens
    charged = sum(group.growth.max_blocks(length, *sizes) for group in groups)
    reserved = 1 + sum(group.reserved_blocks for group in groups)
    spare = draw(st.integers(0, int(charged * max_spare)))
    return plan_cache(
        model,
        2**30,
        max_model_len=length,
        num_blocks_override=max(2, reserved + charged + spare),
        limits=limits,
    )


def ids(count: int, *, malformed: bool = False) -> st.SearchStrategy[int]:
    """A row, a block id or a slot: ``0 .. count - 1``.

    Args:
      count: rows, blocks or slots.
      malformed: also -1, -2**31, ``count`` and 2**31 - 1.
    """
    check_positive(count=count)
    good = st.integers(0, count - 1)
    return good | st.sampled_from([*EXTREMES, count]) if malformed else good


def id_arrays(
    count: int, size: int, *, malformed: bool = False, unique: bool = False
) -> st.SearchStrategy[np.ndarray]:
    """int32[size] of `ids`; the same id may come twice unless ``unique``."""
    sampled = st.lists(ids(count, malformed=malformed), min_size=size, max_size=size, unique=unique)
    return sampled.map(lambda values: np.array(values, np.int32))


@st.composite
def table_entries(
    draw: st.DrawFn,
    num_groups: int,
    *,
    max_requests: int,
    num_blocks: int,
    max_entries: int = 4,
    max_block_ids: int = 12,
    max_start: int = 3,
    malformed: bool = False,
) -> list[TableEntry]:
    """Changes of one update; several entries may name one row, and one id come twice.

    Args:
      num_groups: of the plan.
      max_requests, num_blocks: rows and block ids to draw from.
      max_entries, max_block_ids: most entries, and most ids in all of them.
      max_start: most ids that a row is said to hold already.
      malformed: also ids out of range.
    """
    rows = ids(max_requests)
    block_ids = ids(num_blocks, malformed=malformed)
    logical_blocks = st.none() | st.lists(
        st.integers(0, max_start), min_size=num_groups, max_size=num_groups
    )
    heads = draw(st.lists(st.tuples(rows, logical_blocks), max_size=max_entries))
    if not heads:
        return []
    place = st.tuples(st.integers(0, len(heads) - 1), st.integers(0, num_groups - 1), block_ids)
    given: list[list[list[int]]] = [[[] for _ in range(num_groups)] for _ in heads]
    for entry, group, block_id in draw(st.lists(place, max_size=max_block_ids)):
        given[entry][group].append(block_id)
    return [TableEntry(row, per, starts) for (row, starts), per in zip(heads, given, strict=True)]


def nan_arrays(shape: tuple[int, ...], dtype: str) -> st.SearchStrategy[np.ndarray]:
    """NaN of every payload and both signs, in any float that a cache page can hold.

    Args:
      shape: of the array.
      dtype: as specs name it.
    """
    name = canonical_dtype(dtype)
    if name not in FIRST_NAN:
        raise ValueError(f"dtype={dtype!r} has no NaN; use one of {sorted(FIRST_NAN)}")
    bits = 8 * jnp.dtype(name).itemsize
    sign = 1 << (bits - 1)
    payloads = st.integers(FIRST_NAN[name], sign - 1)
    patterns = payloads | payloads.map(lambda payload: payload | sign)
    sampled = hnp.arrays(f"uint{bits}", shape, elements=patterns, fill=patterns)
    return sampled.map(lambda array: array.view(jnp.dtype(name)))


def byte_arrays(shape: tuple[int, ...], dtype: str) -> st.SearchStrategy[np.ndarray]:
    """Any bytes at all, viewed in a dtype: numbers, infinities, NaN."""
    kind = jnp.dtype(canonical_dtype(dtype))
    sampled = hnp.arrays(np.uint8, (*shape, kind.itemsize), fill=st.integers(0, 255))
    return sampled.map(lambda array: array.view(kind)[..., 0])


def poisoned_buffers(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str] = ("bf16", "fp8_e4m3", "f32")
) -> st.SearchStrategy[np.ndarray]:
    """Content of memory before the first write: NaN throughout, or any bytes.

    Args:
      shapes, dtypes: to draw from; one of each for a suite that compiles once.
    """
    pairs = st.tuples(st.sampled_from(shapes), st.sampled_from(dtypes))
    return pairs.flatmap(lambda pair: nan_arrays(*pair) | byte_arrays(*pair))
