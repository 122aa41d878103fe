"""Blocks copied to and from page-locked host memory beside steps, and the share that is hidden."""

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
    """pool: int32[layers, num_blocks, page]. swapped: int32[layers, moved, page], on the host."""

    weights: list[Array]
    tokens: Array
    pool: Array
    ids: Array
    swapped: Array


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer
    report.title("Blocks to and from the host beside steps: ms of the host's clock")
    sizes = by_size(
        full=Sizes(32, (4096, 57_344), 2048, 2**14, 64, 24),
        small=Sizes(4, (256, 512), 64, 2**10, 8, 4),
        smallest=Sizes(2, (32, 64), 8, 16, 2, 2),
    )
    data = _make(sizes)
    alone = _seconds(data, sizes.steps, _program(_step))
    report.note(f"{'a step alone':<44} {1e3 * alone:8.3f}", seconds=alone)
    for what, move in {"stored": _store, "loaded": _load}.items():
        by_itself = _seconds(data, sizes.steps, _program(move))
        rate = data.swapped.nbytes / by_itself / 1e9
        name = f"{data.swapped.nbytes / 2**20:g} MiB {what}"
        report.note(f"{name:<44} {1e3 * by_itself:8.3f}, {rate:.1f} GB/s", seconds=by_itself)
        for where, programs in {
            "in steps": [_program(_step, move)],
            "in steps, hiding latency": [_program(_step, move, options=HIDING)],
            "between steps": [_program(_step), _program(move)],
        }.items():
            seconds = _seconds(data, sizes.steps, *programs)
            hidden = min(1.0, max(0.0, 1 - (seconds - alone) / by_itself))
            text = f"{1e3 * seconds:8.3f}, {hidden:.0%} of the copy hidden"
            report.note(f"{name + ' ' + where:<44} {text}", seconds=seconds)


def _make(sizes: Sizes) -> Data:
    rows = jnp.arange(sizes.layers * sizes.moved * sizes.page, dtype=jnp.int32)
    swapped = rows.reshape(sizes.layers, sizes.moved, sizes.page)
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return Data(
        [jnp.full(sizes.weights, 0.01, jnp.bfloat16) for _ in range(sizes.layers)],
        jnp.ones((16, sizes.weights[0]), jnp.bfloat16),
        jnp.zeros((sizes.layers, sizes.num_blocks, sizes.page), jnp.int32),
        jnp.arange(sizes.moved, dtype=jnp.int32) * (sizes.num_blocks // sizes.moved),
        jax.device_put(swapped, on_host),
    )


# --- pieces: each takes the data, and returns what changes ----------------------------

Piece = Callable[[Data], dict[str, Any]]


def _step(data: Data) -> dict[str, Any]:
    """Reads all weights, as the matrix products of a decode step do."""
    tokens = data.tokens
    for weights in data.weights:
        products = (tokens @ weights).reshape(len(tokens), -1, tokens.shape[1])
        tokens = jnp.tanh(tokens + products.max(axis=1))  # of a slice, XLA reads no more weights
    return {"tokens": tokens}


def _store(data: Data) -> dict[str, Any]:
    return {"swapped": jax.device_put(data.pool[:, data.ids], HOST)}


def _load(data: Data) -> dict[str, Any]:
    blocks = jax.device_put(data.swapped, DEVICE)
    return {"pool": data.pool.at[:, data.ids].set(blocks, unique_indices=True)}


# --- clocks ---------------------------------------------------------------------------


def _seconds(data: Data, steps: int, *programs: Callable[[Data], Data]) -> float:
    """Returns the seconds of some programs one after another, repeated."""
    data = data._replace(pool=data.pool.copy())  # programs donate it
    for i in range(steps + 2):
        if i == 2:
            jax.block_until_ready(data)
            started = time.perf_counter()
        for program in programs:
            data = program(data)
    jax.block_until_ready(data)
    return (time.perf_counter() - started) / steps


def _program(*pieces: Piece, options: dict[str, Any] | None = None) -> Callable[[Data], Data]:
    """Returns a jitted program of some parts, which changes a pool in place."""

    def changes(pool: Array, others: Data) -> dict[str, Any]:
        data, changed = others._replace(pool=pool), {}
        for piece in pieces:
            new = piece(data)
            data, changed = data._replace(**new), changed | new
        return changed

    donated = 0 if _load in pieces else ()
    jitted = jax.jit(changes, donate_argnums=donated, compiler_options=options or None)
    return lambda data: data._replace(**jitted(data.pool, data._replace(pool=data.ids)))
