"""A served model with drafts of a known share of right ones, next to the same without drafts.

The next token is the last one plus one, whatever the weights, so that a drafter knows it.
"""

import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxkv
from tests.benchmarks.served.comparison import TINY, text_config
from tests.benchmarks.served.decoders import Decoder, Params, Step
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

COUNT = 4  # drafts of a request in a step
SHIFTS = (16, 8, 0)  # a token id in columns that bf16 holds


class Counting(Decoder):
    """A decoder whose next token is the last one plus one."""

    def hidden_states(self, params: Params, step: Step) -> Array:
        x = super().hidden_states(params, step)
        columns = [step.token_ids >> shift & 255 for shift in SHIFTS]
        return jnp.concatenate([x, jnp.stack(columns, axis=1).astype(x.dtype)], axis=1)

    def head(self, params: Params, hidden: Array) -> Array:
        columns = hidden[:, -len(SHIFTS) :].astype(jnp.int32)
        ids = sum(columns[:, at] << shift for at, shift in enumerate(SHIFTS))
        logits = super().head(params, hidden[:, : -len(SHIFTS)])
        following = (jnp.asarray(ids)[:, None] + 1) % self.vocab
        return logits + 1e4 * (following == jnp.arange(self.vocab, dtype=jnp.int32)[None])


class Forced:
    """A drafter of `COUNT` drafts, of which some first ones are right, in turns."""

    max_tokens = COUNT

    def __init__(self, vocab: int, right: Sequence[int]):
        self._vocab, self._right = vocab, itertools.cycle(right)

    def propose(
        self, tokens: Mapping[Hashable, np.ndarray], max_tokens: int
    ) -> dict[Hashable, np.ndarray]:
        found = {}
        for name, ids in tokens.items():
            drafts = ids[-1] + 1 + np.arange(max_tokens)
            drafts[next(self._right) :] += 1
            found[name] = drafts % self._vocab
        return found


class Load(NamedTuple):
    """Prompts that come at once, and the tokens of their answers."""

    requests: int
    prompt: int
    answer: int


def independent(share: float, steps: int = 1000) -> list[int]:
    """Returns how many first drafts of steps are right if each is with a probability."""
    are_right = np.random.default_rng(0).random((steps, COUNT)) < share
    return np.cumprod(are_right, axis=1).sum(axis=1).tolist()


ONE = "60 % of drafts", "drafts right with 60 % each"
RIGHT = {ONE[0]: [2, 3, 2, 3, 2], ONE[1]: independent(0.6), "no draft": [0]}


def run(report: Report, peer: VllmPeer | None) -> None:
    """Times answers to requests with and without drafts; the last two rounds of three count."""
    del peer
    report.title(f"Drafts: {COUNT} for each token, ms a token of a request")
    config = by_size(full=text_config("llama-3.1-8b"), small=TINY, smallest=TINY)
    decoder = Counting.from_config(config)
    params = decoder.init_params(jax.random.key(0), config["torch_dtype"])
    one, many = (
        by_size(full=Load(1, 2048, 512), small=Load(1, 64, 96), smallest=Load(1, 8, 8)),
        by_size(full=Load(48, 512, 768), small=Load(4, 16, 128), smallest=Load(2, 8, 8)),
    )
    without = {load: _ms_of_a_token(decoder, params, None, load) for load in (one, many)}
    for load, names in ((one, (*ONE, "no draft")), (many, ("no draft",))):
        for name in names:
            ms = _ms_of_a_token(decoder, params, Forced(decoder.vocab, RIGHT[name]), load)
            text = f"{load.requests} x {load.prompt}, {name} accepted"
            each = f"{ms:8.3f} ms, {without[load]:8.3f} without: {ms / without[load]:.3f}"
            report.note(f"{text:<60} {each}", seconds=ms / 1e3)


def _ms_of_a_token(decoder: Decoder, params: Params, drafts: Any, load: Load) -> float:
    page = 2 * sum(spec.page_bytes for spec in decoder.layers.values())
    length = load.prompt + load.answer
    blocks = load.requests * (length // 16 + 2) + 8
    plan = jaxkv.plan_cache(decoder.layers, blocks * page, max_model_len=length)
    engine = jaxkv.Engine(
        *(decoder.hidden_states, params, plan),
        head=decoder.head,
        drafts=drafts,
        max_requests=max(8, load.requests),
        max_tokens=by_size(full=2048, small=64, smallest=16),
    )
    rng, times = np.random.default_rng(0), list[float]()
    for _ in range(3):
        prompts = rng.integers(0, decoder.vocab, (load.requests, load.prompt), dtype=np.int32)
        for name, prompt in enumerate(prompts):
            engine.add(name, prompt, jaxkv.Sampling(max_tokens=load.answer))
        started = 0.0
        while engine.has_work:
            if engine.step() and not started:
                started = time.perf_counter()
        times.append(time.perf_counter() - started)
    stats = engine.stats
    print(f"  {stats.steps} steps, {stats.drafted_tokens} drafts, {stats.accepted_tokens} accepted")
    return 1e3 * min(times[1:]) / load.answer
