"""`Engine` after interrupts, failures of the device and calls in any state: no token is lost."""

import contextlib
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv._src.engine import _states
from jaxkv._src.sleeping import CacheTemplate
from jaxkv._src.sleeping._host import ArrayTemplate
from jaxkv.sleeping import SleepError
from tests.engine_models import head, hidden_states, make_params, make_plan

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"
SHARED = list(range(7, 19))
REQUESTS = {
    "a": ([*SHARED, 1], Sampling(max_tokens=9, temperature=0.9, seed=1, n=3, prompt_logprobs=True)),
    "b": ([*SHARED, 2, 3], Sampling(max_tokens=8, logprobs=True)),
    "e": ([*SHARED, 2, 3], Sampling(max_tokens=4, logprobs=2, prompt_logprobs=1, side=True)),
    "c": ([5, 4], Sampling(max_tokens=7, temperature=1.1, seed=3, stop_token_ids=[11])),
    "d": ([*SHARED[:8], 30], Sampling(max_tokens=5, temperature=0.7, seed=4, n=2)),
}
Served = dict[tuple[Any, int], list[jaxkv.Output]]


@functools.cache
def make_engine(decode_steps: int) -> jaxkv.Engine:
    """With so few blocks that requests are preempted, and go to host memory."""
    plan = make_plan(("full",), 15)
    memory = jaxkv.HostMemory(num_bytes=40 * plan.layouts[0].bytes_per_block, min_tokens=1)
    sizes: dict[str, Any] = {"max_requests": 4, "max_tokens": 8, "decode_steps": decode_steps}
    sizes |= {"host_memory": memory, "head": head}
    return jaxkv.Engine(hidden_states, make_params(), plan, **sizes)


@contextlib.contextmanager
def going_on(failures: list[BaseException]) -> Generator[None]:
    """Notes failures, and no mistakes."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError) as error:
        failures.append(error)
    except Exception as error:
        # jax's C++ code hands on others like this.
        if not any(
            name in str(error) for name in ("KeyboardInterrupt", "callback", "exception set")
        ):
            raise
        failures.append(error)


def served(engine: jaxkv.Engine, failures: list[BaseException] | None = None) -> Served:
    """Serves all requests by a caller that goes on after every failure."""
    told: Served = {}
    failures = [] if failures is None else failures
    for name, (prompt, sampling) in REQUESTS.items():
        while name not in engine._samples.of_request:
            with going_on(failures):
                engine.add(name, prompt, sampling)
    has_work = True
    while has_work:
        outputs: list[jaxkv.Output] = []
        with going_on(failures):
            outputs = engine.step()
            has_work = engine.has_work
        assert len(failures) < 500
        for o in outputs:
            told.setdefault((o.request, o.sample), []).append(o)
    return told


@functools.cache
def undisturbed(decode_steps: int) -> Served:
    engine = make_engine(decode_steps)
    engine.update(make_params())
    failures: list[BaseException] = []
    told = served(engine, failures)
    assert not failures and engine.stats.preemptions and engine.stats.cached_tokens
    return told


def assert_same(told: Served, wanted: Served) -> None:
    assert told.keys() == wanted.keys()
    for name in wanted:
        (tokens, end, details), (right, right_end, of_right) = (
            joined(told[name]),
            joined(wanted[name]),
        )
        assert (tokens, end) == (right, right_end), name
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), details, of_right)


def joined(outputs: list[jaxkv.Output]) -> tuple[list[int], Any, Any]:
    """Returns the tokens, the end and the details of all outputs of a sample."""
    of_prompt = [(o.prompt_logprobs, o.prompt_top_logprobs) for o in outputs]
    assert not jax.tree.leaves(of_prompt[1:])
    parts = [(o.logprobs, o.top_logprobs, o.side) for o in outputs]
    details = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    tokens = [token for output in outputs for token in output.tokens]
    return tokens, outputs[-1].finish_reason, (of_prompt[0], details)


def assert_idle(engine: jaxkv.Engine) -> None:
    assert not engine.has_work and not engine.manager.requests
    assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks
    samples = engine._samples
    assert not samples.tokens and not any(samples.by_index)


# --- interrupts -----------------------------------------------------------------------


class Interrupts:
    """Raises KeyboardInterrupt where Python looks for signals: as functions begin, and after calls.

    Those of this library; ``at``: numbers of these places, in the order in which they are passed.
    """

    def __init__(self, at: set[int] | None = None):
        self.at, self.count, self.hook = at or set(), 0, sys.unraisablehook

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and "jaxkv" + os.sep + "_src" in frame.f_code.co_filename:
            self.count += 1
            if self.count in self.at:
                sys.setprofile(None)
                sys.setprofile(self)
                raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        sys.unraisablehook = lambda _: None  # some end a generator that nobody reads any more
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.unraisablehook = self.hook


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_an_interrupt_in_any_place_changes_no_token(decode_steps: int) -> None:
    engine, wanted = make_engine(decode_steps), undisturbed(decode_steps)
    with Interrupts() as places:
        served(engine)
    draw = random.Random(0)
    for _ in range(places.count if IS_LONG else 10):
        at = {draw.randrange(places.count) for _ in range(draw.choice([1, 1, 2, 6]))}
        with Interrupts(at):
            told = served(engine)
        assert_same(told, wanted)
        assert_idle(engine)


def test_an_interrupt_in_any_place_of_generate_and_of_others_is_made_good() -> None:
    engine, wanted = make_engine(1), undisturbed(1)
    params, draw = make_params(), random.Random(1)
    prompts, samplings = zip(*REQUESTS.values(), strict=True)

    def sleep(level: int) -> None:
        engine.sleep(level)
        engine.wake_up()

    calls: list[Callable[[], object]] = [
        lambda: list(engine.generate(prompts, samplings)),
        lambda: next(engine.generate(prompts, samplings)),
        lambda: sleep(1),
        lambda: sleep(2),
        lambda: engine.update(params),
        lambda: engine.update(params, in_flight="restart"),
        lambda: engine.update(params, in_flight="recompute"),
        engine.restart,
    ]
    for call in calls:
        for has_requests in (False, True) if calls.index(call) > 1 else (False,):
            with Interrupts() as places:
                call()
            for _ in range(places.count if IS_LONG else 4):
                if has_requests:
                    engine.add("b", *REQUESTS["b"])
                    told = engine.step()
                with (
                    Interrupts({draw.randrange(places.count)}),
                    contextlib.suppress(KeyboardInterrupt),
                ):
                    call()
                with contextlib.suppress(SleepError):
                    engine.wake_up()
                if has_requests:
                    told = []
                    while engine.has_work:
                        told += engine.step()
                    assert told[-1].finish_reason == "length"
                assert_same(served(engine), wanted)
                assert_idle(engine)


# Between the traces that it takes and sets there, jax itself does not survive an interrupt.
JAX_CORE = os.path.join("jax", "_src", "core.py")


def files_of(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_signals_at_any_time_change_no_token(decode_steps: int, monkeypatch) -> None:
    """Whatever the process is doing, the compiled call and the wait for it included."""
    engine, wanted = make_engine(decode_steps), undisturbed(decode_steps)
    draw, count, wait = random.Random(2), 0, 0.0
    started = time.perf_counter()
    served(engine)
    longest = time.perf_counter() - started

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal count, wait
        if any(name.endswith(JAX_CORE) for name in files_of(frame)):
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
            return
        wait *= 1.1  # a GPU serves faster than it allocates: recovery needs longer at last
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.3, 2) * wait)
        while frame is not None and not frame.f_code.co_filename.endswith("_engine.py"):
            frame = frame.f_back
        if frame is not None:  # otherwise it is the test
            count += 1
            raise KeyboardInterrupt

    # An interrupt within a callback of the garbage collector is none.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(500 if IS_LONG else 10):
            wait = longest
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.01, 1) * longest)
            assert_same(served(engine), wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count
    assert_idle(engine)


# --- failures of the device -----------------------------------------------------------


def test_calls_that_fail_after_they_took_the_cache_run_again(monkeypatch) -> None:
    """As where memory runs out, whether that shows at once or as a wait for the call ends."""
    engine, wanted, draw = make_engine(1), undisturbed(1), random.Random(3)
    failures: list[BaseException] = []
    run = engine._device.run

    class Failed:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise RuntimeError("RESOURCE_EXHAUSTED")

    def sometimes(*given: Any) -> Any:
        out, chance = run(*given), draw.random()
        if chance < 0.15:
            if chance < 0.1:
                jax.tree.map(lambda array: array.delete(), engine._device.cache)
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return {"sampled": Failed()} if chance < 0.3 else out

    with monkeypatch.context() as patch:
        patch.setattr(engine._device, "run", sometimes)
        assert_same(served(engine, failures), wanted)
    assert len(failures) > 3
    assert_same(served(engine), wanted)
    assert_idle(engine)


@jax.default_matmul_precision("highest")  # tokens are compared, on a GPU, too
def small_forward(params: Any, step: jaxkv.StepContext) -> jax.Array:
    x = params["embed"][step.token_ids]
    x = jax.pure_callback(Callback.call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return step.attend("full", x, x, x)[step.last_tokens].reshape(-1, 8) @ params["head"]


class Callback:
    """A function of the host that a model calls."""

    fails: Iterator[bool] = iter(())

    @classmethod
    def call(cls, x: np.ndarray) -> np.ndarray:
        if next(cls.fails, False):
            raise RuntimeError("a callback fails")
        return np.asarray(x)


def small_params(seed: int = 8) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    embed = draw.normal(size=(9, 1, 8)).astype(np.float32)
    return {"embed": jnp.array(embed), "head": jnp.array(3 * draw.normal(size=(8, 9)), jnp.float32)}


def small_plan() -> jaxkv.Plan:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="fp8_e4m3")
    return jaxkv.plan_cache({"full": spec}, 2**20, max_model_len=32, num_blocks_override=20)


@functools.cache
def small_engine() -> jaxkv.Engine:
    """With scales, which a new cache needs again."""
    plan = small_plan()
    cache = jaxkv.make_cache(plan, max_requests=2, scales=(0.02, 0.05), order="BLHNC")
    options: dict[str, Any] = {"max_requests": 2, "max_tokens": 4, "cache": cache}
    return jaxkv.Engine(small_forward, small_params(), plan, **options)


def answers(engine: jaxkv.Engine, failures: list[BaseException] | None = None) -> list[int]:
    """Returns the tokens of request "r", by a caller that goes on after every failure."""
    tokens: list[int] = []
    while engine.has_work:
        with going_on([] if failures is None else failures):
            tokens += [token for output in engine.step() for token in output.tokens]
    return tokens


PROMPT, SAMPLING = [1, 2, 3, 4, 5, 6], Sampling(max_tokens=12)


@functools.cache
def right_answer() -> list[int]:
    engine = small_engine()
    engine.update(small_params())
    engine.add("r", PROMPT, SAMPLING)
    return answers(engine)


def test_a_callback_that_raises_in_the_model_loses_the_call_and_no_token() -> None:
    engine, wanted = small_engine(), right_answer()
    failures: list[BaseException] = []
    Callback.fails = iter([False, True, False, False, False, True, False, False, True])
    engine.add("r", PROMPT, SAMPLING)
    assert answers(engine, failures) == wanted
    assert failures and not list(Callback.fails)
    assert_idle(engine)


@pytest.mark.parametrize("device", ["default", "chosen", "mesh"])
def test_a_cache_made_again_is_one_for_which_nothing_is_compiled_again(device: str) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    places: dict[str, dict[str, Any]] = {
        "default": {},
        "chosen": {"device": jax.devices()[0]},
        "mesh": {"mesh": mesh, "axis": "x"},
    }
    scales = {"full": (0.25, 3.0)}
    cache = jaxkv.make_cache(small_plan(), max_requests=2, scales=scales, **places[device])
    made = CacheTemplate.from_cache(cache).make()
    for array, wanted in zip(*map(jax.tree.leaves, (made, cache)), strict=True):
        assert ArrayTemplate.from_array(array) == ArrayTemplate.from_array(wanted)
        np.testing.assert_array_equal(array, wanted)
    assert made.layout is cache.layout


# --- calls in any state ---------------------------------------------------------------


def fail_once(engine: jaxkv.Engine) -> list[int]:
    """Steps until a step fails. Returns the tokens of those before, of which a GPU runs some."""
    Callback.fails = iter([True])
    failures: list[BaseException] = []
    tokens: list[int] = []
    while not failures:
        with going_on(failures):
            tokens += [token for output in engine.step() for token in output.tokens]
    return tokens


def delete_params(engine: jaxkv.Engine) -> None:
    engine.update(params := small_params())
    jax.tree.map(lambda array: array.delete(), params)


STATES: dict[str, Callable[[jaxkv.Engine], object]] = {
    "running": lambda engine: None,
    "asleep at level 1": lambda engine: engine.sleep(1),
    "asleep at level 2": lambda engine: engine.sleep(2),
    "after a failed step": fail_once,
    "weights deleted": delete_params,
    "cache deleted": lambda engine: engine._device.cache.rows.delete(),
    "cache donated": lambda engine: jax.tree.map(lambda x: x.delete(), engine._device.cache),
}
CALLS: dict[str, Callable[[jaxkv.Engine], object]] = {
    "step": lambda engine: engine.step(),
    "add": lambda engine: engine.add("s", [1], Sampling(max_tokens=2)),
    "abort": lambda engine: engine.abort("r"),
    "generate": lambda engine: list(engine.generate([[1]])),
    "update": lambda engine: engine.update(small_params()),
    "update anew": lambda engine: engine.update(small_params(), in_flight="restart"),
    "sleep": lambda engine: engine.sleep(2) and None,
    "wake_up": lambda engine: engine.wake_up(),
    "restart": lambda engine: engine.restart(),
    "warm_up": lambda engine: engine.warm_up(),
}
WANTED = {
    **{("asleep", call): (SleepError, "asleep at level") for call in ("step", "sleep", "warm_up")},
    **{("weights", call): (RuntimeError, "deleted.*update") for call in ("step", "warm_up")},
    ("cache", "step"): (RuntimeError, "outside of the engine"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", STATES)
def test_a_call_in_any_state_works_or_names_the_state(state: str, call: str) -> None:
    """And after it, sleep, new weights and a wake-up work, and no token is lost."""
    engine, wanted = small_engine(), right_answer()
    engine.add("r", PROMPT, SAMPLING)
    tokens = [token for _ in range(5) for output in engine.step() for token in output.tokens]
    more = STATES[state](engine)
    tokens += more if isinstance(more, list) else []
    error, match = WANTED.get((state.split()[0], call), (None, ""))
    if call == "generate":
        error, match = ValueError, "have not ended"
    elif call == "wake_up" and "asleep" not in state:
        error, match = SleepError, "awake"
    found = contextlib.nullcontext() if error is None else pytest.raises(error, match=match)
    with found:
        result: Any = CALLS[call](engine)
        tokens += [token for output in result or () for token in output.tokens]
    with contextlib.suppress(SleepError):
        engine.sleep(1)
    engine.update(small_params())
    with contextlib.suppress(SleepError):
        engine.wake_up()
    tokens = [] if call == "update anew" else tokens
    while engine.has_work:
        with contextlib.suppress(RuntimeError):
            for output in engine.step():
                tokens += output.tokens if output.request == "r" else ()
    assert tokens == wanted if call != "abort" else tokens == wanted[: len(tokens)]
    assert_idle(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_after_any_step_with_requests_in_host_memory_too(level: int) -> None:
    engine, wanted = make_engine(1), undisturbed(1)
    sleeps, step = 0, engine.step

    def sometimes() -> list[jaxkv.Output]:
        nonlocal sleeps
        sleeps += 1
        if sleeps % 4 == 0:
            engine.sleep(level)
            with pytest.raises(SleepError, match="call wake_up first"):
                step()
            engine.add(sleeps, [1, 2], Sampling(max_tokens=2))
            engine.update(make_params())
            engine.abort(sleeps)
            engine.wake_up()
        return [output for output in step() if output.request in REQUESTS]

    engine.step = sometimes  # type: ignore
    try:
        assert_same(served(engine), wanted)
    finally:
        del engine.step
    assert sleeps > 8
    assert_idle(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_up_that_is_interrupted_at_its_end_can_be_called_again(level, monkeypatch) -> None:
    engine, wanted = small_engine(), right_answer()
    engine.add("r", PROMPT, SAMPLING)
    tokens = [token for _ in range(5) for output in engine.step() for token in output.tokens]
    engine.sleep(level)
    wake_up = _states.wake_up

    def interrupted(cache: Any) -> None:
        wake_up(cache)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_states, "wake_up", interrupted)
        engine.wake_up()
    engine.wake_up()
    assert tokens + answers(engine) == wanted
    with pytest.raises(SleepError, match="awake"):
        engine.wake_up()
    assert_idle(engine)


def test_a_cache_belongs_to_one_engine() -> None:
    plan = small_plan()
    cache = jaxkv.make_cache(plan, max_requests=2)

    def make() -> jaxkv.Engine:
        sizes = {"max_requests": 2, "max_tokens": 4}
        return jaxkv.Engine(small_forward, small_params(), plan, cache=cache, **sizes)

    engine = make()
    with pytest.raises(ValueError, match="belongs to another engine"):
        make()
    del engine
    make()  # which nobody has any more
