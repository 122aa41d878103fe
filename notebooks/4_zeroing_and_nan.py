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
# # 4. Zeroing and NaN: the bug, two cures, the cost
#
# In a hybrid model a block may hold a recurrent state now and keys and values a moment later.
# Attention kernels read whole blocks and mask the tokens that a request has not written. If they
# mask only the logits, a weight of 0 meets an old value, and 0 times NaN is NaN. This notebook
# makes that happen, prevents it in two ways, and counts the cost.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import plotting
from jaxkv.hf_config import encoder_len, preset_names

# %% [markdown]
# One attention layer with fp8 keys and values, and one layer with a float32 state. Both lie on the
# same bytes, and the plan knows it. The pool is tiny: three blocks, and the null block that nobody
# owns.

# %%
layers = {
    "attention": jaxkv.FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype="fp8_e4m3"
    ),
    "state": jaxkv.StateSpec(block_size=16, shapes=((16, 16),), dtypes=("f32",)),
}


def make_plan(zero_policy):
    return jaxkv.plan_cache(
        layers, 2**20, max_model_len=16, num_blocks_override=4, zero_policy=zero_policy
    )


plan = make_plan("when_needed")
print("groups whose fresh blocks are zeroed:", plan.groups_to_zero)

# %% [markdown]
# ## The bug
#
# Three requests run one after the other. Each writes keys and values of five tokens, all ones, and
# a random state. Then it ends and gives its blocks back. The plan is told not to zero anything.


# %%
@jax.jit(donate_argnums=0)
def model_step(cache, upload, state):
    cache, batch = jaxkv.apply_step(cache, upload)
    ones = jnp.ones((5, 1, 32))
    cache = jaxkv.write_tokens(cache, "attention", batch, ones, ones)
    cache = jaxkv.write_state(cache, "state", batch, [state])
    return cache, batch


def serve(plan):
    manager = jaxkv.BlockManager(plan, max_requests=1)
    cache = jaxkv.make_cache(plan, max_requests=1)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=1, max_tokens=5)
    snapshots = []
    for number, name in enumerate("ABC"):
        manager.start(name)
        state = jax.random.uniform(jax.random.key(number), (1, 16, 16))
        cache, batch = model_step(cache, manager.step(shape, {name: 5}), state)
        snapshots.append(plotting.snapshot_blocks(manager))
        manager.finish(name)
    return cache, batch, snapshots


cache, batch, snapshots = serve(make_plan("never"))
plotting.plot_pool_over_time(plan, snapshots)

# %% [markdown]
# Blocks come back in the order in which they were freed. Request C keeps its keys and values in
# block 2, which held the state of A. Its attention below is what many kernels do: mask the logits,
# softmax, product. All values are ones, so the answer has to be ones.


# %%
@jax.jit
def attend_masking_logits(cache, batch, queries):
    keys, values = (x[0, :, 0] for x in jaxkv.read_tokens(cache, "attention", batch))
    visible = jnp.arange(keys.shape[0]) <= batch.positions[:, None]
    scores = jnp.where(visible, queries[:, 0] @ keys.T, -jnp.inf)
    return jax.nn.softmax(scores) @ values


queries = jnp.ones((5, 1, 32))
print(attend_masking_logits(cache, batch, queries)[-1])  # of the last token

# %% [markdown]
# The other eleven rows of the block are bytes of the old float32 state, read as fp8. Two of 256
# byte values are NaN there. The mask made their weights 0, and 0 times NaN is NaN.

# %%
_, values = jaxkv.read_tokens(cache, "attention", batch)
print("rows with NaN among the values:", np.flatnonzero(np.isnan(values[0]).any(axis=(1, 2))))

# %% [markdown]
# ## The first cure: mask the values, too
#
# `jaxkv.attend` replaces values that a token must not see before it multiplies. Stale bytes never
# reach its output, whatever they are. The cache is the same one, nothing was zeroed:

# %%
attend = jax.jit(jaxkv.attend, static_argnums=1)
_, output = attend(cache, "attention", batch, queries)  # no keys: writes nothing
print(output[-1, 0])

# %% [markdown]
# ## The second cure: zero fresh blocks
#
# If your kernel masks only logits, a block has to be zeroed before its new owner reads it.
# `BlockManager` lists the fresh blocks of the groups that need it, and `apply_step` clears them,
# padding included, before anything of the same step is written. The plan decides:
# `zero_policy="when_needed"` is the default.

# %%
cache, batch, _ = serve(make_plan("when_needed"))
print(attend_masking_logits(cache, batch, queries)[-1])

# %% [markdown]
# ## Models that need zeroing
#
# They are not those that mix dtypes, but those that let bytes change their meaning. Models with
# one kind of layer, or with windows next to full attention in one dtype and shape, zero nothing by
# default. `zero_policy="always"` is for tenants who must never read each other's bytes.

# %%
needed = {True: [], False: []}
for name in preset_names():
    config = jaxkv.load_config(name)
    preset = jaxkv.plan_cache(
        jaxkv.layers_from_config(config),
        80 * 2**30,
        max_model_len=jaxkv.hf_config.model_len(config),
        fit_max_model_len=True,
        limits=jaxkv.Limits(max_encoder_tokens=encoder_len(config)),
    )
    needed[any(preset.groups_to_zero)].append(name)
print("zero fresh blocks:", ", ".join(needed[True]))
print("\nneed not:", ", ".join(needed[False]))

# %% [markdown]
# ## The cost
#
# Only fresh blocks are zeroed, once. A request reads its blocks again and again while it decodes,
# so the blocks that are zeroed are few next to those that are read. Here is a trace of a small
# Qwen3-Next, and the blocks that change hands in it.

# %%
config = jaxkv.load_config("qwen3-next-demo")
small = jaxkv.plan_cache(
    jaxkv.layers_from_config(config),
    1_000_000,
    max_model_len=jaxkv.hf_config.model_len(config),
    limits=jaxkv.Limits(max_in_flight_tokens=64),
)
manager = jaxkv.BlockManager(small, max_requests=6)
shape = jaxkv.StepShape.for_plan(small, max_requests=6, max_tokens=256)
rng = np.random.default_rng(1)
lengths, snapshots, zeroed, read = {}, [], 0, 0
for step in range(160):
    if len(lengths) < 6 and rng.random() < 0.3 and manager.num_free_blocks > 6:
        manager.start(f"r{step}")
        lengths[f"r{step}"] = int(rng.integers(20, 120))
    left = {name: total - manager.num_computed_tokens(name) for name, total in lengths.items()}
    work = {name: min(left[name], 1 if left[name] < lengths[name] else 64) for name in lengths}
    upload = manager.step(shape, work)
    zeroed += upload.parts()["zero_ids"].size
    read += sum(manager.allocated_blocks())
    snapshots.append(plotting.snapshot_blocks(manager))
    for name in [name for name in lengths if left[name] == work[name]]:
        manager.finish(name)
        del lengths[name]
print(f"{zeroed:,} blocks zeroed, {read:,} read: {100 * zeroed / read:.1f} %")
plotting.plot_pool_over_time(small, snapshots)

# %% [markdown]
# On a GPU a Mosaic kernel zeroes blocks in place, at the speed of memory. The README has figures.
