"""Host, tables and pool together: no request ever sees bytes that are not its own.

A random serving loop over plans whose groups overlay each other, driven by the state machine
of `jaxkv.testing`. Every byte of every token and state is its request's own. The pool starts
as NaN; blocks are freed and handed out again between groups all the time; after every step
each request must read exactly what it wrote, and zeros where it has not written yet.
"""

import functools
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jaxkv.planning import plan_cache
from jaxkv.specs import (
    FullAttentionSpec,
    Limits,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv.testing import JaxkvStateMachine, assert_no_recompilation
from tests.helpers import IMPLEMENTATIONS, ON_GPU, hybrid_plan, kernels_run

plan_small = functools.partial(
    plan_cache, memory_bytes=2**30, max_model_len=24, limits=Limits(max_in_flight_tokens=8)
)


class Machine(JaxkvStateMachine):
    plan = hybrid_plan(num_blocks=24, max_model_len=24, kv_dtype="bf16")
    unwritten_reads_zero = True  # every group of these plans is zeroed
    seen: Counter[str]

    def grow(self, request, num_computed_tokens, num_tokens):
        self.seen["refused"] += 1
        super().grow(request, num_computed_tokens, num_tokens)
        self.seen["refused"] -= 1
        self.seen["grown"] += 1

    def finish(self, request):
        super().finish(request)
        self.seen["finished"] += self.computed[request] > 0


def run(examples: int, steps: int, **changes: object) -> Counter[str]:
    """What the requests of a run did."""
    machine = type("Machine", (Machine,), {**changes, "seen": Counter()})
    options = settings(max_examples=examples, stateful_step_count=steps, derandomize=True)
    with kernels_run():
        run_state_machine_as_test(machine, settings=options)
    return machine.seen


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_request_reads_what_it_wrote_and_nothing_else(implementation, stacked) -> None:
    interpreted = implementation == "mosaic_gpu" and not ON_GPU
    size = (2, 12) if interpreted else (30, 30)  # interpreting costs tenths of a second a step
    seen = run(*size, implementation=implementation, stacked=stacked)
    assert seen["grown"]
    if not interpreted:  # entering interpret mode changes jax's configuration, once
        assert seen["finished"] and seen["refused"]
        with assert_no_recompilation():
            run(3, 30, implementation=implementation, stacked=stacked)


FIND = settings(max_examples=300, phases=[Phase.generate], report_multiple_bugs=False)
HEADS = {"num_kv_heads": 2, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, dtype="fp8_e4m3", **HEADS)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, dtype="fp8_e5m2", **HEADS)
LATENT = MLASpec(block_size=4, head_size=8, compress_ratio=2)
WINDOW_LATENT = SlidingWindowMLASpec(block_size=4, head_size=4, sliding_window=5)
STATE = StateSpec(block_size=4, shapes=((2,), (2, 3)), dtypes=("bf16", "f32"), cache_mode="align")
STATES = StateSpec(block_size=4, shapes=((7,),), dtypes=("f32",), cache_mode="all")


@pytest.mark.parametrize(
    ("layers", "num_blocks"),
    [
        ({"full": FULL, "window": WINDOW}, 13),
        ({"latent": LATENT, "window": WINDOW_LATENT}, 12),
        ({"state": STATE, "states": STATES, "full": FULL}, 16),
    ],
    ids=["windows of two fp8 formats", "compressed latents", "states of every block"],
)
def test_other_overlays_hold_too(layers, num_blocks) -> None:
    plan = plan_small(layers, num_blocks_override=num_blocks)
    assert all(plan.groups_to_zero)
    seen = run(20, 30, plan=plan)
    assert seen["grown"] and seen["finished"]


def test_a_forked_request_outlives_its_donor() -> None:
    """What the machine draws now and then, done once for certain."""
    plan = plan_small({"full": FULL, "window": WINDOW}, num_blocks_override=24)
    machine = type("Machine", (Machine,), {"plan": plan, "seen": Counter()})()
    machine.begin(count=0)
    (donor,) = machine.computed
    machine.step({donor: 15})
    fork = machine.fork_request(donor, 1)
    assert machine.computed[fork] == 8 and machine.manager.pool.references(1) == 2
    for after in (
        machine.decode,
        lambda: machine.finish_request(donor, again=False),
        machine.decode,
    ):
        after()
        machine.blocks_are_free_or_held_once()
        machine.requests_read_what_they_wrote()
    assert machine.manager.pool.references(1) == 1 and machine.computed == {fork: 10}


def test_without_zeroing_the_machine_finds_stale_bytes() -> None:
    """The checks above can fail: the same loop with zeroing off reads somebody's bytes."""
    machine = type("Machine", (Machine,), {"zero_policy": "never", "seen": Counter()})
    with pytest.raises(AssertionError, match="reads as NaN, and no request wrote that"):
        run_state_machine_as_test(machine, settings=FIND)


def test_tenants_are_kept_apart_by_zeroing_always_and_not_otherwise() -> None:
    """Blocks of one meaning are not zeroed by default: others' finite bytes can be read."""
    options = {"plan": plan_small({"full": FULL}, num_blocks_override=12)}
    run(20, 30, **options, zero_policy="always")
    machine = type("Machine", (Machine,), {**options, "seen": Counter()})
    with pytest.raises(AssertionError, match="which nobody wrote"):
        run_state_machine_as_test(machine, settings=FIND)
