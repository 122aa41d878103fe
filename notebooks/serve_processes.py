"""Serves two requests over all devices of several processes.

``python serve_processes.py INDEX COUNT HOST:PORT HOW``, in each process with its own INDEX. HOW
is ``each`` (a scheduler in every process), ``one`` (process 0 packs for all), or ``drift`` (as
``each``, but process 1 makes a mistake).
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv

index, count, address, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.distributed.initialize(
    address, count, index, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20
)

# The same in every process: a mesh over all devices, plan, cache, shapes, weights.
HEADS, SIZE, VOCABULARY = 4, 16, 256
mesh = Mesh(np.array(jax.devices()), ("heads",))
spec = jaxkv.FullAttentionSpec(
    block_size=8, num_kv_heads=HEADS // mesh.size, head_size=SIZE, dtype="f32"
)
plan = jaxkv.plan_cache({"layer": spec}, 2**20, max_model_len=64)
cache = jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads")
shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=16, extra=16)
weights = np.random.default_rng(0).normal(size=(2, VOCABULARY, HEADS, SIZE)).astype(np.float32)
everywhere = NamedSharding(mesh, PartitionSpec())
weights = jax.make_array_from_callback(weights.shape, everywhere, lambda part: weights[part])


@jax.jit(donate_argnums=1)
def step(weights, cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    x = weights[0, batch.extra]
    cache, out = jaxkv.attend(cache, "layer", batch, x, x, x)
    logits = jax.numpy.einsum("bhd,vhd->bv", (x + out)[batch.last_tokens], weights[1])
    # Every process reads all of it, so every device has to hold all of it.
    return cache, jax.lax.with_sharding_constraint(logits.argmax(axis=-1), everywhere)


tokens = {"a": [3, 1, 4, 1, 5], "b": [2, 7, 1]}  # of the requests, with what they are served


def run(upload):
    global cache
    cache, picked = step(weights, cache, upload)
    return np.asarray(picked)


def serve(share):
    """A scheduler's loop. ``share`` sees to it that all processes run the same upload."""
    manager = jaxkv.BlockManager(plan, max_requests=4)
    for name in tokens:
        manager.start(name)
    for number in range(12):
        work = {name: len(ids) - manager.num_computed_tokens(name) for name, ids in tokens.items()}
        ids = [token for name, new in work.items() for token in tokens[name][-new:]]
        if (how, index, number) == ("drift", 1, 5):
            ids[0] += 1
        picked = run(share(manager.step(shape, work, extra=ids)))
        for name, token in zip(work, picked.tolist(), strict=False):
            tokens[name].append(token)


def compared(upload):
    jaxkv.step.check_same_upload(upload, mesh)
    return upload


def broadcast(upload):
    return jaxkv.step.broadcast_upload(upload, [shape], mesh)


def receive():
    """The loop of a process without a scheduler."""
    while (upload := broadcast(None)) is not None:
        run(upload)


try:
    if how != "one":
        serve(compared)
    elif index == 0:
        serve(broadcast)
        broadcast(None)  # the end
    else:
        receive()
    jaxkv.check_errors(cache)
    end = "ends"
except RuntimeError as error:
    end = f"stops: {error}"
print(f"process {index} has {tokens} and {end}")
