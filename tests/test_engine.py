"""`Engine`: the tokens of a model without a cache, whatever the batch, and nothing lost."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import sys
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Output
from jaxkv._src.engine import _device, _engine, _logprobs, _shape_buckets
from jaxkv._src.engine._device import Device
from jaxkv._src.engine._outputs import Kind
from jaxkv._src.engine._sampler import _keep, _scaled, draw, fields_of
from jaxkv._src.engine._samples import RECORD, record_of
from jaxkv._src.internal.numbers import MAX_SAMPLES
from jaxkv._src.prefixes import _beginnings
from jaxkv.testing import count_compilations
from tests.engine_models import (
    SPECS,
    VOCAB,
    assert_details,
    forward,
    forward_in_a_jit,
    head,
    hidden_states,
    kept,
    make_params,
    make_plan,
    noise,
    redrawn,
)
from tests.helpers import needs_devices

Sampling = jaxkv.Sampling
ALL, NEW = tuple(SPECS), 9
HEADED = "full", "window"  # layers of the engine whose model returns no logits
TIGHT = 34  # blocks: requests are preempted
SIZES = {"max_requests": 4, "max_tokens": 16}
LONG_RUN = int(os.environ.get("JAXKV_ENGINE_REQUESTS", "0"))


@functools.cache
def make_engine(
    layers: tuple[str, ...] = ALL, num_blocks: int = TIGHT, decode_steps: int = 1
) -> jaxkv.Engine:
    plan = make_plan(layers, num_blocks)
    return jaxkv.Engine(forward, make_params(), plan, decode_steps=decode_steps, **SIZES)


def random_requests(seed: int, count: int) -> list[tuple[list[int], Sampling]]:
    """Prompts, half of which begin alike, with all kinds of sampling."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 13).tolist()
    requests = []
    for number in range(count):
        begins = shared[: rng.integers(8, 13)] if number % 2 else []
        prompt = [*begins, *rng.integers(0, VOCAB, rng.integers(1, 18)).tolist()]
        sampling = Sampling(max_tokens=int(rng.integers(1, NEW)), logprobs=True)
        if number % 3:
            limits = [{}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.02}][rng.integers(3)]
            sampled: dict[str, Any] = {"temperature": float(rng.uniform(0.5, 1.5)), **limits}
            sampled |= {"n": int(rng.integers(1, 4)), "seed": int(rng.integers(2**32))}
            sampling = dataclasses.replace(sampling, **sampled)
        requests.append((prompt, sampling))
    return requests


def assert_right(
    outputs: Sequence[Output], requests: Sequence[tuple[list[int], Sampling]], layers=ALL
) -> None:
    """Compares every sample with the model without a cache, up to its end."""
    assert len(outputs) == sum(sampling.n for _, sampling in requests)
    for output in outputs:
        prompt, sampling = requests[output.request]
        right = redrawn(make_params(), layers, prompt, sampling, output, NEW)
        assert output.tokens == right.tokens, output
        if sampling.logprobs is not None:
            np.testing.assert_allclose(output.logprobs, right.logprobs, atol=2e-4)
        assert_details(make_params(), layers, prompt, sampling, output, atol=2e-4)
        if output.finish_reason == "length":
            assert len(output.tokens) == sampling.max_tokens


def assert_all_free(engine: jaxkv.Engine) -> None:
    assert not engine.has_work and not engine.manager.requests
    assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks


def run(engine: jaxkv.Engine, requests: Sequence[tuple[list[int], Sampling]]) -> list[Output]:
    prompts, samplings = zip(*requests, strict=True)
    outputs = list(engine.generate(prompts, samplings))
    assert_all_free(engine)
    return outputs


# --- tokens ---------------------------------------------------------------------------


def test_tokens_are_those_of_the_model_without_a_cache() -> None:
    """Greedy and drawn, chunked, forked, after prefix hits and preemptions, of all layers."""
    engine, requests = make_engine(), random_requests(1, 30)
    before = engine.stats
    assert_right(run(engine, requests), requests)
    assert engine.stats.preemptions > before.preemptions
    assert engine.stats.cached_tokens > before.cached_tokens


def test_stats_count_what_was_served(monkeypatch) -> None:
    engine, requests = make_engine(), random_requests(4, 12)
    counts, before = Counter(), Counter(dataclasses.asdict(engine.stats))
    step, start, schedule = engine.manager.step, engine._device.run, engine._scheduler.schedule

    def packed(shape: jaxkv.StepShape, work: Any, **options: Any) -> Any:
        num_tokens, last = sum(work.values()), schedules[-1]
        counts.update(steps=1, computed_tokens=num_tokens)
        counts.update(padded_tokens=shape.max_tokens - num_tokens, preemptions=len(last.preempted))
        counts.update(cached_tokens=sum(hit.num_cached_tokens for hit in last.hits.values()))
        return step(shape, work, **options)

    def started(*uploads: Any) -> Any:
        assert len(engine._calls.in_flight) < 2, "the host is further ahead than a call"
        counts.update(calls=1)
        return start(*uploads)

    def chosen(**options: Any) -> Any:
        schedules.append(schedule(**options))
        return schedules[-1]

    schedules: list[Any] = []
    monkeypatch.setattr(engine._scheduler, "schedule", chosen)
    monkeypatch.setattr(engine.manager, "step", packed)
    monkeypatch.setattr(engine._device, "run", started)
    outputs = run(engine, requests)
    counts.update(prompt_tokens=sum(len(prompt) for prompt, _ in requests))
    counts.update(sampled_tokens=sum(len(output.tokens) for output in outputs))
    assert Counter(dataclasses.asdict(engine.stats)) - before == +counts
    assert counts["preemptions"] and counts["cached_tokens"]


def test_samples_of_a_long_prompt_start_in_one_step() -> None:
    engine = make_engine()
    before = engine.stats
    prompt = [*range(26)]  # shares nothing with those of other tests, which would cut its chunks
    (*outputs,) = engine.generate([prompt], Sampling(n=3, temperature=1.0, max_tokens=4))
    assert [len(output.tokens) for output in outputs] == [4, 4, 4]
    # Three compute the prompt and draw the first token of each.
    assert engine.stats.steps - before.steps == 6
    assert engine.stats.preemptions == before.preemptions


def test_a_prompt_is_a_sequence_or_an_array_that_the_caller_may_change() -> None:
    engine, requests = make_engine(), random_requests(0, 4)
    right = run(engine, requests)
    kinds: list[Any] = [list, tuple, np.int16, np.int32, np.uint64, jnp.int32]
    for kind in kinds:
        for name, (ids, sampling) in enumerate(requests):
            prompt = kind(ids)
            engine.add(name, prompt, sampling)
            if isinstance(prompt, list | np.ndarray):
                prompt[:] = [0] * len(ids)
        tokens = {(o.request, o.sample): list[int]() for o in right}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request, output.sample] += output.tokens
        assert tokens == {(o.request, o.sample): o.tokens for o in right}, kind


def test_steps_with_prompts_are_as_long_as_a_shape_and_others_hold_all_that_decode() -> None:
    engine = make_engine()
    samples, scheduler = engine._samples, engine._packer.scheduler
    asked: list[tuple[int | None, bool]] = []

    def schedule(max_tokens: int | None) -> Any:
        asked.append((max_tokens, len(engine._packer.sampled.samples) == len(samples.tokens)))
        return right(max_tokens=max_tokens)

    right, requests = scheduler.schedule, random_requests(3, 8)
    before = engine.stats.prompt_tokens
    with mock.patch.object(scheduler, "schedule", schedule):
        run(engine, requests)
    assert engine.stats.prompt_tokens == before + sum(len(prompt) for prompt, _ in requests)
    assert {most for most, decodes in asked if decodes} == {None}
    assert {most for most, decodes in asked if not decodes} <= set(engine._buckets.mixed)
    assert {decodes for _, decodes in asked} == {False, True}


def test_an_engine_begins_with_no_figures_and_room_for_few_copies() -> None:
    plan = make_plan(("full",))
    engine = jaxkv.Engine(forward, make_params(), plan, max_requests=40, max_tokens=48)
    assert not any(dataclasses.astuple(engine.stats))
    assert {shape.block_copies for shape in engine._buckets.shapes} == {32}


def test_the_logger_tells_what_an_engine_decides(caplog) -> None:
    """And is silent where nobody configures logging."""
    logger = logging.getLogger("jaxkv")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    plan, requests = make_plan(("full",), 14), [([1, 2, 3, number], 20) for number in range(4)]
    with caplog.at_level(logging.INFO, logger="jaxkv"):
        engine = jaxkv.Engine(forward, make_params(), plan, **SIZES)
        for number, (prompt, count) in enumerate(requests):
            engine.add(number, prompt, Sampling(max_tokens=count))
        while engine.has_work:
            engine.step()
        engine.update(make_params())
        engine.sleep()
        engine.wake_up()
    told = [record.getMessage() for record in caplog.records]
    for words, count in {
        "groups that share prefixes: 0; host memory: none": 1,
        "preempts ": engine.stats.preemptions,
        "new weights, version 1; in flight: finish": 1,
        "sleeps at level 1": 1,
        "is awake": 1,
    }.items():
        assert sum(words in text for text in told) == count > 0, told
    traced = [text for text in told if text.startswith("traces a step to compile")]
    # A GPU's uploads lie in page-locked memory; what is traced for errors before has none.
    assert 2 <= len({*traced}) <= len(traced) <= len(engine._buckets.shapes) + 1


@functools.cache
def engine_with_head() -> jaxkv.Engine:
    """With so few blocks that requests are preempted."""
    plan = make_plan(HEADED, 21)
    return jaxkv.Engine(hidden_states, make_params(), plan, head=head, **SIZES)


def without_limits(
    requests: list[tuple[list[int], Sampling]],
) -> list[tuple[list[int], Sampling]]:
    """Returns requests without limits, which would take as long to compile as a layer."""
    no_limits = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    return [(prompt, dataclasses.replace(sampling, **no_limits)) for prompt, sampling in requests]


def random_details(seed: int, count: int) -> list[tuple[list[int], Sampling]]:
    """The same requests, half of which ask for more than tokens."""
    rng, found = np.random.default_rng(seed), []
    for number, (prompt, sampling) in enumerate(random_requests(seed, count)):
        if number % 4 > 1:
            found.append((prompt, sampling))
            continue
        asked = rng.choice([None, False, True, 0, 1, 3], 2).tolist()
        details = {"logprobs": asked[0], "prompt_logprobs": asked[1], "side": bool(rng.integers(2))}
        found.append((prompt, dataclasses.replace(sampling, **details)))
    return found


def test_a_head_computes_the_logits_that_requests_ask_for(monkeypatch) -> None:
    """Of prompts piece by piece; after chunks, forks, hits and preemptions."""
    monkeypatch.setattr(_logprobs, "PIECE", 3)
    engine, requests = engine_with_head(), without_limits(random_details(1, 30))
    assert_right(run(engine, requests), requests, HEADED)
    assert engine.stats.preemptions and engine.stats.cached_tokens
    engine.warm_up(*[sampling for _, sampling in requests])
    with count_compilations() as compilations:
        run(engine, requests)
    assert not compilations


def test_logits_of_a_prompt_are_in_memory_piece_by_piece() -> None:
    tokens, vocab, bf16 = 4096, 8192, jnp.bfloat16
    shapes = [((8, vocab), bf16), ((tokens, 8), bf16), ((tokens,), jnp.int32)]

    @jax.jit
    def logprobs(weights: jax.Array, hidden: jax.Array, ids: jax.Array) -> jax.Array:
        return _logprobs.prompt_logprobs(lambda rows: rows @ weights, hidden, ids, 2)

    compiled = logprobs.lower(*itertools.starmap(jax.ShapeDtypeStruct, shapes)).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 2.5 * 4 * _logprobs.PIECE * vocab < 4 * tokens * vocab / 3


def test_steps_return_details_with_the_tokens_that_they_belong_to() -> None:
    """Those of all outputs of a sample make up what `generate` returns."""
    engine, requests = engine_with_head(), without_limits(random_details(4, 10))
    whole = {(o.request, o.sample): o for o in run(engine, requests)}
    parts: dict[Any, list[Output]] = {name: [] for name in whole}
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    while engine.has_work:
        for output in engine.step():
            assert (output.prompt_logprobs is None) or not parts[output.request, output.sample]
            parts[output.request, output.sample].append(output)
    for name, outputs in parts.items():
        tokens = [token for output in outputs for token in output.tokens]
        assert tokens == whole[name].tokens
        details = [(o.logprobs, o.top_logprobs, o.side) for o in outputs]
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *details)
        wanted = whole[name].logprobs, whole[name].top_logprobs, whole[name].side
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), joined, wanted)


def test_an_abort_leaves_no_number_for_what_was_not_computed() -> None:
    engine = engine_with_head()
    asked = Sampling(prompt_logprobs=2, side=True, logprobs=1, max_tokens=4)
    engine.add("waits", [1, 2, 3], asked)
    engine.abort("waits")
    engine.add("begins", [*range(40)], asked)  # in chunks of 16
    (first,) = engine.step()
    assert np.isnan(first.prompt_logprobs).all() and first.side is None
    assert engine.step() == []
    engine.abort("begins")
    (second,) = engine.step()
    num = len(second.side["x"])
    assert num in (16, 32) and second.side["at"][0].tolist() == [*range(num)]
    is_known = (np.arange(40) > 0) & (np.arange(40) <= num)
    assert (~np.isnan(second.prompt_logprobs)).tolist() == is_known.tolist()
    assert (second.prompt_top_logprobs.token_ids[:, 1] >= 0).tolist() == is_known.tolist()
    assert second.top_logprobs.logprobs.shape == (0, 1)


def test_what_an_engine_is_given_reaches_its_parts(monkeypatch) -> None:
    """Also numbers among the weights, which are no arrays."""
    given = {"chunk_tokens": 3, "shared_prefixes": 2, "decode_steps": 2}
    monkeypatch.setattr(_shape_buckets, "LEAST_SAVED_BYTES", 1)
    params = make_params() | {"scale": 2.0, "count": 3, "is_tied": True}
    seeds = []
    for seed in (5, 6, 5):
        engine = made(params=params, seed=seed, **given)
        engine.update(params | {"scale": 4.0, "count": 5, "is_tied": False})
        options = engine._scheduler._options
        assert (options.chunk_tokens, options.lookahead_steps, options.forks) == (3, 4, 4)
        assert [shape.shared_prefixes for shape in engine._buckets.shapes] == [0, 2, 0]
        assert repr(engine) == f"Engine({engine._scheduler!r}, 3 shapes)"
        engine.add("r", [1], Sampling(temperature=1.0))
        seeds.append(engine._samples.of_request["r"][0].seed)
    assert seeds[0] == seeds[2] != seeds[1]
    with pytest.raises(ValueError, match=r"params\['scale'\] is int32\(\); .* with float32\(\)"):
        engine.update(params | {"scale": 4})


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_groups_of_samples_read_what_they_share_where_that_pays(
    decode_steps: int, monkeypatch
) -> None:
    """By default, where the device has kernels for it; others take steps without groups."""
    layers = ("full", "latent") if decode_steps == 1 else ("full",)
    sizes = {"plan": make_plan(layers), "max_requests": 6}
    monkeypatch.setattr(_engine, "default_implementation", lambda *kernels: "mosaic_gpu")
    engine = made(**sizes, decode_steps=decode_steps)
    assert not engine._buckets.shared, "prompts are too short"
    monkeypatch.setattr(_shape_buckets, "LEAST_SAVED_BYTES", 2**12)
    monkeypatch.setattr(_beginnings, "LEAST_TOKENS", 8)
    assert not made(**sizes, shared_prefixes=0)._buckets.shared
    assert not made(**sizes, reproducible=True)._buckets.shared
    engine, found = made(**sizes, decode_steps=decode_steps), list[tuple[int, bool]]()
    engine.warm_up(Sampling(temperature=1.0))
    run_right = engine._device.run

    def noted(uploads: Any, wants: int) -> Any:
        if uploads[0].shape.max_query_len == 1:
            groups = len(uploads[0].parts().get("prefix_lens", ()))
            found.append((groups, bool(uploads[0].shape.shared_prefixes)))
        return run_right(uploads, wants)

    monkeypatch.setattr(engine._device, "run", noted)
    sampled = Sampling(temperature=1.0, seed=1, max_tokens=8, logprobs=True)
    alone = [([*range(at, at + 20)], sampled) for at in range(3)]
    together = [([*range(30)], dataclasses.replace(sampled, n=4))]
    with count_compilations() as compilations:
        outputs = run(engine, alone)
        assert found and not any(is_shared for _, is_shared in found)
        of_group = run(engine, together)
    assert (1, True) in found and not compilations
    assert_right(outputs, alone, layers)
    assert_right(of_group, together, layers)


def test_a_sample_does_not_depend_on_the_batch() -> None:
    engine, requests = make_engine(), random_requests(0, 10)
    together = {(o.request, o.sample): o.tokens for o in run(engine, requests)}
    for at in (4, 7):
        for output in run(engine, requests[at : at + 1]):
            assert output.tokens == together[at, output.sample]


def test_a_reproducible_engine_draws_the_same_bits_whatever_the_batch() -> None:
    """Alone and together, in other rows and chunks, after hits and preemptions, by one shape."""
    plan, requests = make_plan(("full", "window"), 21), random_requests(0, 12)
    engine = jaxkv.Engine(forward, make_params(), plan, reproducible=True, **SIZES)
    engine.warm_up()
    assert len(engine._buckets.shapes) == 1
    with count_compilations() as compilations:
        together = {(o.request, o.sample): o for o in run(engine, requests)}
        assert engine.stats.preemptions and engine.stats.cached_tokens
        for at in (0, 3, 5):
            engine.manager.reset_prefixes()
            for output in run(engine, requests[at : at + 1]):
                among = together[at, output.sample]
                assert output.tokens == among.tokens
                assert output.logprobs.tolist() == among.logprobs.tolist()
    assert not compilations


@pytest.mark.skipif(not LONG_RUN, reason="JAXKV_ENGINE_REQUESTS=10000 for the long run")
@pytest.mark.parametrize("layers", [*((layer,) for layer in SPECS), ALL], ids="+".join)
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_many_requests(layers: tuple[str, ...], decode_steps: int) -> None:
    engine = make_engine(layers, TIGHT if len(layers) > 1 else 20, decode_steps)
    for seed in range(LONG_RUN // 100 // 10):
        requests = random_requests(seed, 100)
        assert_right(run(engine, requests), requests, layers)


@functools.cache
def engine_of_three_steps() -> jaxkv.Engine:
    """With uploads of a ring, as on one GPU, where an upload that is packed must also run.

    Its model returns the step, too.
    """
    plan, sizes = make_plan(("full", "state"), 200), {"max_requests": 2, "max_tokens": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "ring", lambda self, depth: jaxkv.UploadRing(depth=depth))
        return jaxkv.Engine(forward_in_a_jit, make_params(), plan, decode_steps=3, **sizes)


def test_several_steps_in_one_call_draw_the_same_tokens() -> None:
    engine, requests = engine_of_three_steps(), without_limits(random_requests(1, 8))
    assert_right(run(engine, requests), requests, ("full", "state"))
    assert engine.stats.calls < engine.stats.steps


def test_a_call_returns_what_each_of_its_steps_draws() -> None:
    """From uploads in the host's memory, which are on the device before they are put together."""
    engine = engine_of_three_steps()
    device, shape = engine._device, engine._buckets.decode[2]
    for count in (1, 2, 3):
        uploads = tuple([shape.idle(engine._packer.ring) for _ in range(count)])
        traced = device._step_of(uploads).trace(*device._arguments(uploads))
        state, out = traced.out_info
        assert out["sampled"].shape == (count, 2 * shape.batch_size + 1)
        assert state[1].shape == device._sampled.shape
        assert f"<host>[{count}," not in str(traced.jaxpr)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_sample_that_stops_within_a_call_writes_and_keeps_nothing_more(
    steps: int, monkeypatch
) -> None:
    """A call of one step has computed what it stopped at, when the host learns of it."""
    engine = engine_of_three_steps() if steps == 3 else make_engine()
    prompt, kept = [1, 2, 3], list[int]()
    (whole,) = engine.generate([prompt], Sampling(max_tokens=NEW))
    at = next(i for i, token in enumerate(whole.tokens) if i and token not in whole.tokens[:i])
    sampling = Sampling(stop_token_ids=[0, whole.tokens[at]], max_tokens=20)
    engine.sleep(level=2)
    engine.wake_up()
    group, held, tokens = engine._device.cache.layout.placement_of("full").group, set(), []
    right = engine.manager.finish

    def finish(name: Any, more: Any) -> None:
        held.update(engine.manager.block_ids(name)[group])
        kept.extend(more)
        right(name, more)

    monkeypatch.setattr(engine.manager, "finish", finish)
    engine.add("r", prompt, sampling)
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.tokens]
    assert tokens == whole.tokens[: at + 1]
    rows = np.asarray(jaxkv.layer_view(engine._device.cache, "full"))[sorted(held)]
    at += steps == 1
    assert rows.any(axis=(2, 3)).sum() == len(prompt) + at
    assert kept == whole.tokens[:at]


def test_a_stop_token_ends_a_sample_and_is_its_last() -> None:
    engine, requests = make_engine(), random_requests(0, 10)
    whole = {(o.request, o.sample): o for o in run(engine, requests)}
    stops = [whole[at, 0].tokens[len(whole[at, 0].tokens) // 2] for at in range(10)]
    stopping = [
        (prompt, dataclasses.replace(sampling, stop_token_ids=(stop, 49)))
        for (prompt, sampling), stop in zip(requests, stops, strict=True)
    ]
    for output in run(engine, stopping):
        tokens, ends = whole[output.request, output.sample].tokens, {stops[output.request], 49}
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        assert output.tokens == tokens[:end]
        assert (output.finish_reason == "stop") == (output.tokens[-1] in ends)


def test_steps_return_tokens_as_they_come_and_an_abort_keeps_them() -> None:
    engine, requests = make_engine(), random_requests(0, 6)
    whole = {(o.request, o.sample): o for o in run(engine, requests)}
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    streamed: dict[Any, list[int]] = {}
    ends: dict[Any, str] = {}
    while engine.has_work:
        for output in engine.step():
            streamed.setdefault((output.request, output.sample), []).extend(output.tokens)
            if output.finish_reason is not None:
                ends[output.request, output.sample] = output.finish_reason
            if output.request == 4 and output.finish_reason is None:
                engine.abort(4)
    assert_all_free(engine)
    assert {name for name, end in ends.items() if end == "abort"} == {n for n in whole if n[0] == 4}
    for name, tokens in streamed.items():
        assert tokens == whole[name].tokens[: len(tokens)]
        assert name[0] == 4 or len(tokens) == len(whole[name].tokens)


def test_one_sample_is_aborted_and_the_others_go_on() -> None:
    """Also the one that computes the prompt, before and after it has."""
    engine, sampling = make_engine(), Sampling(n=3, temperature=1.0, max_tokens=6, seed=5)
    whole = {o.sample: o.tokens for o in engine.generate([[*range(30)]], [sampling])}
    for number, steps in itertools.product(range(3), (0, 1, 2, 4)):
        engine.manager.reset_prefixes()
        engine.add("r", [*range(30)], sampling)
        outputs = [output for _ in range(steps) for output in engine.step()]
        engine.abort("r", sample=number)
        with pytest.raises(ValueError, match=f"sample={number} of 'r' is unknown, or has ended"):
            engine.abort("r", sample=number)
        while engine.has_work:
            outputs += engine.step()
        for sample in range(3):
            of_one = [output for output in outputs if output.sample == sample]
            tokens = [token for output in of_one for token in output.tokens]
            is_aborted = of_one[-1].finish_reason == "abort"
            assert is_aborted == (sample == number)
            assert tokens == whole[sample][: len(tokens) if is_aborted else None]
    assert_all_free(engine)


def test_prompts_of_another_salt_share_nothing_and_events_tell_what_is_cached() -> None:
    log = jaxkv.prefixes.EventLog()
    engine, prompt = made(events=log), [*range(9)]
    key = jaxkv.ExtraKey.lora("a", "/a")
    for prefix in ({"salt": "a"}, {"salt": "b"}, {"salt": "b", "extra_keys": [key]}):
        before = engine.stats.cached_tokens
        list(engine.generate([prompt], Sampling(max_tokens=1), **prefix))
        assert engine.stats.cached_tokens == before
        assert log.take() is not None
    list(engine.generate([prompt], Sampling(max_tokens=1), salt="a"))
    assert engine.stats.cached_tokens == 8


def test_leaving_the_loop_aborts_the_rest() -> None:
    engine, requests = make_engine(), random_requests(0, 6)
    prompts, samplings = zip(*requests, strict=True)
    for _ in engine.generate(prompts, samplings):
        break
    assert_all_free(engine)


@functools.cache
def engine_on_two_devices() -> jaxkv.Engine:
    spec = dataclasses.replace(SPECS["full"], num_kv_heads=1)  # on each of them
    plan = jaxkv.plan_cache({"full": spec}, 2**16, max_model_len=48)
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2])
    cache = jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads")
    same = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with pytest.MonkeyPatch.context() as patch:  # uploads as on GPUs, the same on every device
        ring = jaxkv.UploadRing(device=same)
        patch.setattr(Device, "ring", lambda self, depth: ring)
        params = jax.device_put(make_params(), same)
        columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "heads"))
        params["head"] = jax.device_put(params["head"], columns)  # and so are the logits
        return jaxkv.Engine(hidden_states, params, plan, head=head, cache=cache, **SIZES)


@needs_devices(2)
def test_a_warm_engine_compiles_nothing_and_two_devices_draw_the_tokens_of_one(
    monkeypatch,
) -> None:
    monkeypatch.setattr(_device, "folder_for", None)  # of the lowered layers, for one device alone
    engine, requests = engine_on_two_devices(), random_details(2, 6)
    engine.warm_up(*[sampling for _, sampling in requests])
    with count_compilations() as compilations:
        outputs = run(engine, requests)
    assert not compilations
    assert_right(outputs, requests, ("full",))
    assert [shape.max_tokens for shape in engine._buckets.shapes] == [4, 16]


# --- the sampler ----------------------------------------------------------------------

keep, scaled_logits = jax.jit(_keep), jax.jit(_scaled)


def fields(records: list[tuple[Any, ...]], **changes: Any) -> dict[str, np.ndarray]:
    """Returns the fields of records as the sampler takes them, some of them replaced."""
    array = np.array(records, RECORD)
    for name, values in changes.items():
        array[name] = values
    return jax.tree.map(np.asarray, jax.jit(fields_of)(array.view(np.int32)))


def test_limits_keep_what_sorting_keeps() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, VOCAB)).astype(np.float32) * 3
    samplings = [
        Sampling(
            temperature=float(rng.uniform(0.2, 2)),
            top_k=int(rng.integers(1, VOCAB)) if i % 2 else None,
            top_p=float(rng.uniform(0.05, 1)) if i % 3 else 1.0,
            min_p=float(rng.uniform(0, 0.3)) if i % 5 else 0.0,
        )
        for i in range(40)
    ]
    records = [record_of(sampling, seed, 1, 9) for seed, sampling in enumerate(samplings)]
    of = fields(records, index=range(40), position=7)
    scaled = scaled_logits(logits, of["temperature"])
    are_kept = np.isfinite(keep(scaled, of["top_k"], of["top_p"], of["min_p"]))
    right = [
        np.isfinite(kept(r.astype(np.float64), s)) for r, s in zip(logits, samplings, strict=True)
    ]
    np.testing.assert_array_equal(are_kept, right)
    tokens, _ = jax.jit(draw, static_argnums=2)(logits, of, Kind.LIMITED)
    sampled = np.asarray(noise(np.arange(40, dtype=np.uint32), np.full(40, 1), np.full(40, 7)))
    wanted = [
        int((kept(row.astype(np.float64), sampling) + g).argmax())
        for row, sampling, g in zip(logits, samplings, sampled, strict=True)
    ]
    assert tokens.tolist() == wanted


@pytest.mark.parametrize("kind", Kind)
def test_logits_of_16_bits_are_drawn_from_in_32(kind: Kind) -> None:
    """So that few tokens of a draw tie, and log-probabilities are those of all logits."""
    logits = (np.random.default_rng(0).normal(size=(40, VOCAB)) * 3).astype(jnp.bfloat16)
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9)
    of = fields([record_of(sampling, seed, 0, 9) for seed in range(40)], index=range(40))
    tokens, logprobs = jax.jit(draw, static_argnums=2)(logits, of, kind)
    wide = jax.jit(draw, static_argnums=2)(logits.astype(np.float32), of, kind)
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(tokens, wide[0])
    np.testing.assert_array_equal(logprobs, wide[1])


def test_without_limits_every_logit_is_kept() -> None:
    rows = np.array([[0, np.inf], [-np.inf, -np.inf], [-1, 1e38]] * 2, np.float32)
    rows, none = rows.repeat(2, axis=1), np.zeros((6, 1), np.float32)
    rows = np.asarray(scaled_logits(rows, none + 1))
    assert (rows.max(axis=1) == 0).all()
    np.testing.assert_array_equal(keep(rows, none.astype(int), none + 1, none), rows)


@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1000])
def test_limits_keep_the_smallest_set_at_any_temperature(vocab: int) -> None:
    """Most logits are equal to others, some are -inf or as large as floats are."""
    rng, count = np.random.default_rng(vocab), 60
    levels = np.array([-np.inf, -3e38, -1e9, -1.5, -0.25, 0, 0.5, 0.5000001, 2e9, 3e38], np.float32)
    logits = rng.choice(levels[: rng.integers(6, 11)], (count, vocab))
    logits[::2] = rng.choice(levels[3:8], (count // 2, vocab))
    logits[np.arange(count), rng.integers(0, vocab, count)] = np.maximum(logits[:, 0], 0)
    samplings = [
        Sampling(
            temperature=rng.choice([1e-30, 0.5, 1.0, 1e30]),
            top_k=None if rng.random() < 0.4 else int(rng.integers(1, vocab + 2)),
            top_p=rng.choice([1e-30, 0.1, 0.25, 0.5, 0.8, 0.999, 1.0]),
            min_p=rng.choice([0.0, 0.0, 0.3, 1.0]),
            logprobs=True,
        )
        for _ in range(count)
    ]
    records = [record_of(sampling, seed, 0, 9) for seed, sampling in enumerate(samplings)]
    of = fields(records, index=range(count))
    scores = scaled_logits(logits, of["temperature"])
    are_kept = np.isfinite(keep(scores, of["top_k"], of["top_p"], of["min_p"]))
    wide = logits.astype(np.float64)
    right = np.array([np.isfinite(kept(*one)) for one in zip(wide, samplings, strict=True)])
    # Where no part is left in f32, float64 is finer.
    are_parts = (wide - wide.max(axis=1, keepdims=True)) / of["temperature"] > -80
    np.testing.assert_array_equal(are_kept & are_parts, right & are_parts)
    for kind in (Kind.SAMPLED, Kind.LIMITED):
        tokens, logprobs = jax.jit(draw, static_argnums=2)(logits, of, kind)
        at = np.arange(count), np.asarray(tokens)
        assert (logits[at] > -np.inf).all() and are_parts[at].all()
        assert kind == Kind.SAMPLED or right[at].all()
        parts = wide - wide.max(axis=1, keepdims=True)
        wanted = (parts - np.log(np.exp(parts).sum(axis=1, keepdims=True)))[at]
        small = logits.max(axis=1) < 1e6  # of others, f32 rounds the logarithm away
        np.testing.assert_allclose(logprobs[small], wanted[small], rtol=1e-5, atol=1e-5)


def test_top_p_of_equal_logits_keeps_no_more_than_it_says() -> None:
    rows, none = np.zeros((3, 4096), np.float32), np.zeros((3, 1), np.float32)
    top_p, top_k = none + np.float32([[0.1], [0.5], [0.1]]), np.array([[0], [0], [100]])
    are_kept = np.isfinite(keep(rows, top_k, top_p, none))
    assert are_kept.sum(axis=1).tolist() == [410, 2048, 10]
    assert (np.diff(are_kept.astype(int), axis=1) <= 0).all()


def test_limits_tell_neighbouring_floats_apart_and_stop_where_they_are_reached() -> None:
    near = (np.array(1, np.float32).view(np.int32) + np.arange(4, dtype=np.int32)).view(np.float32)
    quarters, apart = np.arange(4) * 1e-30, np.arange(4) * 20.0  # a quarter of the sum each
    rows = np.array([near - near[-1]] * 4 + [quarters, apart - apart[-1]], np.float32)
    top_k, top_p = np.array([[1], [2], [3], [4], [0], [0]]), np.ones((6, 1), np.float32)
    top_p[4] = 0.25
    are_kept = np.isfinite(keep(rows, top_k, top_p, np.zeros((6, 1), np.float32)))
    assert are_kept.tolist() == [[at >= 4 - k for at in range(4)] for k in (1, 2, 3, 4, 1, 4)]


def test_drawn_tokens_have_the_model_s_distribution() -> None:
    count = 4000
    logits = np.linspace(0, 3, 8, dtype=np.float32)[None]
    sampling = Sampling(temperature=0.5)
    of = fields([record_of(sampling, 3, 0, count)] * count, position=range(count))
    tokens, _ = jax.jit(draw, static_argnums=2)(logits, of, Kind.SAMPLED)
    parts = np.exp(logits[0] / 0.5)
    found = np.bincount(np.asarray(tokens), minlength=8) / count
    np.testing.assert_allclose(found, parts / parts.sum(), atol=0.03)


def test_prompts_of_one_seed_have_random_numbers_of_their_own() -> None:
    count = 8
    engine, sampling = (
        made(forward=lambda p, s: forward(p, s) * 0),
        Sampling(temperature=1.0, seed=7),
    )

    def answers(sampling: Any, prompts: Sequence[Any] = [[1, 2]] * count) -> np.ndarray:
        outputs = sorted(engine.generate(prompts, sampling))
        return np.array([output.tokens for output in outputs])

    tokens = answers(sampling)
    equal = [(a == b).mean() for a, b in itertools.combinations(tokens, 2)]
    assert np.mean(equal) < 2 / VOCAB and max(equal) < 0.2
    np.testing.assert_array_equal(answers(sampling), tokens)
    np.testing.assert_array_equal(answers(sampling, [[1, 2]] * 3), tokens[:3])
    np.testing.assert_array_equal(answers([sampling] * count), tokens[[0] * count])
    assert not (answers(dataclasses.replace(sampling, seed=8)) == tokens).all(axis=1).any()
    unseeded = answers(Sampling(temperature=1.0))
    assert len({*map(tuple, unseeded)}) == count


# --- weights, memory, shapes ----------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["finish", "restart"])
def test_new_weights(in_flight: Any) -> None:
    engine = engine_of_three_steps()
    requests = [
        (ids, dataclasses.replace(one, max_tokens=NEW)) for ids, one in random_requests(0, 4)
    ]
    old, new = run(engine, requests), make_params(1)
    longest = max((prompt for prompt, _ in requests), key=len)
    with pytest.raises(ValueError, match="the engine was made with"):
        engine.update(new | {"turn": jnp.zeros(3)})
    assert engine.manager.find_prefix(longest).num_cached_tokens
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    for _ in range(2):
        assert not any(output.finish_reason for output in engine.step())
    hits = engine.stats.cached_tokens
    engine.update(new, in_flight=in_flight)
    assert not engine.manager.find_prefix(longest).num_cached_tokens
    outputs: dict[Any, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault((output.request, output.sample), []).extend(output.tokens)
    before = {(o.request, o.sample): o.tokens for o in old}
    fresh = {(o.request, o.sample): o.tokens for o in run(engine, requests)}
    assert fresh.keys() == before.keys() and fresh != before
    engine.update(make_params())
    assert {(o.request, o.sample): o.tokens for o in run(engine, requests)} == before
    assert hits <= engine.stats.cached_tokens
    if in_flight == "restart":
        assert outputs == fresh


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_tokens_that_are_kept_are_computed_again_by_new_weights(decode_steps: int) -> None:
    """Each token is that of the weights whose version it has, over all tokens before it."""
    engine, layers = make_engine(), ALL
    if decode_steps == 3:
        engine, layers = engine_of_three_steps(), ("full", "state")
    requests, first = random_requests(0, 6), engine._samples.version
    engine.update(make_params())
    engine.update(make_params())
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    told: dict[Any, tuple[list[int], list[int]]] = {}
    for steps in itertools.count():
        for output in engine.step():
            tokens, version = told.setdefault((output.request, output.sample), ([], []))
            tokens += output.tokens
            version += output.version
        if not engine.has_work:
            break
        if steps in (3, 5):
            engine.update(make_params(steps - 2), in_flight="recompute")
    engine.update(make_params())
    assert {v - first for _, version in told.values() for v in version} == {2, 3, 4}
    for (name, number), (tokens, version) in told.items():
        output = Output(name, number, tokens, None, version, None)
        right = [
            redrawn(make_params(seed), layers, *requests[name], output, NEW).tokens
            for seed in (0, 1, 3)
        ]
        assert tokens == [right[v - first - 2][at] for at, v in enumerate(version)]


@pytest.mark.parametrize("level", [1, 2])
def test_requests_go_on_after_sleep(level: int) -> None:
    engine, requests = make_engine(), random_requests(0, 6)
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    outputs: dict[Any, Output] = {}

    def note(new: list[Output]) -> None:
        for o in new:
            old = outputs.get((o.request, o.sample), Output(0, 0, [], [], [], None))
            outputs[o.request, o.sample] = o._replace(
                tokens=old.tokens + o.tokens, logprobs=np.append(old.logprobs, o.logprobs)
            )

    for _ in range(5):
        note(engine.step())
    assert engine.sleep(level) > 0
    with pytest.raises(RuntimeError, match=r"the engine sleeps, .*; call wake_up first"):
        engine.sleep(level)
    with pytest.raises(RuntimeError, match=r"asleep.*; call wake_up first"):
        engine.step()
    engine.wake_up()
    while engine.has_work:
        note(engine.step())
    assert_right(list(outputs.values()), requests)


@pytest.mark.parametrize(("lost", "decode_steps"), [("run", 1), ("step", 1), ("step", 3)])
def test_a_lost_call_runs_again(lost: str, decode_steps: int, monkeypatch) -> None:
    """Whether it was packed or not."""
    engine = engine_of_three_steps() if decode_steps == 3 else make_engine()
    requests = without_limits(random_requests(0, 6))
    failures = iter([*[*[False] * decode_steps, True] * 4, True])
    owner = engine._device if lost == "run" else engine.manager
    right = getattr(owner, lost)

    def sometimes(*args: Any, **options: Any) -> Any:
        if next(failures, False):
            raise KeyboardInterrupt
        return right(*args, **options)

    monkeypatch.setattr(owner, lost, sometimes)
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    tokens: dict[Any, list[int]] = {}
    interrupts = 0
    while engine.has_work:
        try:
            for output in engine.step():
                tokens.setdefault((output.request, output.sample), []).extend(output.tokens)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 5
    monkeypatch.undo()
    assert tokens == {(o.request, o.sample): o.tokens for o in run(engine, requests)}


def test_an_interrupted_wait_loses_no_token(monkeypatch) -> None:
    engine, requests = make_engine(), random_requests(0, 6)
    right, failures = engine._device.run, iter([False, True, False, True, True])

    class Sampled:
        def __init__(self, out: jax.Array):
            self.out = out

        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            if next(failures, False):
                raise KeyboardInterrupt
            return np.asarray(self.out)

    monkeypatch.setattr(
        engine._device, "run", lambda *given: {"sampled": Sampled(right(*given)["sampled"])}
    )
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    tokens: dict[Any, list[int]] = {}
    while engine.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            for output in engine.step():
                tokens.setdefault((output.request, output.sample), []).extend(output.tokens)
    assert not list(failures)
    monkeypatch.undo()
    assert tokens == {(o.request, o.sample): o.tokens for o in run(engine, requests)}


def test_progress_is_shown_where_tqdm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampling, shown = make_engine(), Sampling(n=2, temperature=1.0, max_tokens=2), []

    def tqdm(done: Any, **options: Any) -> Any:
        shown.append(options)
        return done

    for module in (types.SimpleNamespace(tqdm=tqdm), None):
        monkeypatch.setitem(sys.modules, "tqdm", module)
        engine.warm_up(sampling)
        assert len(list(engine.generate([[1], [2]], sampling, progress=True))) == 4
        next(engine.generate([[1], [2]], sampling, progress=True))
        assert_all_free(engine)
    many = {"total": 4, "desc": "generating", "unit": "sample", "disable": None}
    assert shown == [many | {"total": 2, "desc": "compiling", "unit": "shape"}, many, many]


@pytest.mark.parametrize("has_ring", [False, True])
def test_a_warm_up_that_is_interrupted_loses_nothing(has_ring: bool, monkeypatch) -> None:
    """Its steps were packed, and never run."""
    engine, layers = make_engine(), ALL
    if has_ring:
        engine, layers = engine_of_three_steps(), ("full", "state")
    requests = random_requests(0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(engine._device, "warm_up", lambda calls: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.warm_up()
    assert_right(run(engine, requests), requests, layers)


def test_requests_for_which_there_is_no_work_are_an_error_and_no_loop(monkeypatch) -> None:
    engine = make_engine()
    engine.add("r", [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(engine._packer, "pack", lambda most_steps: [])
        with pytest.raises(RuntimeError, match="found no work, although requests wait"):
            engine.step()
    engine.abort("r")
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    assert_all_free(engine)


def test_an_engine_restarts_after_a_lost_upload() -> None:
    engine, requests = make_engine(), random_requests(0, 6)
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    tokens: dict[Any, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            tokens.setdefault((output.request, output.sample), []).extend(output.tokens)

    for _ in range(4):
        step()
    for _ in range(2):
        engine._packer.pack(1)  # what is packed here is lost
        with pytest.raises(jaxkv.CacheError, match="an upload was lost"):
            while engine.has_work:
                step()
        step()
    engine.restart()
    while engine.has_work:
        step()
    assert_all_free(engine)
    assert tokens == {(o.request, o.sample): o.tokens for o in run(engine, requests)}


def test_requests_that_come_and_go_leave_nothing() -> None:
    """In random order, aborted in any state. 10,000 of them in the long run."""
    engine, rng = make_engine(), np.random.default_rng(5)
    requests = random_requests(7, LONG_RUN or 60)
    left, alive, ended = list(range(len(requests))), set(), 0
    while left or engine.has_work:
        for _ in range(rng.integers(0, 3)):
            if left:
                alive.add(name := left.pop())
                engine.add(name, *requests[name])
        for output in engine.step():
            if output.finish_reason is not None:
                ended += 1
                if output.request not in engine._samples.of_request:
                    alive.discard(output.request)
        if alive and rng.random() < 0.1:
            engine.abort(gone := int(rng.choice(sorted(alive))))
            alive.remove(gone)
    assert_all_free(engine)
    assert ended == sum(sampling.n for _, sampling in requests)
    samples = engine._samples
    assert not samples.tokens and not samples.of_request
    assert not engine._calls.in_flight


# --- refusals -------------------------------------------------------------------------

RANGES = {
    **{"n": (1, MAX_SAMPLES), "top_k": (1, 2**31 - 1), "max_tokens": (1, 2**31 - 1)},
    **{"seed": (0, 2**32 - 1), "temperature": (1e-30, 1e30), "top_p": (1e-30, 1.0)},
    "min_p": (0.0, 1.0),
}
# Samplings that draw, by whether they have limits.
KINDS = {"temperature": {1e-30: False}, "min_p": {0.0: False, 1e-6: True, 1.0: True}}
KINDS |= {"top_k": {1: True, 2**31 - 1: True}, "top_p": {1.0: False, 0.999: True, 1e-30: True}}


@pytest.mark.parametrize("name", RANGES)
def test_a_sampling_takes_its_ranges_and_no_more(name: str) -> None:
    least, most = RANGES[name]
    for value in (least, most):
        assert getattr(Sampling(**{"temperature": 1.0, name: value}), name) == value
    for wrong in (True, "1", [1], 1j):
        with pytest.raises(TypeError, match=f"^{name} must be "):
            Sampling(**{"temperature": 1.0, name: wrong})
    if isinstance(least, float):
        with pytest.raises(ValueError, match=f"^{name}=nan must be "):
            Sampling(**{"temperature": 1.0, name: float("nan")})
    outside = np.nextafter(least, -1), np.nextafter(most, np.inf)
    for wrong in (least - 1, most + 1) if isinstance(least, int) else map(float, outside):
        with pytest.raises(ValueError, match=f"^{name}.* must be ") as caught:
            Sampling(**{"temperature": 1.0, name: wrong})
        assert str(wrong) in str(caught.value)


def test_ints_of_numpy_are_ints() -> None:
    sampling = Sampling(temperature=1.0, n=np.int32(2), seed=np.uint32(3), max_tokens=np.int64(2))
    assert [type(one) for one in (sampling.n, sampling.seed, sampling.max_tokens)] == [int] * 3
    plans = []
    for as_int in (np.int32, int):
        sizes = {name: as_int(2) for name in ("block_size", "num_kv_heads", "head_size")}
        limits = jaxkv.Limits(max_in_flight_tokens=as_int(9))
        given = {"max_model_len": as_int(8), "limits": limits}
        spec = jaxkv.FullAttentionSpec(**sizes)
        plan = jaxkv.plan_cache({"a": spec}, as_int(2**20), **given)
        shape = jaxkv.StepShape.for_plan(plan, max_requests=as_int(2), max_tokens=as_int(4))
        jaxkv.make_cache(plan, max_requests=as_int(2))
        plans.append((plan, shape))
    assert plans[0] == plans[1]
    engine = made(decode_steps=np.int8(2), seed=np.int64(5))
    outputs = engine.generate(np.array([[1, 2], [3, 4]]), sampling)
    same = Sampling(temperature=1.0, n=2, seed=3, max_tokens=2)
    assert sorted(outputs) == sorted(engine.generate([[1, 2], [3, 4]], same))


def test_stop_tokens_are_given_in_any_collection() -> None:
    given: list[Any] = [{7, 3}, frozenset({7, 3}), {3: 1, 7: 1}.keys(), [3, 7], np.array([3, 7])]
    for stops in given:
        assert sorted(Sampling(stop_token_ids=stops).stop_token_ids) == [3, 7]


def test_prompts_and_answers_are_as_long_as_the_plan_allows() -> None:
    engine = make_engine()
    for size, more in ((47, None), (47, 1), (40, 8)):
        engine.add("r", [1] * size, Sampling(max_tokens=more))
        assert engine._samples.of_request["r"][0].end == 48
        engine.abort("r")
        engine.step()
    assert_all_free(engine)


@pytest.mark.parametrize("name", KINDS)
def test_a_sampling_needs_no_more_of_the_sampler_than_its_limits(name: str) -> None:
    for value, is_limited in KINDS[name].items():
        kind = Sampling(**{"temperature": 1.0, name: value}).step_options.kind
        assert kind == (Kind.LIMITED if is_limited else Kind.SAMPLED)
        assert Sampling(**{name: value, "temperature": 0}).step_options.kind == Kind.GREEDY


def no_logits(params: Any, step: jaxkv.StepContext) -> Any:
    forward(params, step)
    return step.token_ids


def logits_of_all(params: Any, step: jaxkv.StepContext) -> Any:
    forward(params, step)
    return jnp.zeros((step.token_ids.size, VOCAB))


def forward_hidden(params: Any, step: jaxkv.StepContext) -> Any:
    return forward(params, step, hidden=True)


def made(**options: Any) -> jaxkv.Engine:
    """Makes an engine of the tests, with some arguments replaced."""
    given = {"forward": forward, "params": make_params(), "plan": make_plan(("full",))}
    return jaxkv.Engine(**given | SIZES | options)


def small_cross_plan() -> jaxkv.Plan:
    cross = jaxkv.CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    limits = jaxkv.Limits(max_encoder_tokens=4)
    return jaxkv.plan_cache({"cross": cross}, 2**16, max_model_len=8, limits=limits)


MISTAKES = {
    "text": (lambda e: e.add("r", "Hello"), TypeError, "a sequence of ints, got str; tokenize"),
    "floats": (lambda e: e.add("r", [1.0]), TypeError, "must be token ids, ints, got float64"),
    "a batch": (lambda e: e.add("r", [[1], [2]]), ValueError, r"an array of shape \(2, 1\)"),
    "no tokens": (lambda e: e.add("r", []), ValueError, "prompt is empty"),
    "an id out of range": (
        lambda e: e.add("r", [1, 50]),
        ValueError,
        "holds the token id 50; ids are from 0 to 49, the columns of the logits",
    ),
    "too long": (
        lambda e: e.add("r", [1] * 40, Sampling(max_tokens=9)),
        ValueError,
        "prompt of 40 tokens and max_tokens=9 are more than the plan's max_model_len=48",
    ),
    "one prompt for several": (
        lambda e: e.generate([1, 2, 3]),
        TypeError,
        r"got the token ids of one prompt: write \[prompt\]",
    ),
    "fewer samplings": (
        lambda e: e.generate([[1], [2]], [Sampling()]),
        ValueError,
        "sampling holds 1 for 2 prompts",
    ),
    "no list of prompts": (
        lambda e: e.generate(iter([[1]])),
        TypeError,
        "prompts must be a list of prompts, each of them token ids; got list_iterator",
    ),
    "a set of prompts": (lambda e: e.generate({(1,), (2,)}), TypeError, "got set"),
    "a set for a prompt": (lambda e: e.add("r", {1, 2}), TypeError, "prompt must be .*, got set"),
    "nothing": (lambda e: e.add("r", None), TypeError, "prompt must be .*, got NoneType$"),
    "a huge id": (lambda e: e.add("r", [1, 2**70]), ValueError, "token id 11805916207174"),
    "one id": (lambda e: e.add("r", jnp.int32(3)), TypeError, "a sequence of ints, got ArrayImpl"),
    "lists in a prompt": (lambda e: e.add("r", [[1], [2, 3]]), ValueError, "got nested ones"),
    "a dict": (
        lambda e: e.add("r", [1], {"n": 2}),
        TypeError,
        r"sampling must be a jaxkv.Sampling\(...\), got dict",
    ),
    "no sampling": (lambda e: e.add("r", [1], {}), TypeError, "sampling must be a"),
    "a list for a name": (lambda e: e.add([1], [1]), TypeError, "must be a hashable name"),
    "to abort": (lambda e: e.abort([1]), TypeError, "must be a hashable name"),
    "to warm up": (lambda e: e.warm_up({"n": 2}), TypeError, "samplings must be jaxkv.Sampling"),
    "unknown": (lambda e: e.abort("r"), ValueError, "request='r' is unknown, or has ended"),
    "other weights": (
        lambda e: e.update(make_params() | {"turn": jnp.zeros(3)}),
        ValueError,
        r"params\['turn'\] is float32\(3,\); the engine was made with float32\(1, 16\)",
    ),
    "fewer weights": (
        lambda e: e.update({name: x for name, x in make_params().items() if name != "turn"}),
        ValueError,
        r"the engine was made with: params\['turn'\] is missing",
    ),
    "more weights": (
        lambda e: e.update(make_params() | {"more": jnp.zeros(3)}),
        ValueError,
        r"another tree structure than the engine was made with: params\['more'\] is new",
    ),
    "a sample": (lambda e: e.abort("r", sample=-1), ValueError, "sample must be at least 0"),
    "no flag": (lambda e: e.generate([[1]], progress=1), TypeError, "progress must be True or"),
    "no salt": (lambda e: e.generate([[1]], salt=1), TypeError, "salt"),
    "no events": (lambda e: made(events=[]), TypeError, "events must be an EventLog, got list"),
    "what becomes of others": (
        lambda e: e.update(make_params(), in_flight="abort"),
        ValueError,
        "in_flight='abort'; use one of 'finish', 'restart', 'recompute'",
    ),
    "a prompt that leaves no token": (
        lambda e: e.add("r", [1] * 48),
        ValueError,
        "prompt of 48 tokens and one token to generate are more than the plan's max_model_len=48",
    ),
    "samples without forks": (
        lambda e: made(forks=0).add("r", [1], Sampling(n=2, temperature=1.0)),
        ValueError,
        "samples share no blocks with forks=0",
    ),
    "no decode_steps": (lambda e: made(decode_steps=0), ValueError, "decode_steps must be at le"),
    "many decode_steps": (lambda e: made(decode_steps=49), ValueError, "decode_steps=49"),
    "a seed below 0": (lambda e: made(seed=-1), ValueError, "seed must be at least 0"),
    "weights of another dtype": (
        lambda e: e.update(make_params() | {"turn": np.zeros((1, 16), np.float16)}),
        ValueError,
        r"params\['turn'\] is float16\(1, 16\); the engine was made with float32\(1, 16\)",
    ),
    "awake": (lambda e: e.wake_up(), RuntimeError, "the cache is awake"),
    "equal samples": (lambda e: Sampling(n=2), ValueError, "n=2 samples at temperature=0"),
    "no temperature": (lambda e: Sampling(temperature=-1.0), ValueError, "temperature=-1.0 must"),
    "no top_p": (lambda e: Sampling(top_p=None), TypeError, "top_p must be a number, got None"),
    "top_k": (lambda e: Sampling(top_k=0), ValueError, "top_k=0 must be in 1.*; None means no"),
    "top_k of vLLM": (lambda e: Sampling(top_k=-1), ValueError, "top_k=-1 must be in .*; None"),
    "a temperature of float64": (
        lambda e: Sampling(temperature=1e-300),
        ValueError,
        "temperature=1e-300 must be 0, .* or from 1e-30 to 1e",
    ),
    "cross attention": (
        lambda e: made(plan=small_cross_plan()),
        ValueError,
        "the plan has cross attention, and an Engine takes no encoder input: .* Scheduler",
    ),
    "a stop string": (
        lambda e: Sampling(stop="end"),
        TypeError,
        "Sampling has no option stop='end'; it knows token ids, no texts: pass stop_token_ids",
    ),
    "a penalty": (
        lambda e: Sampling(presence_penalty=1.0),
        TypeError,
        r"no option presence_penalty=1.0; pass processors={PresencePenalty: ...}, with one of",
    ),
    "an option unknown": (lambda e: Sampling(p=1), TypeError, "p=1; its options are temperature, "),
    "an option of vLLM": (
        lambda e: made(max_num_seqs=8),
        TypeError,
        "Engine has no option max_num_seqs=8; pass max_requests",
    ),
    "sizes without names": (
        lambda e: jaxkv.Engine(forward, make_params(), make_plan(), 4, 16),
        TypeError,
        "Engine takes its options by name; write max_requests=4, max_tokens=16",
    ),
    "a temperature without its name": (lambda e: Sampling(0.7), TypeError, "write temperature=0.7"),
    "masked prompts": (
        lambda e: e.generate(np.ma.masked_equal([[1, 2]], 2)),
        TypeError,
        r"prompts\[0\] is a masked array; pass prompts\[0\].compressed",
    ),
    "a masked prompt": (lambda e: e.add("r", np.ma.masked_equal([1, 2], 2)), TypeError, "masked"),
    "one stop": (lambda e: Sampling(stop_token_ids=2), TypeError, "must be token ids, a sequence"),
    "a text": (lambda e: Sampling(stop_token_ids="a"), TypeError, "stop_token_ids must be token"),
    "a huge stop": (
        lambda e: Sampling(stop_token_ids=[2**40]),
        ValueError,
        "the token id 10",
    ),
    "a stop out of range": (
        lambda e: e.add("r", [1], Sampling(stop_token_ids=[50])),
        ValueError,
        "stop_token_ids holds the token id 50; ids are from 0 to 49, the columns of the logits",
    ),
    "a flag of NumPy": (lambda e: Sampling(side=np.True_), TypeError, r"; pass bool\(...\)"),
    "logprobs": (lambda e: Sampling(logprobs="5"), TypeError, "logprobs must be an int, got '5'"),
    "logprobs below 0": (lambda e: Sampling(prompt_logprobs=-1), ValueError, "must be at least 0"),
    "more logprobs than tokens": (
        lambda e: e.add("r", [1], Sampling(logprobs=51)),
        ValueError,
        "logprobs=51 is more than the 50 tokens",
    ),
    "logprobs of a prompt without a head": (
        lambda e: e.add("r", [1], Sampling(prompt_logprobs=True)),
        ValueError,
        r"prompt_logprobs needs logits of all tokens of a prompt, .* head: .* Engine\(head=\)",
    ),
    "side outputs of a model without any": (
        lambda e: e.warm_up(Sampling(side=True)),
        ValueError,
        r"side=True, and forward returns no side outputs: return jaxkv.ModelOutput\(result, side=",
    ),
    "side outputs of last tokens": (
        lambda e: made(
            forward=lambda params, step: jaxkv.ModelOutput(
                forward(params, step), side=[jnp.ones(4)]
            )
        ),
        ValueError,
        r"an array of shape \(4,\) as side\[0\]; side outputs are arrays of all tokens, \[16, ",
    ),
    "reproducible details": (
        lambda e: made(reproducible=True).add("r", [1], Sampling(logprobs=1)),
        ValueError,
        "has one compiled step, without side outputs, prompt_logprobs and the most likely",
    ),
    "a salt of ints": (lambda e: e.add("r", [1], salt=3), TypeError, "salt must be a str"),
    "reproducible states": (
        lambda e: jaxkv.Engine(forward, make_params(), make_plan(), reproducible=True, **SIZES),
        ValueError,
        "does not hold for recurrent layers",
    ),
    "reproducible decode_steps": (
        lambda e: jaxkv.Engine(
            forward, (), make_plan(("full",)), reproducible=True, decode_steps=2, **SIZES
        ),
        ValueError,
        "leave out decode_steps=2",
    ),
    "reproducible prefixes": (
        lambda e: made(reproducible=True, shared_prefixes=1),
        ValueError,
        "leave out decode_steps=1 and shared_prefixes=1",
    ),
    "no logits": (
        lambda e: made(forward=no_logits),
        ValueError,
        r"an array of shape \(16,\); it must return the logits of each request's last token, \[4",
    ),
    "logits of all tokens": (
        lambda e: made(forward=logits_of_all),
        ValueError,
        "index with step.last_tokens",
    ),
    "as many as there are requests": (
        lambda e: made(forward=logits_of_all, max_tokens=4),
        ValueError,
        r"an array of shape \(5, 50\); it must return the logits of each request's last token, \[",
    ),
    **{
        f"logits of {len(shape)} axes": (
            lambda e, shape=shape: made(forward=lambda *given: jnp.zeros(shape)),
            ValueError,
            rf"returned an array of shape \({str(shape)[1:-1]}\); it must return the logits of",
        )
        for shape in ((4,), (4, 1, VOCAB))
    },
    "logits of ints": (
        lambda e: made(forward=lambda params, step: no_logits(params, step)[:4, None]),
        TypeError,
        "forward returned logits of dtype int32; they are floats",
    ),
    "a head that is none": (lambda e: made(head=3), TypeError, "head must be a function .*got int"),
    "logits of last tokens beside a head": (
        lambda e: made(head=head),
        ValueError,
        r"forward returned an array of shape \(4, 50\); it must return the hidden states of all "
        r"tokens, \[16, ...\], because the Engine has a head",
    ),
    "hidden states of ints": (
        lambda e: made(forward=no_logits, head=head),
        TypeError,
        "forward returned hidden states of dtype int32; they are floats",
    ),
    "a head of one token": (
        lambda e: made(forward=forward_hidden, head=lambda params, x: head(params, x)[0]),
        ValueError,
        r"head returned an array of shape \(50,\); it must return the logits of the hidden states",
    ),
    "swapped": (
        lambda e: jaxkv.Engine(make_params(), forward, make_plan(), **SIZES),
        TypeError,
        r"forward must be a function of params and a step, got dict; the order is Engine\(forward",
    ),
    "the model's arguments swapped": (
        lambda e: made(forward=lambda step, params: forward(params, step)),
        TypeError,
        r"forward has params and step in the wrong order \(.*; it is called as forward\(params, st",
    ),
    "a step has no such thing": (
        lambda e: made(forward=lambda params, step: step.token_idz),
        AttributeError,
        "^'StepContext' object has no attribute 'token_idz'",
    ),
    "params with a name": (
        lambda e: made(params={"name": "llama"}),
        TypeError,
        r"params\['name'\] is of type str; params is a pytree of arrays",
    ),
    "layers": (lambda e: made(plan={}), TypeError, "plan must be what plan_cache returned, got d"),
    "a plan twice": (lambda e: made(cache=make_plan()), TypeError, "cache must be a KVCache"),
    "a key for a seed": (lambda e: made(seed=jax.random.key(0)), TypeError, "seed must be an int"),
    "three things": (
        lambda e: made(forward=lambda params, step: (step, step, step)),
        ValueError,
        "forward returned tuple; it must return the logits of each request's last token",
    ),
    "a flag": (lambda e: made(shared_prefixes=True), TypeError, "shared_prefixes must be an int"),
    "a small step": (
        lambda e: made(max_requests=8, max_tokens=4),
        ValueError,
        "max_tokens=4 is less than max_requests=8",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named(what: str) -> None:
    call, kind, message = MISTAKES[what]
    engine = make_engine()
    with pytest.raises(kind, match=message):
        call(engine)
    assert_all_free(engine)


def test_generate_wants_the_engine_for_itself() -> None:
    engine = make_engine()
    engine.add("r", [1, 2], Sampling(max_tokens=2))
    with pytest.raises(ValueError, match="the engine has 1 samples that have not ended"):
        list(engine.generate([[1]]))
    with pytest.raises(ValueError, match="request='r' has not ended"):
        engine.add("r", [1])
    engine.abort("r")
    (output,) = engine.step()
    assert (output.request, output.tokens, output.finish_reason) == ("r", [], "abort")
    engine.add("r", [1, 2], Sampling(max_tokens=2))
    engine.abort("r")
    assert engine.has_work  # to tell of it
    with pytest.raises(ValueError, match=r"has 0 samples .*, or outputs that step has not"):
        list(engine.generate([[1]]))
    assert len(engine.step()) == 1
    assert_all_free(engine)


def test_prompts_with_the_longest_answers_start_first() -> None:
    """Four of six have rows; of these, the shortest answer ends before the two that wait begin."""
    counts = (1, 5, 2, 6, 3, 5)  # the longer the answer, the shorter the prompt
    outputs = run(make_engine(), [([1] * (9 - n), Sampling(max_tokens=n)) for n in counts])
    assert outputs[0].request == 4
    assert sorted(output.request for output in outputs) == list(range(6))


def test_a_request_that_is_refused_leaves_nothing_and_was_passed_on_whole(monkeypatch) -> None:
    engine, seen = make_engine(), list[Any]()
    prefix = {"salt": "s", "extra_keys": [jaxkv.ExtraKey.lora("a", "/a")], "boundaries": [2]}
    prefix |= {"priority": 3}

    def add(*given: Any, **options: Any) -> None:
        seen.append((given, options))
        raise ValueError("refused")

    monkeypatch.setattr(engine._scheduler, "add", add)
    before = engine.stats
    with pytest.raises(ValueError, match="refused"):
        engine.add("r", [1, 2, 3], Sampling(n=2, temperature=1.0, max_tokens=4), **prefix)
    assert seen == [(("r", 3), {"samples": 2, "max_tokens": 7, **prefix})]
    assert engine.stats == before
    assert_all_free(engine)


def test_a_name_that_a_sample_has_is_refused_and_the_sample_goes_on() -> None:
    engine, sampling = make_engine(), Sampling(n=2, temperature=1.0, max_tokens=2)
    engine.add("r", [1, 2], sampling)
    with pytest.raises(ValueError, match=r"request=\('r', 1\) has not ended; use another name"):
        engine.add(("r", 1), [1])
    engine.abort("r")
    engine.add(("q", 1), [1])
    with pytest.raises(ValueError, match=r"request=\('q', 1\) has not ended; use another name"):
        engine.add("q", [1, 2], sampling)
    engine.add(("q", 0), [1])  # no sample has this name
    engine.abort(("q", 1))
    engine.add("q", [1])
    for name in (("q", 0), "q"):
        engine.abort(name)
    ended = [(output.request, output.sample) for output in engine.step()]
    assert ended == [("r", 0), ("r", 1), (("q", 1), 0), (("q", 0), 0), ("q", 0)]
    assert_all_free(engine)


def test_names_that_equal_nothing_or_give_arrays_are_aborted() -> None:
    """NaN differs from itself, and ``==`` of NumPy's scalars and tuples is an array."""
    engine, names = make_engine(), [float("nan"), np.int64(1), (1, 2)]
    for name in names:
        engine.add(name, [1, 2], Sampling(n=2, temperature=1.0, max_tokens=2))
    for name in names:
        engine.abort(name)
    assert [output.request for output in engine.step()] == [name for name in names for _ in "ab"]
    assert_all_free(engine)
