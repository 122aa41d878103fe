"""Reads of a pool on XLA's paths pass a barrier before anything else uses them.

`pallas_kernels.read_extents` holds the barrier, and says why.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import pallas_kernels
from jaxkv._src.layout import ORDERS
from tests.helpers import ON_GPU
from tests.test_sizes_of_one import KINDS, RECURRENT, TAPS, attention_specs, plan_of, state_spec

# What is still a pool after them, whatever its shape and dtype, if their first operand is one.
IN_PLACE = {"reshape", "bitcast_convert_type", "scatter", "optimization_barrier"}

Flags = list[bool]  # which values are buffers of a pool


def pools_after(jaxpr: Any, are_pools: Flags, misused: list[str]) -> Flags:
    """Returns which outputs are buffers of a pool, given which inputs are.

    Args:
      misused: takes the operations that use what was read from one, and are no barriers.
    """
    pools = {var for var, is_pool in zip(jaxpr.invars, are_pools, strict=True) if is_pool}
    reads: set[Any] = set()

    def which(variables: Sequence[Any], some: set[Any]) -> Flags:
        return [not hasattr(var, "val") and var in some for var in variables]  # no literals

    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, which(eqn.invars, pools)
        if name != "optimization_barrier" and any(which(eqn.invars, reads)):
            misused.append(name)
        outs: Flags = [False] * len(eqn.outvars)
        if name in IN_PLACE and any(given):
            outs = given[: len(outs)]
        elif any(given):
            inner = list(programs_of(eqn, given))
            for program, flags in inner:
                outs = pools_after(program, flags, misused)
            reads.update([] if inner else eqn.outvars)
        pools.update(var for var, is_pool in zip(eqn.outvars, outs, strict=True) if is_pool)
    misused += ["return"] * any(which(jaxpr.outvars, reads))
    return which(jaxpr.outvars, pools)


def programs_of(eqn: Any, given: Flags) -> Iterator[tuple[Any, Flags]]:
    """Yields the programs that an equation runs, and which of their inputs are pools."""
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            yield from ((branch.jaxpr, given[1:]) for branch in params["branches"])
        case "while":
            yield params["body_jaxpr"].jaxpr, given[params["cond_nconsts"] :]
        case "jit" | "pjit" | "scan" | "closed_call":
            yield params["jaxpr"].jaxpr, given


def misuses(function: Any, cache: jaxkv.KVCache, *rest: Any) -> list[str]:
    """Returns the operations of a program that use reads of a cache's pool without a barrier."""
    traced = jax.make_jaxpr(function)(cache, *rest)
    pool = {id(buffer) for buffer in cache.buffers}
    are_pools = [id(leaf) in pool for leaf in jax.tree.leaves((cache, *rest))]
    misused: list[str] = []
    after = pools_after(traced.jaxpr, are_pools, misused)
    assert sum(after) == len(cache.buffers), "a pool is lost on the way"
    return misused


def attention_step(cache: Any, upload: Any, inputs: Any) -> Any:
    cache, batch = jaxkv.apply_step(cache, upload)
    for layer, given in inputs.items():
        if layer in ("full", "window"):
            cache = jaxkv.write_tokens(cache, layer, batch, *given[1:])
            jaxkv.read_tokens(cache, layer, batch)
        cache, _ = jaxkv.attend(cache, layer, batch, *given)
        rows = jaxkv.read_rows(cache, "full", batch)[0, : batch.token_shape[0]]
        cache = jaxkv.write_rows(cache, "full", batch, rows)
    return cache


def recurrent_step(cache: Any, upload: Any, x: Any, weights: Any, at: Any) -> Any:
    cache, batch = jaxkv.apply_step(cache, upload)
    inputs, beta = x, x[:, :1]
    own = jaxkv.read_state(cache, "own", batch, at=at)
    cache = jaxkv.write_state(cache, "own", batch, [-array for array in own], at=at)
    conv: dict[str, Any] = {"conv_weights": weights}
    cache, _ = jaxkv.short_conv(cache, "short_conv", batch, inputs, **conv)
    cache, _ = jaxkv.linear_attention(cache, "linear_attention", batch, inputs, beta)
    cache, _ = jaxkv.mamba2(cache, "mamba2", batch, inputs, beta, beta, num_groups=1, **conv)
    run = functools.partial(jaxkv.gated_delta, num_key_heads=1, **conv)
    return run(cache, "gated_delta", batch, inputs, beta, beta)[0]


pytestmark = pytest.mark.skipif(ON_GPU, reason="a machine without a GPU traces XLA's paths alone")


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_attention_reads_the_pool_through_a_barrier(order: Any, tokens: int) -> None:
    plan = plan_of(attention_specs(KINDS, 1, "f32", 2))
    sizes = {"max_requests": 1, "max_tokens": tokens}
    shape = jaxkv.StepShape.for_plan(plan, **sizes, forks=1)
    queries, wide = np.ones((tokens, 1, 2), np.float32), np.ones((tokens, 1, 3), np.float32)
    inputs: dict[str, Any] = dict.fromkeys(KINDS, (queries, queries, queries[..., :1]))
    inputs |= {"shared": (queries, None, None)}
    inputs |= {"cross": (queries, queries[None, :1], queries[None, :1, :, :1])}
    inputs |= dict.fromkeys(("latent", "window_latent"), (wide, wide[:, 0], None))
    cache = jaxkv.make_cache(plan, max_requests=1, order=order)
    assert misuses(attention_step, cache, shape.idle(), inputs) == []


@pytest.mark.parametrize("tokens", [1, 2])
def test_recurrent_layers_read_the_pool_through_a_barrier(tokens: int) -> None:
    plan = plan_of({kind: state_spec(kind, 1, 2, "none") for kind in RECURRENT})
    shape = jaxkv.StepShape.for_plan(plan, max_requests=1, max_tokens=tokens)
    cache = jaxkv.make_cache(plan, max_requests=1)
    given = jnp.ones((tokens, 6)), jnp.ones((TAPS, 6)), jnp.zeros(1, jnp.int32)
    assert misuses(recurrent_step, cache, shape.idle(), *given) == []


def test_a_read_without_a_barrier_is_found() -> None:
    plan = plan_of(attention_specs(("full",), 1, "f32", 2))
    cache = jaxkv.make_cache(plan, max_requests=1)

    def read(cache: Any, ids: Any, *, once: bool) -> Any:
        data = cache.buffers[0].reshape(-1, cache.buffers[0].shape[-1])
        found = pallas_kernels.read_extents(data, ids) if once else data[ids]
        return cache, found + 1

    ids = jnp.zeros(1, jnp.int32)
    assert misuses(functools.partial(read, once=True), cache, ids) == []
    assert misuses(functools.partial(read, once=False), cache, ids) == ["add"]
