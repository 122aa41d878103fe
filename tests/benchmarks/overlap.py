"""Blocks copied to and from page-locked host memory beside steps, and the share that is hidden."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# XLA then starts copies early and waits for them late.
HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True} if jax.default_backend() == "gpu" else {}


class Sizes(NamedTuple):
    """Weights of a step, and a pool; a block is a page in each of its layers."""

    layers: int
    weights: tuple[int, int]
    num_blocks: int
    page: int  # elements of 4 bytes
    moved: int  # blocks
    steps: int


class Data(NamedTuple):
    """pool: int32[layers, num_blocks, page]. parked: int32[layers, moved, page], on the host."""

    weights: list[Array]
    tokens: Array
    pool: Array
    ids: Array
    parked: Array


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer
    report.title("Blocks to and from the host beside steps: ms of the host's clock")
    sizes = by_size(
        full=Sizes(32, (4096, 57_344), 2048, 2**14, 64, 24),
        small=Sizes(4, (256, 512), 64, 2**10, 8, 4),
        smallest=Sizes(2, (32, 64), 8, 16, 2, 2),
    )
    data = _make(sizes)
    moved = data.parked.nbytes
    alone = _seconds(_step, data, sizes.steps)
    report.note(f"{'a step alone':<44} {1e3 * alone:8.3f}", seconds=alone)
    for what, move in {"stored": _store, "loaded": _load}.items():
        by_itself = _seconds(move, data, sizes.steps)
        rate = moved / by_itself / 1e9
        name = f"{moved / 2**20:g} MiB {what}"
        report.note(f"{name:<44} {1e3 * by_itself:8.3f}, {rate:.1f} GB/s", seconds=by_itself)
        for where, run_both, options in (
            ("in steps", _both(move), {}),
            ("in steps, hiding latency", _both(move), HIDING),
            ("between steps", None, {}),
        ):
            if run_both is None:
                seconds = _seconds_between(move, data, sizes.steps)
            else:
                seconds = _seconds(run_both, data, sizes.steps, options)
            hidden = min(1.0, max(0.0, 1 - (seconds - alone) / by_itself))
            text = f"{1e3 * seconds:8.3f}, {hidden:.0%} of the copy hidden"
            report.note(f"{name + ' ' + where:<44} {text}", seconds=seconds)


def _make(sizes: Sizes) -> Data:
    host = jax.devices()[0].memory("pinned_host")
    rows = jnp.arange(sizes.layers * sizes.moved * sizes.page, dtype=jnp.int32)
    parked = rows.reshape(sizes.layers, sizes.moved, sizes.page)
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=host.kind)
    return Data(
        [jnp.full(sizes.weights, 0.01, jnp.bfloat16) for _ in range(sizes.layers)],
        jnp.ones((16, sizes.weights[0]), jnp.bfloat16),
        jnp.zeros((sizes.layers, sizes.num_blocks, sizes.page), jnp.int32),
        jnp.arange(sizes.moved, dtype=jnp.int32) * (sizes.num_blocks // sizes.moved),
        jax.device_put(parked, on_host),
    )


# --- pieces: each takes the data, and returns them with its results in place ----------


def _step(data: Data) -> Data:
    """Reads all weights, as the matrix products of a decode step do."""
    tokens = data.tokens
    for weights in data.weights:
        tokens = jnp.tanh(tokens + (tokens @ weights)[:, : tokens.shape[1]])
    return data._replace(tokens=tokens)


def _store(data: Data) -> Data:
    return data._replace(parked=jax.device_put(data.pool[:, data.ids], HOST))


def _load(data: Data) -> Data:
    blocks = jax.device_put(data.parked, DEVICE)
    return data._replace(pool=data.pool.at[:, data.ids].set(blocks, unique_indices=True))


def _both(move: Callable[[Data], Data]) -> Callable[[Data], Data]:
    return lambda data: move(_step(data))


# --- clocks ---------------------------------------------------------------------------


def _seconds(
    call: Callable[[Data], Data], data: Data, steps: int, options: dict[str, Any] | None = None
) -> float:
    """Returns the seconds of each of some calls in a row."""
    return _time(_jitted(call, options), data, steps)


def _seconds_between(move: Callable[[Data], Data], data: Data, steps: int) -> float:
    """Returns the seconds of a step and then a copy, each a program of its own."""
    step, between = _jitted(_step), _jitted(move)
    return _time(lambda data: between(step(data)), data, steps)


def _jitted(
    call: Callable[[Data], Data], options: dict[str, Any] | None = None
) -> Callable[[Data], Data]:
    """Returns a jitted call that updates what changes of the data, and returns them whole."""

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options or None)
    def changed(pool: Array, tokens: Array, weights: Any, ids: Array, parked: Array) -> Any:
        after = call(Data(weights, tokens, pool, ids, parked))
        return after.pool, after.tokens, after.parked

    def run(data: Data) -> Data:
        pool, tokens, parked = changed(data.pool, data.tokens, data.weights, data.ids, data.parked)
        return data._replace(pool=pool, tokens=tokens, parked=parked)

    return run


def _time(call: Callable[[Data], Data], data: Data, steps: int) -> float:
    data = data._replace(pool=data.pool.copy())  # the calls donate it
    data = jax.block_until_ready(call(call(data)))
    started = time.perf_counter()
    for _ in range(steps):
        data = call(data)
    jax.block_until_ready(data)
    return (time.perf_counter() - started) / steps
