"""Real weights next to transformers: ``make real``, a download of 93 MB; not in ``make test``.

``python -m tests.record_real_model`` recorded the tokens, over the same weights in f32.
"""

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.logits_processors import MinTokens, RepetitionPenalty
from tests.record_real_model import LONG, MIN_TOKENS, NUM_TOKENS, REPETITION_PENALTY, TEXTS

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "notebooks"))
import chat  # noqa: E402

RECORDED = json.loads((HERE / "golden" / "real_model.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def as_in_a_guide() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def model() -> chat.Chat:
    return chat.load(chat.download())


@pytest.fixture(scope="module")
def engine(model: chat.Chat) -> jaxkv.Engine:
    return chat.make_engine(model, max_requests=4)


def test_prompts_go_on_as_in_transformers(engine: jaxkv.Engine, model: chat.Chat) -> None:
    recorded: list[dict[str, Any]] = RECORDED["texts"]
    assert max(len(one["prompt"]) for one in recorded) > 1000
    sampling = jaxkv.Sampling(max_tokens=NUM_TOKENS, stop_token_ids=model.stops)
    outputs = {o.request: o for o in engine.generate([r["prompt"] for r in recorded], sampling)}
    wrong = [at for at, one in enumerate(recorded) if list(outputs[at].tokens) != one["tokens"]]
    assert len(outputs) == 20 and not wrong


def test_a_chat_goes_on_as_in_transformers_over_the_cache(
    engine: jaxkv.Engine, model: chat.Chat
) -> None:
    messages: list[dict[str, str]] = []
    for question, turn in zip(chat.QUESTIONS, RECORDED["turns"], strict=True):
        messages.append({"role": "user", "content": question})
        assert model.prompt(messages) == turn["prompt"]
        before = engine.stats.cached_tokens
        sampling = jaxkv.Sampling(max_tokens=NUM_TOKENS, stop_token_ids=model.stops)
        (output,) = engine.generate([turn["prompt"]], sampling)
        assert list(output.tokens) == turn["tokens"]
        said = model.tokenizer.decode(turn["tokens"], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    assert engine.stats.cached_tokens > before


def test_four_samples_have_the_log_probabilities_of_transformers(engine: jaxkv.Engine) -> None:
    """Of their first tokens: one distribution, from which each of the four samples."""
    logprob_of = dict(zip(RECORDED["likeliest"], RECORDED["logprobs"], strict=True))
    sampling = jaxkv.Sampling(n=4, temperature=1.0, top_k=50, max_tokens=1, logprobs=True, seed=0)
    outputs = list(engine.generate([RECORDED["texts"][0]["prompt"]], sampling))
    assert len(outputs) == 4
    for output in outputs:
        np.testing.assert_allclose(output.logprobs, [logprob_of[output.tokens[0]]], atol=1e-4)


def test_prompts_have_the_log_probabilities_of_transformers(engine: jaxkv.Engine) -> None:
    """The second time over prefixes that are cached."""
    prompts = [one["prompt"] for one in RECORDED["texts"]]
    sampling = jaxkv.Sampling(max_tokens=1, prompt_logprobs=1)
    for output in [*engine.generate(prompts, sampling), *engine.generate(prompts, sampling)]:
        recorded, told = RECORDED["prompt_logprobs"][output.request], output.prompt_logprobs
        assert told is not None and output.prompt_top_logprobs is not None and np.isnan(told[0])
        np.testing.assert_allclose(told[1:], recorded["logprobs"], atol=1e-4)
        likeliest = output.prompt_top_logprobs.token_ids[1:, 0]
        np.testing.assert_array_equal(likeliest, recorded["likeliest"])


def test_penalties_are_those_of_transformers(model: chat.Chat) -> None:
    vocab = model.tokenizer.get_vocab_size()
    processors = RepetitionPenalty(vocab), MinTokens(vocab)
    engine = chat.make_engine(model, max_requests=4, logits_processors=processors)
    asked = {RepetitionPenalty: REPETITION_PENALTY, MinTokens: (MIN_TOKENS, [*model.stops])}
    given = {"max_tokens": NUM_TOKENS, "stop_token_ids": model.stops, "processors": asked}
    prompts = [one["prompt"] for one in RECORDED["texts"]]
    outputs = {o.request: o for o in engine.generate(prompts, jaxkv.Sampling(**given))}
    assert [list(outputs[at].tokens) for at in range(20)] == RECORDED["penalized"]


def test_texts_become_the_tokens_of_transformers(model: chat.Chat) -> None:
    for text, one in zip([*TEXTS, LONG], RECORDED["texts"], strict=True):
        assert model.tokenizer.encode(text, add_special_tokens=False).ids == one["prompt"]
