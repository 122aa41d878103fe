"""The demo end to end on a small trace, and the command line as a newcomer meets it."""

import argparse
import dataclasses
import functools
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxkv.__main__ import main
from jaxkv.demo.engine import Engine, Report
from jaxkv.demo.model import Model, Params, init_params
from jaxkv.demo.reference import Comparison, compare
from jaxkv.demo.run import BOUNDS
from jaxkv.demo.trace import Request, make_trace
from jaxkv.hf_config import layers_from_config, load_config, model_len
from jaxkv.planning import plan_cache
from jaxkv.specs import Limits
from jaxkv.testing import count_compilations

CONFIG = {**load_config("qwen3-next-demo"), "num_hidden_layers": 4}  # half, to compile faster
MAX_MODEL_LEN = model_len(CONFIG)
TRACE = make_trace(12, seed=3, prompt_tokens=(16, 150), new_tokens=(8, 30))


BLOCKS = {"fp8_e4m3": 22, "bf16": 32}  # of which some requests are preempted


class Served(NamedTuple):
    engine: Engine
    report: Report
    found: Comparison
    compilations: list[str]


@functools.cache
def make_model(kv_dtype: str, *, is_all_attention: bool) -> tuple[Model, Params, dict[str, Any]]:
    """A model, which several tests serve and compile the reference of once."""
    config = {**CONFIG, "full_attention_interval": 1} if is_all_attention else CONFIG
    layers = layers_from_config(config, kv_dtype=kv_dtype)
    model = Model(config, tuple(layers))
    return model, init_params(model, jax.random.key(1)), layers


def serve(
    trace: list[Request],
    *,
    kv_dtype: str = "fp8_e4m3",
    num_blocks: int | None = None,
    ranks: int = 1,
    zero_policy: str = "when_needed",
    **options,
) -> Served:
    """Serves a trace, and compares it with the model without a cache."""
    model, params, layers = make_model(kv_dtype, is_all_attention=ranks > 1)
    plan = plan_cache(
        layers,
        2**30,
        max_model_len=MAX_MODEL_LEN,
        num_blocks_override=BLOCKS[kv_dtype] if num_blocks is None else num_blocks,
        limits=Limits(max_in_flight_tokens=64),
        context_parallel=ranks,
        zero_policy=zero_policy,
    )
    engine = Engine(model, params, plan, **options)
    longest = max(len(request.prompt) + request.max_new_tokens for request in trace)
    if longest <= MAX_MODEL_LEN:
        engine.warm_up()
    with count_compilations() as compilations:
        report = engine.serve(trace, lambda: None)
    found = compare(
        *(model, params, layers, list(report.answers.values())),
        max_model_len=MAX_MODEL_LEN,
        on_finish=lambda: None,
    )
    return Served(engine, report, found, list(compilations))


@pytest.mark.parametrize(
    ("kv_dtype", "zero_policy"), [("fp8_e4m3", "never"), ("bf16", "when_needed")]
)
def test_served_logits_are_those_of_the_model_without_a_cache(
    kv_dtype: str, zero_policy: str
) -> None:
    """Also without zeroing: attend masks what is read, not logits alone."""
    engine, report, found, compilations = serve(TRACE, kv_dtype=kv_dtype, zero_policy=zero_policy)
    assert found.largest_difference <= BOUNDS[kv_dtype]
    assert found.num_tokens == sum(request.max_new_tokens for request in TRACE)
    assert found.num_equal >= 0.99 * found.num_tokens
    assert not compilations and not report.num_nan
    assert report.blocks_allocated > 2 * engine.plan.usable_blocks
    assert report.preemptions
    assert engine.manager.num_free_blocks == engine.plan.usable_blocks
    assert len(report.occupancy) == report.steps
    assert max(map(sum, report.occupancy)) <= engine.plan.usable_blocks


@pytest.mark.parametrize("ranks", [1, 2], ids=["kernel blocks", "context parallel"])
def test_own_kernels_ranks_and_sleep_change_no_logit(ranks: int) -> None:
    """Wherever a block lies: read by kernel ids, dealt out over devices, sent to the host."""
    if len(jax.devices()) < ranks:
        pytest.skip(f"needs {ranks} devices")
    trace = make_trace(9, seed=4, prompt_tokens=(16, 90), new_tokens=(4, 12))
    engine, report, found, compilations = serve(
        trace,
        num_blocks=60,
        ranks=ranks,
        kernel_block_size=8,
        own_attention=ranks == 1,
        sleep_between_batches=True,
    )
    assert found.largest_difference <= BOUNDS["fp8_e4m3"]
    assert report.naps == 1 and report.bytes_released > engine.cache.num_bytes
    # Sleeping compiles a copy or two of its own the first time, and the step never.
    assert engine.step._cache_size() == len(engine.shapes)
    assert len(compilations) <= 4


def test_shared_prefixes_change_no_logit() -> None:
    """Of conversations and of groups of samples, with states that are kept and forgotten."""
    sizes = {"prompt_tokens": (20, 90), "new_tokens": (4, 40)}
    chat = make_trace(9, 5, "chat", **sizes)
    rl = [
        dataclasses.replace(
            request,
            name=request.name + len(chat),
            sample_of=None if request.sample_of is None else request.sample_of + len(chat),
        )
        for request in make_trace(8, 6, "rl", **sizes)
    ]
    trace = sorted([*chat, *rl], key=lambda request: request.arrival_step)
    engine, report, found, compilations = serve(trace, num_blocks=50, share_prefixes=True)
    assert found.largest_difference <= BOUNDS["fp8_e4m3"]
    assert found.num_tokens == sum(request.max_new_tokens for request in trace)
    assert not compilations
    assert report.cached_tokens > 0.2 * report.prompt_tokens
    assert sum(use.shared > 0 for use in report.uses) > 5
    assert engine.manager.num_free_blocks == engine.plan.usable_blocks


def test_a_step_of_wrong_blocks_is_far_beyond_the_bound(monkeypatch) -> None:
    """The bound is for rounding: values of the request next to it are well past it."""
    import jaxkv.demo.memory as memory

    def of_another(cache, layer, batch):
        keys, values = read(cache, layer, batch)
        return keys, jnp.roll(values, 1, axis=0)

    read = memory._read_kernel_blocks
    monkeypatch.setattr(memory, "_read_kernel_blocks", of_another)
    found = serve(TRACE[:2], num_blocks=60, own_attention=True).found
    assert found.largest_difference > 5 * BOUNDS["fp8_e4m3"]


def test_without_zeroing_stale_state_turns_attention_that_masks_logits_only_into_nan() -> None:
    """With zeroing the same attention agrees with the model; see the test of own kernels."""
    report = serve(TRACE, own_attention=True, zero_policy="never").report
    assert report.num_nan > 0 and report.first_nan_request is not None
    assert report.blocks_zeroed == 0


def test_a_request_longer_than_the_plan_is_refused_before_serving() -> None:
    with pytest.raises(ValueError, match="the plan admits 720"):
        serve(make_trace(1, 0, prompt_tokens=(700, 700), new_tokens=(21, 21)))


def test_the_command_prints_its_proof_and_writes_a_picture(capsys, tmp_path) -> None:
    picture = tmp_path / "new" / "pool.png"
    assert main(["demo", "--requests", "3", "--seed", "1", "--output", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "3 x (12 state @ 544) + 1 x (12 full @ 544)" in text
    assert "13,369,344 bytes" in text
    assert "logits of the same tokens differ by 0.0" in text
    assert "0 after warm-up" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "fp9"], "invalid choice: 'fp9'"),
        (["--implementation", "triton"], "invalid choice: 'triton'"),
        (["--requests", "0"], "--requests must be at least 1"),
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
def test_bad_arguments_get_one_clear_message_and_status_2(capsys, arguments, message) -> None:
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
    from jaxkv.demo.run import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([])
    assert (options.requests, options.seed, options.kv_dtype) == (64, 0, "fp8_e4m3")
