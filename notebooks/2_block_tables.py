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
# # 2. Block tables: the life of a request
#
# A **block table** has one row per running request and, per group of layers, the ids of the blocks
# that the request was given. The host decides who gets which block. The device keeps the tables
# and turns them into the numbers that kernels read. This notebook follows a few requests through
# both.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import plotting

# %% [markdown]
# A small model with three groups: full attention, a window of 9 tokens, recurrent states. Blocks
# hold 4 tokens.

# %%
kv = {"block_size": 4, "num_kv_heads": 2, "head_size": 4, "dtype": "bf16"}
state = jaxkv.StateSpec(block_size=4, shapes=((4, 8),), dtypes=("f32",))
layers = {
    "full.0": jaxkv.FullAttentionSpec(**kv),
    "full.1": jaxkv.FullAttentionSpec(**kv),
    "window.0": jaxkv.SlidingWindowSpec(**kv, sliding_window=9),
    "window.1": jaxkv.SlidingWindowSpec(**kv, sliding_window=9),
    "state.0": state,
    "state.1": state,
}
plan = jaxkv.plan_cache(
    layers,
    2**20,
    max_model_len=40,
    num_blocks_override=48,  # few, so that the pictures stay small
    limits=jaxkv.Limits(max_in_flight_tokens=8),  # of one request in one step
)
plotting.plot_layout(plan.layout)

# %% [markdown]
# ## A step
#
# `BlockManager` keeps the books on the host, `make_cache` allocates tables and pool on the device,
# and a `StepShape` fixes the sizes of a step, so that nothing compiles twice. All three are made
# from the plan. Group 0 gets kernel blocks of 2 tokens, because its kernel wants them.

# %%
manager = jaxkv.BlockManager(plan, max_requests=4)
cache = jaxkv.make_cache(plan, max_requests=4, kernel_block_sizes=[2, 4, 4])
shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=12, batch_size=3, forks=2)
print(manager, cache, shape, sep="\n")

# %% [markdown]
# `start` gives a request a row. `step` gives all requests of a step the blocks for their next
# tokens, or raises and changes nothing, and packs all that the device must learn into one array.
# `apply_step` brings the cache up to date and returns the **batch**: the step as the model sees it.
# In your own code it is the first line of your jitted step. The cache is donated, so the update
# happens in place.

# %%
apply_step = jax.jit(jaxkv.apply_step, donate_argnums=0)

manager.start("a")
manager.start("b")
upload = manager.step(shape, {"a": 6, "b": 3})  # request -> new tokens
cache, batch = apply_step(cache, upload)
print(f"upload: int32{list(upload.data.shape)}")
for name in ("query_start_loc", "num_computed_tokens", "seq_lens", "positions"):
    print(f"{name:20}", getattr(batch, name))

# %% [markdown]
# The shape has room for 3 requests and 12 tokens, and two requests came with 9 tokens. So the third
# request has no tokens, and the last three tokens have position -1. Each token has a **slot** in
# every layer that stores tokens: `block_id * 4 + offset` here. Each request has a row of block ids,
# padded with 0, the **null block** that nobody owns.

# %%
print("slot_mapping of window.0:", batch.slot_mapping("window.0"))
print("block_tables of window.0:", *batch.kernel_block_tables("window.0"), sep="\n")

# %% [markdown]
# `write_tokens` and `read_tokens` take the batch, so you never pass slots or block ids yourself.
# Here each key is the number of its token.

# %%
marks = jnp.broadcast_to(batch.positions[:, None, None].astype(jnp.bfloat16), (12, 2, 4))
for layer in ("full.0", "full.1", "window.0", "window.1"):
    cache = jaxkv.write_tokens(cache, layer, batch, marks, marks)
keys, _ = jaxkv.read_tokens(cache, "full.0", batch)
print("keys of a:", keys[0, :8, 0, 0])  # whole blocks: 6 and 7 are not written yet

# %% [markdown]
# ## Kernel blocks
#
# Blocks of group 0 are two kernel blocks each, so its tables name twice as many ids. Layers of one
# size lie in one buffer, one after the other, and `layer_view` returns all of that buffer. So the
# ids of the second layer start where those of the first end: 48 blocks of two kernel blocks later.

# %%
print("blocks of a:       ", manager.block_ids("a")[0])
for layer in ("full.0", "full.1"):
    view = jaxkv.layer_view(cache, layer)
    print(f"{layer} as {view.shape}:", batch.kernel_block_tables(layer)[0, :6])

# %% [markdown]
# ## Windows start in the middle of a row
#
# A block keeps its column for as long as the request holds it: column `i` of a group with blocks
# of 4 tokens holds positions `4 * i` to `4 * i + 3`. Blocks that leave the window go back to the
# pool, and a step reads the row from the first visible block on. Below, what the
# last step reads is dark. Pale ids are leftovers: those blocks may belong to other requests by now.

# %%
for tokens in (8, 8, 8):
    cache, batch = apply_step(cache, manager.step(shape, {"a": tokens, "b": 4}))
plotting.plot_block_tables(cache, batch=batch)

# %% [markdown]
# Tables of the batch start at the first dark id, and `first_positions` says which token that is. A
# kernel of your own needs both; `jaxkv.attend` takes the batch and needs neither. On the host,
# blocks that were given back read 0:

# %%
print("the manager's row of a:", manager.block_ids("a")[1])
print("block_tables of a:     ", batch.kernel_block_tables("window.0")[0])
print("first_positions:       ", batch.first_positions("window.0"), "of seq_lens", batch.seq_lens)

# %% [markdown]
# ## Fork, and copy on write
#
# `fork` starts requests that share the blocks of another one, for parallel samples or a common
# prompt. Nothing is copied until a request writes into a shared block. Then it gets a block of its
# own, which starts as a copy, in the same step. The `forks` of the shape are room for that.

# %%
manager.fork("b", ["c"])
for name in "bc":
    print(f"{name} after the fork:", *manager.block_ids(name))
cache, batch = apply_step(cache, manager.step(shape, {"c": 1}))
for name in "bc":
    print(f"{name} after the step:", *manager.block_ids(name))

# %% [markdown]
# Request c has 15 tokens, so its next one goes into the fourth block of both attention groups, and
# every token changes the state. These three are copies. The blocks before are still shared (but for
# the first one of the window, which c will never read), and c reads from them what b wrote:

# %%
keys, _ = jaxkv.read_tokens(cache, "full.0", batch)
print("first keys of c:", keys[0, :3, 0, 0])

# %% [markdown]
# ## Rewind
#
# Speculative decoding computes draft tokens and rejects some. `rewind` sets the request back. Its
# blocks stay, and the next step writes over the rejected tokens. That is all for keys and values. A
# recurrent state cannot be taken back, and the manager says so:

# %%
cache, batch = apply_step(cache, manager.step(shape, {"b": 4}))  # one token and three drafts
try:
    manager.rewind({"b": 17})  # two of the drafts are rejected
except ValueError as error:
    print(error)

# %% [markdown]
# With `speculative_blocks=3` each of three drafts has a block for its state. `write_state` writes
# them (`at=`), and `read_state` reads the one after the last accepted draft.

# %%
spec = dataclasses.replace(state, speculative_blocks=3)
drafts = {"full.0": layers["full.0"], "state.0": spec}
drafts = jaxkv.plan_cache(drafts, 2**20, max_model_len=40)
books = jaxkv.BlockManager(drafts, max_requests=1)
books.start("b")
for num_tokens in (15, 4):
    books.step(jaxkv.StepShape.for_plan(drafts, max_requests=1, max_tokens=16), {"b": num_tokens})
books.rewind({"b": 17})
print(books.num_computed_tokens("b"), "tokens; blocks with states:", books.block_ids("b")[1])

# %% [markdown]
# ## What does not fit is dropped and reported
#
# A jitted function cannot raise. It drops what is wrong, does the rest, and sets a flag in the
# cache. `check_errors` raises what the flags say; it waits for the device, so call it every hundred
# steps or so. Here an upload gets lost, and the next one is applied twice.

# %%
manager.step(shape, {"a": 4})  # lost: never applied
upload = manager.step(shape, {"a": 1})
apply_to_copy = jax.jit(jaxkv.apply_step)  # without donation the old cache stays valid
broken, _ = apply_to_copy(cache, upload)
broken, _ = apply_to_copy(broken, upload)
try:
    jaxkv.check_errors(broken)
except jaxkv.CacheError as error:
    print(*str(error).split("; "), sep="\n")

# %% [markdown]
# ## Sixty steps
#
# Requests come and go, grow by a chunk and then token by token. When blocks run out, the youngest
# request is preempted: `finish` gives its blocks back, and a scheduler would start it again later.
# Blocks of the window (orange) return to the pool early.

# %%
rng = np.random.default_rng(0)
manager = jaxkv.BlockManager(plan, max_requests=4)
shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=32)
lengths, snapshots = {}, []
for step in range(60):
    if len(lengths) < 4 and rng.random() < 0.35:
        manager.start(f"r{step}")
        lengths[f"r{step}"] = int(rng.integers(12, 41))
    computed = {name: manager.num_computed_tokens(name) for name in lengths}
    work = {name: 8 if computed[name] < 8 else 1 for name in lengths}
    while True:
        try:
            manager.step(shape, work)
            break
        except jaxkv.OutOfBlocksError:
            name, _ = work.popitem()
            manager.finish(name)
            del lengths[name]
    snapshots.append(plotting.snapshot_blocks(manager))
    for name in [n for n in lengths if manager.num_computed_tokens(n) == lengths[n]]:
        manager.finish(name)
        del lengths[name]
plotting.plot_pool_over_time(plan, snapshots)
