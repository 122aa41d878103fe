"""Groups of requests that begin with the same blocks: as chosen by the host, and as attended to."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.prefixes import _beginnings

BLOCK, LONGEST, REQUESTS, GROUPS, VOCAB = 16, 320, 8, 3, 100
LAYERS = ("full", "window", "latent")


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch) -> None:
    monkeypatch.setattr(_beginnings, "LEAST_TOKENS", 2 * BLOCK)


@functools.cache
def make_plan(layers: tuple[str, ...] = LAYERS) -> jaxkv.Plan:
    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "f32"}
    specs = {
        "full": jaxkv.FullAttentionSpec(block_size=BLOCK, **common),
        "window": jaxkv.SlidingWindowSpec(block_size=BLOCK, sliding_window=40, **common),
        "latent": jaxkv.MLASpec(block_size=BLOCK, head_size=16, value_size=8, dtype="f32"),
    }
    return jaxkv.plan_cache(
        {layer: specs[layer] for layer in layers},
        2**30,
        max_model_len=LONGEST,
        num_blocks_override=3 * REQUESTS * LONGEST // BLOCK + 1,
        limits=jaxkv.Limits(max_in_flight_tokens=LONGEST),
    )


def make_shape(plan: jaxkv.Plan, max_query_len: int, shared: int = 0) -> jaxkv.StepShape:
    return jaxkv.StepShape.for_plan(
        plan,
        max_requests=REQUESTS,
        max_tokens=max(REQUESTS, max_query_len),
        max_query_len=max_query_len,
        forks=REQUESTS,
        cached_tokens=REQUESTS * LONGEST,
        shared_prefixes=shared,
    )


# --- what the host chooses ------------------------------------------------------------


def groups_of(upload: jaxkv.blocks.Upload) -> list[tuple[list[int], int]]:
    parts = upload.parts()
    members, ends = np.split(parts["prefix_members"], parts["prefix_ends"]), parts["prefix_lens"]
    assert not members[-1].size
    to_spare = upload.shape.format.split(upload.data)["prefix_ends"][ends.size :]
    assert (to_spare == parts["prefix_members"].size).all()
    return [(m.tolist(), n) for m, n in zip(members[:-1], ends.tolist(), strict=True)]


def most_saved(beginnings: list[tuple[int, ...]], least: int) -> int:
    """Tokens that the best choice of groups saves, by looking at every beginning there is."""

    def best(members: list[int], blocks: int) -> int:
        children: dict[tuple[int, ...], list[int]] = {}
        for member in members:
            if len(beginnings[member]) > blocks:
                children.setdefault(beginnings[member][: blocks + 1], []).append(member)
        own = (len(members) - 1) * blocks * BLOCK if blocks * BLOCK >= least else 0
        return max(own, sum(best(each, blocks + 1) for each in children.values()))

    return best(list(range(len(beginnings))), 0) if beginnings else 0


class Course:
    """Random forks, hits, ends, rewinds and steps of a manager.

    shared: groups of its decodes; without one, their steps have the shape of prompts.
    on_step: called with each upload and the token ids of its step.
    """

    def __init__(self, seed: int, shared: int = GROUPS, on_step: Callable | None = None):
        self.rng, self.plan, self.on_step = np.random.default_rng(seed), make_plan(), on_step
        self.manager = jaxkv.BlockManager(self.plan, max_requests=REQUESTS)
        self.prefill = make_shape(self.plan, LONGEST)
        self.decode = make_shape(self.plan, 1, shared) if shared else self.prefill
        self.names, self.found = itertools.count(), 0
        self.tokens: dict[int, list[int]] = {}
        self.root = self.rng.integers(0, VOCAB, LONGEST).tolist()

    def act(self) -> None:
        manager, running = self.manager, list(self.manager.requests)
        free, kind = REQUESTS - len(running), self.rng.integers(0, 6)
        if kind == 0 and free:
            self.start(next(self.names))
        elif kind == 1 and free and running:
            donor = running[self.rng.integers(len(running))]
            cut = int(self.rng.integers(1, manager.num_computed_tokens(donor) + 1))
            cut = cut if self.rng.random() < 0.5 else manager.num_computed_tokens(donor)
            samples = [next(self.names) for _ in range(self.rng.integers(1, free + 1))]
            with contextlib.suppress(ValueError):  # refused behind a window
                manager.fork(donor, samples, num_tokens=cut)
                self.tokens |= {name: self.tokens[donor][:cut] for name in samples}
        elif kind == 2 and len(running) > 3:
            name = running[self.rng.integers(len(running))]
            manager.finish(name)
            if self.rng.random() < 0.5:  # it was preempted
                self.start(name, self.tokens[name])
        elif kind == 3 and running:
            name = running[self.rng.integers(len(running))]
            kept = int(self.rng.integers(1, manager.num_computed_tokens(name) + 1))
            with contextlib.suppress(ValueError):  # refused below a prompt, and behind a window
                manager.rewind({name: kept})
                del self.tokens[name][kept:]
        else:
            self.step()

    def start(self, name: int, prompt: list[int] | None = None) -> None:
        if prompt is None:
            cut = int(self.rng.choice([0, 40, 130, 200]))
            prompt = self.root[:cut] + self.rng.integers(0, VOCAB, 60).tolist()
        self.tokens[name] = [*prompt]
        cached = self.manager.start(name, prompt).num_cached_tokens
        upload = self.manager.step(self.prefill, {name: len(prompt) - cached})
        if self.on_step is not None:
            self.on_step(upload, prompt[cached:])

    def step(self) -> None:
        computed = self.manager.num_computed_tokens
        running = [name for name in self.manager.requests if computed(name) < LONGEST - 1]
        work = dict.fromkeys(running[: self.rng.integers(0, len(running) + 1)], 1)
        if not work and self.on_step is not None:  # which takes requests
            return
        before, ids = [computed(name) for name in work], []
        for name in work:
            if len(self.tokens[name]) == computed(name):
                self.tokens[name].append(int(self.rng.integers(VOCAB)))
            ids.append(self.tokens[name][computed(name)])
        upload = self.manager.step(self.decode, work)
        if self.decode.shared_prefixes:
            held = [self.manager.block_ids(name) for name in work]
            check_groups(self.plan, groups_of(upload), held, before)
            self.found += bool(groups_of(upload))
        if self.on_step is not None:
            self.on_step(upload, ids)


def check_groups(plan: jaxkv.Plan, groups, ids, computed: list[int], unit: int = BLOCK) -> None:
    """Checks that members are in one group each, have the same blocks, and save the most.

    unit: tokens of which beginnings are multiples.
    """
    members = [member for group, _ in groups for member in group]
    assert len(set(members)) == len(members)
    full = [g for g, group in enumerate(plan.groups) if group.growth.window > LONGEST]
    for group, tokens in groups:
        assert len(group) > 1 and tokens > 0 == tokens % unit
        assert tokens <= min(computed[member] for member in group)
        for g in full:
            assert len({ids[member][g][: tokens // BLOCK] for member in group}) == 1
    beginnings = [
        tuple(zip(*(of_request[g] for g in full), strict=False))[: tokens // unit * unit // BLOCK]
        for of_request, tokens in zip(ids, computed, strict=True)
    ]
    saved = sum((len(group) - 1) * tokens for group, tokens in groups)
    best = most_saved(beginnings, _beginnings.LEAST_TOKENS)
    if best * _beginnings.LEAST_PART < sum(computed):
        assert not groups
    elif len(groups) < GROUPS:
        assert saved == best
    else:
        assert saved <= best


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16))
def test_the_host_chooses_groups_that_save_the_most(seed: int) -> None:
    course = Course(seed)
    for _ in range(100):
        course.act()


@settings(max_examples=150)
@given(seed=st.integers(0, 2**16), sizes=st.sampled_from([(1, 1), (1, 2), (2, 1)]))
def test_groups_save_the_most_in_any_tables(seed: int, sizes: tuple[int, int]) -> None:
    """Also of requests that are equal, or that end where a block does, and of columns of two."""
    rng, width, unit = np.random.default_rng(seed), 8, sizes[0]
    computed = np.minimum(rng.integers(1, 2 * width, 8) * (BLOCK // 2), width * BLOCK)
    tables = [np.arange(1, 1 + 8 * width // size).reshape(8, -1) for size in sizes]
    for request in range(1, 8):
        like, same = rng.integers(request), rng.integers(width + 1)
        tables[0][request, : same // unit] = tables[0][like, : same // unit]
        if rng.integers(2):  # a copy in one group of layers
            same = rng.integers(same // unit + 1) * unit
        tables[1][request, : same // sizes[1]] = tables[1][like, : same // sizes[1]]
    for table, size in zip(tables, sizes, strict=True):
        table[np.arange(table.shape[1]) >= -(-computed[:, None] // (size * BLOCK))] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_beginnings, "LEAST_TOKENS", int(rng.integers(1, 3)) * BLOCK)
        found, one, every = (
            _beginnings.group_by_beginning(tables, [size * BLOCK for size in sizes], computed, most)
            for most in (GROUPS, 1, 8)
        )
        best = [(group.members.tolist(), group.tokens, group.saved) for group in every]
        for some, most in ((found, GROUPS), (one, 1)):
            is_enough = 8 * sum(saved for *_, saved in best[:most]) >= computed.sum()
            wanted = best[:most] if is_enough else []
            assert [(group.members.tolist(), group.tokens, group.saved) for group in some] == wanted
        assert [saved for *_, saved in best] == sorted([saved for *_, saved in best], reverse=True)
        plan: Any = SimpleNamespace(
            groups=[SimpleNamespace(growth=SimpleNamespace(window=2**31 - 1))] * 2
        )
        by_block = [np.repeat(table, n, axis=1) for table, n in zip(tables, sizes, strict=True)]
        ids = [[tuple(table[request]) for table in by_block] for request in range(8)]
        groups = [(group.members.tolist(), group.tokens) for group in found]
        check_groups(plan, groups, ids, computed.tolist(), unit * BLOCK)


# --- what attention makes of it -------------------------------------------------------


@functools.partial(jax.jit, donate_argnums=0)
def attend_all(cache: jaxkv.KVCache, upload: jaxkv.blocks.Upload, embedded: jax.Array) -> Any:
    """Attends in all layers, whose keys and values are those of a token and its position.

    embedded: [layers, T, 40].
    """
    cache, batch = jaxkv.apply_step(cache, upload)
    outs = []
    for layer, tokens in zip(LAYERS, embedded, strict=True):
        positions = batch.positions[:, None].astype(jnp.float32)
        turned = tokens * jnp.cos(positions * jnp.arange(40.0)[None])
        queries, keys, values = turned[:, :32].reshape(-1, 2, 16), turned[:, :16], turned[:, 32:]
        if layer == "latent":
            cache, out = jaxkv.attend(cache, layer, batch, queries, keys)
        else:
            rows = keys[:, None, :8], values[:, None]
            cache, out = jaxkv.attend(cache, layer, batch, queries[..., :8], *rows)
        outs.append(out)
    return cache, jnp.concatenate(outs, axis=-1)


def serve(seed: int, shared: int) -> tuple[list[np.ndarray], int]:
    """Returns the outputs of all decodes of a course, over a pool of NaN."""
    cache = jaxkv.make_cache(make_plan(), max_requests=REQUESTS)
    cache = dataclasses.replace(cache, buffers=tuple(jnp.full_like(b, 255) for b in cache.buffers))
    outs: list[np.ndarray] = []
    table = np.random.default_rng(0).normal(size=(len(LAYERS), VOCAB, 40)).astype(np.float32)

    def on_step(upload: jaxkv.blocks.Upload, ids: list[int]) -> None:
        nonlocal cache
        padded = np.zeros(upload.shape.max_tokens, np.int32)
        padded[: len(ids)] = ids
        cache, out = attend_all(cache, upload, table[:, padded])
        outs.append(np.asarray(out)[: len(ids)])

    course = Course(seed, shared, on_step)
    for _ in range(40):
        course.act()
    jaxkv.check_errors(cache)
    return outs, course.found


def test_attention_gives_what_it_gives_without_sharing() -> None:
    (shared, found), (alone, _) = serve(0, GROUPS), serve(0, 0)
    assert found, "nothing is shared"
    for ours, theirs in zip(shared, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


def test_a_shape_for_what_does_not_go_with_sharing_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_prefixes=3 does not go with max_query_len=2"):
        make_shape(make_plan(), 2, shared=GROUPS)
    decode = make_shape(make_plan(), 1, shared=GROUPS)
    with pytest.raises(ValueError, match="does not go with context_parallel=2;"):
        dataclasses.replace(decode, context_parallel=2)
    with pytest.raises(ValueError, match="with max_query_len=2 and context_parallel=3 and repro"):
        dataclasses.replace(decode, max_query_len=2, context_parallel=3, reproducible=True)
    with pytest.raises(ValueError, match="does not go with reproducible=True"):
        jaxkv.StepShape.for_plan(
            make_plan(),
            max_requests=2,
            max_tokens=2,
            max_query_len=1,
            shared_prefixes=1,
            reproducible=True,
        )
