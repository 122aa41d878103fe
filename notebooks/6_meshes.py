# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Meshes: heads, positions, several processes
#
# One cache can lie on many devices. This notebook divides it by head and by position, under
# explicit axes too, and then runs it in several processes, as on several hosts. Virtual devices of
# a CPU stand in for GPUs. Nothing else changes on a GPU.

# %%
import os
import socket
import subprocess
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv import plotting

jax.config.update("jax_num_cpu_devices", 4)
devices = np.array(jax.devices("cpu"))
HEADS, SIZE, TOKENS = 4, 16, 8


def make_plan(num_kv_heads, **options):
    spec = jaxkv.FullAttentionSpec(
        block_size=4, num_kv_heads=num_kv_heads, head_size=SIZE, dtype="f32"
    )
    return jaxkv.plan_cache(
        {"layer": spec}, 2**20, max_model_len=32, num_blocks_override=24, **options
    )


@jax.jit(donate_argnums=0)
def step(cache, upload, queries, keys, values):
    cache, batch = jaxkv.apply_step(cache, upload)
    cache, out = jaxkv.attend(cache, "layer", batch, queries, keys, values)
    return cache, out, batch


def serve(plan, cache, spec=None):
    """Three steps of two requests. Returns the cache, the batch and what was attended to."""
    manager = jaxkv.BlockManager(plan, max_requests=2)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=TOKENS)
    for name in "ab":
        manager.start(name)
    rng, outs = np.random.default_rng(0), []
    for work in ({"a": 6, "b": 2}, {"a": 1, "b": 5}, {"b": 3, "a": 4}):
        shapes = [(TOKENS, heads, SIZE) for heads in (2 * HEADS, HEADS, HEADS)]
        arrays = [rng.normal(size=one).astype(np.float32) for one in shapes]
        if spec is not None:
            arrays = jax.device_put(arrays, spec)
        cache, out, batch = step(cache, manager.step(shape, work), *arrays)
        outs.append(np.asarray(out))
    jaxkv.check_errors(cache)
    return cache, batch, np.stack(outs)


plan = make_plan(HEADS)
cache = jaxkv.make_cache(plan, max_requests=2, device=devices[0])
_, _, expected = serve(plan, cache)
print(f"a page of {HEADS} heads has {plan.groups[0].specs[0].page_bytes:,} bytes")

# %% [markdown]
# ## Heads: tensor parallelism
#
# The plan is that of **one** rank: its share of the KV heads and its memory. Its pages are half
# as large. (`layers_from_config(..., tensor_parallel=2)` makes such layers
# of a configuration; where there are fewer KV heads than ranks, each head is kept more than once.)

# %%
half = make_plan(HEADS // 2)
print(f"a page of {HEADS // 2} heads has {half.groups[0].specs[0].page_bytes:,} bytes")

# %% [markdown]
# `make_cache(plan, mesh=, axis=)` makes one cache over all ranks. Your step stays as it is:
# `attend` and all the others run on every device by themselves. Queries, keys and values have all
# heads. Block ids mean the same on all devices, so there is one `BlockManager`, and the tables are
# on each.

# %%
mesh = Mesh(devices[:2], ("heads",))
cache = jaxkv.make_cache(half, max_requests=2, mesh=mesh, axis="heads")
cache, batch, outs = serve(half, cache)
print("differs from one device by", f"{np.abs(outs - expected).max():.1g}")
for shard in cache.buffers[0].addressable_shards:
    print(shard.device, "holds", shard.data.shape, "of", cache.buffers[0].shape)
plotting.plot_block_tables(cache, batch=batch)

# %% [markdown]
# Other axes of the mesh repeat the pool. `make_cache(plan, mesh=mesh)` without an axis is refused,
# because it may mean two things. To give every device all of the pool, say so:

# %%
try:
    jaxkv.make_cache(plan, max_requests=2, mesh=mesh)
except ValueError as error:
    print(error)
everywhere = NamedSharding(mesh, PartitionSpec())
print(jaxkv.make_cache(plan, max_requests=2, device=everywhere).buffers[0].sharding)

# %% [markdown]
# ## Explicit axes
#
# With `AxisType.Explicit` shardings are part of the types of your arrays. The cache fits in: what
# goes in by head comes out by head. A step that has compiled once does not compile again.

# %%
explicit = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,), devices=devices[:2])
with jax.set_mesh(explicit):
    cache = jaxkv.make_cache(half, max_requests=2, mesh=explicit, axis="heads")
    _, _, outs = serve(half, cache, PartitionSpec(None, "heads"))
print("differs from one device by", f"{np.abs(outs - expected).max():.1g}")

# %% [markdown]
# ## Positions: context parallelism
#
# Long requests may outgrow the memory of one device. `plan_cache(context_parallel=2)` gives the
# positions of each request to two ranks in turns, `interleave_tokens` at a time. Each rank
# attends to what it has, and `attend` combines the two. It is for groups that keep all tokens,
# not for windows and states.

# %%
divided = make_plan(HEADS, context_parallel=2)
mesh = Mesh(devices[:2], ("context",))
cache = jaxkv.make_cache(divided, max_requests=2, interleave_tokens=2, mesh=mesh, axis="context")
cache, _, outs = serve(divided, cache)
print("differs from one device by", f"{np.abs(outs - expected).max():.1g}")

# %% [markdown]
# Slots differ by rank, so they are known inside of `jax.shard_map`, where a kernel of your own
# would run, too. -1: the token is on the other device.

# %%
manager = jaxkv.BlockManager(divided, max_requests=2)
manager.start("a")
shape = jaxkv.StepShape.for_plan(divided, max_requests=2, max_tokens=TOKENS)


def slots_of_rank(cache, upload):
    _, batch = jaxkv.apply_step(cache, upload)
    return batch.slot_mapping("layer")[None]


fresh = jaxkv.make_cache(divided, max_requests=2, interleave_tokens=2, mesh=mesh, axis="context")
slots = jax.shard_map(
    slots_of_rank,
    mesh=mesh,
    in_specs=(fresh.partition_specs(), PartitionSpec()),
    out_specs=PartitionSpec("context"),
    check_vma=False,
)
for rank, row in enumerate(jax.jit(slots)(fresh, manager.step(shape, {"a": 8}))):
    print(f"rank {rank}: slots of tokens 0 to 7:", row)

# %% [markdown]
# ## Replicas: data parallelism
#
# Replicas serve different requests, so each has a cache, tables and books of its own, on its own
# part of the mesh. They need not run in step. Weights may be shared as your model likes. (Models
# whose replicas meet within a step, to exchange experts, say, have to call their steps together.)

# %%
for devices_of_replica in Mesh(devices.reshape(2, 2), ("data", "heads")).devices:
    mesh = Mesh(devices_of_replica, ("heads",))
    cache = jaxkv.make_cache(half, max_requests=2, mesh=mesh, axis="heads")
    _, _, outs = serve(half, cache)  # with a BlockManager of its own
    print([device.id for device in mesh.devices], f"{np.abs(outs - expected).max():.1g}")

# %% [markdown]
# ## Several processes, several hosts
#
# JAX runs one program in many processes. After `jax.distributed.initialize`, `jax.devices()` lists
# the devices of all of them, and a mesh may span them. Every process makes the same calls: plan,
# `make_cache`, `apply_step`, `sleep`, `wake_up`. Each holds its own shards, and nothing ever
# gathers a pool in one place. What must be the same everywhere is the **upload** of each step. Two
# ways:
#
# - **A scheduler in each process.** The same calls in the same order give the same uploads, to the
#   byte, whatever `PYTHONHASHSEED` is. (Your side of it: no clocks, and no order of a `set`.)
#   `check_same_upload(upload, mesh)` before the step makes sure: it raises in **all** processes,
#   in the step where they differ. Without it, uploads that differ would be applied in silence, and
#   steps of different shapes would wait for each other for good.
# - **One scheduler.** Process 0 packs, and the others receive, through `broadcast_upload`. They
#   need no books and see no requests.
#
# `serve_processes.py`, next to this notebook, does both. Its commands, for a GPU on
# each of two hosts:
#
# ```sh
# host-a$ python serve_processes.py 0 2 host-a:9911 each
# host-b$ python serve_processes.py 1 2 host-a:9911 each
# ```
#
# On one host, give each process its GPU by `CUDA_VISIBLE_DEVICES=0` and `1`. A process may have
# several GPUs. Under Slurm, Open MPI and on clouds `jax.distributed.initialize()` finds its
# arguments. Here are both processes on this machine, with a virtual device each:


# %%
def launch(how, count=2):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = [sys.executable, "serve_processes.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*script, str(index), str(count), address, how], env=environment, **pipes)
        for index in range(count)
    ]
    for process in processes:
        lines = "".join(process.communicate()).splitlines()
        print(*[line for line in lines if line.startswith("process ")], sep="\n")


launch("one")

# %% [markdown]
# Process 1 has seen no request. With a scheduler in each, and a mistake in the sixth step of one of
# them, no process runs that step:

# %%
launch("drift")

# %% [markdown]
# ## What it costs, and what it waits for
#
# Microseconds per step on two H200s of one host, one process each, 256 decodes, an upload of 8 kB;
# medians of two runs of `python -m tests.hosts` (jax 0.11.2):
#
# | | over the GPUs (NCCL) | over the CPUs (gloo) |
# |---|---|---|
# | the step alone | 268, 352 | |
# | with `check_same_upload` | 840, 845 | 667, 707 |
# | with `broadcast_upload` | 849, 858 | 697, 752 |
# | with `multihost_utils.broadcast_one_to_all` | 1,091, 1,184 | |
#
# Both functions exchange over the mesh that you pass. Over GPUs they wait for the steps before.
# Pass `Mesh(jax.devices("cpu"), ("hosts",))` to let CPUs talk, next to whatever the GPUs do.
#
# ## When a process ends
#
# - **It is killed.** On CPUs an exchange or a step of the others raises at once. Collectives of
#   GPUs wait, until `jax` ends all processes because heartbeats are missed: after 100 seconds, or
#   `jax.distributed.initialize(heartbeat_timeout_seconds=)`. With 10 it took 8 to 10 seconds.
# - **Process 0 is killed.** `jax` ends the others at once, because the coordinator is gone.
# - **It raises.** At its exit it waits for the others, which wait for it in a collective. `jax`
#   ends all after 300 seconds, or `shutdown_timeout_seconds=`.
#
# So give `jax.distributed.initialize` short timeouts, and start **all** processes anew. Begin with
# new books and a new cache: `make_cache` zeroes it, and uploads are numbered from 1. Nothing half
# done passes for whole: after a step that failed, reading the cache raises; old books with a new
# cache, or the other way round, are reported by `check_errors` as lost or repeated uploads. A
# sleeping cache belongs to its process, and its copies on the host end with it.
