"""The decoders of the served benchmark: in f32, logits over a cache equal those without one."""

import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.benchmarks import timing
from tests.benchmarks.served import alone, comparison, jaxkv_engine, profiling, workloads
from tests.benchmarks.served.decoders import AXIS, Decoder
from tests.benchmarks.served.workloads import Decode, Trace
from tests.benchmarks.timing import KernelEvent
from tests.helpers import needs_devices

SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "torch_dtype": "float32"}
SMALL |= {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**SMALL, "model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 1},
    "windows": {
        **SMALL,
        "model_type": "gemma3_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "hybrid": {
        **SMALL,
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    },
    "latent": {
        **SMALL,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "q_lora_rank": None,
    },
}
LENGTHS = (7, 25, 17)


class WholeStep:
    """All tokens of one request, without a cache: attention by its definition.

    Each token counts as a last one, so that one pass gives the logits of all.
    """

    def __init__(self, layers: dict[str, Any], token_ids: Any):
        self.layers, self.token_ids = layers, jnp.asarray(token_ids)
        self.positions = jnp.arange(len(token_ids))
        self.last_tokens = self.positions

    def attend(self, layer, queries, keys, values=None, *, scale=None):
        spec, at = self.layers[layer], self.positions
        seen = at[None, :] <= at[:, None]
        if isinstance(spec, jaxkv.SlidingWindowSpec):
            seen &= at[None, :] > at[:, None] - spec.sliding_window
        if values is None:  # latent vectors
            keys, values = keys[:, None], keys[:, None, : spec.value_size]
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = (jnp.repeat(rows, repeats, axis=1) for rows in (keys, values))
        scores = jnp.einsum("qhd,khd->hqk", queries, keys)
        scores *= scale or queries.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, values)

    def gated_delta(self, layer, qkv, log_decay, beta, *, conv_weights, num_key_heads):
        """The rule token by token (arXiv 2412.06464), after a causal convolution."""
        heads, value_size, key_size = self.layers[layer].shapes[1]
        width, tokens = len(conv_weights), len(qkv)
        padded = jnp.pad(qkv, ((width - 1, 0), (0, 0)))
        mixed = jax.nn.silu(sum(padded[i : i + tokens] * conv_weights[i] for i in range(width)))
        sizes = [num_key_heads * key_size, 2 * num_key_heads * key_size]
        q, k, v = (rows.reshape(tokens, -1, heads) for rows in jnp.split(mixed, sizes, axis=-1))
        q, k = (rows.reshape(tokens, num_key_heads, key_size) for rows in (q, k))
        q, k = (rows / jnp.linalg.norm(rows, axis=-1, keepdims=True) for rows in (q, k))
        q, k = (jnp.repeat(rows, heads // num_key_heads, axis=1) for rows in (q, k))

        def step(state, token):
            q, k, v, decay, b = token
            state = state * decay[:, None, None]
            old = jnp.einsum("hvk,hk->hv", state, k)
            state += jnp.einsum("hv,hk->hvk", b[:, None] * (v - old), k)
            return state, jnp.einsum("hvk,hk->hv", state, q * key_size**-0.5)

        tokens_of = q, k, v.reshape(tokens, heads, value_size), jnp.exp(log_decay), beta
        return jax.lax.scan(step, jnp.zeros((heads, value_size, key_size)), tokens_of)[1]


def random_params(decoder: Decoder) -> dict[str, Any]:
    """Returns weights that keep the size of what they multiply; drawing them needs no program."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: decoder.init_params(key, jnp.float32), jax.random.key(0))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        weights = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            return 1 + weights / 8
        fan_in = shape[0] if shape[0] == decoder.hidden else shape[-2]
        return weights / max(fan_in, 4) ** 0.5

    return jax.tree.map(lambda like: draw(like.shape), shapes)


RUNS = [(name, 1) for name in CONFIGS]
RUNS += [pytest.param(name, 2, marks=needs_devices(2)) for name in ("dense", "hybrid")]


@pytest.mark.parametrize(("name", "devices"), RUNS)
@jax.default_matmul_precision("highest")
@jax.numpy_rank_promotion("allow")  # a model is written as its readers write theirs
def test_logits_over_a_cache_equal_those_without_one(name: str, devices: int) -> None:
    mesh = jaxkv_engine.mesh_of(devices)
    decoder = Decoder.from_config(CONFIGS[name], mesh=mesh)
    params = random_params(decoder)
    plan = jaxkv.plan_cache(decoder.layers, 2**20, max_model_len=64)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=16, extra=16)
    manager, cache = (
        jaxkv.BlockManager(plan, max_requests=4),
        jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis=mesh and AXIS),
    )

    @jax.jit(donate_argnums=1)
    def run(params, cache, upload):
        step = jaxkv.StepContext(cache, upload)
        logits = decoder.forward(params, step)
        return step.done(), logits

    @jax.jit
    def run_whole(params, token_ids):
        whole = Decoder.from_config(CONFIGS[name])
        return whole.forward(params, WholeStep(whole.layers, token_ids))

    ids = np.random.default_rng(0).integers(0, decoder.vocab, (len(LENGTHS), max(LENGTHS)))
    wanted = [run_whole(params, row) for row in ids]
    tokens = {r: ids[r, :length] for r, length in enumerate(LENGTHS)}
    for request in tokens:
        manager.start(request)
    done, compared = dict.fromkeys(tokens, 0), 0
    while any(done[r] < len(tokens[r]) for r in tokens):  # uneven pieces, three to a step
        work = {r: min(1 + r + done[r] % 3, len(tokens[r]) - done[r]) for r in tokens}
        work = {r: count for r, count in work.items() if count}
        ids = np.concatenate([tokens[r][done[r] :][:count] for r, count in work.items()])
        cache, logits = run(params, cache, manager.step(shape, work, extra=ids))
        for row, (r, count) in enumerate(work.items()):
            done[r] += count
            np.testing.assert_allclose(logits[row], wanted[r][done[r] - 1], atol=2e-5)
            compared += 1
    jaxkv.check_errors(cache)
    assert compared > 15


@pytest.mark.parametrize("case", comparison.CASES, ids=lambda case: case.name)
def test_published_models_have_decoders(case: comparison.Case) -> None:
    config = comparison.text_config(case.model)
    decoder = Decoder.from_config(config, kv_dtype=case.kv_dtype)
    assert len(decoder.layers) == config["num_hidden_layers"]
    assert jax.eval_shape(decoder.init_params, jax.random.key(0))["embed"].shape[0] == decoder.vocab
    assert workloads.load(workloads.dump(case.chosen)) == list(case.chosen)


@jax.default_matmul_precision("highest")
@jax.numpy_rank_promotion("allow")
def test_requests_of_a_trace_have_the_same_tokens_alone() -> None:
    sizes = {"max_requests": 3, "max_tokens": 16, "memory_bytes": 2**18, "max_model_len": 64}
    found = alone.run(CONFIGS["dense"], Trace(9, (8, 40), (2, 20)), **sizes)
    assert found["requests"] == 9 and found["equal"] == found["tokens"] > 50


class Queue:
    """An engine that answers one request in each step, and has no way to change their order."""

    vocab = 96

    def __init__(self):
        self.added: list[tuple[np.ndarray, int, int]] = []
        self.waiting: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt: np.ndarray, tokens: int, samples: int = 1) -> int:
        self.waiting.append(len(self.added))
        self.added.append((prompt, tokens, samples))
        return self.waiting[-1]

    def step(self) -> dict[int, int]:
        name = self.waiting.pop()
        return {name: self.added[name][1] * self.added[name][2]}


@pytest.mark.parametrize("trace", [workloads.AT_ONCE, workloads.GROUPS], ids=workloads.name_of)
def test_requests_are_queued_in_the_order_given(trace: Trace) -> None:
    queue, requests = Queue(), workloads.requests(trace, Queue.vocab)
    figures = workloads.run(queue, trace)
    for added, request in zip(queue.added, requests, strict=True):
        np.testing.assert_array_equal(added[0], request.prompt)
        assert added[1:] == (request.answer_tokens, trace.samples)
    assert figures.tokens == sum(request.answer_tokens for request in requests) * trace.samples
    others = workloads.requests(trace._replace(by_generate=True), Queue.vocab)
    for one, other in zip(requests, others, strict=True):  # as long, and no prefix of it is cached
        assert one[1:] == other[1:] and len(one.prompt) == len(other.prompt)
        assert one.prompt.tolist() != other.prompt.tolist()


def test_only_what_both_engines_serve_in_one_order_is_compared(monkeypatch, capsys) -> None:
    def in_process(module: str, config, chosen, *arguments: str, **variables: str):
        asked.append((module, *arguments))
        return {workloads.name_of(w): {"seconds": 1.0, "tokens": 1} for w in chosen}

    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(comparison, "_in_process", in_process)
    monkeypatch.setattr(timing, "vllm_engine", pathlib.Path("vllm"))
    report = timing.Report()
    capsys.readouterr()
    for case in comparison.CASES[:2]:
        comparison._run_case(report, case)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(workloads.FULL) + 2 * len(workloads.ROLLOUTS)
    assert all(("vLLM" in line) != ("by generate" in line) for line in lines)
    assert sum("rollouts, shared_prefixes=0" in line for line in lines) == len(workloads.ROLLOUTS)
    ours, theirs = (
        [more for module, *more in asked if module == name]
        for name in ("jaxkv_engine", "vllm_engine")
    )
    assert [groups for _, groups, _ in ours] == ["", "", "", "0"]  # the first starts twice
    cached = [
        f'"enable_prefix_caching": {found}' in more[1]
        for more, found in zip(theirs, ("false", "true"), strict=True)
    ]
    assert cached == [True, True]


def test_a_profile_counts_each_kernel_in_one_kind_and_what_lies_between_them() -> None:
    names = ["gemm_fusion_dot", "paged_attention_decode_kernel", "loop_add_fusion"]
    names += ["nvjet_sm90", "paged_attention_decode_kernel", "paged_attention_combine_kernel"]
    events, start = [], 0.0
    for _ in range(3):  # of two attention layers, 1 us a kernel and 0.5 us between steps
        events += [KernelEvent(n, start + 1000.0 * i, 1000.0) for i, n in enumerate(names)]
        start += 6500.0
    found = {kind: time for kind, time in profiling.by_kind(events, 2).items() if time}
    assert found.pop("gaps") == pytest.approx(1.0 / 3)
    assert found == {"products": 2, "attention": 2, "combine": 1, "rest of the model": 1}
    assert profiling.by_kind([KernelEvent("gemm", 0.0, 1.0)], 2) == {}


def test_a_step_reads_the_weights_and_what_its_tokens_see() -> None:
    def read(name: str, decode: Decode) -> int:
        decoder = Decoder.from_config(CONFIGS[name])
        server = types.SimpleNamespace(decoder=decoder, weights_bytes=10**6, embedding_bytes=10**3)
        return profiling.bytes_read(server, decode) - 10**6 + (0 if decoder.tied else 10**3)

    # One layer or two; keys and values of f32: 2 heads, 8 or 16 wide.
    assert read("dense", Decode(3, 100)) == 3 * 100 * (2 * 2 * 8 * 4)
    assert read("windows", Decode(3, 100)) == 3 * (100 + 8) * (2 * 2 * 16 * 4)
    states = 4 * (3 * (2 * 2 * 16 + 4 * 8) + 4 * 8 * 16)  # inputs of the convolution, and a state
    assert read("hybrid", Decode(3, 100)) == 3 * (100 * (2 * 2 * 16 * 4) + 2 * states)
