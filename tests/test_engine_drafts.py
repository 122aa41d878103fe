"""`Engine(drafts=)`: the tokens of an engine without drafts, in fewer steps."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv._src.engine import _drafts
from jaxkv._src.engine._drafts import FIRST, MOST, SHARE, WAIT, Drafting
from jaxkv.drafts import NgramDrafts
from jaxkv.testing import count_compilations
from tests.engine_models import (
    SPECS,
    VOCAB,
    assert_details,
    forward,
    head,
    hidden_states,
    make_params,
    make_plan,
)

COUNT = 3
SIZES: dict[str, Any] = {"max_requests": 4, "max_tokens": 8, "head": head}
Answers = dict[tuple[int, int], jaxkv.Output]


def plan_of(layers: tuple[str, ...], num_blocks: int, longest: int = 48) -> jaxkv.Plan:
    """Returns a plan whose states can be set back."""
    state = dataclasses.replace(SPECS["state"], speculative_blocks=COUNT)
    specs = {layer: state if layer == "state" else SPECS[layer] for layer in layers}
    limits = jaxkv.Limits(max_in_flight_tokens=8)
    options: Any = {"max_model_len": longest, "limits": limits}
    return jaxkv.plan_cache(specs, 2**30, num_blocks_override=num_blocks, **options)


def make_engine(plan: jaxkv.Plan, drafts: Any = None, **options: Any) -> jaxkv.Engine:
    return jaxkv.Engine(hidden_states, make_params(), plan, drafts=drafts, **SIZES | options)


def random_requests(
    seed: int, longest: int, *, ask: bool = False
) -> list[tuple[list[int], Sampling]]:
    """Prompts, half of which begin alike, with all kinds of sampling, and details if they ask."""
    rng = np.random.default_rng(seed)
    requests, shared = [], rng.integers(0, VOCAB, 13).tolist()
    for number in range(12):
        begins = shared[: rng.integers(8, 13)] if number % 2 else []
        prompt = [*begins, *rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()]
        prompt = prompt[: longest // 2]
        options: dict[str, Any] = {"logprobs": 0, "stop_token_ids": rng.integers(0, VOCAB, 2)}
        if ask:
            options |= {"logprobs": number % 3, "side": number % 4 == 1}
            options["prompt_logprobs"] = 1 if number % 3 == 0 else None
        if number % 3:
            options |= {"temperature": 1.0, "seed": number, "n": int(rng.integers(1, 4))}
            if not ask:  # with details, limits would take as long to compile as layers
                options |= [{}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.02}][rng.integers(3)]
        most = int(rng.integers(1, longest - len(prompt) + 1))
        requests.append((prompt, Sampling(max_tokens=most, **options)))
    return requests


def served(engine: jaxkv.Engine, requests: list[tuple[list[int], Sampling]]) -> Answers:
    prompts, samplings = zip(*requests, strict=True)
    engine.warm_up(*samplings)  # no step for greedy tokens alone
    outputs = {(o.request, o.sample): o for o in engine.generate(prompts, samplings)}
    assert not engine.has_work and not engine.manager.requests
    assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks
    return outputs


class Knowing:
    """Proposes tokens of known answers, some of them replaced by others, for some samples."""

    max_tokens = COUNT

    def __init__(self, answers: Mapping[Hashable, list[int]], share: float):
        self.answers, self.share, self.rng = answers, share, np.random.default_rng(0)

    def propose(
        self, tokens: Mapping[Hashable, np.ndarray], max_tokens: int
    ) -> dict[Hashable, np.ndarray]:
        found = {}
        for name, ids in tokens.items():
            assert ids.tolist() == self.answers[name][: ids.size]
            right = np.array(self.answers[name][ids.size :][:max_tokens], np.int64)
            is_kept = self.rng.random(right.size) < self.share
            if self.rng.random() < 0.8:
                found[name] = np.where(is_kept, right, self.rng.integers(0, VOCAB, right.size))
        return found


CASES = {
    "states, few blocks": (("full", "state"), 30, 48, 4),
    "a window": (("window",), 14, 48, 4),
    "latents alone": (("latent",), 60, 48, 1),
    "two blocks": (("full",), 3, 8, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_give_the_same_tokens(case: str, monkeypatch) -> None:
    """Sampled tokens, too: each position has its own random numbers, whatever was drafted."""
    monkeypatch.setattr(_drafts, "FIRST", 1e6)  # they are tried in any case
    layers, num_blocks, longest, max_requests = CASES[case]
    plan = plan_of(layers, num_blocks, longest)
    requests = random_requests(1, longest, ask=case == "a window")
    right = served(make_engine(plan, max_requests=max_requests), requests)
    known = {at: requests[at[0]][0] + of.tokens for at, of in right.items()}
    engine = make_engine(plan, Knowing(known, 0.7), max_requests=max_requests)
    found, stats = served(engine, requests), engine.stats
    for at, output in found.items():
        assert output.tokens == right[at].tokens
        assert output.finish_reason == right[at].finish_reason
        assert len(output.logprobs) == len(output.version) == len(output.tokens)
        np.testing.assert_allclose(output.logprobs, right[at].logprobs, atol=1e-4)
        assert_details(make_params(), layers, *requests[at[0]], output, atol=2e-4)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions or "few blocks" not in case
    assert stats.sampled_tokens == sum(len(output.tokens) for output in right.values())


def test_a_warm_engine_with_drafts_compiles_nothing() -> None:
    engine = make_engine(plan_of(("full",), 60), NgramDrafts(4, min_match=1))
    engine.warm_up(Sampling(temperature=1.0))
    with count_compilations() as compiled:
        list(engine.generate([[1, 2, 1, 2, 1], [3, 3, 3]], Sampling(max_tokens=12)))
    assert engine.stats.drafted_tokens and not compiled


def drafted_steps(accepted: list[int]) -> tuple[list[int], float]:
    """Returns the steps with drafts, of which so many would be accepted, and what they cost."""
    drafting, steps, lost = Drafting(NgramDrafts(4), 256, VOCAB), list[int](), 0.0
    for step, count in enumerate(accepted):
        waits = drafting.may_try or step - 1 in steps[-1:]
        lost += WAIT * waits
        may_try = drafting.may_try
        drafting.begin_step(waits=waits)
        if may_try:
            steps.append(step)
            drafting.verified(2 * count, 2)
            lost -= count
        assert lost <= max(FIRST, SHARE * (step + 1))
    return steps, lost


def test_drafts_cost_a_hundredth_of_all_steps_at_most_and_are_tried_again() -> None:
    for count in (256, 640, 5000):
        steps, lost = drafted_steps([0] * count)
        assert lost <= 0.01 * count and steps[-1] >= count - 3 / SHARE
    rng = np.random.default_rng(0)
    for right in (0.0, 0.1, 0.3, 0.6, 0.9):
        drafted_steps((rng.random((3000, 4)) < right).cumprod(axis=1).sum(axis=1).tolist())
    before = [2] * 1000
    assert len(drafted_steps(before)[0]) == 1000 and drafted_steps(before)[1] == -1375
    again, _ = drafted_steps([0] * 1000 + before)
    assert sum(step >= 1000 for step in again) >= 1000 - 3 / SHARE
    late, _ = drafted_steps(before + [0] * 100)
    assert sum(step >= 1000 for step in late) <= MOST / WAIT


def following(ids: list[int], count: int, least: int, most: int) -> list[int]:
    """Returns what `NgramDrafts` drafts, from its definition."""

    def matched(end: int) -> int:
        lengths = range(1, min(most, end + 1) + 1)
        fit = [n for n in lengths if ids[end + 1 - n : end + 1] == ids[len(ids) - n :]]
        return max(fit, default=0)

    places = range(len(ids) - 1)
    longest = max(map(matched, places), default=0)
    if longest < least:
        return []
    best = [end for end in places if matched(end) == longest]
    enough = [end for end in best if end + count < len(ids)]
    end = enough[-1] if enough else best[0]
    return ids[end + 1 :][:count]


def test_what_followed_the_last_tokens_before_is_drafted() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        ids = rng.integers(0, rng.integers(1, 5), rng.integers(1, 30)).tolist()
        least, count = (int(rng.integers(1, 4)) for _ in range(2))
        most = least + int(rng.integers(3))
        drafts = NgramDrafts(4, min_match=least, max_match=most)
        found = drafts.propose({"r": np.array(ids, np.int32)}, count)
        assert [*found.get("r", [])] == following(ids, count, least, most), (ids, drafts)


class Fixed:
    """Proposes the same for every step."""

    max_tokens = 2

    def __init__(self, **drafts: Any):
        self.drafts = drafts

    def propose(self, *given: Any) -> dict[Any, Any]:
        return {("r", 0) if name == "r" else name: of for name, of in self.drafts.items()}


STATES = make_plan(("full", "state"))
REFUSED = {
    "no drafter": ({"drafts": 4}, TypeError, "an object with a method propose"),
    "a class": ({"drafts": NgramDrafts}, TypeError, "an object with a method propose"),
    "no head": ({"head": None, "forward": forward}, ValueError, "and pass head="),
    "several steps": ({"decode_steps": 2}, ValueError, "do not go with decode_steps=2"),
    "reproducible": ({"reproducible": True}, ValueError, "do not go with reproducible=True"),
    "long": ({"drafts": NgramDrafts(8)}, ValueError, "are more than the 8 tokens of a request"),
    "states": ({"plan": STATES}, ValueError, "layer 'state' cannot be set back .* speculative_b"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_drafts_that_cannot_be_verified_are_refused(what: str) -> None:
    options, kind, message = REFUSED[what]
    given: dict[str, Any] = {"forward": hidden_states, "params": make_params()}
    given |= {"plan": plan_of(("full",), 20), "drafts": NgramDrafts(3)} | SIZES | options
    with pytest.raises(kind, match=message):
        jaxkv.Engine(**given)


@pytest.mark.parametrize(
    ("drafts", "kind"),
    [
        ({"r": [1, 2, 3]}, ValueError),
        ({"r": [VOCAB]}, ValueError),
        ({"r": [1.0]}, TypeError),
        ({"other": [1]}, ValueError),
    ],
    ids=str,
)
def test_a_drafter_s_mistake_is_named_and_the_request_goes_on(drafts: Any, kind: Any) -> None:
    drafter = Fixed(**drafts)
    engine = make_engine(plan_of(("full",), 20), drafter)
    engine.add("r", [1, 2], Sampling(max_tokens=6))
    tokens: list[int] = []
    with pytest.raises(kind, match="the drafter"):
        for _ in range(9):
            tokens += [token for output in engine.step() for token in output.tokens]
    drafter.drafts = {}
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.tokens]
    (right,) = make_engine(plan_of(("full",), 20)).generate([[1, 2]], Sampling(max_tokens=6))
    assert tokens == right.tokens
