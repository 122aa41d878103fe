"""The demo end to end on a small trace, and the command line as a newcomer meets it."""

import argparse
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from jaxkv.__main__ import main
from jaxkv.demo.engine import Engine
from jaxkv.demo.model import Model, init_params
from jaxkv.demo.reference import dense_outputs
from jaxkv.demo.trace import make_trace
from jaxkv.models import layers_from_config, load_config, model_len
from jaxkv.planning import Plan, plan_cache
from jaxkv.specs import Limits
from jaxkv.testing import count_compilations

CONFIG = load_config("qwen3-next-demo")
TRACE = make_trace(12, seed=3, prompt_tokens=(16, 150), new_tokens=(8, 30))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, tuple(layers_from_config(CONFIG)))


@pytest.fixture(scope="module")
def params(model: Model) -> Iterator[dict]:
    return init_params(model, jax.random.key(0))


def small_plan(kv_dtype: str) -> Plan:
    return plan_cache(
        layers_from_config(CONFIG, kv_dtype=kv_dtype),
        2**30,
        max_model_len=model_len(CONFIG),
        num_blocks_override={"fp8_e4m3": 24, "bf16": 34}[kv_dtype],
        limits=Limits(max_in_flight_tokens=64),
    )


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "bf16"])
def test_served_tokens_equal_the_dense_reference(model, params, kv_dtype) -> None:
    plan = small_plan(kv_dtype)
    engine = Engine(model, params, plan)
    engine.warm_up()
    finished = []
    with count_compilations() as compilations:
        report = engine.serve(TRACE, lambda: finished.append(1))
    expected = dense_outputs(
        model,
        params,
        layers_from_config(CONFIG, kv_dtype=kv_dtype),
        TRACE,
        max_model_len=plan.max_model_len,
        on_finish=lambda: None,
    )
    assert report.outputs == expected
    assert len(finished) == len(TRACE) and not compilations
    assert report.nan_rows == 0
    assert report.blocks_allocated > 2 * plan.usable_blocks
    assert report.preemptions
    assert engine.manager.pool.num_free_blocks == plan.usable_blocks
    assert len(report.occupancy) == report.steps
    assert max(map(sum, report.occupancy)) <= plan.usable_blocks


@pytest.mark.parametrize(
    ("kernel_block_size", "ranks"), [(8, 1), (4, 3)], ids=["kernel", "context"]
)
def test_kernel_blocks_context_parallelism_and_sleep_change_no_token(
    kernel_block_size, ranks
) -> None:
    """The cache sleeps while requests run; the steps are those compiled before."""
    if len(jax.devices()) < ranks:
        pytest.skip(f"needs {ranks} devices")
    trace = make_trace(9, seed=4, prompt_tokens=(16, 90), new_tokens=(4, 12))
    config = CONFIG if ranks == 1 else {**CONFIG, "full_attention_interval": 1}
    layers = layers_from_config(config)
    plan = plan_cache(
        layers,
        2**30,
        max_model_len=model_len(config),
        num_blocks_override=60,
        limits=Limits(max_in_flight_tokens=64),
        context_parallel=ranks,
    )
    model = Model(config, tuple(layers))
    params = init_params(model, jax.random.key(1))
    engine = Engine(
        model, params, plan, kernel_block_size=kernel_block_size, sleep_between_batches=True
    )
    engine.warm_up()
    with count_compilations() as compilations:
        report = engine.serve(trace, lambda: None)
    expected = dense_outputs(
        model, params, layers, trace, max_model_len=plan.max_model_len, on_finish=lambda: None
    )
    assert report.outputs == expected
    assert report.naps == 1 and report.bytes_released > engine.pool.num_bytes
    # Sleeping compiles a copy or two of its own the first time, and the steps never.
    assert all(step._cache_size() == 1 for _, step in engine._steps.values())
    assert len(compilations) <= 4


def test_without_zeroing_stale_state_turns_attention_into_nan(model, params) -> None:
    engine = Engine(model, params, small_plan("fp8_e4m3"), zeroing=False)
    report = engine.serve(TRACE, lambda: None)
    assert report.nan_rows > 0 and report.first_nan_request is not None
    assert report.blocks_zeroed == 0


def test_a_request_longer_than_the_plan_is_refused_before_serving(model, params) -> None:
    engine = Engine(model, params, small_plan("fp8_e4m3"))
    with pytest.raises(ValueError, match="the plan admits 720"):
        engine.serve(make_trace(1, 0, prompt_tokens=(700, 700), new_tokens=(21, 21)), int)


def test_the_command_prints_its_proof_and_writes_a_picture(capsys, tmp_path) -> None:
    picture = tmp_path / "new" / "pool.png"
    assert main(["demo", "--requests", "3", "--seed", "1", "--output", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "3 x (12 state @ 544) + 1 x (12 full @ 544)" in text
    assert "13,369,344 bytes" in text
    assert "3/3 requests equal" in text
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


def test_options_have_the_defaults_that_the_readme_states() -> None:
    from jaxkv.demo.run import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([])
    assert (options.requests, options.seed, options.kv_dtype) == (64, 0, "fp8_e4m3")
