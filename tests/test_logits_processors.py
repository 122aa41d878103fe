"""Logits processors: what they do by definition, whatever the engine does meanwhile."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from jaxkv import Sampling
from jaxkv.logits_processors import (
    AllowedTokens,
    FrequencyPenalty,
    LogitBias,
    MinTokens,
    PresencePenalty,
    RepetitionPenalty,
    TokenAutomaton,
    TokenTable,
)
from jaxkv.testing import count_compilations
from tests.engine_models import SPECS, VOCAB, forward, kept, make_params, make_plan, noise, whole
from tests.helpers import needs_devices

ALL: Any = (
    RepetitionPenalty,
    FrequencyPenalty,
    PresencePenalty,
    LogitBias,
    AllowedTokens,
    MinTokens,
)
LAYERS = "full", "state"
SIZES = {"max_requests": 4, "max_tokens": 16}


@functools.cache
def make_engine(decode_steps: int = 1, logprobs_mode: Any = "raw") -> jaxkv.Engine:
    """Tight, so that requests are preempted."""
    processors = [kind(VOCAB) for kind in ALL]
    sizes = SIZES | {"decode_steps": decode_steps, "logprobs_mode": logprobs_mode}
    return jaxkv.Engine(
        forward, make_params(), make_plan(LAYERS, 28), logits_processors=processors, **sizes
    )


def processed(
    logits: np.ndarray, data: dict[Any, Any], prompt: list[int], answer: list[int]
) -> np.ndarray:
    """Returns the logits of one token after all processors, by their definitions."""
    logits, counts = logits.copy(), Counter(answer)
    for token in {*prompt, *answer}:
        penalty = data.get(RepetitionPenalty, 1)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in counts.items():
        logits[token] -= data.get(FrequencyPenalty, 0) * count + data.get(PresencePenalty, 0)
    for token, bias in data.get(LogitBias, {}).items():
        logits[token] += bias
    for token in {*range(VOCAB)} - {*data.get(AllowedTokens, range(VOCAB))}:
        logits[token] = -np.inf
    least, ends = data.get(MinTokens, (0, ()))
    if len(answer) < least:
        logits[[*ends]] = -np.inf
    return logits


def random_requests(seed: int, count: int) -> list[tuple[list[int], Sampling]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 13).tolist()
    options: dict[Any, Any] = {
        RepetitionPenalty: lambda: float(rng.uniform(0.5, 3)),
        FrequencyPenalty: lambda: float(rng.uniform(-1, 3)),
        PresencePenalty: lambda: float(rng.uniform(-1, 3)),
        LogitBias: lambda: {int(t): 3.0 for t in rng.integers(0, VOCAB, 5)} | {3: -np.inf},
        AllowedTokens: lambda: {*rng.integers(0, VOCAB, 30).tolist()},
        MinTokens: lambda: (4, [5, 7, 9]),
    }
    requests = []
    for number in range(count):
        begins = shared[: rng.integers(8, 13)] if number % 2 else []
        prompt = [*begins, *rng.integers(0, VOCAB, rng.integers(1, 18)).tolist()]
        asked = [kind for kind in ALL if rng.random() < 0.4] if number % 4 else []
        given: dict[str, Any] = {"processors": {kind: options[kind]() for kind in asked}}
        if number % 3:
            given |= {"temperature": 1.0, "seed": number, "n": int(rng.integers(1, 4))}
            given |= [{}, {"top_k": 5}, {"top_p": 0.7}][rng.integers(3)]
        given |= {"stop_token_ids": [5, 7, 9], "max_tokens": int(rng.integers(1, 12))}
        requests.append((prompt, Sampling(logprobs=True, **given)))
    return requests


def assert_right(
    outputs: Sequence[jaxkv.Output],
    requests: Sequence[tuple[list[int], Sampling]],
    layers: tuple[str, ...],
    mode: str = "raw",
) -> None:
    """Compares every token with the definition, over an output's own tokens."""
    assert len(outputs) == sum(sampling.n for _, sampling in requests)
    for output in outputs:
        prompt, sampling = requests[output.request]
        model = whole(make_params(), layers, [*prompt, *output.tokens])[len(prompt) - 1 : -1]
        for at, (given, token) in enumerate(zip(model, output.tokens, strict=True)):
            logits = processed(given, sampling.processors or {}, prompt, output.tokens[:at])
            place = np.uint32([sampling.seed or 0]), np.array([output.sample]), np.array([at])
            scores = logits
            if sampling.temperature:
                scores = kept(logits, sampling) + np.asarray(noise(*place))[0]
            assert token == scores.argmax(), (output, at)
            of = given if mode == "raw" else logits
            logprob = of[token] - np.log(np.exp(of - of.max()).sum()) - of.max()
            assert output.logprobs is not None and abs(output.logprobs[at] - logprob) < 1e-3


@pytest.mark.parametrize(("decode_steps", "mode"), [(1, "raw"), (3, "processed")])
def test_tokens_are_drawn_from_logits_that_are_processed_by_definition(
    decode_steps: int, mode: str
) -> None:
    """Also after preemptions, forks, hits, new starts, and in several steps of a call."""
    engine = make_engine(decode_steps, mode)
    requests = random_requests(1 + decode_steps, 24)
    outputs = list(engine.generate(*zip(*requests, strict=True)))
    assert_right(outputs, requests, LAYERS, mode)
    assert engine.stats.preemptions and engine.stats.cached_tokens
    for name, (prompt, sampling) in enumerate(requests):
        engine.add(name, prompt, sampling)
    told: dict[Any, jaxkv.Output] = {}
    for steps in itertools.count():
        for o in engine.step():
            old = told.get((o.request, o.sample), o._replace(tokens=[], logprobs=[]))
            logprobs: Any = np.append(old.logprobs, o.logprobs)
            told[o.request, o.sample] = o._replace(tokens=old.tokens + o.tokens, logprobs=logprobs)
        if not engine.has_work:
            break
        if steps in (9, 30):
            engine.restart()
        if steps == 20:
            engine.update(make_params(), in_flight="recompute")
    assert_right(list(told.values()), requests, LAYERS, mode)


def test_a_warm_engine_compiles_nothing_for_processors() -> None:
    engine, requests = make_engine(), random_requests(0, 8)
    engine.warm_up(*[sampling for _, sampling in requests])
    with count_compilations() as compilations:
        list(engine.generate(*zip(*requests, strict=True)))
        engine.add("r", *requests[1])
        engine.step()
        engine.restart()
        while engine.has_work:
            engine.step()
    assert not compilations


@needs_devices(2)
def test_two_devices_process_as_one() -> None:
    """On a mesh of explicit axes, which processors do not see."""
    kind = jax.sharding.AxisType.Explicit
    spec = dataclasses.replace(SPECS["full"], num_kv_heads=1)  # on each of them
    plan = jaxkv.plan_cache({"full": spec}, 2**16, max_model_len=48)
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2], axis_types=(kind,))
    cache = jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads")
    params = jax.device_put(make_params(), NamedSharding(mesh, PartitionSpec()))
    processors, requests = [of(VOCAB) for of in ALL], random_requests(4, 12)
    engine = jaxkv.Engine(forward, params, plan, cache=cache, logits_processors=processors, **SIZES)
    assert_right(list(engine.generate(*zip(*requests, strict=True))), requests, ("full",))


def test_only_arrays_that_a_token_changes_are_written() -> None:
    state: Any = TokenAutomaton(VOCAB).init(None, np.zeros(0, np.int32))
    advanced = jax.eval_shape(
        jax.vmap(TokenAutomaton(VOCAB).advance),
        *jax.tree.map(lambda x: jnp.zeros((3, *x.shape), x.dtype), (state, np.int32(0))),
    )
    assert advanced.classes.shape == (3, VOCAB)
    engine = make_engine()
    device, shape = engine._device, engine._buckets.shapes[0]
    text = str(device._step_of((shape.idle(),)).trace(*device._arguments((shape.idle(),))).jaxpr)
    assert text.count("bool[5,50] = scatter") == 1  # the penalty's, not the masks'


# --- automata ---------------------------------------------------------------------------

TEXTS = [chr(32 + i) for i in range(VOCAB - 4)] + ['{"', '":', "},", "12"]
END = 2


def digits_then_end() -> dict[int, dict[int, int]]:
    """1 to 4 digits in brackets, then the end: "(12)"."""
    digits = {i: text for i, text in enumerate(TEXTS) if text.isdigit()}
    states: dict[int, dict[int, int]] = {0: {TEXTS.index("("): 1}}
    for count in range(5):
        longer = {i: 1 + count + len(t) for i, t in digits.items() if count + len(t) <= 4}
        states[1 + count] = longer | ({TEXTS.index(")"): 6} if count else {})
    return states | {6: {END: 6}}


def test_answers_never_leave_the_language_of_an_automaton() -> None:
    """1,000 of them, next to others without one, over logits that know nothing of it."""
    table = TokenTable.from_transitions(digits_then_end(), vocab_size=VOCAB)
    assert table.next_states.shape[1] <= 8
    processors = [TokenAutomaton(VOCAB, max_states=8, max_classes=8)]
    plan = make_plan(("full",), 60)
    engine = jaxkv.Engine(
        forward, make_params(), plan, logits_processors=processors, **SIZES | {"max_requests": 8}
    )
    one = Sampling(temperature=2.0, max_tokens=8, stop_token_ids=[END], seed=1)
    bound = dataclasses.replace(one, n=4, processors={TokenAutomaton: table})
    samplings = [
        dataclasses.replace(of, seed=i) for i in range(250) for of in (bound, one)[: 2 - i % 2]
    ]
    outputs = list(engine.generate([[i % VOCAB, 3] for i in range(len(samplings))], samplings))
    answers = [o for o in outputs if samplings[o.request].processors]
    texts = {"".join(TEXTS[token] for token in o.tokens[:-1]) for o in answers}
    assert len(answers) == 1000 and len(texts) > 300
    for text in texts:
        assert text[0] == "(" and text[-1] == ")" and text[1:-1].isdigit() and len(text) <= 6
    assert {o.finish_reason for o in answers} == {"stop"}
    free = {o.tokens[0] for o in outputs if not samplings[o.request].processors}
    assert len(free) > 5


def test_a_table_is_the_automaton_whatever_its_classes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        states, vocab = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        automaton = {
            s: {
                int(t): int(rng.integers(states))
                for t in rng.integers(0, vocab, rng.integers(1, 9))
            }
            for s in range(states)
        }
        table = TokenTable.from_transitions(automaton, vocab_size=vocab, start=states - 1)
        for s, t in itertools.product(range(states), range(vocab)):
            assert table.next_states[s, table.classes[t]] == automaton[s].get(t, -1)
        columns = {tuple(automaton[s].get(t, -1) for s in range(states)) for t in range(vocab)}
        assert table.next_states.shape == (states, len(columns)) and table.start == states - 1


# --- refusals ---------------------------------------------------------------------------


class Halves(LogitBias):
    """Returns logits of another shape."""

    def apply(self, state: Any, logits: Any) -> Any:
        return logits[::2]


def asked(kind: Any, data: Any) -> Any:
    return lambda: make_engine().add("r", [1], Sampling(processors={kind: data}))


def made(*processors: Any, **options: Any) -> Any:
    given = SIZES | {"logits_processors": processors} | options
    return lambda: jaxkv.Engine(forward, make_params(), make_plan(("full",)), **given)


def table_of(transitions: Any, **options: Any) -> Any:
    return lambda: TokenTable.from_transitions(transitions, **{"vocab_size": 5} | options)


MISTAKES = {
    "unknown": (
        asked(TokenAutomaton, 1),
        ValueError,
        "holds TokenAutomaton, and the engine has Rep",
    ),
    "none": (asked(MinTokens, None), TypeError, r"processors\[MinTokens\] is None"),
    "a name": (
        lambda: Sampling(processors={"bias": 1}),
        TypeError,
        "a mapping from classes to data",
    ),
    "a list": (lambda: Sampling(processors=[LogitBias]), TypeError, "processors must be a mapping"),
    "bias": (asked(LogitBias, {50: 1}), ValueError, "LogitBias holds the token id 50, and vocab_s"),
    "biases": (asked(LogitBias, [1]), TypeError, "LogitBias must be a mapping from token ids"),
    "a text": (asked(LogitBias, {1: "a"}), TypeError, "LogitBias must be a number"),
    "nothing": (asked(AllowedTokens, []), ValueError, "AllowedTokens is empty"),
    "one number": (asked(MinTokens, 3), TypeError, r"MinTokens must be \(a number of tokens"),
    "three": (asked(MinTokens, (1, [], 2)), ValueError, "MinTokens="),
    "less than no": (asked(MinTokens, (-1, [2])), ValueError, "MinTokens must be at least 0"),
    "zero": (asked(RepetitionPenalty, 0), ValueError, "RepetitionPenalty=0 must be"),
    "infinite": (asked(PresencePenalty, np.inf), ValueError, "PresencePenalty=inf must be finite"),
    "a class": (made(LogitBias), TypeError, r"logits_processors\[0\] must be an object"),
    "two alike": (made(LogitBias(VOCAB), LogitBias(VOCAB)), ValueError, "two of a class"),
    "another size": (made(LogitBias(3)), ValueError, "LogitBias fails for logits of 50 tokens"),
    "a shape": (made(Halves(VOCAB)), ValueError, r"Halves.apply returns float32\[25\] for logits"),
    "a mode": (made(logprobs_mode="all"), ValueError, "logprobs_mode='all'; use one of 'raw'"),
    "no vocab": (lambda: MinTokens(0), ValueError, "vocab_size must be at least 1"),
    "no way on": (table_of({0: {}}), ValueError, r"transitions\[0\] must be .* allow a token"),
    "a state": (table_of({0: {1: 1}}), ValueError, "0. leads to state 1, which has no trans"),
    "a token": (table_of({0: {5: 0}}), ValueError, r"transitions\[0\] allows token 5; tokens are"),
    "the start": (table_of({0: {1: 0}}, start=1), ValueError, "start=1 must be a state"),
    "other tokens": (
        lambda: TokenAutomaton(4).init(table_of({0: {1: 0}})(), np.zeros(0, np.int32)),
        ValueError,
        "TokenAutomaton has vocab_size=4, and its TokenTable was made with vocab_size=5",
    ),
    "a large table": (
        lambda: TokenAutomaton(5, max_classes=1).init(
            table_of({0: {1: 0}})(), np.zeros(0, np.int32)
        ),
        ValueError,
        "a table of 1 states and 2 classes is larger than max_states=256 and max_classes=1",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named_and_changes_nothing(what: str) -> None:
    call, kind, message = MISTAKES[what]
    with pytest.raises(kind, match=message):
        call()
    assert not make_engine().has_work
