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
# # 4. Zeroing and NaN: the bug, the cure, the cost
#
# In a hybrid model a block may hold a recurrent state now and keys and values a moment later.
# Attention reads whole blocks and masks what a request has not written. Masking is a product with
# 0, and 0 times NaN is NaN. This notebook makes that happen, cures it, and counts what the cure
# costs.

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import plotting
from jaxkv.block_tables import make_block_tables
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.models import encoder_len, layers_from_config, load_config, model_len, preset_names
from jaxkv.planning import plan_cache
from jaxkv.pool import make_pool, read_tokens, write_state, write_tokens, zero_new_blocks
from jaxkv.specs import FullAttentionSpec, Limits, StateSpec
from jaxkv.step import StepShape, apply_step, pack_step

# %% [markdown]
# One attention layer with fp8 keys and values and one layer with an f32 state. Both lie on the
# same bytes, and the plan knows: fresh blocks of both groups have to be zeroed. The pool is tiny:
# three blocks beside the null block.

# %%
layers = {
    "attention": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype="fp8_e4m3"),
    "state": StateSpec(block_size=16, shapes=((16, 16),), dtypes=("f32",)),
}
limits = Limits(max_in_flight_tokens=16)
plan = plan_cache(layers, 2**20, max_model_len=16, num_blocks_override=4, limits=limits)
print("groups to zero:", plan.groups_to_zero)
plotting.plot_layout(plan.layout)

# %% [markdown]
# ## The bug
#
# Three requests run one after the other. Each writes keys and values of five tokens, all ones, and
# a random state. Then it ends and gives its blocks back.

# %%
ATTENTION, STATE = (plan.layout.place_of(layer).group for layer in ("attention", "state"))


def serve(zero_policy):
    """Serves three requests; returns the pool, the last one's block and who held what."""
    manager, snapshots = BlockManager(plan, max_requests=1, zero_policy=zero_policy), []
    tables, pool = make_block_tables(plan, max_requests=1), make_pool(plan)
    shape = StepShape(entries=1, block_ids=2, zero_ids=1, batch=1, widths=tables.widths, tokens=5)
    for number, name in enumerate("ABC"):
        row = manager.start(name)
        manager.grow(name, 0, 5)
        update = manager.take_update()
        upload = pack_step(shape, update=update, rows=[row], first_positions=[0], lengths=[5])
        tables, pool, batch = apply_step(tables, pool, upload, shape=shape)
        pool = write_tokens(pool, "attention", batch.slots[ATTENTION], *jnp.ones((2, 5, 1, 32)))
        state = jax.random.uniform(jax.random.key(number), (1, 16, 16))
        pool = write_state(pool, "state", batch.block_tables[STATE][0], (state,))
        snapshots.append(plotting.snapshot_blocks(manager))
        manager.finish(name)
    return pool, batch.block_tables[ATTENTION][0], snapshots


pool, block_ids, snapshots = serve("never")
plotting.plot_pool_over_time(plan, snapshots)

# %% [markdown]
# Blocks come back in the order in which they were freed. Request C keeps its keys and values in
# block 2, which held the state of A. It attends to its five tokens the way attention does: mask,
# softmax, product. All values are ones, so the answer has to be ones.


# %%
def attend(pool, block_ids, length):
    keys, values = read_tokens(pool, "attention", block_ids)
    scores = jnp.where(jnp.arange(keys.shape[0]) < length, keys[:, 0].sum(axis=-1), -jnp.inf)
    return jax.nn.softmax(scores) @ values[:, 0]


print(f"block {block_ids} without zeroing:\n{attend(pool, block_ids, 5)}")

# %% [markdown]
# What went wrong lies in the other eleven rows of the block: bytes of the old f32 state, read as
# fp8. Two of 256 byte values are NaN there. The mask made their weights 0, and 0 times NaN is NaN.

# %%
_, values = read_tokens(pool, "attention", block_ids)
print("rows with NaN among the values:", np.flatnonzero(np.isnan(values).any(axis=(1, 2))))

# %% [markdown]
# ## The cure
#
# Zero a block before its new owner reads it. `BlockManager` lists the fresh blocks of each group
# (`zero_policy="when_needed"` is the default) and `apply_step` clears them, padding included,
# before anything of the same step writes.

# %%
pool, block_ids, _ = serve("when_needed")
print(f"block {block_ids} with zeroing:\n{attend(pool, block_ids, 5)}")

# %% [markdown]
# ## Who needs it
#
# Not whoever mixes dtypes, but whoever lets bytes change their meaning. Models with one kind of
# layer, or with windows beside full attention in one dtype and shape, zero nothing by default.
# To keep tenants apart byte for byte there is `zero_policy="always"`.

# %%
needed = {}
for name in preset_names():
    config = load_config(name)
    limits = Limits(max_encoder_tokens=encoder_len(config))
    options = {"max_model_len": model_len(config), "fit_max_model_len": True, "limits": limits}
    flags = plan_cache(layers_from_config(config), 80 * 2**30, **options).groups_to_zero
    needed.setdefault(any(flags), []).append(name)
print("zero fresh blocks:", ", ".join(needed[True]))
print("\nneed not:", ", ".join(needed[False]))

# %% [markdown]
# ## The cost
#
# Only fresh blocks are zeroed, once. A block is written over and over while its owner decodes, so
# the bytes zeroed are few beside the bytes that a step reads. Here is a trace of a small Qwen3-Next
# and the blocks that change hands in it.

# %%
config = load_config("qwen3-next-demo")
options = {"max_model_len": model_len(config), "limits": Limits(max_in_flight_tokens=64)}
demo = plan_cache(layers_from_config(config), 1_000_000, **options)
rng = np.random.default_rng(1)
manager, running, snapshots, names = BlockManager(demo, max_requests=6), {}, [], iter(range(1000))
zeroed = read = 0
for _ in range(160):
    if len(running) < 6 and rng.random() < 0.3 and manager.pool.num_free_blocks > 6:
        name = f"r{next(names)}"
        manager.start(name)
        running[name] = (0, int(rng.integers(20, 120)))
    for name, (computed, total) in list(running.items()):
        target = min(computed + (64 if not computed else 1), total)
        try:
            manager.grow(name, computed, target)
        except OutOfBlocksError:
            target = total
        running[name] = (target, total)
        if target == total:
            manager.finish(name)
            del running[name]
    zeroed += sum(len(ids) for ids in manager.take_update().zero_ids)
    read += sum(manager.held_blocks())
    snapshots.append(plotting.snapshot_blocks(manager))
print(f"{zeroed:,} blocks zeroed, {read:,} read: {100 * zeroed / read:.1f} %")
plotting.plot_pool_over_time(demo, snapshots)

# %% [markdown]
# And the time. On a GPU with Mosaic kernels zeroing runs in place at memory speed; the README has
# figures from an H200. On a CPU the XLA path is taken, so this number says little about serving.

# %%
pool = make_pool(demo)
ids = np.full((len(demo.groups), 8), -1, np.int32)
ids[0, :4] = range(1, 5)
zero = jax.jit(zero_new_blocks, donate_argnums=0)
pool = jax.block_until_ready(zero(pool, ids))  # compiles
start = time.perf_counter()
for _ in range(100):
    pool = zero(pool, ids)
jax.block_until_ready(pool)
each = (time.perf_counter() - start) / 100
print(f"{jax.devices()[0].device_kind}: 4 blocks of {demo.layout.bytes_per_block:,} bytes ", end="")
print(f"in {1e6 * each:,.0f} us")
