"""The benchmarks run at all, in their smallest sizes; their figures are not looked at."""

import functools
import gc
import itertools
import time

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks import attention_bounds, timing
from tests.benchmarks.__main__ import PARTS, load_peer


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch):
    """The smallest sizes, by the host's clock alone: a profiler slows down what comes after it."""
    monkeypatch.setattr(timing, "size", "smallest")
    monkeypatch.setattr(timing, "clock", "host")
    monkeypatch.setattr(timing, "every_case", True)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests go on with theirs
    with jax.numpy_rank_promotion("allow"):  # the served models are written as their readers write
        yield
    gc.unfreeze()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_and_reports_what_it_timed(part: str, smallest, capsys) -> None:
    report = timing.Report()
    PARTS[part](report, None)
    assert report.rows
    assert len(capsys.readouterr().out.splitlines()) > len(report.rows)


def test_compared_calls_take_turns_and_keep_their_own_times(smallest) -> None:
    made: list[str] = []

    def subject(name: str, seconds: float, **options) -> timing.Subject:
        def call() -> None:
            made.append(name)
            time.sleep(seconds)

        return timing.Subject(call, lambda _: None, **options)

    prepare = functools.partial(made.append, "prepare")
    fast, slow = timing.measure_in_turns(
        subject("fast", 0.001), subject("slow", 0.02, prepare=prepare)
    )
    for times, least, most in ((fast, 0.001, 0.02), (slow, 0.02, 1.0)):
        assert least <= min(times.synced, times.dispatched)
        assert max(times.synced, times.dispatched) < most
    turns = [name for name, _ in itertools.groupby(n for n in made if n != "prepare")]
    assert turns == ["fast", "slow"] * (timing.ROUNDS + 1)  # the first of them warms up
    assert made.count("prepare") == made.count("slow")


def test_a_folder_without_vllm_is_named_and_not_timed(tmp_path, capsys) -> None:
    assert load_peer(tmp_path, timing.Report()) is None
    assert f"vLLM is not timed: {tmp_path} holds no" in capsys.readouterr().out


@pytest.mark.parametrize("copies", [1, 4])
def test_the_kernel_that_only_reads_is_lowered_for_cuda(copies: int) -> None:
    places = jnp.zeros((8, copies), jnp.int32)
    read = attention_bounds.make_reader(places, heads=2, words=64, blocks_per_sm=2, stages=2)
    rows = jax.ShapeDtypeStruct((512, 128), jnp.uint32)
    lowered = jax.jit(read).trace(places, rows).lower(lowering_platforms=("cuda",))
    assert "read_pages" in lowered.as_text()
