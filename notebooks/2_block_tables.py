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
# A **block table** has one row per running request and, per group, the ids of the blocks that the
# request was given. The host decides who gets which block. The device keeps the tables and turns
# them into what kernels read. Tables are immutable: every function takes a state and returns a new
# one.

# %%
import jax
import numpy as np

from jaxkv import plotting
from jaxkv.block_tables import (
    BlockTableError,
    append_block_ids,
    check_overflow,
    gather_block_tables,
    make_block_tables,
    map_slots,
    release_rows,
    swap_rows,
)
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.planning import plan_cache
from jaxkv.specs import FullAttentionSpec, Limits, SlidingWindowSpec, StateSpec
from jaxkv.step import pack_entries

# %% [markdown]
# A small model with three groups: full attention, a window of 9 tokens, recurrent state.

# %%
attention = {"block_size": 4, "num_kv_heads": 2, "head_size": 4, "dtype": "fp8_e4m3"}
state = StateSpec(block_size=4, shapes=((4, 4),), dtypes=("f32",))
layers = {
    "full.0": FullAttentionSpec(**attention),
    "full.1": FullAttentionSpec(**attention),
    "window.0": SlidingWindowSpec(**attention, sliding_window=9),
    "window.1": SlidingWindowSpec(**attention, sliding_window=9),
    "state.0": state,
    "state.1": state,
}
limits = Limits(max_in_flight_tokens=8)
plan = plan_cache(layers, 2**20, max_model_len=40, num_blocks_override=48, limits=limits)
plotting.plot_layout(plan.layout)

# %% [markdown]
# ## Append
#
# `BlockManager` lives on the host. `start` gives a request a row, `grow` gives it the blocks for
# the tokens that the next step computes, `take_update` is what the device has to learn.

# %%
manager = BlockManager(plan, max_requests=6)
tables = make_block_tables(plan, max_requests=6, kernel_block_sizes=[2, 4, 4])
empty = tables


def apply(tables, update):
    # Arrays of fixed sizes, so that nothing compiles twice.
    entries = pack_entries(update.entries, num_groups=3, max_entries=6, max_block_ids=64)
    return append_block_ids(tables, entries)


row = manager.start("r0")
manager.grow("r0", 0, 6)
update = manager.take_update()
print(update)
tables = apply(tables, update)
one_request = tables
print(tables)

# %% [markdown]
# More requests arrive and grow. Entries keep their place in the row, so a row is read by position:
# entry `i` of a group with blocks of 4 tokens holds positions `4 * i` to `4 * i + 3`. The device is
# not told when a window gives a block back: group 1 of r2 still shows nine ids, and the manager
# holds the last few. Gathering, below, hides the others.

# %%
for request, length in {"r1": 20, "r2": 34, "r3": 11}.items():
    manager.start(request)
    for start in range(0, length, 8):
        manager.grow(request, start, min(start + 8, length))
tables = apply(tables, manager.take_update())
print("r2 holds in group 1:", manager.block_ids("r2")[1])
plotting.plot_block_tables(tables)

# %% [markdown]
# ## Gather and expand
#
# A step reads the rows of its batch. `gather_block_tables` returns them at the granularity of the
# kernels: group 0 was made for kernel blocks of 2 tokens, so each id becomes two. `widths` is how
# many blocks per row to return; a small one keeps the step small. Entries wholly below the window
# read 0, the **null block**, because their blocks may belong to somebody else by now.

# %%
rows = np.array([manager.requests["r2"], manager.requests["r3"], -1], np.int32)  # -1: padding
positions = np.array([34, 11, 0], np.int32)
tables, gathered = gather_block_tables(tables, rows, positions, widths=(9, 9, 1))
for group, ids in enumerate(gathered):
    print(f"group {group}\n{ids}")

# %% [markdown]
# ## Slots
#
# `map_slots` says where the row of each new token goes. States have no slots.

# %%
tables, slots = map_slots(tables, rows[:2], positions[:2] - 1)  # the last tokens computed
print(slots)  # [group, token]; -1: none

# %% [markdown]
# ## Old states stay valid
#
# Nothing above changed a table in place. The states that we kept still say what they said.

# %%
for name, kept in {"empty": empty, "one request": one_request, "now": tables}.items():
    print(f"{name:12} {np.asarray(kept.num_blocks).sum(axis=0)} ids by row")

# %% [markdown]
# That costs a copy of the tables for each call. Whoever does not need the old state **donates** it
# in a `jit` of their own. Then the update happens in place and the old state is gone. The library
# never donates behind your back.

# %%
swap = jax.jit(swap_rows, donate_argnums=0)
first, second = np.array([0], np.int32), np.array([3], np.int32)
donated, tables = tables, swap(tables, first, second)
manager.swap_rows(0, 3)
print("old state deleted:", donated.num_blocks.is_deleted())
print("rows:", manager.requests)

# %% [markdown]
# ## What does not fit is dropped and reported
#
# The device never waits for the host, so it cannot raise. It drops what is out of range, changes
# nothing else and remembers why. `check_overflow` raises it, off the hot path. Below, a gathered
# width of 6 is too small for one row in each of two groups, and row 77 does not exist. In the
# picture a line marks the width, and a frame the row that is too long.

# %%
bad, _ = gather_block_tables(tables, rows, positions, widths=(6, 6, 1))
bad = release_rows(bad, np.array([77], np.int32))
try:
    check_overflow(bad)
except BlockTableError as error:
    print(error)
plotting.plot_block_tables(bad, widths=(6, 6, 1))

# %% [markdown]
# ## Sixty steps
#
# Requests come and go, grow by a chunk and then token by token, and lose their blocks when there
# are none left. The window's blocks (hatched orange) return to the pool early.

# %%
rng = np.random.default_rng(0)
manager, lengths, snapshots = BlockManager(plan, max_requests=6), {}, []
names = map("r{}".format, range(1000))
for _ in range(60):
    if len(lengths) < 6 and rng.random() < 0.35:
        name = next(names)
        manager.start(name)
        lengths[name] = (0, int(rng.integers(12, 40)))
    for name, (computed, total) in list(lengths.items()):
        target = min(computed + (8 if computed < 8 else 1), total)
        try:
            manager.grow(name, computed, target)
            lengths[name] = (target, total)
        except OutOfBlocksError:
            total = target  # preempted: it would start again later
        if target == total:
            manager.finish(name)
            del lengths[name]
    snapshots.append(plotting.snapshot_blocks(manager))
plotting.plot_pool_over_time(plan, snapshots)

# %% [markdown]
# In a serving stack the table work, zeroing and copies of a step are one call: `jaxkv.step`. The
# README shows it.
