"""The guide's models: from a folder, through the cache, the logits of transformers."""

import functools
import importlib.util
import json
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.logits_processors import RepetitionPenalty

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "golden" / "hugging_face.json"
KINDS = "llama", "qwen3", "gemma3_text"
PENALTY = 1.3
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [27, 18, 28]]


def guide(name: str) -> Any:
    """Returns a module that lies next to the notebooks."""
    path = HERE.parent / "notebooks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = types.ModuleType(name)
    spec.loader.exec_module(module)
    return module


hugging_face, random_checkpoint = guide("hugging_face"), guide("random_checkpoint")


def in_full(part: Callable[..., jax.Array], *args: Any) -> jax.Array:
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        return part(*args)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path) -> None:
    """After every token of the prompts: each of their beginnings is a request."""
    random_checkpoint.write_folder(kind, tmp_path)
    config, params = hugging_face.load(tmp_path)
    layers = jaxkv.layers_from_config(config)
    plan = jaxkv.plan_cache(layers, 2**20, max_model_len=config["max_position_embeddings"])
    model, head = (
        functools.partial(in_full, part, config)
        for part in (hugging_face.hidden_states, hugging_face.head)
    )
    engine = jaxkv.Engine(model, params, plan, head=head, max_requests=4, max_tokens=16)
    beginnings = [ids[: n + 1] for ids in PROMPTS for n in range(len(ids))]
    logits = np.concatenate(json.loads(GOLDEN.read_text())[kind])
    wanted = jax.nn.log_softmax(logits)
    for output in engine.generate(beginnings, jaxkv.Sampling(max_tokens=1, logprobs=True)):
        (token,), (logprob,) = output.tokens, output.logprobs or [0.0]
        assert token == logits[output.request].argmax()
        assert abs(logprob - wanted[output.request, token]) < 1e-5


def test_a_model_that_the_guide_does_not_know_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type='gpt2'; this reads llama, qwen3, gemma3_text"):
        hugging_face.load(tmp_path)
    config = random_checkpoint.CONFIGS["llama"] | {"rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(ValueError, match="rope_type='yarn'; this knows default, linear and llama3"):
        hugging_face.rope_angles(config, np.arange(2))


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    recorded = json.loads(GOLDEN.read_text())
    for ids, logits, penalized in zip(
        PROMPTS, recorded["llama"], recorded["repetition_penalty"], strict=True
    ):
        given = np.array(logits[-1], np.float32)
        processor = RepetitionPenalty(given.size)
        state = processor.init(PENALTY, np.array(ids[:2], np.int32))
        for token in ids[2:]:
            state = processor.advance(jax.tree.map(jnp.asarray, state), jnp.int32(token))
        np.testing.assert_allclose(processor.apply(state, given), penalized, rtol=1e-6)
        assert (given != penalized).sum() == len({*ids})
