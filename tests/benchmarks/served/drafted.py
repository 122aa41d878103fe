"""A served model with drafts of a known share of right ones, next to the same without drafts.

The next token is the last one plus one, whatever the weights, so that a drafter knows it.
"""

import dataclasses
import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxkv
from jaxkv._src.engine._drafts import Drafting
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
        return jnp.where(following == jnp.arange(self.vocab, dtype=jnp.int32)[None], 1e4, logits)


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


RIGHT = {
    "60 % of drafts right": [2, 3, 2, 3, 2],
    "drafts right with 60 % each": independent(0.6),
    "no draft right": [0],
}


def run(report: Report, peer: VllmPeer | None) -> None:
    """Times answers to requests with and without drafts, in turns."""
    del peer
    report.title(f"Drafts: {COUNT} for each token, ms a token of a request")
    config = by_size(full=text_config("llama-3.1-8b"), small=TINY, smallest=TINY)
    decoder = Counting.from_config(config)
    params = decoder.init_params(jax.random.key(0), config["torch_dtype"])
    loads = by_size(
        full=(Load(1, 2048, 256), Load(48, 512, 640)),
        small=(Load(1, 64, 96), Load(4, 16, 128)),
        smallest=(Load(1, 8, 8),),
    )
    engine = engine_for(decoder, params, loads)
    most = max(engine._packer.buckets.drafted)
    for load in loads:
        found: dict[str | None, float] = {}
        names = [None, *RIGHT] if load.requests == 1 else [None, "no draft right"]
        for _, name in itertools.product(range(3), names):  # the first round compiles
            drafter = name and Forced(decoder.vocab, RIGHT[name])
            engine._packer.drafting = drafter and Drafting(drafter, most, decoder.vocab)
            ms = ms_of_a_token(engine, decoder.vocab, load)
            found[name] = ms if _ == 1 else min(ms, found.get(name, ms))
        for name, ms in found.items():
            text = f"{load.requests} x {load.prompt}, {name or 'without drafts'}"
            report.note(f"{text:<50} {ms:8.3f} ms: {ms / found[None]:.3f}", seconds=ms / 1e3)


def engine_for(decoder: Decoder, params: Params, loads: Sequence[Load]) -> jaxkv.Engine:
    page = 2 * sum(spec.page_bytes for spec in decoder.layers.values())
    longest = max(load.prompt + load.answer for load in loads)
    requests = max(load.requests for load in loads)
    blocks = requests * (longest // 16 + 2) + 8
    return jaxkv.Engine(
        *(decoder.hidden_states, params),
        jaxkv.plan_cache(decoder.layers, blocks * page, max_model_len=longest),
        head=decoder.head,
        drafts=Forced(decoder.vocab, [0]),
        shared_prefixes=0,
        max_requests=requests,
        max_tokens=by_size(full=512, small=64, smallest=16),
    )


def ms_of_a_token(engine: jaxkv.Engine, vocab: int, load: Load) -> float:
    """Returns the ms between two tokens of a request, all of which are checked."""
    prompts = np.random.default_rng().integers(0, vocab, (load.requests, load.prompt))
    tokens = {name: [int(prompt[-1])] for name, prompt in enumerate(prompts)}
    for name, prompt in enumerate(prompts):
        engine.add(name, prompt, jaxkv.Sampling(max_tokens=load.answer))
    started, before = 0.0, dataclasses.replace(engine.stats)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request] += output.tokens
        if not started and min(map(len, tokens.values())) > 1:
            started, left = time.perf_counter(), sum(map(len, tokens.values()))
    seconds = time.perf_counter() - started
    assert all((np.diff(one) % vocab == 1).all() for one in tokens.values())
    names = "steps", "drafted_tokens", "accepted_tokens"
    counts = {name: getattr(engine.stats, name) - getattr(before, name) for name in names}
    made = sum(map(len, tokens.values())) - left
    print(f"  {load}: {seconds:.3f} s for {made} tokens, {counts}", flush=True)
    return 1e3 * seconds * load.requests / made
