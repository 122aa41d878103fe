"""Whole steps whose bits depend on each request alone: served alone, among others, preempted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.helpers import ON_GPU

VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH = 100, 256, 4, 2, 64
# Of a step, and of a request. On a GPU, prompts have tiles of their own and several segments.
TOKENS, LONGEST = (128, 1400) if ON_GPU else (16, 70)
REQUESTS, ANSWER = 5, 3
LAYERS = ("full", "window", "full.2")


def make_plan(dtype: str) -> jaxkv.Plan:
    common: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_size": WIDTH, "dtype": dtype}
    full = jaxkv.FullAttentionSpec(block_size=16, **common)
    window = jaxkv.SlidingWindowSpec(block_size=16, sliding_window=LONGEST // 3, **common)
    return jaxkv.plan_cache(
        dict(zip(LAYERS, (full, window, full), strict=True)),
        2**30,
        max_model_len=LONGEST,
        num_blocks_override=REQUESTS * LONGEST // 5,
        limits=jaxkv.Limits(max_in_flight_tokens=TOKENS),
    )


@functools.cache
def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.bfloat16)

    into = {"q": HEADS * WIDTH, "k": KV_HEADS * WIDTH, "v": KV_HEADS * WIDTH}
    of_layer = {
        layer: {
            **{name: matrix(HIDDEN, width) for name, width in into.items()},
            "o": matrix(HEADS * WIDTH, HIDDEN),
        }
        for layer in LAYERS
    }
    return of_layer | {"embed": matrix(VOCAB, HIDDEN), "head": matrix(HIDDEN, VOCAB)}


def forward(params: dict[str, Any], step: jaxkv.StepContext) -> jax.Array:
    x = params["embed"][step.token_ids] * 16
    for layer in LAYERS:
        weights = params[layer]
        wide = x.astype(jnp.float32)
        h = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        h = h.astype(jnp.bfloat16)
        q, k, v = ((h @ weights[name]).reshape(len(x), -1, WIDTH) for name in "qkv")
        x = x + step.attend(layer, q, k, v).reshape(len(x), -1) @ weights["o"]
    return (x[step.last_tokens] @ params["head"]).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=1)
def run(params, cache, upload):
    step = jaxkv.StepContext(cache, upload)
    logits = forward(params, step)
    return step.done(), logits


class Server:
    """Serves requests in steps of one shape: random work, preemptions, hits and rows."""

    def __init__(self, plan: jaxkv.Plan, seed: int):
        self.rng, self.plan = np.random.default_rng(seed), plan
        self.manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
        self.cache = jaxkv.make_cache(plan, max_requests=REQUESTS)
        self.shape = jaxkv.StepShape.for_plan(
            plan,
            max_requests=REQUESTS,
            max_tokens=TOKENS,
            forks=REQUESTS,
            cached_tokens=REQUESTS * LONGEST,
            extra=TOKENS,
            reproducible=True,
        )
        self.started: dict[str, int] = {}
        self.hits = self.preemptions = 0

    def serve(self, prompts: dict[str, list[int]]) -> dict[str, list[bytes]]:
        """Returns the logits of each token of the answers."""
        tokens, found = {n: [*p] for n, p in prompts.items()}, {n: [] for n in prompts}
        while waiting := [name for name in tokens if len(found[name]) < ANSWER]:
            for name in self.rng.permutation(waiting).tolist():
                if name not in self.manager.requests and self.rng.random() < 0.7:
                    self.hits += self.manager.start(name, tokens[name]).num_cached_tokens > 0
                    self.started[name] = len(tokens[name])
            work = self._choose(tokens)
            if not work:
                continue
            ids: list[int] = []
            for name, count in work.items():
                done = self.manager.num_computed_tokens(name)
                ids += tokens[name][done : done + count]
            upload = self.manager.step(self.shape, work, extra=ids)
            self.cache, logits = run(make_params(), self.cache, upload)
            self._note(tokens, found, list(work), np.asarray(logits))
        jaxkv.check_errors(self.cache)
        return found

    def _choose(self, tokens: dict[str, list[int]]) -> dict[str, int]:
        work, room = {}, TOKENS
        for name in self.rng.permutation(list(self.manager.requests)).tolist():
            left = len(tokens[name]) - self.manager.num_computed_tokens(name)
            count = min(left, room, int(self.rng.integers(0, left + 1)))
            if count:
                work[name] = count
                room -= count
        return work

    def _note(self, tokens, found, names: list[str], logits: np.ndarray) -> None:
        for name, row in zip(names, logits, strict=False):
            if self.manager.num_computed_tokens(name) == len(tokens[name]):
                assert np.isfinite(row).all() and row.std() > 0.1
                found[name].append(row.tobytes())
                tokens[name].append(int(row.argmax()))
            if len(found[name]) == ANSWER:
                self.manager.finish(name)
            elif self.rng.random() < 0.2:
                self.manager.finish(name, tokens[name][self.started[name] :])
                self.preemptions += 1
                if self.rng.random() < 0.3:
                    self.manager.reset_prefixes()


@pytest.mark.parametrize("dtype", ["fp8_e4m3", *["bf16"] * ON_GPU])
def test_answers_have_the_same_bits_alone_and_among_others_in_any_order(dtype: str) -> None:
    rng = np.random.default_rng(0)
    lengths = [LONGEST * part // 70 for part in (60, 20, 4, 33, 50)]
    beginning = rng.integers(0, VOCAB, lengths[1]).tolist()
    prompts = {
        name: rng.integers(0, VOCAB, length).tolist()
        for name, length in zip("abcde", lengths, strict=True)
    }
    for name in "bde":
        prompts[name][: len(beginning) - 1] = beginning[:-1]
    plan, hits, preemptions = make_plan(dtype), 0, 0
    alone = {
        name: Server(plan, seed).serve({name: prompts[name]})[name]
        for seed, name in enumerate("abd")
    }
    for seed in range(2):
        server = Server(plan, 100 + seed)
        among = server.serve(prompts)
        for name, answer in alone.items():
            assert among[name] == answer, name
        hits, preemptions = hits + server.hits, preemptions + server.preemptions
    assert hits > 1 and preemptions > 1
