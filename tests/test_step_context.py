"""`StepContext`: the same bytes as by hand, and mistakes of a model are refused in its trace."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.step import _context
from jaxkv.testing import assert_same_bytes

LAYERS = ("layers.0", "layers.1")
SPEC = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="f32")
STATE = jaxkv.StateSpec(block_size=4, shapes=((4,),), dtypes=("f32",))
PLAN = jaxkv.plan_cache(dict.fromkeys(LAYERS, SPEC), 2**20, max_model_len=32)
HYBRID = jaxkv.plan_cache({"full": SPEC, "state": STATE}, 2**20, max_model_len=32)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
EMBED = jnp.asarray(np.random.default_rng(0).normal(size=(16, 2, 8)), jnp.float32)
Step = jaxkv.StepContext


def keys_of(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return x, jnp.roll(x, 1, axis=-1), x * 0.5


@functools.cache
def made(tokens_per_request: int | None = None, plan: jaxkv.Plan = PLAN):
    """A cache, and the upload of a step of two requests, 5 and 3 tokens of them."""
    manager = jaxkv.BlockManager(plan, max_requests=2)
    sizes: dict[str, Any] = {"max_tokens": 8}
    if tokens_per_request:
        sizes = {"tokens_per_request": tokens_per_request}
    ids = IDS if not tokens_per_request else [*IDS[:5], 0, 0, 0, *IDS[5:], *[0] * 5]
    ids = [*ids, 15, 15]  # of which the last two are no tokens
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, extra=len(ids), **sizes)
    for name in "ab":
        manager.start(name, encoder_tokens=0)
    return jaxkv.make_cache(plan, max_requests=2), manager.step(shape, {"a": 5, "b": 3}, extra=ids)


def by_hand(cache: jaxkv.KVCache, upload: Any) -> tuple[jaxkv.KVCache, jax.Array]:
    cache, batch = jaxkv.apply_step(cache, upload)
    x = EMBED[batch.extra[:-2].reshape(batch.token_shape)]
    for layer in LAYERS:
        cache, out = jaxkv.attend(cache, layer, batch, *keys_of(x))
        x = x + out
    return cache, x


def by_name(step: Step) -> tuple[Step, jax.Array]:
    x = EMBED[step.token_ids]
    for layer in LAYERS:
        x = x + step.attend(layer, *keys_of(x))
    return step, x


def with_a_batch_axis(step: Step) -> tuple[Step, jax.Array]:
    x = EMBED[step.token_ids[None]]
    for layer in LAYERS:
        x = x + step.attend(layer, *keys_of(x))
    return step, x[0]


def in_a_scan(step: Step) -> tuple[Step, jax.Array]:
    def body(carry, i):
        step, x = carry
        return (step, x + step.attend(LAYERS[0], *keys_of(x), layer_index=i)), None

    return jax.lax.scan(body, (step, EMBED[step.token_ids]), jnp.arange(2))[0]


def in_a_jit(step: Step) -> tuple[Step, jax.Array]:
    @functools.partial(jax.jit, static_argnums=0)
    def layer(name, step, x):
        return step, x + step.attend(name, *keys_of(x))

    x = EMBED[step.token_ids]
    for name in LAYERS:
        step, x = layer(name, step, x)
    return step, x


def of_flax(step: Step) -> tuple[Step, jax.Array]:
    nnx = pytest.importorskip("flax.nnx", reason='pip install "jaxkv[test]"')

    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Param(EMBED)

        def __call__(self, step):
            x = self.embed[step.token_ids]
            for layer in LAYERS:
                x = x + step.attend(layer, *keys_of(x))
            return x

    graphdef, params = nnx.split(Model())
    return step, nnx.merge(graphdef, params)(step)


def of_equinox(step: Step) -> tuple[Step, jax.Array]:
    equinox = pytest.importorskip("equinox", reason='pip install "jaxkv[test]"')

    class Block(equinox.Module):
        layer: str = equinox.field(static=True)

        def __call__(self, step, x):
            return x + step.attend(self.layer, *keys_of(x))

    class Model(equinox.Module):
        embed: jax.Array
        blocks: list[Block]

        def __call__(self, step):
            x = self.embed[step.token_ids]
            for block in self.blocks:
                x = block(step, x)
            return x

    model = Model(EMBED, [Block(layer) for layer in LAYERS])
    params, static = equinox.partition(model, equinox.is_array)
    return step, equinox.combine(params, static)(step)


MODELS = [by_name, with_a_batch_axis, in_a_scan, in_a_jit, of_flax, of_equinox]


def jitted(run: Callable[..., Any]) -> Any:
    """By one name, because programs that differ in nothing else are compiled once."""

    def step(cache, upload):
        return run(cache, upload)

    return jax.jit(step)


run_by_hand = jitted(by_hand)


def run(model: Callable[[Step], Any], *made_of: Any) -> Any:
    def whole(cache, upload):
        step, out = model(Step(cache, upload))
        return step.done(), out

    return jitted(whole)(*made(*made_of))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_writes_and_reads_as_by_hand(model: Callable[[Step], Any]) -> None:
    assert_same_bytes(run(model), run_by_hand(*made()))


def test_a_rectangular_batch() -> None:
    cache, x = run(by_name, 8)
    wanted, rows = run_by_hand(*made(8))
    x, rows = np.asarray(x), np.asarray(rows)
    assert_same_bytes((cache, x[0, :5], x[1, :3]), (wanted, rows[0, :5], rows[1, :3]))


def test_tokens_and_positions_are_those_of_the_batch() -> None:
    @jax.jit
    def given(cache, upload):
        step = Step(cache, upload)
        assert repr(step).endswith("int32s), 0 layers written)")
        assert Step(cache, upload, token_ids=EMBED[:8, 0, 0]).token_ids.dtype == EMBED.dtype
        lens = step.batch.query_lens, step.batch.encoder_lens
        return step.token_ids, step.positions, step.last_tokens, *lens

    wanted = IDS, [0, 1, 2, 3, 4, 0, 1, 2], [4, 7], [5, 3], [0, 0]
    for got, want in zip(given(*made()), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_tokens_that_steps_drew_take_the_places_of_their_numbers() -> None:
    cache, upload = made()
    given, sampled = np.array([0, -1, 7, -2, 0, -3, 1, -1]), np.array([11, 0, 13])
    given, sampled = given.astype(np.int32), sampled.astype(np.int32)

    @jax.jit
    def ids(cache, upload, given, sampled):
        return Step(cache, upload, token_ids=given, newest_tokens=sampled).token_ids

    assert ids(cache, upload, given, sampled).tolist() == [0, 11, 7, 0, 0, 13, 1, 11]
    with pytest.raises(ValueError, match="implementation='cuda'"):
        Step(cache, upload, implementation="cuda")


def test_states_and_calls_of_others() -> None:
    def model(step: Step) -> tuple[Step, Any]:
        (state,) = step.read_state("state")
        step.write_state("state", [state + 1])
        (again,) = step.read_state("state", at=jnp.zeros(2, jnp.int32))
        with pytest.raises(TypeError, match=r"stores states, not tokens; use .* such as gated_d"):
            step.attend("state", jnp.ones((8, 2, 8)))
        keys = jnp.ones((8, 2, 8))
        assert step.call(jaxkv.write_tokens, "full", keys, keys) is None
        return step, (state, again, step.call(jaxkv.read_tokens, "full"))

    _, (state, again, (keys, _)) = run(model, None, HYBRID)
    assert (state.shape, np.asarray(state).any()) == ((2, 4), False)
    assert again.shape == (2, 4)  # a fresh request reads zeros
    np.testing.assert_array_equal(np.asarray(keys)[0, :5], 1)


# --- mistakes ----------------------------------------------------------------------------


def a_layer_twice(step: Step) -> Any:
    x = EMBED[step.token_ids]
    return step, [step.attend(LAYERS[0], *keys_of(x)) for _ in range(2)]


def a_layer_left_out(step: Step) -> Any:
    return step, step.attend(LAYERS[0], *keys_of(EMBED[step.token_ids]))


def keys_forgotten(step: Step) -> Any:
    return step, step.attend(LAYERS[0], EMBED[step.token_ids])


def after_its_end(step: Step) -> Any:
    by_name(step)
    step.done()
    return step, step.attend(LAYERS[0], EMBED[step.token_ids])


def lost_in_a_scan(step: Step) -> Any:
    def body(x, i):
        return x + step.attend(LAYERS[0], *keys_of(x), layer_index=i), None

    return step, jax.lax.scan(body, EMBED[step.token_ids], jnp.arange(2))


def lost_in_a_jit(step: Step) -> Any:
    jax.jit(lambda step: by_name(step)[1])(step)
    return step, None


def stale_copy(step: Step) -> Any:
    in_a_scan(step)
    return step, step.attend(LAYERS[0], *keys_of(EMBED[step.token_ids]))


ONES = [1, np.int32(1), np.array(1, np.int32), jnp.int32(1)]  # all of them a known layer index


def another_layer_index(step: Step, one: Any = 1) -> Any:
    x = EMBED[step.token_ids]
    step.attend(LAYERS[0], *keys_of(x), layer_index=one)
    return step, step.attend(LAYERS[1], *keys_of(x))


def a_layer_index_twice(step: Step, one: Any = 1) -> Any:
    x = EMBED[step.token_ids]
    return step, [step.attend(LAYERS[1], *keys_of(x), layer_index=one) for _ in range(2)]


def only_one_period(step: Step, one: Any = 1) -> Any:
    return step, step.attend(LAYERS[0], *keys_of(EMBED[step.token_ids]), layer_index=one)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (a_layer_twice, "layer='layers.0' is written twice in one step"),
        (a_layer_left_out, "it never wrote 'layers.1': "),
        (keys_forgotten, "layer='layers.0' is read and this step has not written it"),
        (after_its_end, "this step has ended; make a StepContext of the next upload"),
        (lost_in_a_scan, r"a scan or a jit that it was not passed to; pass .* jax.lax.scan"),
        (lost_in_a_jit, r"a copy of this step has written since.* returns jaxkv.ModelOutput\(l"),
        (stale_copy, "layer='layers.0': a copy of this step has written since"),
        *(
            (functools.partial(model, one=one), said)
            for one in ONES
            for model, said in (
                (a_layer_index_twice, "layer='layers.1' is written twice in one step"),
                (another_layer_index, "layer='layers.1' is written twice in one step"),
                (only_one_period, "it never wrote 'layers.0': "),
            )
        ),
    ],
)
def test_a_slip_is_said_while_the_step_is_traced(model: Callable[[Step], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(model)


def test_layers_of_all_kinds_that_were_not_written_are_named_up_to_three() -> None:
    window = jaxkv.SlidingWindowSpec(**dataclasses.asdict(SPEC), sliding_window=5)
    states = dict.fromkeys(("state.0", "state.1"), STATE)
    plan = jaxkv.plan_cache({"full": SPEC, "window": window} | states, 2**20, max_model_len=32)
    names = [name for group in plan.layout.groups for name in group.layers]

    def model(count: int, *given: Any) -> jaxkv.KVCache:
        step = Step(*given)
        for name in names[:count]:  # what returns a cache has written it
            step.call(lambda cache, *_: cache, name)
        return step.done()

    given = made(None, plan)
    for count in range(4):
        left = ", ".join(map(repr, names[count:][:3])) + " and 1 other layers" * (count == 0)
        with pytest.raises(ValueError, match=f"it never wrote {left}: the model calls"):
            jax.eval_shape(functools.partial(model, count), *given)
    jax.eval_shape(functools.partial(model, 4), *given)


def test_earlier_tokens_alone_are_read_if_asked() -> None:
    def model(step: Step) -> Any:
        before = step.attend(LAYERS[0], EMBED[step.token_ids], write=False)
        return by_name(step)[0], before

    jax.eval_shape(lambda *given: model(Step(*given))[0].done(), *made())


def test_a_layer_is_read_as_often_as_a_model_likes_once_it_is_written() -> None:
    def model(*given: Any) -> jaxkv.KVCache:
        step = Step(*given)
        x = EMBED[step.token_ids]
        step.attend(LAYERS[0], *keys_of(x), layer_index=1)
        for options in ({}, {"write": False}):
            with pytest.raises(ValueError, match=r"layer_index=2 is not in|has not written it"):
                step.attend(LAYERS[0], x, layer_index=2, **options)
            step.attend(LAYERS[1], x, **options)
            step.attend(LAYERS[0], x, layer_index=1, **options)
        step.attend(LAYERS[0], *keys_of(x))
        return step.done()

    jax.eval_shape(model, *made())


def test_a_layer_that_shares_keys_is_read_once_their_own_is_written() -> None:
    layers = {LAYERS[0]: SPEC, "shares": jaxkv.SharedKVSpec(LAYERS[0])}
    given = made(None, jaxkv.plan_cache(layers, 2**20, max_model_len=32))

    def model(*given: Any) -> jaxkv.KVCache:
        step = Step(*given)
        x = EMBED[step.token_ids]
        with pytest.raises(ValueError, match="'shares' is read and this step has not written it"):
            step.attend("shares", x)
        step.attend(LAYERS[0], *keys_of(x))
        step.attend("shares", x)
        return step.done()

    jax.eval_shape(model, *given)


def test_a_state_is_written_twice_only_in_places_that_are_named() -> None:
    def model(step: Step, at: jax.Array | None) -> jaxkv.KVCache:
        for _ in range(2):
            step.write_state("state", [jnp.ones((2, 4))], at=at)
        step.attend("full", *keys_of(EMBED[step.token_ids]))
        return step.done()

    given = made(None, HYBRID)
    jax.eval_shape(lambda *given: model(Step(*given), jnp.zeros(2, jnp.int32)), *given)
    with pytest.raises(ValueError, match="layer='state' is written twice in one step"):
        jax.eval_shape(lambda *given: model(Step(*given), None), *given)


# Methods, and the axes of their arrays after those of the tokens.
CALLS = {"attend": 2, "gated_delta": 1, "mamba2": 1, "linear_attention": 1, "short_conv": 1}
CALLS |= {"read_state": None, "write_state": None}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_passes_on_all_that_it_is_given(name: str, monkeypatch) -> None:
    """Also [1, ...] of a single token, which has no batch axis, and [1, 1, ...], which has one."""
    shape = jaxkv.StepShape.for_plan(PLAN, max_requests=2, max_tokens=1, extra=1)
    kinds = [p.kind for p in inspect.signature(getattr(Step, name)).parameters.values()]
    array = np.ones((1, *[2] * (CALLS[name] or 0)))
    arrays = [array + i for i in range(kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 2)]
    options = {
        parameter.name: object()
        for parameter in inspect.signature(getattr(jaxkv, name)).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert "layer_index" in options
    passed: list[tuple[Any, ...]] = []

    def record(cache: Any, layer: str, batch: Any, *arrays: Any, **options: Any) -> Any:
        passed.append((cache, layer, batch, options, arrays))
        return array

    def check(cache: jaxkv.KVCache, upload: Any) -> None:
        step = Step(cache, upload)
        for given in (arrays, [x[None] for x in arrays]):
            is_batched = CALLS[name] is not None and given is not arrays
            out = getattr(step, name)("layers.0", *given, **options)
            if name != "write_state":
                assert out.shape == (array[None] if is_batched else array).shape
            *others, found = passed.pop()
            assert others == [step._cache, "layers.0", step.batch, options]
            np.testing.assert_equal(found, tuple(arrays if is_batched else given))

    monkeypatch.setattr(_context, name, record)
    jax.eval_shape(check, made()[0], shape.idle())


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda step, x: step.attend(LAYERS[0], *keys_of(x), write=1), TypeError, "write must be"),
        (lambda step, x: step.call(LAYERS[0], x), TypeError, "function must be a function of a c"),
        # Of two batches neither is the step's.
        (lambda step, x: step.attend(LAYERS[0], *keys_of(jnp.stack([x, x]))), ValueError,
         r"queries has shape \(2, 8, 2, 8\)"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_are_refused_by_name(call, error: type[Exception], said: str) -> None:
    def model(*given: Any) -> None:
        step = Step(*given)
        call(step, EMBED[step.token_ids])

    with pytest.raises(error, match=said):
        jax.eval_shape(model, *made())


def test_a_shape_without_token_ids() -> None:
    cache, upload = made()
    manager = jaxkv.BlockManager(PLAN, max_requests=2)
    manager.start("a")
    shape = jaxkv.StepShape.for_plan(PLAN, max_requests=2, max_tokens=8)
    without_ids, ids = manager.step(shape, {"a": 1}), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"extra=0 and 8 tokens: send their ids"):
        jax.eval_shape(lambda *given: Step(*given).token_ids, cache, without_ids)
    with pytest.raises(ValueError, match=r"token_ids has shape \(3,\); this step wants \(8,\)"):
        jax.eval_shape(lambda *given: Step(*given, token_ids=ids).token_ids, cache, upload)
