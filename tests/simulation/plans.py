"""Random small plans: every kind of layer, alone and next to others, in pools of every size."""

import random
from collections.abc import Sequence

from jaxkv import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    Limits,
    MLASpec,
    Plan,
    RingSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.planning import ZeroPolicy
from jaxkv.specs import LayerSpec
from tests.layer_examples import plan_of

KV = {"num_kv_heads": 1, "head_size": 4}
ROW = {"head_size": 8, "dtype": "f32"}
MAX_DRAFTS = 2
ZERO_POLICIES: tuple[ZeroPolicy, ...] = "when_needed", "always", "never"


def _full(draw: random.Random) -> LayerSpec:
    return FullAttentionSpec(
        block_size=draw.choice([1, 2, 4, 8]), sink_tokens=draw.choice([0, 0, 0, 3]), **KV
    )


def _window(draw: random.Random) -> LayerSpec:
    size = draw.choice([1, 2, 4, 8])
    return SlidingWindowSpec(block_size=size, sliding_window=draw.randint(1, 13), **KV)


def _chunk(draw: random.Random) -> LayerSpec:
    size = draw.choice([1, 2, 4, 8])
    return ChunkedAttentionSpec(block_size=size, chunk_size=draw.randint(1, 13), **KV)


def _mla(draw: random.Random) -> LayerSpec:
    return MLASpec(block_size=draw.choice([2, 4, 8]), **ROW)


def _compressed(draw: random.Random) -> LayerSpec:
    size = draw.choice([4, 8])
    return MLASpec(block_size=size, compress_ratio=draw.choice([2, 4]), **ROW)


def _compressed_window(draw: random.Random) -> LayerSpec:
    return SlidingWindowMLASpec(
        block_size=draw.choice([4, 8]),
        compress_ratio=draw.choice([1, 2]),
        sliding_window=draw.randint(1, 13),
        **ROW,
    )


def _ring(draw: random.Random) -> LayerSpec:
    size = draw.choice([2, 3, 4])
    return RingSpec(block_size=size + draw.choice([0, 1, 2]), group_size=size, **ROW)


def _state(mode: str):
    def spec(draw: random.Random) -> LayerSpec:
        drafts = draw.choice([0, 0, 1, MAX_DRAFTS])
        sizes = [size for size in (1, 2, 4, 8) if mode == "none" or size > drafts]
        return StateSpec(
            block_size=draw.choice(sizes),
            shapes=((4,),),
            dtypes=("f32",),
            cache_mode=mode,
            speculative_blocks=drafts,
        )

    return spec


def _cross(draw: random.Random) -> LayerSpec:
    return CrossAttentionSpec(block_size=draw.choice([2, 4]), **KV)


KINDS = {
    "full": [_full],
    "windows": [_full, _window],
    "two windows": [_window, _window],
    "chunks": [_full, _chunk],
    "mla": [_mla],
    "compressed": [_compressed, _compressed_window],
    "cross": [_full, _cross],
    "ring": [_full, _compressed, _ring],
    "ring and state": [_full, _ring, _state("align")],
    "rings": [_window, _ring, _ring, _state("none")],
    "none": [_full, _state("none")],
    "align": [_full, _state("align")],
    "all": [_full, _state("all")],
    "one state": [_state("none")],
    "one align": [_state("align")],
    "one all": [_state("all")],
    "two states": [_state("align"), _state("all"), _window],
    "two aligned": [_state("align"), _state("align")],
    "three states": [_full, _state("none"), _state("align")],
}


ROOM = (1, 1.2, 1.5, 2.5, 5)


def random_plan(draw: random.Random, kind: str, room: Sequence[float] = ROOM) -> Plan:
    """Returns a plan of one of `KINDS`; now and then it barely holds its longest request.

    Args:
      room: by how much a pool may be larger than its longest request.
    """
    while True:
        layers = {f"layer{i}": make(draw) for i, make in enumerate(KINDS[kind])}
        length = draw.choice([16, 32, 48])
        options = {
            "limits": Limits(
                max_in_flight_tokens=draw.choice([2, 4, 8, 16, 64]),
                max_encoder_tokens=6 if kind == "cross" else 0,
            ),
            "zero_policy": draw.choice(ZERO_POLICIES),
            "context_parallel": 2 if kind in ("full", "mla") and draw.random() < 0.2 else 1,
        }
        length += options["context_parallel"] - 1  # one rank gets a token more
        try:
            plan = plan_of(layers, 1000, length, **options)
        except ValueError:  # pages that cannot share a pool
            continue
        sinks = sum(group.reserved_blocks for group in plan.groups)
        needed = plan.admission_blocks(length)
        num_blocks = 1 + sinks + int(needed * draw.choice(room))
        return plan_of(layers, num_blocks, length, **options)


def most_drafts(plan: Plan) -> int:
    """Returns how many drafts a step may verify: states need a block for each, rings a row."""
    growths = [group.growth for group in plan.groups]
    most = [growth.speculative_blocks for growth in growths if growth.kind == "state"]
    most += [growth.block_size - growth.group_size for growth in growths if growth.kind == "ring"]
    return min(most, default=MAX_DRAFTS)
