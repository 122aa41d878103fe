"""One request of one token, one head, one layer, blocks of one token: all equals its definition.

XLA compiles sizes of one in ways of their own: a gather or scatter of one index becomes a slice,
and it computes a slice again wherever its result is used.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import pallas_kernels
from jaxkv._src.layout import ORDERS
from tests.engine_models import SPECS, forward, make_params, whole
from tests.helpers import ON_GPU, as_ids
from tests.reference_recurrence import RecurrentCase, convolve, normalized
from tests.test_attend import attention, poisoned, visible

LENGTH, ENCODER, WINDOW = 5, 1, 2
DTYPES = ("f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8")
KINDS = ("full", "shared", "window", "chunked", "cross", "latent", "window_latent")
RECURRENT = ("gated_delta", "mamba2", "linear_attention", "short_conv", "own")
TAPS = 2  # of convolutions
BOUND = 5e-3 if ON_GPU else 2e-5  # a GPU's products of float32 are of TF32
close = functools.partial(np.testing.assert_allclose, rtol=BOUND, atol=BOUND)


def plan_of(specs: dict[str, Any], num_blocks: int = 8 * LENGTH) -> jaxkv.Plan:
    """A pool for one longest request, in which blocks are zeroed."""
    return jaxkv.plan_cache(
        specs,
        2**30,
        max_model_len=LENGTH,
        num_blocks_override=num_blocks,
        limits=jaxkv.Limits(max_in_flight_tokens=1, max_encoder_tokens=ENCODER),
        zero_policy="always",
    )


class Served:
    """One request, in jitted and donated steps of one token."""

    def __init__(self, plan: jaxkv.Plan, order: Any, encoder_tokens: int = 0):
        self.manager = jaxkv.BlockManager(plan, max_requests=1)
        self.cache = poisoned(jaxkv.make_cache(plan, max_requests=1, order=order))
        self.shape = jaxkv.StepShape.for_plan(plan, max_requests=1, max_tokens=1)
        self.manager.start("a", encoder_tokens=encoder_tokens)

    def step(self, run: Any, *given: Any, also_traced: Any = None) -> Any:
        """Returns what a step returns; also traces it with the last argument replaced."""
        upload = self.manager.step(self.shape, {"a": 1})
        if also_traced is not None:
            jax.eval_shape(run, self.cache, upload, also_traced)
        self.cache, out = run(self.cache, upload, *given)
        return jax.tree.map(lambda array: np.asarray(array).astype(np.float64), out)


# --- attention ------------------------------------------------------------------------


def attention_specs(kinds: tuple[str, ...], heads: int, dtype: str, block_size: int) -> Any:
    """Layers of these kinds on one page size: keys of two elements, and values of one."""
    kv: dict[str, Any] = {"block_size": block_size, "num_kv_heads": heads, "dtype": dtype}
    kv |= {"head_size": 2, "head_size_v": 1}
    latent: dict[str, Any] = {"block_size": block_size, "head_size": 3 * heads, "dtype": dtype}
    specs: dict[str, Any] = {
        "full": jaxkv.FullAttentionSpec(**kv),
        "shared": jaxkv.SharedKVSpec("full"),
        "window": jaxkv.SlidingWindowSpec(sliding_window=WINDOW, **kv),
        "chunked": jaxkv.ChunkedAttentionSpec(chunk_size=WINDOW, **kv),
        "cross": jaxkv.CrossAttentionSpec(**kv),
        "latent": jaxkv.MLASpec(value_size=1, **latent),
        "window_latent": jaxkv.SlidingWindowMLASpec(sliding_window=WINDOW, **latent),
    }
    return {kind: specs[kind] for kind in kinds}


@functools.partial(jax.jit, donate_argnums=0)
def attend(cache, upload, inputs):
    """Returns the output of each layer, and the rows that it then holds from which position on."""
    cache, batch = jaxkv.apply_step(cache, upload)
    outs = {}
    for layer, (queries, keys, values, sinks) in inputs.items():
        cache, outs[layer] = jaxkv.attend(cache, layer, batch, queries, keys, values, sinks=sinks)
    held = {
        layer: (jaxkv.read_rows(cache, layer, batch), batch.first_positions(layer))
        for layer in inputs
    }
    return cache, (outs, held)


def sampled(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(np.float64)  # exact in every dtype


@pytest.mark.parametrize(
    ("order", "heads"), [*((order, 1) for order in ORDERS), *((order, 2) for order in ORDERS[1::2])]
)
def test_a_cache_of_every_order_and_kind_serves_one_token(order: str, heads: int) -> None:
    index, kinds = ORDERS.index(order), KINDS
    block_size = 1 + (index + heads) % 2
    if heads > 1 and order in ("LHBNC", "BHLNC"):  # latent vectors count as one head
        mixed = plan_of(attention_specs(kinds, heads, "f32", block_size))
        with pytest.raises(ValueError, match="KV heads"):
            jaxkv.make_cache(mixed, max_requests=1, order=order)
        kinds = KINDS[:5]
    # All are traced; some run, because compilations take the most time.
    compiled = ["full", KINDS[1 + index]] if heads == 1 else ["full"]
    check_attention(kinds, compiled, order, heads, DTYPES[index], block_size)


@pytest.mark.parametrize("kind", ["chunked", "cross", "latent"])
def test_one_layer_of_one_head_serves_one_token(kind: str) -> None:
    check_attention((kind,), [kind], "BHLNC", 1, "f32", 1)


def check_attention(
    kinds: tuple[str, ...],
    compiled: list[str],
    order: str,
    heads: int,
    dtype: str,
    block_size: int,
) -> None:
    """Compares outputs, and rows that can be seen, of one token after the other."""
    rng = np.random.default_rng(0)
    plan = plan_of(attention_specs(kinds, heads, dtype, block_size))
    served = Served(plan, order, ENCODER if "cross" in kinds else 0)
    stored = {kind: np.zeros((0, 1 if "latent" in kind else heads, 3)) for kind in kinds}
    stored |= {"cross": sampled(rng, ENCODER, heads, 3)}
    for t in range(LENGTH):
        inputs: dict[str, Any] = {}
        for kind in kinds:
            width = 3 * heads if "latent" in kind else 2
            queries, sinks = sampled(rng, 1, heads, width), sampled(rng, heads)
            if "latent" in kind:
                new = sampled(rng, 1, 1, width)
                inputs[kind] = queries, new[:, 0], None, sinks
                stored[kind] = np.concatenate([stored[kind].reshape(-1, 1, width), new])
            elif kind == "shared":
                inputs[kind] = queries, None, None, sinks
            else:
                new = sampled(rng, 1, heads, 3) if kind != "cross" else stored[kind]
                keys, values = (x[None] if kind == "cross" else x for x in np.split(new, [2], -1))
                inputs[kind] = queries, keys, values, sinks
                if kind != "cross":
                    stored[kind] = np.concatenate([stored[kind], new])
        single = jax.tree.map(lambda x: x.astype(np.float32), inputs)
        some = {kind: single[kind] for kind in compiled}
        outs, held = served.step(attend, some, also_traced=None if t else single)
        for kind in compiled:
            queries, _, _, sinks = inputs[kind]
            rows = stored["full" if kind == "shared" else kind]
            seen = visible(kind, t, ENCODER, WINDOW, WINDOW)
            keys = rows[seen.start : seen.stop]
            values = {"latent": keys[..., :1], "window_latent": keys}.get(kind, keys[..., 2:])
            keys = keys if "latent" in kind else keys[..., :2]
            wanted = attention(queries[0], keys, values, sinks=tuple(sinks))
            close(outs[kind][0], wanted, err_msg=f"{kind} at {t}")
            got, first = held[kind]
            places = np.array(seen) - int(first[0])
            np.testing.assert_array_equal(
                got[0][places].reshape(len(places), -1),
                rows[seen.start : seen.stop].reshape(len(places), -1),
                err_msg=f"rows of {kind} at {t}",
            )
    jaxkv.check_errors(served.cache)


# --- recurrent layers -----------------------------------------------------------------


def state_spec(kind: str, heads: int, size: int, mode: Any) -> jaxkv.StateSpec:
    channels = 3 * heads * size
    conv, states = (TAPS - 1, channels), (heads, size, size)
    shapes = {"linear_attention": (states,), "short_conv": (conv,)}.get(kind, (conv, states))
    dtypes = ("f32",) * len(shapes)
    return jaxkv.StateSpec(block_size=1, shapes=shapes, dtypes=dtypes, cache_mode=mode)


@functools.partial(jax.jit, static_argnames=("kinds", "heads"), donate_argnums=0)
def recur(cache, upload, x, weights, *, kinds, heads):
    cache, batch = jaxkv.apply_step(cache, upload)
    outs = {}
    for kind in kinds:
        given: tuple[Any, ...] = cache, kind, batch, x["inputs"]
        decays = x["log_decay"], x["beta"]
        if kind == "gated_delta":
            run = functools.partial(jaxkv.gated_delta, *given, *decays, num_key_heads=heads)
            cache, outs[kind] = run(conv_weights=weights)
        elif kind == "mamba2":
            run = functools.partial(jaxkv.mamba2, *given, *decays, num_groups=heads)
            cache, outs[kind] = run(conv_weights=weights)
        elif kind == "linear_attention":
            cache, outs[kind] = jaxkv.linear_attention(*given, x["log_decay"])
        elif kind == "short_conv":
            cache, outs[kind] = jaxkv.short_conv(*given, conv_weights=weights)
        else:  # arithmetic of the model's own, in which each array depends on the other
            before, states = jaxkv.read_state(cache, kind, batch)
            total = jnp.sum(before) + jnp.sum(states)
            new = 0.5 * before + x["inputs"][:, None], states[:, :, ::-1] + total
            cache, outs[kind] = jaxkv.write_state(cache, kind, batch, new), total
    return cache, outs


def recurrence(
    kind: str, given: dict[str, np.ndarray], weights: np.ndarray, heads: int, size: int
) -> np.ndarray:
    """Returns the outputs of all tokens by the definition."""
    inputs, length = given["inputs"], len(given["inputs"])
    if kind == "own":
        before, states = np.zeros((TAPS - 1, inputs.shape[1])), np.zeros((heads, size, size))
        totals = []
        for t in range(length):
            totals.append(before.sum() + states.sum())
            before, states = 0.5 * before + inputs[t], states[:, ::-1] + totals[-1]
        return np.array(totals)
    zeros = np.zeros((TAPS - 1, inputs.shape[1]))
    if kind == "short_conv":
        return convolve(inputs, zeros, weights, None, False)[1]
    if kind != "linear_attention":
        inputs = convolve(inputs, zeros, weights, None, True)[1]
    queries, keys, values = (x.reshape(length, heads, size) for x in np.split(inputs, 3, axis=1))
    if kind == "gated_delta":
        queries, keys = normalized(queries) * size**-0.5, normalized(keys)
    if kind == "mamba2":  # x, b, c
        queries, values = values, queries
    beta = np.ones((length, heads)) if kind == "linear_attention" else given["beta"]
    decay = np.exp(given["log_decay"])[..., None]
    case = RecurrentCase(queries, keys, values, decay, beta, delta=kind == "gated_delta")
    return np.stack(case.run(np.zeros((heads, size, size)), range(length))[1])


RUNS: list[Any] = [  # kinds of layers, order, heads, their sizes, and the states that are kept
    (("gated_delta", "linear_attention"), "LBNHC", 1, 2, "none"),
    (("linear_attention",), "LBHNC", 1, 1, "none"),
    (("mamba2", "own"), "LHBNC", 1, 2, "align"),
    (("own",), "BLNHC", 1, 2, "none"),
    (("short_conv", "gated_delta"), "BLHNC", 2, 2, "all"),
    (("short_conv",), "BHLNC", 1, 2, "none"),
]


@pytest.mark.parametrize(("kinds", "order", "heads", "size", "mode"), RUNS)
def test_recurrent_layers_serve_one_token(kinds, order, heads, size, mode) -> None:
    rng = np.random.default_rng(0)
    specs = {kind: state_spec(kind, heads, size, mode) for kind in kinds}
    if order.startswith("B"):  # which wants pages of one size
        largest = max(spec.page_bytes for spec in specs.values())
        specs = {
            kind: dataclasses.replace(spec, page_bytes_padded=largest)
            for kind, spec in specs.items()
        }
    served = Served(plan_of(specs), order)
    given = {
        "inputs": rng.normal(size=(LENGTH, 3 * heads * size)),
        "log_decay": -rng.exponential(size=(LENGTH, heads)),
        "beta": rng.uniform(size=(LENGTH, heads)),
    }
    weights = rng.normal(size=(TAPS, 3 * heads * size))
    wanted = {kind: recurrence(kind, given, weights, heads, size) for kind in kinds}
    run = functools.partial(recur, kinds=kinds, heads=heads)
    for t in range(LENGTH):
        x = {name: array[t : t + 1].astype(np.float32) for name, array in given.items()}
        outs = served.step(run, x, weights.astype(np.float32))
        for kind, out in outs.items():
            close(out.reshape(-1), wanted[kind][t].reshape(-1), err_msg=f"{kind} at {t}")
    jaxkv.check_errors(served.cache)


def test_a_step_of_one_token_copies_no_pool() -> None:
    kinds = ("gated_delta", "short_conv", "own")
    plan = plan_of({kind: state_spec(kind, 1, 2, "none") for kind in kinds}, 9000)
    cache = jaxkv.make_cache(plan, max_requests=1)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=1, max_tokens=1)
    x = {"inputs": np.ones((1, 6)), "log_decay": np.ones((1, 1)), "beta": np.ones((1, 1))}
    x = jax.tree.map(jnp.float32, x)
    lowered = recur.lower(cache, shape.idle(), x, jnp.ones((TAPS, 6)), kinds=kinds, heads=1)
    memory, pool = lowered.compile().memory_analysis(), sum(b.nbytes for b in cache.buffers)
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 100


# --- kernels --------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_kernels_take_one_id_again_and_again(num_blocks: int, width: int) -> None:
    """Each reads what the one before it wrote, in one program."""
    rng = np.random.default_rng(0)
    transfers = rng.integers(0, num_blocks, (9, 4)).astype(np.int32)
    rows = rng.normal(size=(9, 1, width)).astype(np.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(data, transfers, rows):
        read = []
        for (source, target, zeroed, written), row in zip(transfers, rows, strict=True):
            data = pallas_kernels.zero_blocks(data, zeroed[None])
            data = pallas_kernels.copy_blocks(data, source[None], target[None])
            read.append(pallas_kernels.read_extents(data, target[None]))
            data = pallas_kernels.write_rows(data, written[None], as_ids([0]), row + read[-1])
        return data, read

    start = rng.normal(size=(num_blocks, width)).astype(np.float32)
    wanted, wanted_reads = start.copy(), []
    for (source, target, zeroed, written), row in zip(transfers, rows, strict=True):
        wanted[zeroed] = 0
        wanted[target] = wanted[source]
        wanted_reads.append(wanted[[target]])
        wanted[written] = row[0] + wanted[target]
    data, reads = run(jnp.array(start), list(map(tuple, transfers)), list(rows))
    np.testing.assert_array_equal(np.asarray(data), wanted)
    np.testing.assert_array_equal(np.stack([np.asarray(read) for read in reads]), wanted_reads)


# --- engines --------------------------------------------------------------------------

NEW, LAYERS, PROMPTS = 6, ("full", "state"), ([0], [1], [0, 1, 0], [0])
MEMORY = jaxkv.HostMemory(num_bytes=2**16, min_tokens=1)


def params_of(vocab: int) -> Any:
    params = make_params()
    return params | {"embed": params["embed"][:vocab], "head": params["head"][:, :vocab]}


@pytest.mark.parametrize(
    ("vocab", "layers", "options"),
    [
        (1, LAYERS, {}),
        (2, LAYERS, {"shared_prefixes": 1}),
        (2, LAYERS, {"decode_steps": 2, "host_memory": MEMORY}),
        (2, LAYERS[:1], {"reproducible": True}),
    ],
    ids=str,
)
def test_an_engine_serves_one_request_of_one_token_a_step(vocab, layers, options) -> None:
    specs = {name: dataclasses.replace(SPECS[name], block_size=1) for name in layers}
    plan = jaxkv.plan_cache(
        specs,
        2**30,
        max_model_len=NEW + 3,
        num_blocks_override=len(layers) * (NEW + 3) + 3,
        limits=jaxkv.Limits(max_in_flight_tokens=1),
    )
    params = params_of(vocab)
    engine = jaxkv.Engine(forward, params, plan, max_requests=1, max_tokens=1, **options)
    prompts = [[token % vocab for token in prompt] for prompt in PROMPTS]
    sampling = jaxkv.Sampling(n=1, max_tokens=NEW, logprobs=True)
    for output in engine.generate(prompts, sampling):
        prompt = prompts[output.request]
        logits = whole(params, layers, prompt + output.tokens)[len(prompt) - 1 : -1]
        assert output.tokens == logits.argmax(axis=-1).tolist(), prompt
        wanted = logits.max(axis=-1) - np.log(np.exp(logits).sum(axis=-1))
        np.testing.assert_allclose(output.logprobs, wanted, atol=2e-4)
