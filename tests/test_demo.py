"""The demo end to end on a small trace, and the command line as a newcomer meets it."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import KVCache
from jaxkv.__main__ import main
from jaxkv._src.blocks import BlockUse
from jaxkv._src.demo import reference, run, serving, trace
from jaxkv._src.demo.memory import PagedMemory, forward_step, tokens_of
from jaxkv._src.demo.model import Model, Params, init_params
from jaxkv._src.demo.reference import Answer, Comparison, compare
from jaxkv._src.demo.run import BOUNDS, bound_of
from jaxkv._src.demo.serving import Report, make_engine, serve
from jaxkv._src.demo.trace import Request, make_trace
from jaxkv._src.engine import Output, Stats, _ladder
from jaxkv._src.hf_config import layers_from_config, load_config, model_len
from jaxkv._src.planning import ZeroPolicy, plan_cache
from jaxkv._src.specs import FullAttentionSpec, Limits, canonical_dtype
from pallas_kernels import _capability, default_implementation
from tests.helpers import needs_mosaic
from tests.reference_model import logprobs_of

DEMO = load_config("qwen3-next-demo")
# One layer of attention and one of states, smaller: that compiles and runs faster. Attention comes
# first, so that what it says of every token of a prompt counts.
SMALL = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
CONFIG = DEMO | SMALL | {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 192}
del CONFIG["full_attention_interval"]
ALL_ATTENTION = CONFIG | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
ALL_ATTENTION |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TRACE = make_trace(12, seed=3, prompt_tokens=(16, 150), new_tokens=(8, 30))
MAX_REQUESTS, MAX_TOKENS = 8, 24


@pytest.fixture(scope="module", autouse=True)
def few_shapes():
    with pytest.MonkeyPatch.context() as patch:
        for module in (serving, run):
            patch.setattr(module, "MAX_TOKENS", MAX_TOKENS)
        patch.setattr(serving, "MAX_REQUESTS", MAX_REQUESTS)
        yield


def decode_as_prompts(patch: pytest.MonkeyPatch) -> None:
    """Leaves out the shape of decodes: most of the time is compiling a step for each shape."""
    patch.setattr(_ladder, "_of_decodes", lambda _: [])


class Served(NamedTuple):
    report: Report
    found: Comparison


@functools.cache
def make_model(kv_dtype: str, *, is_all_attention: bool) -> tuple[Model, Params, dict[str, Any]]:
    """A model, which several tests serve and compile the reference of once."""
    config = ALL_ATTENTION if is_all_attention else CONFIG
    layers = layers_from_config(config, kv_dtype=kv_dtype)
    model = Model(config, tuple(layers))
    return model, init_params(model, jax.random.key(1)), layers


@functools.cache
def engine_of(
    num_blocks: int,
    *,
    kv_dtype: str = "fp8_e4m3",
    ranks: int = 1,
    max_model_len: int = model_len(CONFIG),
    zero_policy: ZeroPolicy = "when_needed",
    has_decodes: bool = False,
    **options: Any,
) -> jaxkv.Engine:
    """An engine, which several tests serve with and compile the step of once.

    has_decodes: whether steps that only decode have a shape of their own.
    """
    model, params, layers = make_model(kv_dtype, is_all_attention=ranks > 1)
    plan = plan_cache(
        layers,
        2**30,
        max_model_len=max_model_len,
        num_blocks_override=num_blocks,
        limits=Limits(max_in_flight_tokens=MAX_TOKENS),
        context_parallel=ranks,
        zero_policy=zero_policy,
    )
    with pytest.MonkeyPatch.context() as patch:
        if not has_decodes:
            decode_as_prompts(patch)
        return make_engine(model, params, plan, **options)


def serve_and_compare(
    engine: jaxkv.Engine, trace: list[Request], kv_dtype: str = "fp8_e4m3", **options: Any
) -> Served:
    """Serves a trace, and compares it with the model without a cache."""
    plan = engine.manager.plan
    model, params, layers = make_model(kv_dtype, is_all_attention=plan.context_parallel > 1)
    report = serve(engine, trace, lambda: None, **options)
    found = compare(
        *(model, params, layers, list(report.answers.values())),
        max_model_len=plan.max_model_len,
        on_finish=lambda: None,
    )
    return Served(report, found)


def test_served_tokens_are_those_of_the_model_without_a_cache() -> None:
    """Also without zeroing: attend masks what is read, not logits alone."""
    engine = engine_of(num_blocks=14, zero_policy="never", has_decodes=True)
    report, found = serve_and_compare(engine, TRACE)
    assert found.largest_difference <= BOUNDS["fp8_e4m3"]
    assert found.num_tokens == sum(request.max_new_tokens for request in TRACE)
    assert found.num_equal >= 0.99 * found.num_picked == 0.99 * found.num_tokens
    assert not report.nan_requests
    assert report.preemptions
    assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks
    assert max(map(sum, report.occupancy)) <= engine.manager.plan.usable_blocks


TINY = {"hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 4, "head_dim": 8}
TINY |= {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rope_theta": 100.0}
TINY |= {"linear_key_head_dim": 3, "linear_value_head_dim": 5, "rms_norm_eps": 0.01}


def test_the_model_is_the_one_it_is_said_to_be() -> None:
    """Served tokens are compared with the same arithmetic, which this compares with NumPy."""
    config = CONFIG | TINY
    layers = layers_from_config(config, kv_dtype="f32")
    model = Model(config, tuple(layers))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    params = jax.tree.map(lambda of: rng.normal(size=of.shape).astype(np.float32) / 4, shapes)
    ids = rng.integers(0, 256, (2, 7), np.int32)
    got = reference._compiled(model, tuple(layers.items()))(params, ids)
    wanted = [logprobs_of(config, params, request) for request in ids]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_weights_are_drawn_apart_and_scaled_by_their_fan_in() -> None:
    _, params, _ = make_model("fp8_e4m3", is_all_attention=False)
    matrices = [np.asarray(matrix) for matrix in jax.tree.leaves(params)]
    assert len({float(matrix[0, 0]) * len(matrix) ** 0.5 for matrix in matrices}) == len(matrices)
    for matrix in matrices:
        assert (matrix * len(matrix) ** 0.5).std() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("counts", [[1, 4, 1], [4, 0, 2], [3], [1, 1, 1]], ids=str)
def test_the_tokens_of_a_step_go_to_their_requests_and_back(counts: list[int]) -> None:
    """Each to one place, whoever comes before or after it; padding becomes zeros."""
    starts, num_tokens = np.cumsum([0, *counts]).astype(np.int32), sum(counts) + 2
    shape = SimpleNamespace(max_query_len=4, max_tokens=num_tokens)
    batch = SimpleNamespace(
        query_start_loc=jnp.array(starts), query_lens=jnp.array(np.diff(starts)), shape=shape
    )
    step: Any = SimpleNamespace(batch=batch, token_ids=jnp.zeros(num_tokens), positions=None)
    tokens, given = tokens_of(step), np.arange(1, num_tokens + 1)
    by_request = np.zeros((len(counts), 4), int)
    for row, start, count in zip(by_request, starts, counts, strict=False):
        row[:count] = given[start : start + count]
    np.testing.assert_array_equal(tokens.to_requests(jnp.array(given)), by_request)
    given[starts[-1] :] = 0
    # What lies past a request's tokens goes nowhere.
    there = np.where(by_request > 0, by_request, 99)
    np.testing.assert_array_equal(tokens.to_tokens(jnp.array(there)), given)


KERNEL_BLOCKS = {"num_blocks": 17, "kernel_block_size": 8, "own_attention": True}
RANKS = {"num_blocks": 60, "kernel_block_size": 8, "ranks": 2}


@pytest.mark.parametrize("options", [KERNEL_BLOCKS, RANKS], ids=["kernel blocks", "context"])
def test_own_kernels_ranks_and_sleep_change_no_logit(options, monkeypatch) -> None:
    """Wherever a block lies: read by kernel ids, divided among devices, sent to the host."""
    if len(jax.devices()) < options.get("ranks", 1):
        pytest.skip(f"needs {options['ranks']} devices")
    trace = make_trace(9, seed=4, prompt_tokens=(16, 90), new_tokens=(4, 12))
    monkeypatch.setattr(serving, "REQUESTS_BETWEEN_NAPS", 4)
    engine, released = engine_of(**options), []
    sleep = engine.sleep
    monkeypatch.setattr(engine, "sleep", lambda: released.append(sleep()) or released[-1])
    report, found = serve_and_compare(engine, trace, naps=True)
    assert found.largest_difference <= BOUNDS["fp8_e4m3"]
    assert report.naps == len(released) == 2 and min(released) > 0
    assert report.bytes_released == sum(released)


@pytest.mark.parametrize("kind", ["random", "chat", "rl"])
def test_lengths_of_a_trace_lie_in_the_ranges_that_are_asked_for(kind) -> None:
    trace = make_trace(60, 0, kind, prompt_tokens=(5, 9), new_tokens=(20, 31))
    assert {len(request.prompt) - request.boundary for request in trace} == set(range(5, 10))
    answers = {request.max_new_tokens for request in trace}
    assert answers <= set(range(20, 32)) and len(answers) > 6
    assert sum(request.samples for request in trace) == 60


class Scripted:
    """An engine whose samples say a token in each step; it preempts and sleeps by a script."""

    def __init__(self, preemptions: dict[int, int]):
        self.stats = Stats(prompt_tokens=100, cached_tokens=50, preemptions=7)
        self.script, self.active, self.added, self.asleep = preemptions, {}, [], 0
        self.manager: Any = SimpleNamespace(held_blocks=lambda: (self.stats.steps, 1))

    @property
    def has_work(self) -> bool:
        return bool(self.active)

    def add(self, request, prompt, sampling, *, boundaries):
        self.added.append((self.stats.steps, request, prompt, sampling, boundaries))
        self.stats.prompt_tokens += len(prompt)
        self.stats.cached_tokens += 1
        self.active |= {(request, sample): sampling.max_tokens for sample in range(sampling.n)}

    def step(self) -> Iterator[Output]:
        self.stats.preemptions += self.script.get(self.stats.steps, 0)
        self.stats.steps += 1
        self.manager.block_use = BlockUse(self.stats.steps, 2, 3, 4)
        for (request, sample), left in [*self.active.items()]:
            token = 100 * request + 10 * sample + left
            logprob = np.nan if token in (1, 202, 201) else -token
            reason = "length" if left == 1 else None
            self.active[request, sample] -= 1
            if reason:
                del self.active[request, sample]
            yield Output(request, sample, [token], [logprob], reason)

    def sleep(self) -> int:
        self.asleep += 1
        return 10**self.asleep

    def wake_up(self) -> None:
        assert self.asleep


def test_the_course_of_a_serving_is_reported_as_it_was(monkeypatch) -> None:
    """The arrival and prompt of each request, and what each step did; of this serving alone."""
    monkeypatch.setattr(serving, "REQUESTS_BETWEEN_NAPS", 2)
    trace = [
        Request(0, 0, (1, 2), 3),
        Request(1, 0, (5,), 2, after=0),
        Request(2, 4, (7, 8, 9), 2, samples=2, boundary=2),
        Request(3, 9, (6,), 1, after=2),
    ]
    engine: Any = Scripted({1: 1, 4: 2})
    finished: list[None] = []
    report = serve(engine, trace, lambda: finished.append(None), naps=True)
    greedy = functools.partial(jaxkv.Sampling, temperature=0.0, logprobs=True)
    assert engine.added == [
        (0, 0, [1, 2], greedy(max_tokens=3, seed=0), []),
        (3, 1, [1, 2, 3, 2, 1, 5], greedy(max_tokens=2, seed=1), []),
        (4, 2, [7, 8, 9], greedy(max_tokens=2, seed=2, n=2, temperature=1.0), [2]),
        (9, 3, [7, 8, 9, 202, 201, 6], greedy(max_tokens=1, seed=3), []),
    ]
    said = {(0, 0): [3, 2, 1], (1, 0): [102, 101], (2, 0): [202, 201], (2, 1): [212, 211]}
    prompts = {name: prompt for _, name, prompt, *_ in engine.added}
    for name, tokens in (said | {(3, 0): [301]}).items():
        answer = report.answers[name]
        assert answer.tokens == prompts[name[0]] + tokens
        np.testing.assert_array_equal(
            answer.logprobs, [np.nan if x in (1, 202, 201) else -x for x in tokens]
        )
        assert answer.is_greedy == (name[0] != 2)
    assert report.nan_requests == [0, 2, 2] and report.num_tokens == 10
    assert report.preemptions == [1, 4, 4]
    assert report.occupancy == [(steps, 1) for steps in range(1, 11)]
    assert report.uses == [BlockUse(steps, 2, 3, 4) for steps in range(1, 11)]
    assert report.prompt_tokens == sum(map(len, prompts.values())) and report.cached_tokens == 4
    assert (report.naps, report.bytes_released, len(finished)) == (2, 110, 5)


def test_a_trace_is_of_the_kind_that_is_asked_for() -> None:
    """Turns go on from the last one and begin with a system prompt; samples share a prompt."""
    kinds: tuple[Any, ...] = ("random", "chat", "rl")
    ranges = ((16, 600), (8, 120)), ((10, 60), (8, 60)), ((200, 500), (30, 90))
    random, chat, rl = (make_trace(62, 1, kind) for kind in kinds)
    for kind, (prompts, answers) in zip(kinds, ranges, strict=True):
        asked = make_trace(62, 1, kind, prompt_tokens=prompts, new_tokens=answers)
        assert asked == make_trace(62, 1, kind)
    for made, kind in zip((random, chat, rl), kinds, strict=True):
        arrivals = [request.arrival_step for request in made]
        assert arrivals == sorted(arrivals) and len({*arrivals}) > 10
        assert made == make_trace(62, 1, kind) != make_trace(62, 2, kind)
        assert {token for request in made for token in request.prompt} == set(range(256))
    assert (
        [request.name for request in random] == [request.name for request in chat] == [*range(62)]
    )
    assert {(r.after, r.samples, r.boundary) for r in random} == {(None, 1, 0)}
    systems = set()
    for name, request in enumerate(chat):
        assert request.after == (name - 1 if name % 3 else None) and request.samples == 1
        assert (request.boundary > 0) == (name % 3 == 0)
        systems |= {request.prompt[: request.boundary]} - {()}
    assert len(systems) == 3 and all(80 <= len(system) <= 160 for system in systems)
    assert [request.name for request in rl] == [*range(0, 62, 4)]
    assert [request.samples for request in rl] == [4] * 15 + [2]
    assert [r.arrival_step for r in rl] == [random[r.name].arrival_step for r in rl]
    assert {(r.after, r.boundary) for r in rl} == {(None, 0)}


def test_the_bound_is_wider_only_where_mosaic_rounds_the_queries_of_bf16() -> None:
    rounding = {"fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "bf16": 0.003, "f16": 0.003, "f32": 0.001}
    assert rounding == BOUNDS
    for dtype, bound in BOUNDS.items():
        assert bound_of(dtype, "xla") == bound
        assert bound_of(dtype, "mosaic_gpu") == (0.02 if dtype == "bf16" else bound)


@pytest.mark.parametrize(("difference", "agrees"), [(0.01, True), (0.03, False), (np.nan, False)])
def test_answers_agree_within_the_bound_and_not_where_one_is_nan(
    difference: float, agrees: bool, monkeypatch
) -> None:
    monkeypatch.setattr(run, "compare", lambda *_, **options: Comparison(difference, 1, 1, 1))
    params: Any = None
    assert run._compare(Model(CONFIG, ()), params, {}, Report(), bound=0.02) == agrees


class Ran(NamedTuple):
    """An engine that the command served with: its options, and what was served."""

    seed: int = 0
    pool_bytes: int = 1_500_000
    policy: str = "when_needed"
    own: bool = False
    kernel: int | None = None
    ranks: int = 1
    temperatures: frozenset[float] = frozenset({0.0})
    served: int = 64
    naps: bool = False


@contextlib.contextmanager
def enabled_x64() -> Iterator[None]:
    """Widens dtypes as a shell may ask for, until a demo undoes that."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


RL = ["--trace", "rl", "--requests", "5", "--seed", "3", "--kv-dtype", "bf16", "--pool-bytes"]
RL += ["2000000", "--sleep-between-batches"]
OF_RL = Ran(3, 2_000_000, temperatures=frozenset({0.0, 1.0}), served=2, naps=True)
CHAT = ["--kernel-block-size", "8", "--requests", "20", "--trace", "chat"]
CONTEXT = ["--context-parallel", "2", "--kernel-block-size", "4", "--kv-dtype", "fp8_e5m2"]
UNZEROED = Ran(policy="never", own=True)


@pytest.mark.parametrize(
    ("arguments", "wanted", "picture", "bound"),
    [
        ([], [Ran(), UNZEROED._replace(served=24)], "occupancy", "0.03"),
        (RL, [OF_RL], "use of blocks", "0.003"),
        (CHAT, [Ran(own=True, kernel=8, served=20)], "use of blocks", "0.03"),
        (["--no-zeroing"], [UNZEROED], None, None),
        (CONTEXT, [Ran(kernel=4, ranks=2)], "occupancy", "0.06"),
    ],
    ids=["plain", "rl", "chat", "no zeroing", "context"],
)
@pytest.mark.parametrize("difference", [0.0001, 1.0])
def test_options_of_the_command_reach_what_they_are_for(
    arguments, wanted, picture, bound, difference, monkeypatch, tmp_path, capsys
) -> None:
    """With nothing computed: an engine that is none, and a report of it."""
    parser, path = argparse.ArgumentParser(), tmp_path / "new" / "deep" / "a.png"
    run.add_arguments(parser)
    asked = ["--implementation", "xla"] if difference == 1 else []  # or the best one, which it is
    options = parser.parse_args([*arguments, *asked, "--output", str(path)])
    if len(jax.devices()) < options.context_parallel:
        pytest.skip("needs 2 devices")
    nan = np.array([np.nan, 0.0, np.nan])
    answers = {(5, 0): Answer([1], nan, True), (3, 1): Answer([1], nan[:1], True)}
    answers[3, 0] = Answer([1], nan[1:2], True)
    report = Report(answers, 2.5, [3, 4], [(1,)] * 1234, prompt_tokens=9000, cached_tokens=1500)
    report.naps, report.bytes_released = 3, 10**6
    engines, ran, traces, drawn = [], [], [], []

    def make_engine(model, seed, plan, *, implementation, kernel_block_size, own_attention):
        assert implementation == "xla" and plan.limits == Limits(max_in_flight_tokens=MAX_TOKENS)
        (pool_bytes,) = plan.memory_bytes
        made = Ran(seed, pool_bytes, plan.zero_policy, own_attention, kernel_block_size)
        engines.append(made._replace(ranks=plan.context_parallel))
        return SimpleNamespace(warm_up=lambda *samplings: drawn.append(samplings))

    def serve(engine, trace, on_finish, *, naps):
        temperatures = frozenset(sampling.temperature for sampling in drawn[-1])
        served = {"served": len(trace), "temperatures": temperatures, "naps": naps}
        assert on_finish.__self__.total == sum(request.samples for request in trace)
        assert not jax.config.jax_enable_x64
        ran.append(engines[-1]._replace(**served))
        return report

    def compare(model, seed, layers, answers, *, max_model_len, on_finish):
        assert (seed, max_model_len) == (options.seed, 720)
        assert on_finish.__self__.total == len(answers)
        assert [id(answer) for answer in answers] == [*map(id, report.answers.values())]
        dtypes = {spec.dtype for spec in layers.values() if isinstance(spec, FullAttentionSpec)}
        assert dtypes == {canonical_dtype(options.kv_dtype)} and model.layers == tuple(layers)
        return Comparison(difference, 1, 2, 3)

    def draw(name, *use, preemptions):
        assert use[-1] is (report.uses if name == "use of blocks" else report.occupancy)
        assert preemptions is report.preemptions
        return SimpleNamespace(savefig=lambda path, dpi: path.write_text(name))

    def make_trace(*given):
        traces.append(given)
        return trace.make_trace(*given)

    for name in ("make_engine", "serve", "compare", "make_trace"):
        monkeypatch.setattr(run, name, locals()[name])
    monkeypatch.setattr(run, "default_implementation", lambda: "xla")
    monkeypatch.setattr(run, "init_params", lambda _, key: int(jax.random.key_data(key)[-1]))
    monkeypatch.setattr(run, "plot_occupancy", functools.partial(draw, "occupancy"))
    monkeypatch.setattr(run, "plot_block_use", functools.partial(draw, "use of blocks"))
    agrees = bound is None or difference < float(bound)
    with enabled_x64():
        assert run.run(options) == (0 if agrees else 1)
    assert ran == wanted
    assert traces == [(options.requests, options.seed, options.trace)]
    text = capsys.readouterr().out
    assert (path.read_text() if path.exists() else None) == picture
    assert bound is None or f"differ by {difference:.2g} at most (allowed: {bound}); 1 of 2" in text
    steps = "steps             1,234 in 2.5 s, 5 new tokens, 2 tokens/s; 2 preemptions\n"
    found = "prefixes          1,500 tokens were found in the cache; prompts had 9,000\n"
    slept = "slept             3 times, 1,000,000 bytes released in all\n"
    first = wanted[0]
    how = ["xla", *[f"{first.ranks} ranks"][first.ranks == 1 :]]
    how += [] if first.kernel is None else [f"kernel blocks of {first.kernel}"]
    assert f"\nServing {len(trace.make_trace(*traces[0]))} requests on " in text
    assert f" ({', '.join(how)})\n" in text
    assert picture is None or f"\n{picture:<17} {path}\n" in text
    for line in (steps, "compilations      0 after warm-up\n", found, slept):
        assert text.count(line) == len(ran), text
    nans = "NaN logits        3 of 5 rows; request 3 first"
    assert text.count(nans) == sum(one.policy == "never" for one in wanted)


def test_shared_prefixes_change_no_logit() -> None:
    """Of conversations and of groups of samples, with states that are kept and forgotten."""
    chat = make_trace(9, 5, "chat", prompt_tokens=(20, 40), new_tokens=(4, 20))
    rl = make_trace(8, 6, "rl", prompt_tokens=(20, 90), new_tokens=(4, 20))
    rl = [dataclasses.replace(request, name=request.name + len(chat)) for request in rl]
    trace = sorted([*chat, *rl], key=lambda request: request.arrival_step)
    engine = engine_of(num_blocks=36, kv_dtype="bf16", max_model_len=360)
    report, found = serve_and_compare(engine, trace, "bf16")
    assert found.largest_difference <= bound_of("bf16", default_implementation())
    assert found.num_tokens == sum(request.max_new_tokens * request.samples for request in trace)
    assert report.cached_tokens > 0.1 * report.prompt_tokens
    assert sum(use.shared > 0 for use in report.uses) > 5
    assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks


def test_a_step_of_wrong_blocks_is_far_beyond_the_bound(monkeypatch) -> None:
    """The bound is for rounding: what another request said is well past it."""
    engine = engine_of(**KERNEL_BLOCKS)
    trace = make_trace(2, seed=4, prompt_tokens=(40, 40), new_tokens=(4, 4))
    trace = [dataclasses.replace(request, arrival_step=0) for request in trace]
    steps = itertools.count()

    def exchange_rows(cache: KVCache) -> KVCache:
        rows = np.array([*engine.manager.requests.values()])
        exchanged = cache.rows.at[rows].set(cache.rows[rows[::-1]])
        return dataclasses.replace(cache, rows=exchanged)

    def run_exchanged(uploads):
        is_wrong = next(steps) == 3
        if is_wrong:
            device.cache = exchange_rows(device.cache)
        out = right(uploads)
        if is_wrong:
            device.cache = exchange_rows(device.cache)
        return out

    device, right = engine._device, engine._device.run
    monkeypatch.setattr(device, "run", run_exchanged)
    wrong = serve_and_compare(engine, trace).found.largest_difference
    assert wrong > 5 * BOUNDS["fp8_e4m3"]
    monkeypatch.undo()
    engine.manager.reset_prefixes()
    assert serve_and_compare(engine, trace).found.largest_difference <= BOUNDS["fp8_e4m3"]


def test_a_comparison_counts_what_differs() -> None:
    """The largest difference whatever comes after it, NaN too; picks of greedy answers alone."""
    engine = engine_of(num_blocks=14, zero_policy="never", has_decodes=True)
    model, params, layers = make_model("fp8_e4m3", is_all_attention=False)
    trace = make_trace(5, seed=3, prompt_tokens=(16, 40), new_tokens=(2, 5))
    answers = [*serve(engine, trace, lambda: None).answers.values()]

    def compared(at: int, **changes: Any) -> Comparison:
        served, finished = [*answers], list[None]()
        served[at] = served[at]._replace(**changes)
        of = {"max_model_len": engine.manager.plan.max_model_len}
        found = compare(
            *(model, params, layers, served), **of, on_finish=lambda: finished.append(None)
        )
        assert len(finished) == len(served)
        return found

    right, count = compared(0), sum(request.max_new_tokens for request in trace)
    assert right.num_picked == right.num_tokens == count
    for at in (0, 3, 4):  # the ends of batches
        tokens, logprobs, _ = answers[at]
        wrong = [*tokens[:-1], 255 - tokens[-1]]
        assert compared(at, tokens=wrong).num_equal == right.num_equal - 1
        drawn = compared(at, is_greedy=False)
        assert (drawn.num_picked, drawn.num_tokens) == (count - len(logprobs), count)
        assert compared(at, tokens=wrong, is_greedy=False).num_equal == drawn.num_equal
        for token, change in ((0, 2.0), (-1, -2.0), (0, np.nan)):
            changed = logprobs.copy()
            changed[token] += change
            found = compared(at, logprobs=changed).largest_difference
            assert found == pytest.approx(abs(change), abs=0.03, nan_ok=True)


def test_a_request_that_waits_for_none_of_the_trace_is_refused() -> None:
    engine: Any = Scripted({})
    for after in (2, -1):
        trace = [Request(0, 0, (1, 2), 3), Request(1, 0, (5,), 2, after=after)]
        with pytest.raises(ValueError, match="waits for one that is not in it"):
            serve(engine, trace, lambda: None)
    assert not engine.added


def test_a_request_longer_than_the_plan_is_refused() -> None:
    engine = engine_of(num_blocks=14, zero_policy="never", has_decodes=True)
    trace = make_trace(1, 0, prompt_tokens=(180, 180), new_tokens=(13, 13))
    with pytest.raises(ValueError, match="are more than the plan's max_model_len=192"):
        serve(engine, trace, lambda: None)


def test_the_command_prints_its_proof_and_writes_a_picture(capsys, tmp_path, monkeypatch) -> None:
    """Without zeroing, stale states turn attention that masks logits only into NaN.

    Its first engine is that of `KERNEL_BLOCKS`, so that one program serves both.
    """
    decode_as_prompts(monkeypatch)
    configs = {"qwen3-next-demo": CONFIG}
    monkeypatch.setattr(run, "load_config", lambda name: configs.get(name) or load_config(name))
    trace = TRACE[:6]
    monkeypatch.setattr(run, "make_trace", lambda *_: list(trace))
    picture = tmp_path / "new" / "pool.png"
    arguments = ["demo", "--requests", "6", "--pool-bytes", "110000", "--output", str(picture)]
    assert main([*arguments, "--kernel-block-size", "8"]) == 0
    text = capsys.readouterr().out
    assert "3 x (12 state @ 544) + 1 x (12 full @ 544)" in text
    assert "13,369,344 bytes" in text
    assert "141,000,000,000 bytes" in text and "262,144 tokens" in text
    assert (
        "at most (allowed: 0.03); " in text
        and f" of {sum(r.max_new_tokens for r in trace)} picks equal" in text
    )
    assert text.count("0 after warm-up") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    served, without_zeroing = text.split("6 of them without zeroing")
    assert "NaN" not in served and "what zeroing prevents" in without_zeroing


def test_the_demo_s_own_model_fits_its_cache() -> None:
    """All of its layers, whose groups have two each; what it serves is proven by smaller ones."""
    layers = layers_from_config(DEMO, kv_dtype="fp8_e4m3")
    model = Model(DEMO, tuple(layers))
    plan = plan_cache(layers, 1_500_000, max_model_len=model_len(DEMO))
    assert [len(group.layers) for group in plan.groups] == [2] * 4
    params = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    params = jax.tree.map(lambda of: np.zeros(of.shape, np.float32), params)
    engine = make_engine(model, params, plan)  # traces a step
    assert engine._device.vocab_size == DEMO["vocab_size"]


QUERIES = {"fp8_e4m3": "float16", "fp8_e5m2": "float16", "bf16": "bfloat16", "f16": "float16"}


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_the_kernels_that_are_asked_for_get_queries_that_they_take(
    kv_dtype: str, implementation: Any
) -> None:
    """The attention kernel takes 16-bit queries only, and those of pages of 16 bits in theirs."""
    asked: list[tuple[str, Any]] = []

    def call(layer, first, *_, implementation, **options):
        asked.append((first.dtype.name, implementation))
        return first

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=2, dtype=kv_dtype)
    places = {"a": SimpleNamespace(spec=spec)}
    batch = SimpleNamespace(layout=SimpleNamespace(place_of=places.get))
    step: Any = SimpleNamespace(batch=batch, attend=call, gated_delta=call)
    paged, ones = PagedMemory(step, None, False, implementation), np.ones((3, 2), np.float32)
    assert paged.attend("a", jnp.asarray(ones), ones, ones).dtype == np.float32
    paged.gated_delta("b", ones, ones, ones, ones, 1)
    is_xla = implementation == "xla"
    queries = "float32" if is_xla else QUERIES.get(kv_dtype, "float32")
    assert asked == [(name, "xla" if is_xla else None) for name in (queries, "float32")]


@needs_mosaic
def test_a_gpu_serves_with_the_attention_kernel(monkeypatch) -> None:
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    model, params, layers = make_model("fp8_e4m3", is_all_attention=True)
    plan = plan_cache(layers, 2**20, max_model_len=192)
    cache = jaxkv.make_cache(plan, max_requests=4, scales=(0.02, 0.02))
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=4, max_query_len=1, extra=4)

    def step(params, cache, upload):
        step = jaxkv.StepContext(cache, upload)
        return forward_step(model, False, None, params, step), step.done()

    traced = jax.jit(step).trace(params, cache, shape.idle())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "paged_attention_decode" in text and "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "fp9"], "invalid choice: 'fp9'"),
        (["--implementation", "triton"], "invalid choice: 'triton'"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--seed", "-1"], "--seed in 0..2**32 - 1, got 64 and -1"),
        (["--seed", "4294967296"], "--seed in 0..2**32 - 1, got 64 and 4294967296"),
        (["--output", f"{__file__}/a.png"], f"--output {__file__}/a.png: "),
        (["--kernel-block-size", "7"], "group 3: no kernel block size divides block_size=48"),
        (["--kernel-block-size", "0"], "kernel_block_size must be at least 1"),
        (["--context-parallel", "0"], "context_parallel must be at least 1"),
        (["--context-parallel", "99"], "--context-parallel 99: use at most"),
        (["--requests", "many"], "invalid int value: 'many'"),
        (["--pool-bytes", "100000"], "max_model_len=720 needs 18 blocks"),
        (["--pool-bytes", "-1"], "memory_bytes must be at least 1"),
        ([], None),
    ],
)
def test_bad_arguments_get_one_clear_message_and_status_2(
    capsys, arguments, message, monkeypatch
) -> None:
    monkeypatch.setattr(run, "init_params", lambda *_: {})  # most of the time
    arguments = ["demo", *arguments] if message else arguments
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse's own refusals
        status = stop.code
    assert status == 2
    assert (message or "required: COMMAND") in capsys.readouterr().err


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxkv", "--help"], capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout


def test_options_have_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    assert f"after every {serving.REQUESTS_BETWEEN_NAPS} requests" in " ".join(
        parser.format_help().split()
    )
    options = vars(parser.parse_args([]))
    assert options.pop("output") == pathlib.Path("demo_output/occupancy.png")
    nothing = dict.fromkeys(("sleep_between_batches", "no_zeroing"), False)
    nothing |= dict.fromkeys(("implementation", "kernel_block_size"))
    sizes = {"requests": 64, "seed": 0, "pool_bytes": 1_500_000, "context_parallel": 1}
    assert options == sizes | nothing | {"kv_dtype": "fp8_e4m3", "trace": "random"}
