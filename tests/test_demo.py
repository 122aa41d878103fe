"""The demo end to end with a smaller model, and its command as a newcomer meets it."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.__main__ import main
from jaxkv._src.demo import run
from jaxkv._src.demo.model import Model, forward_step, init_params
from jaxkv._src.demo.reference import logprobs_of
from jaxkv._src.demo.run import BOUNDS, Served, compare, make_engine, make_requests
from jaxkv.testing import count_compilations
from pallas_kernels import _capability
from tests import reference_model
from tests.helpers import needs_mosaic

# One layer of attention and one of states. Attention comes first, so that what it computes for
# every token of a prompt counts.
CONFIG = jaxkv.load_config("qwen3-next-demo") | {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 320,
}
del CONFIG["full_attention_interval"]
PROMPTS, SAMPLINGS = make_requests(12)


@functools.cache
def small_demo() -> Served:
    """The small model over a small pool."""
    return make_engine(CONFIG, "fp8_e4m3", num_blocks=26)


def test_served_logprobs_equal_the_model_without_a_cache() -> None:
    """With prompts found in the cache and requests preempted, and one compilation per shape."""
    engine = small_demo().engine
    outputs = list(engine.generate(PROMPTS, SAMPLINGS))
    difference, equal, total = compare(small_demo(), PROMPTS, outputs)
    assert difference <= BOUNDS["fp8_e4m3"]
    assert total == sum(sampling.max_tokens for sampling in SAMPLINGS)
    assert equal >= 0.99 * total
    stats = engine.stats
    assert not stats.nan_tokens and stats.cached_tokens and stats.preemptions
    assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks
    engine.manager.reset_prefixes()
    with count_compilations() as compiled:
        again = engine.generate(PROMPTS, SAMPLINGS)
        assert {o.request: o.tokens for o in again} == {o.request: o.tokens for o in outputs}
    assert not compiled


def test_a_step_of_wrong_blocks_is_far_beyond_the_bound(monkeypatch) -> None:
    """The bound is for rounding: what another request wrote is well past it."""
    served = small_demo()
    engine = served.engine
    engine.manager.reset_prefixes()
    device, right, steps = engine._device, engine._device.run, itertools.count()

    def exchange_rows() -> None:
        rows = np.array([*engine.manager.requests.values()])
        exchanged = device.cache.rows.at[rows].set(device.cache.rows[rows[::-1]])
        device.cache = dataclasses.replace(device.cache, rows=exchanged)

    def run_exchanged(*given):
        is_wrong = next(steps) == 8
        if is_wrong:
            exchange_rows()
        out = right(*given)
        if is_wrong:
            exchange_rows()
        return out

    monkeypatch.setattr(device, "run", run_exchanged)
    prompts, samplings = [prompt[:40] for prompt in PROMPTS[:2]], SAMPLINGS[:2]
    wrong, *_ = compare(served, prompts, list(engine.generate(prompts, samplings)))
    assert wrong > 5 * BOUNDS["fp8_e4m3"]
    monkeypatch.undo()
    engine.manager.reset_prefixes()
    right_again, *_ = compare(served, prompts, list(engine.generate(prompts, samplings)))
    assert right_again <= BOUNDS["fp8_e4m3"]


TINY = {"hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 4, "head_dim": 8}
TINY |= {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rope_theta": 100.0}
TINY |= {"linear_key_head_dim": 3, "linear_value_head_dim": 5, "rms_norm_eps": 0.01}


def test_the_model_equals_its_definition_in_numpy() -> None:
    """The demo compares with the same arithmetic, which this compares with NumPy."""
    config = CONFIG | TINY
    layers = jaxkv.layers_from_config(config, kv_dtype="f32")
    model, rng = Model(config, tuple(layers)), np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    params = jax.tree.map(lambda of: rng.normal(size=of.shape).astype(np.float32) / 4, shapes)
    ids = rng.integers(0, 256, 7, np.int32)
    got = logprobs_of(model, layers, params, ids)
    wanted = reference_model.logprobs_of(config, params, ids)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_the_command_tells_a_short_story_with_the_result_at_its_end(capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "make_engine", lambda *_: small_demo())
    for bound, status, last in ((BOUNDS["fp8_e4m3"], 0, "OK: "), (-1.0, 1, "FAILED: ")):
        monkeypatch.setitem(BOUNDS, "fp8_e4m3", bound)
        assert main(["demo", "--requests", "4"]) == status
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 20 and lines[-1].startswith(last)
        assert "Serving 4 requests on " in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--kv-dtype", "fp9"], "invalid choice: 'fp9'"),
        (["demo", "--requests", "0"], "--requests must be at least 1, got 0"),
        (["demo", "--requests", "many"], "invalid int value: 'many'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments_get_one_clear_message_and_status_2(capsys, arguments, message) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@needs_mosaic
def test_a_gpu_serves_with_the_attention_kernel(monkeypatch) -> None:
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    engine, model, params, _ = small_demo()
    model, plan = Model(CONFIG, model.layers, "float16"), engine.manager.plan
    cache = jaxkv.make_cache(plan, max_requests=4, scales=(0.02, 0.02))
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=4, max_query_len=1, extra=4)

    def step(params, cache, upload):
        step = jaxkv.StepContext(cache, upload)
        return forward_step(model, params, step), step.done()

    traced = jax.jit(step).trace(params, cache, shape.idle())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "paged_attention_decode" in text and "custom_call @mosaic_gpu" in text
