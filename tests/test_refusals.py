"""Each argument of the public functions is refused by its name where it is wrong.

The wrong values follow from an argument's annotation, and for numbers from `LEAST`. They are given
one at a time to the same objects, which then serve a valid call: a refusal changes nothing.
Recurrent layers, the engine, configurations and interop are asked in their own tests.
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import layout, planning, pool, prefixes, specs
from jaxkv._src.layout import LayerExtents, PagePlacement
from jaxkv.attention import (
    block_mask_indices,
    block_mask_sizes,
    hadamard,
    physical_to_logical,
    top_blocks,
)
from jaxkv.drafts import NgramDrafts
from jaxkv.hf_config import count_weights
from jaxkv.logits_processors import TokenAutomaton, TokenTable
from tests.helpers import hybrid_plan

PLAN = hybrid_plan(kv_dtype="bf16")
FULL = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
ATTENTION = {"block_size": 4, "num_kv_heads": 2, "head_size": 8}
PAGES = {"page_bytes_padded": 4096, "page_alignment_bytes": 1}
HEADS = {"head_size_v": 4, "dtype": "bf16", "scale_bytes": 0, "sink_tokens": 0} | PAGES
LATENT = {"block_size": 4, "head_size": 8, "value_size": 4, "bytes_per_token": 16}
LATENT |= {"dtype": "bf16", "compress_ratio": 1} | PAGES
STATES = {"block_size": 4, "shapes": ((3, 4),), "dtypes": ("f32",), "cache_mode": "none"} | PAGES
LLAMA = jaxkv.load_config("llama-3.1-8b")
LENGTHS = (
    "local_tokens blocks_per_group admission_blocks steady_blocks_per_group steady_blocks "
    "admits".split()
)
SIZES: dict[str, Any] = {
    "max_requests": 4,
    "max_tokens": 8,
    "batch_size": 4,
    "tokens_per_request": None,
}
SIZES |= {"max_query_len": 8, "max_seq_len": 24}

# The least value of each number that may be less than 1.
LEAST: dict[str, int | None] = dict.fromkeys(
    "scale_bytes sink_tokens speculative_blocks max_encoder_tokens speculative_tokens forks extra "
    "usable_blocks cached_tokens shared_prefixes max_cached_tokens encoder_tokens start sequence "
    "lookahead_steps rank worker layer page_offset_bytes seed groups logprobs prompt_logprobs "
    "replay BlockManager.fork.num_tokens BlockManager.fork.prompt_tokens "
    "HostMemory.is_worth_it.num_tokens HostMemory.is_worth_it.num_bytes "
    "longest_model_len.max_model_len init_blocks local_blocks".split(),
    0,
)
LEAST |= {"priority": None}
LEAST |= dict.fromkeys((f"Plan.{name}.num_tokens" for name in LENGTHS), 0)


class Served:
    """A step of 8 tokens, 5 of them of request "r", which may go on with 8 more."""

    def __init__(self) -> None:
        self.manager = jaxkv.BlockManager(PLAN, max_requests=4)
        self.shape = jaxkv.StepShape.for_plan(PLAN, max_requests=4, max_tokens=8)
        self.manager.start("r")
        self.upload = self.manager.step(self.shape, {"r": 5})
        step = jax.jit(jaxkv.apply_step)
        self.cache, self.batch = step(jaxkv.make_cache(PLAN, max_requests=4), self.upload)
        self.scheduler = jaxkv.Scheduler(jaxkv.BlockManager(PLAN, max_requests=4), max_tokens=8)
        self.keys = jnp.ones((8, 2, 4))


Call = tuple[Callable[..., Any], dict[str, Any]]


def of_planning(s: Served) -> Iterator[Call]:
    """Yields specs, sizes of states, plans, configurations and layouts."""
    yield jaxkv.FullAttentionSpec, ATTENTION | HEADS
    yield jaxkv.SlidingWindowSpec, ATTENTION | HEADS | {"sliding_window": 4}
    yield jaxkv.ChunkedAttentionSpec, ATTENTION | HEADS | {"chunk_size": 4}
    yield jaxkv.CrossAttentionSpec, ATTENTION | HEADS
    yield jaxkv.MLASpec, LATENT
    yield jaxkv.SlidingWindowMLASpec, LATENT | {"sliding_window": 4}
    ring = {"block_size": 4, "group_size": 2, "head_size": 8, "dtype": "bf16"}
    yield jaxkv.RingSpec, ring | PAGES
    yield jaxkv.StateSpec, STATES | {"speculative_blocks": 0, "replay": 0, "speculative_tokens": 0}
    yield jaxkv.SharedKVSpec, {"layer": "a"}
    yield jaxkv.Limits, {"max_in_flight_tokens": 8, "max_encoder_tokens": 8}
    sizes = {"num_key_heads": 2, "num_value_heads": 2, "key_size": 4, "value_size": 4}
    more = {"conv_kernel": 4, "speculative_tokens": 0, "tensor_parallel": 1}
    yield specs.gated_delta_net_state, sizes | more
    yield specs.kda_state, {"num_heads": 2, "head_size": 4} | more
    yield specs.linear_attention_state, {"num_heads": 2, "head_size": 4, "tensor_parallel": 1}
    inner = {"inner_size": 8, "state_size": 4, "conv_kernel": 4, "tensor_parallel": 1}
    yield specs.mamba1_state, inner
    yield (
        specs.mamba2_state,
        {"num_heads": 2, "head_size": 4, "state_size": 4, "num_groups": 2} | more,
    )
    yield (
        jaxkv.plan_cache,
        {
            "layers": {"a": FULL},
            "memory_bytes": 2**20,
            "max_model_len": 24,
            "fit_max_model_len": False,
            "num_blocks_override": 8,
            "override_beyond_memory": False,
            "grouping": "auto",
            "request_len": 8,
            "limits": jaxkv.Limits(max_in_flight_tokens=8),
            "context_parallel": 1,
            "zero_policy": "never",
        },
    )
    groups = planning.make_groups({"a": FULL})
    yield planning.make_groups, {"layers": {"a": FULL}, "grouping": "auto", "cost": None}
    yield planning.pool_bytes, {"plan": PLAN}
    on_gpu = {"gpu": "h200", "config": LLAMA, "utilization": 0.9, "drafts": False}
    on_gpu |= {"weights": None}
    yield planning.memory_for, on_gpu | {"tensor_parallel": 1, "pipeline_parallel": 1}
    for name in (*LENGTHS, "requests_that_fit", "tokens_that_fit"):
        yield getattr(PLAN, name), {"num_tokens": 4}
    reads = {"kv_dtype": "bf16", "block_size": 16, "tensor_parallel": 1}
    reads |= {"state_cache_mode": "none", "speculative_tokens": 0, "replay": 0}
    yield jaxkv.layers_from_config, {"config": LLAMA} | reads
    yield count_weights, {"config": LLAMA, "drafts": False}
    yield jaxkv.load_config, {"config": "llama-3.1-8b"}
    yield layout.AcceptedSizes, {"exact": (4,), "multiples_of": 4}
    yield layout.PhysicalOrder, {"order": "LBNHC", "tile_tokens": 2}
    yield place, {"num_blocks": 4, "num_layers": 2, "layer": 1, "page_offset_bytes": 0}
    backends = {"a": layout.AcceptedSizes(exact=(4,))}
    one = {"block_size": 4, "backends": backends, "compress_ratio": 1}
    yield layout.select_kernel_block_size, one
    per_group = {"groups_or_specs": groups, "backends_per_group": [backends]}
    yield layout.select_kernel_block_sizes, per_group


def place(*, num_blocks: int, num_layers: int, layer: int, page_offset_bytes: int) -> LayerExtents:
    """Returns where the bytes of a layer lie in a buffer."""
    placed = PagePlacement(
        num_blocks=num_blocks,
        layer=layer,
        num_layers=num_layers,
        page_offset_bytes=page_offset_bytes,
    )
    return layout.PhysicalOrder("LBNHC").extents(FULL, placed)


def of_host(s: Served) -> Iterator[Call]:
    """Yields the block manager, the scheduler, and what packs a step."""
    numbers = {"forks": 0, "cached_tokens": 0, "extra": 0, "shared_prefixes": 0}
    flags = {"token_ids": False, "reproducible": False}
    yield jaxkv.StepShape.for_plan, {"plan": PLAN} | SIZES | numbers | flags
    memory = {"num_bytes": 2**20, "min_tokens": 4, "max_bytes_per_token": 2**20}
    yield jaxkv.HostMemory, memory
    yield jaxkv.HostMemory(**memory).is_worth_it, {"num_tokens": 4, "num_bytes": 8}
    yield (
        jaxkv.BlockManager,
        {
            "plan": PLAN,
            "max_requests": 4,
            "checkpoint_share": 0.5,
            "events": None,
            "host_memory": jaxkv.HostMemory(**memory),
        },
    )
    prompt = {"tokens": [1, 2, 3, 4, 5], "salt": "s", "extra_keys": ()}
    m = s.manager
    more = {"boundaries": (), "max_cached_tokens": 4, "encoder_tokens": 0}
    yield m.start, {"request": "new"} | prompt | more
    yield m.find_prefix, prompt | {"max_cached_tokens": 4}
    for call in (m.num_computed_tokens, m.block_ids, m.is_loading, m.num_swapped_tokens):
        yield call, {"request": "r"}
    yield m.grow, {"work": {"r": 1}}
    yield m.shared_tokens, {"work": {"r": 1}, "groups": 0}
    yield m.step, {"shape": s.shape, "work": {"r": 1}, "extra": (), "ring": None}
    yield m.fork, {"donor": "r", "into": ("copy",), "num_tokens": None, "prompt_tokens": 0}
    yield m.rewind, {"num_tokens": {}}
    yield m.trim, {"requests": ["r"]}
    options = {"max_tokens": 8, "batch_size": 4, "order": "decode_first", "preemption": True}
    options |= {
        "forks": 0,
        "tokens": {},
        "cached_tokens": 0,
        "chunk_tokens": 4,
        "lookahead_steps": 0,
    }
    yield jaxkv.Scheduler, {"manager": jaxkv.BlockManager(PLAN, max_requests=4)} | options
    del (shape := SIZES | numbers | {"reproducible": False})["max_requests"]
    yield s.scheduler.shape, {n: v for n, v in shape.items() if n not in ("forks", "cached_tokens")}
    asked = {"num_tokens": 5, "samples": 1, "max_tokens": 9, "encoder_tokens": 0, "salt": None}
    asked |= {"priority": 1}
    yield s.scheduler.add, {"request": "new"} | asked | {"extra_keys": (), "boundaries": ()}
    yield s.scheduler.append, {"num_tokens": {}}
    yield s.scheduler.rewind, {"num_tokens": {}}
    yield s.scheduler.schedule, {"max_tokens": 8}
    entry = jaxkv.TableEntry(0, [[1], [], [], [], []])
    lists = {"rows": [0], "num_computed_tokens": [0], "num_new_tokens": [1], "encoder_lens": ()}
    lists |= {"accepted_tokens": ()}
    lists |= {"zero_ids": None, "copies": None, "extra": ()}
    yield jaxkv.pack_step, {"shape": s.shape, "entries": [entry]} | lists
    counts = {"num_groups": 5, "max_requests": 4, "max_block_ids": 4, "max_rows": 4}
    yield jaxkv.pack_entries, {"entries": [entry]} | counts
    yield jaxkv.UploadRing, {"depth": 2, "device": jax.devices("cpu")[0]}
    yield jaxkv.UploadRing(depth=2).buffer, {"shape": s.shape}
    yield jaxkv.ExtraKey.lora, {"name": "a", "path": "b"}
    yield jaxkv.ExtraKey.mm, {"identifier": "a", "start": 0, "end": 4}
    yield jaxkv.ExtraKey.prompt_embeds, {"rows": np.ones((4, 2), np.float32)}
    keys = {"block_size": 4, "root": prefixes.root_key(), "start": 0, "parent": None}
    yield prefixes.block_keys, prompt | keys
    yield prefixes.root_key, {"seed": "a"}
    yield prefixes.EventLog, {"max_batches": 4, "root": prefixes.root_key()}
    yield prefixes.EventLog().take, {"timestamp": 1.0}
    yield prefixes.EventLog().since, {"sequence": 0}
    batch = prefixes.EventBatch(0, 1.0, ())
    yield (
        prefixes.encode_events,
        {"batch": batch, "format": "tagged", "keys": "int", "groups": "all", "rank": 0},
    )
    yield prefixes.event_frames, {"sequence": 0, "payload": b"", "topic": ""}
    sampling = {"temperature": 1.0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 1, "n": 1}
    sampling |= {"logprobs": 1, "prompt_logprobs": 1, "side": True, "processors": {}}
    yield jaxkv.Sampling, sampling | {"max_tokens": 4, "stop_token_ids": (1,)}
    yield NgramDrafts, {"max_tokens": 4, "min_match": 2, "max_match": 4}
    yield TokenAutomaton, {"vocab_size": 8, "max_states": 4, "max_classes": 4}
    table = {"transitions": {0: {1: 0}}, "vocab_size": 8, "start": 0}
    yield TokenTable.from_transitions, table


def of_device(s: Served) -> Iterator[Call]:
    """Yields what makes a cache, describes it, and moves it."""
    made = {"plan": PLAN, "max_requests": 4, "kernel_block_sizes": [4] * 5, "order": "LBNHC"}
    made |= {"stacked": None, "interleave_tokens": 1, "scales": None, "mesh": None, "axis": None}
    made |= {"device": None, "worker": 0, "rank": None, "tables_only": False}
    yield jaxkv.make_cache, made
    yield jaxkv.check_errors, {"cache": s.cache}
    cache = {"cache": s.cache}
    yield pool.describe_layer, cache | {"layer": "full.0", "ids": "kernel"}
    yield pool.describe_blocks, cache | {"block_ids": [[1], [], [], [], []]}
    lists = cache | {"layer": "full.0", "shape": s.shape, "q_block_tokens": 4, "causal": True}
    yield block_mask_sizes, lists
    yield hadamard, {"heads": s.keys}
    asleep = {"cache": jaxkv.make_cache(PLAN, max_requests=4)}
    yield jaxkv.sleep, asleep | {"level": 1, "parts": ("kv_cache",), "chunk_bytes": 2**20}
    asleep = {"cache": jaxkv.sleep(jaxkv.make_cache(PLAN, max_requests=4))}
    yield jaxkv.wake_up, asleep | {"parts": ("kv_cache",), "reset_scales": False}
    yield jaxkv.HostBlocks().transfer, cache | {"transfers": None}


def of_steps(s: Served) -> Iterator[Call]:
    """Yields functions of a cache and a step, which are traced only."""
    run, cache = {"implementation": "xla"}, {"cache": s.cache}
    step = cache | {"layer": "full.0", "batch": s.batch, "layer_index": None}
    rows, ids = {"keys": s.keys, "values": s.keys}, {"token_ids": jnp.zeros(8, jnp.int32)}
    given = {
        jaxkv.apply_step: cache | run | {"upload": s.upload},
        jaxkv.attend: step
        | run
        | rows
        | {"queries": s.keys, "scale": 1.0, "soft_cap": None, "sinks": None, "row_packing": None}
        | {"selected": jnp.zeros((8, 3), jnp.int32), "sparse_block_size": 2},
        jaxkv.write_tokens: step | run | rows,
        jaxkv.read_tokens: step | {"dtype": "float32"},
        jaxkv.write_rows: step | run | {"rows": jnp.ones((8, 2, 8), jnp.bfloat16), "mask": None},
        jaxkv.read_rows: step,
        jaxkv.StepContext: cache | run | {"upload": s.upload, "newest_tokens": None} | ids,
        physical_to_logical: step,
        block_mask_indices: step | {"q_block_tokens": 4, "causal": True},
    }
    view = jaxkv.layer_view(s.cache, "full.0")
    ids, ends = jnp.array([1], jnp.int32), jnp.ones(5, jnp.int32)
    given |= {
        jaxkv.layer_view: cache | {"layer": "full.0"},
        jaxkv.with_layer_view: cache | {"layer": "full.0", "view": view},
        pool.zero_blocks: cache | run | {"block_ids": ids, "ends": ends},
        pool.copy_blocks: cache
        | run
        | {"sources": ids, "destinations": ids + 1, "ends": ends, "disjoint": False},
        pool.quantize: {"values": s.keys, "dtype": "float8_e4m3fn", "scale": 1.0},
        jaxkv.expand_blocks: {"block_ids": ids, "blocks_per_kv_block": 2},
    }
    arrays = tuple(jnp.zeros((4, *shape)) for shape in ((3,), (2, 4)))
    states = step | {"layer": "state.0", "at": None, "layer_index": None}
    given |= {jaxkv.read_state: states, jaxkv.write_state: states | run | {"arrays": arrays}}
    for call, arguments in given.items():
        yield traced(call), arguments


def of_recurrent(s: Served) -> Iterator[Call]:
    """Yields recurrent layers of a cache and a step, which are traced only."""
    conv, states = (2, 12), (2, 4, 2)
    shapes = {"delta": (conv, states), "linear": (states,), "conv": (conv,)}
    specs = {
        name: jaxkv.StateSpec(block_size=4, shapes=of, dtypes=("f32",) * len(of))
        for name, of in shapes.items()
    }
    plan = jaxkv.plan_cache(specs, 2**20, max_model_len=24)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=8)
    cache, batch = jaxkv.apply_step(jaxkv.make_cache(plan, max_requests=4), shape.idle())
    run = {"cache": cache, "batch": batch, "layer_index": None, "implementation": "xla"}
    inputs, of_heads = jnp.ones((8, 12)), jnp.ones((8, 2))
    taps = run | {"conv_weights": jnp.ones((3, 12)), "conv_bias": jnp.ones(12)}
    mixed = taps | {"layer": "delta", "log_decay": -of_heads}
    of_delta = {"qkv": inputs, "beta": of_heads, "num_key_heads": 1, "scale": 1.0}
    yield traced(jaxkv.gated_delta), mixed | of_delta
    yield traced(jaxkv.mamba2), mixed | {"xbc": inputs, "steps": of_heads, "num_groups": 1}
    linear = run | {"layer": "linear", "qkv": inputs, "log_decay": -of_heads}
    yield traced(jaxkv.linear_attention), linear | {"num_key_heads": 1, "scale": 1.0}
    yield traced(jaxkv.short_conv), taps | {"layer": "conv", "inputs": inputs, "silu": False}


def of_index(_: Served) -> Iterator[Call]:
    """Yields the choice of tokens by an index, which is traced only."""
    plan = jaxkv.plan_cache(
        {"a": jaxkv.MLASpec(block_size=4, head_size=8)}, 2**20, max_model_len=24
    )
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=8)
    cache, batch = jaxkv.apply_step(jaxkv.make_cache(plan, max_requests=4), shape.idle())
    run = {"cache": cache, "batch": batch, "layer_index": None, "implementation": "xla"}
    arrays = {"queries": jnp.ones((8, 2, 8)), "weights": jnp.ones((8, 2)), "keys": jnp.ones((8, 8))}
    yield traced(jaxkv.top_tokens), run | arrays | {"layer": "a", "count": 4}
    del arrays["weights"]
    sizes = {"count": 4, "sparse_block_size": 2, "init_blocks": 0, "local_blocks": 1}
    yield traced(top_blocks), run | arrays | sizes | {"layer": "a"}


def traced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, so that a call only traces it."""

    @functools.wraps(call)
    def trace(**arguments: Any) -> Any:
        return jax.eval_shape(lambda: call(**arguments))

    return trace


PACKAGES: dict[str, Callable[[Served], Iterator[Call]]] = {
    "planning": of_planning,
    "host": of_host,
    "device": of_device,
    "steps": of_steps,
    "recurrent": of_recurrent,
    "index": of_index,
}


def kinds(annotation: Any) -> list[Any]:
    """The types of which a value may be one."""
    if isinstance(annotation, typing.TypeAliasType):
        return kinds(annotation.__value__)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in kinds(part)]
    if hasattr(annotation, "array_type"):  # of jaxtyping
        return kinds(annotation.array_type)
    return [typing.get_origin(annotation) or annotation]


def wrong_values(known: list[Any], value: Any, least: int | None) -> Iterator[Any]:
    """Yields values that are of none of these types, and the number below the least one."""
    is_array = jax.Array in known
    if not {type(None), Any, Hashable} & set(known):
        yield None
    for kind in known:
        if kind is int:
            yield from ("4", 2.5, [4])
            yield from () if is_array or bool in known else (True,)
            yield from () if is_array or least is None else (least - 1,)
        elif kind is float:
            yield from ("x", [1.0]) if is_array else ("x", [1.0], True)
        elif kind is bool:
            yield from ("yes",) if int in known else (1, "yes")
        elif kind is Literal:
            yield from ("nonsense",) if int in known else ("nonsense", 3)
        elif kind is str:
            yield from (3, b"x")
        elif kind is Hashable:
            yield [1]
        elif kind in (Sequence, Iterable, tuple):
            yield 3
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                yield from (type(value)([other, *value[1:]]) for other in ("x", 2.5))
        elif kind is jax.Array:
            yield "x"
        elif kind not in (Any, type(None)):
            yield from (3, "x", object())


def refusal(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Returns the text of the refusal of a call, or else what comes of it."""
    try:
        call(**arguments)
    except (TypeError, ValueError) as refused:
        return str(refused)
    except Exception as error:
        return f"!{error!r}"
    return "!accepted"


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


def least_of(call: Callable[..., Any], name: str) -> int | None:
    return LEAST.get(f"{call.__qualname__}.{name}", LEAST.get(name, 1))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_wrong_is_refused_by_its_name_and_changes_nothing(
    package: str, served: Served
) -> None:
    problems = []
    for call, arguments in PACKAGES[package](served):
        known = {n: kinds(p.annotation) for n, p in inspect.signature(call).parameters.items()}
        for name, types_of in known.items():
            named = rf"\b({name}|request)\b" if Hashable in types_of else rf"\b{name}\b"
            for wrong in wrong_values(types_of, arguments[name], least_of(call, name)):
                text = refusal(call, arguments | {name: wrong})
                if text[:1] == "!" or not re.search(named, text):
                    problems.append(f"{call.__qualname__}({name}={wrong!r}): {text}")
        call(**arguments)
    assert problems == [], "\n".join(problems)


def test_the_least_numbers_are_not_refused_as_too_small(served: Served) -> None:
    for call, arguments in of_planning(served):
        for name, parameter in inspect.signature(call).parameters.items():
            if int in kinds(parameter.annotation):
                given = arguments | {name: least_of(call, name)}
                assert "must be at least" not in refusal(call, given), (call, name)
