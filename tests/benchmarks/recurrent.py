"""Recurrent layers over states in pages, and vLLM's Triton kernels.

Pages are shuffled over a pool that is larger than the L2 cache, and decodes of few requests take
turns with other pages. Times count the convolution: ours is a part of the kernel, vLLM's a call of
its own. Bytes are of the states, read and written once. Our steps have a multiple of 64
tokens, as in an engine; the last few are padding.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    Convolution,
    Implementation,
    Replay,
    RequestStates,
    StatePages,
    default_implementation,
    gated_delta_rule,
    selective_scan,
)
from pallas_kernels._recurrence.rule import replay_shapes
from tests.benchmarks.timing import ON_GPU, Report, Times, by_size, measure
from tests.benchmarks.vllm_peer import VllmPeer

POOL = 257  # pages


class RecurrentSpec(NamedTuple):
    """Requests with this many tokens each, and the layer that they pass.

    rule: "delta", "delta per key" (each key channel has a decay of its own), or "scan".
    drafts: tokens after which a state is written, other than the last one, of each request.
    replay: tokens of a ring; 0: none. Requests are anywhere in theirs, so that a step writes some
      checkpoints; it takes drafts, if there are some, of which any number is accepted.
    """

    name: str
    counts: tuple[int, ...]
    rule: str = "delta"
    key_heads: int = 16
    value_heads: int = 32
    key: int = 128
    value: int = 128
    state: str = "float32"
    drafts: int = 0
    width: int = 4
    replay: int = 0

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.value, self.key

    @property
    def state_bytes(self) -> int:
        return int(np.prod(self.state_shape)) * jnp.dtype(self.state).itemsize

    @property
    def ring_shapes(self) -> tuple[tuple[int, int, int], ...]:
        item = jnp.dtype(self.state).itemsize
        return replay_shapes(self.replay, self.state_shape, self.key_heads, item, self.drafts)

    @property
    def conv_bytes(self) -> int:
        return self.window * self.channels * 2

    @property
    def window(self) -> int:
        """Inputs of the convolution in a page."""
        return self.width - 1 + (self.drafts if self.replay else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, read once, and written once or after each token.

        With replay, of a checkpoint in L steps, and of the rows of rings, of which half are there.
        """
        if self.replay:
            row = sum(map(math.prod, self.ring_shapes)) * jnp.dtype(self.state).itemsize
            every = self.replay - 2 * self.drafts - 1 if self.drafts else self.replay
            share = (2 + self.drafts) / 2 / every  # of steps that write a checkpoint
            moved = self.state_bytes * (1 + min(share, 1)) + row * (0.5 + 1 / self.replay)
            return int(len(self.counts) * moved)
        return len(self.counts) * (2 + self.drafts) * self.state_bytes

    def smaller(self, times: int) -> "RecurrentSpec":
        """Returns the same with fewer and shorter requests, and fewer heads; itself for 1."""
        if times == 1:
            return self
        counts = tuple(-(-count // times) if count > 8 else count for count in self.counts[:4])
        return self._replace(counts=counts, key_heads=1, value_heads=2)


MAMBA: dict[str, Any] = {"rule": "scan", "key_heads": 8, "value_heads": 128, "value": 64}
SPECS = (
    RecurrentSpec("delta, decode 16", (1,) * 16),
    RecurrentSpec("delta, decode 64", (1,) * 64),
    RecurrentSpec("delta, decode 256", (1,) * 256),
    RecurrentSpec("delta, decode 256, bf16 states", (1,) * 256, state="bfloat16"),
    RecurrentSpec("delta, decode 64, bf16 states", (1,) * 64, state="bfloat16"),
    RecurrentSpec("delta, drafts 64 x 4", (4,) * 64, drafts=3),
    RecurrentSpec("delta, prompt 1 x 8k", (8192,)),
    RecurrentSpec("delta, prompts 8 x 1k, ragged", tuple(768 + 73 * i for i in range(8))),
    RecurrentSpec("delta, 63 decodes and 2k", (*[1] * 63, 2048)),
    RecurrentSpec("KDA, prompt 1 x 8k", (8192,), rule="delta per key", key_heads=32),
    RecurrentSpec("Mamba-2, decode 64", (1,) * 64, **MAMBA),
    RecurrentSpec("Mamba-2, decode 256", (1,) * 256, **MAMBA),
    RecurrentSpec("Mamba-2, prompt 1 x 8k", (8192,), **MAMBA),
)
RINGS = (16, 8)  # tokens of a ring
SMALL = ("delta, decode 16", "delta, 63 decodes and 2k", "Mamba-2, decode 64")


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title("Recurrent layers over states in pages: GPU time of a call and its convolution")
    small = tuple(spec for spec in SPECS if spec.name in SMALL)
    for spec in by_size(full=SPECS, small=small, smallest=small):
        spec = spec.smaller(by_size(full=1, small=16, smallest=64))
        is_step = max(spec.counts) <= 8
        add = functools.partial(report.add, spec.name, num_bytes=spec.num_bytes * is_step)
        ours = add(default_implementation("recurrent_step"), time_ours(spec))
        rings = by_size(full=RINGS, small=RINGS, smallest=RINGS[:1])
        for length in () if spec.rule == "delta per key" else rings[: 1 if spec.drafts else None]:
            ringed = spec._replace(replay=length)
            num_bytes = ringed.num_bytes * is_step
            report.add(
                *(spec.name, f"replay of {length}", time_ours(ringed)),
                base=ours,
                num_bytes=num_bytes,
            )
        if ON_GPU and not spec.drafts and (is_step or spec.rule == "delta per key"):
            add("XLA", time_ours(spec, "xla"), base=ours)
        if peer is not None and peer.has_tables and spec.rule != "delta per key":
            from tests.benchmarks.recurrent_peers import time_peer

            try:
                add("vLLM, Triton", time_peer(spec, peer), base=ours)
            except Exception as error:
                report.note(f"vLLM fails: {type(error).__name__}: {str(error)[:200]}")


class Arrays(NamedTuple):
    inputs: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    weights: jax.Array


def make_arrays(spec: RecurrentSpec) -> Arrays:
    keys = jax.random.split(jax.random.key(0), 4)
    count = sum(spec.counts)
    if max(spec.counts) > 8:
        count += -count % 64
    heads = (count, spec.value_heads)
    per_key = (spec.key,) if spec.rule == "delta per key" else ()
    return Arrays(
        jax.random.normal(keys[0], (heads[0], spec.channels), jnp.bfloat16),
        -jax.random.exponential(keys[1], (*heads, *per_key)) / 8,
        jax.random.uniform(keys[2], heads),
        jax.random.normal(keys[3], (spec.width, spec.channels), jnp.bfloat16),
    )


def page_sets(spec: RecurrentSpec) -> list[np.ndarray]:
    """Returns ids of disjoint pages, int32[B, states]: calls take turns with them."""
    pages = np.random.default_rng(0).permutation(np.arange(1, POOL)).astype(np.int32)
    size = len(spec.counts) * (1 if spec.replay else 1 + spec.drafts)
    return [pages[i : i + size].reshape(len(spec.counts), -1)
            for i in range(0, max(1, POOL - size), size)]  # fmt: skip


def places_of(spec: RecurrentSpec) -> list[np.ndarray]:
    """Returns the tokens before each of some steps, [B]: those of the same pages take turns."""
    batch = len(spec.counts)
    if not (spec.replay and spec.drafts):
        return [
            np.arange(batch) + i if max(spec.counts) == 1 else np.zeros(batch) for i in range(16)
        ]
    rng, places = np.random.default_rng(1), list[np.ndarray]()
    for turn in range(1024):
        before = places[turn - len(page_sets(spec))] if turn >= len(page_sets(spec)) else 0
        places.append(before + rng.integers(1, 1 + spec.drafts, batch, endpoint=True))
    return places


def time_ours(spec: RecurrentSpec, implementation: Implementation | None = None) -> Times:
    arrays, batch = make_arrays(spec), len(spec.counts)
    ring_bytes = sum(map(math.prod, spec.ring_shapes)) * jnp.dtype(spec.state).itemsize
    size = -(-(spec.conv_bytes + spec.state_bytes + ring_bytes) // 4096) * 4096
    counts = np.asarray(spec.counts, np.int32)
    is_step = counts.max() == 1
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    after = np.tile(np.arange(1, 2 + spec.drafts, dtype=np.int32), (batch, 1))
    start = -(-spec.conv_bytes // 512) * 512

    @functools.partial(jax.jit, donate_argnums=0)
    def call(
        data: jax.Array, arrays: Arrays, ids: jax.Array, computed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        states = StatePages(data, jnp.dtype(spec.state), spec.state_shape, POOL, start=start)
        windows = StatePages(data, jnp.bfloat16, (spec.window, spec.channels), POOL)
        options: dict[str, Any] = {
            "convolution": Convolution(windows, arrays.weights),
            "implementation": implementation,
        }
        before = {}
        if spec.replay:
            parts, begin = [], start + spec.state_bytes
            for shape in spec.ring_shapes:
                parts.append(states._replace(shape=shape, start=begin))
                begin += parts[-1].num_bytes
            options["replay"] = Replay(*parts, drafts=spec.drafts)
            before = {"num_computed_tokens": computed}
        requests = RequestStates(ids[:, 0], ids[:, 0], **before)
        if not is_step:
            lists = {"query_start_loc": jnp.asarray(starts)}
            has_states = spec.drafts and not spec.replay
            lists |= {"write_after": jnp.asarray(after)} if has_states else {}
            most = int(counts.max())
            requests = RequestStates(ids[:, 0], ids, **lists, max_query_len=most, **before)
        given = arrays.inputs, arrays.log_decay, arrays.beta, states, requests
        if spec.rule == "scan":
            return selective_scan(*given, num_groups=spec.key_heads, **options)
        return gated_delta_rule(*given, num_key_heads=spec.key_heads, **options)

    held = [jnp.full((POOL, size), 1, jnp.uint8)]  # small numbers in every dtype
    turns = itertools.cycle([jnp.asarray(ids) for ids in page_sets(spec)])
    positions = itertools.cycle([jnp.asarray(place, jnp.int32) for place in places_of(spec)])

    def step() -> jax.Array:
        held[0], out = call(held[0], arrays, next(turns), next(positions))
        return out

    return measure(step)
