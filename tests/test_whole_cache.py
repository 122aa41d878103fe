"""Host, tables and pool together: a request never reads bytes that are not its own.

Random traffic over plans whose groups overlay each other, driven by the state machine of
`jaxkv.testing`. Every byte of every token and state is its request's own. The pool starts
as NaN; blocks are freed and allocated again between groups all the time, forks copy what
they write, drafts are rejected. After every step each request must read
exactly what it wrote, and zeros where it has not written yet.
"""

import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import (
    FullAttentionSpec,
    Limits,
    MLASpec,
    RingSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv.testing import assert_no_recompilation
from tests.helpers import ON_GPU, hybrid_plan, kernels_run, needs_mosaic
from tests.jaxkv_state_machine import JaxkvStateMachine

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

    def fork(self, request, donor, num_tokens):
        forked = super().fork(request, donor, num_tokens)
        self.seen["forked"] += forked
        return forked


def run(examples: int, steps: int = 30, **changes: object) -> Counter[str]:
    """Runs the machine and counts what its requests did."""
    machine = type("Machine", (Machine,), {**changes, "seen": Counter()})
    options = settings(max_examples=examples, stateful_step_count=steps, derandomize=True)
    with kernels_run():
        run_state_machine_as_test(machine, settings=options)
    return machine.seen


@pytest.mark.parametrize(
    ("implementation", "stacked"),
    [
        *(("xla", stacked) for stacked in (False, True)),
        # Interpreted on one buffer, too, by `test_sharded`.
        *(pytest.param("mosaic_gpu", s, marks=needs_mosaic) for s in (False, True)[: 1 + ON_GPU]),
    ],
)
def test_every_request_reads_what_it_wrote_and_nothing_else(implementation, stacked) -> None:
    options = {"implementation": implementation, "stacked": stacked}
    if implementation == "mosaic_gpu" and not ON_GPU:
        small = {"plan": WINDOWS, "max_requests": 2}  # a step takes tenths of a second
        assert run(1, 12, **small, **options)["grown"]
        return
    seen = run(4, **options)
    assert seen["finished"] and seen["refused"] and seen["grown"] > 60
    with assert_no_recompilation():
        run(1, **options)


FIND = settings(
    max_examples=300, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True
)
HEADS = {"num_kv_heads": 2, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, dtype="fp8_e4m3", **HEADS)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, dtype="fp8_e5m2", **HEADS)
LATENT = MLASpec(block_size=4, head_size=8, compress_ratio=2)
WINDOW_LATENT = SlidingWindowMLASpec(block_size=4, head_size=4, sliding_window=5)
RING = RingSpec(block_size=5, group_size=2, head_size=4, dtype="f32")
STATE = StateSpec(block_size=4, shapes=((2,), (2, 3)), dtypes=("bf16", "f32"), cache_mode="align")
STATES = StateSpec(block_size=4, shapes=((7,),), dtypes=("f32",), cache_mode="all")
DRAFTS = dataclasses.replace(STATE, speculative_blocks=2)
RECURRENT = {  # states that the recurrent layers write, and not write_state
    mode: StateSpec(block_size=4, shapes=((1, 6, 1),), dtypes=("f32",), cache_mode=mode)
    for mode in ("none", "align", "all")
}
RUNNING = dataclasses.replace(STATE, cache_mode="none", speculative_blocks=1)


WINDOWS = plan_small({"full": FULL, "window": WINDOW}, num_blocks_override=13)


ALL_STATES = plan_small({"states": STATES, "full": FULL}, num_blocks_override=16)


@pytest.mark.parametrize(
    "plan",
    [
        WINDOWS,
        plan_small({"latent": LATENT, "window": WINDOW_LATENT}, num_blocks_override=12),
        plan_small({"state": STATE, "running": RUNNING, "full": FULL}, num_blocks_override=16),
        ALL_STATES,
        plan_small({"drafts": DRAFTS, "full": FULL}, num_blocks_override=16),
        plan_small({**RECURRENT, "full": FULL}, num_blocks_override=20),
        plan_small({"ring": RING, "latent": LATENT, "state": STATE}, num_blocks_override=16),
    ],
    ids=[
        *["fp8 windows", "compressed latents", "newest states", "all states", "drafts"],
        "layers",
        "ring",
    ],
)
def test_other_overlays_hold_too(plan) -> None:
    assert all(plan.groups_to_zero)
    seen = run(6, plan=plan)
    assert seen["grown"] > 60 and seen["finished"] and seen["forked"]


def test_without_zeroing_the_machine_finds_stale_bytes() -> None:
    """Shows that the checks above can fail: without zeroing, requests read other bytes."""
    plan = hybrid_plan(num_blocks=24, kv_dtype="bf16", zero_policy="never")
    machine = type("Machine", (Stale,), {"plan": plan, "seen": Counter()})
    with pytest.raises(AssertionError, match="reads as NaN, and no request wrote that"):
        run_state_machine_as_test(machine, settings=FIND)


class Stale(Machine):
    """The machine over a pool that starts as NaN although nothing is zeroed."""

    def make_cache(self) -> None:
        super().make_cache()
        (buffer,) = self.cache.buffers
        content = np.full(buffer.shape, 0xFF, np.uint8)
        content[:, 0] = 0
        buffers = (jax.device_put(content, buffer.sharding),)
        self.cache = dataclasses.replace(self.cache, buffers=buffers)


def test_tenants_are_kept_apart_by_zeroing_always_and_not_otherwise() -> None:
    """Blocks of one meaning are not zeroed by default: others' finite bytes can be read."""
    small = functools.partial(plan_small, {"full": FULL}, num_blocks_override=12)
    run(5, plan=small(zero_policy="always"))
    machine = type("Machine", (Machine,), {"plan": small(), "seen": Counter()})
    with pytest.raises(AssertionError, match="which nobody wrote"):
        run_state_machine_as_test(machine, settings=FIND)
