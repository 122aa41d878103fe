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
# # 1. Layouts: pages, groups, kernel blocks, orders
#
# A paged cache is cut into **blocks** of one size, numbered from 0. A block holds one **page** for
# each layer that uses it. This notebook draws the place of every byte. It needs no GPU. All
# notebooks want `pip install ".[notebooks]"`, from a clone.

# %%
import jaxkv
from jaxkv import plotting
from jaxkv.layout import ORDERS, AcceptedSizes, PhysicalOrder, select_kernel_block_sizes

# %% [markdown]
# ## A page
#
# A *spec* describes a layer. This one keeps keys and values of two heads, 16 tokens to a block.
# The **slot** of a token is `block_id * block_size + offset`: one number for its place in the
# pool.

# %%
spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bf16")
plotting.plot_page(spec, block_id=3)

# %% [markdown]
# ## Kernel blocks
#
# Attention kernels have block sizes of their own. If two kernels read a layer, one size has to
# suit both and divide the block. Block `b` is then the kernel blocks `b * k .. b * k + k - 1`.
# No byte moves and slots stay the same: it is a second reading of the same memory.

# %%
layers = {"layers.0": spec, "layers.1": spec}
plan = jaxkv.plan_cache(layers, 2**20, max_model_len=512)
kernels = {"kernel A": AcceptedSizes(multiples_of=4), "kernel B": AcceptedSizes(exact=(4,))}
sizes = select_kernel_block_sizes(plan.groups, [kernels])
print("kernel_block_sizes, per group:", sizes)
plotting.plot_page(spec, block_id=3, kernel_block_size=sizes[0])

# %% [markdown]
# ## Groups
#
# Layers that need the same blocks for the same request share one block table. They are a
# **group**. Qwen3-Next has 36 layers with a recurrent state and 12 with attention. They make four
# groups of 12, and a block belongs to one group at a time. So layers above each other in the
# picture are the same memory. The pool consists of 12 **tensors** (between black lines): each has
# one page per block, which one layer of every group uses. Numbers in boxes are layers, and
# `12 state @ 544` is twelve layers with states, in blocks of 544 tokens.

# %%
config = jaxkv.load_config("qwen3-next-80b-a3b")
options = {"max_model_len": jaxkv.hf_config.model_len(config)}
qwen = jaxkv.plan_cache(jaxkv.layers_from_config(config), 40 * 2**30, **options)
plotting.plot_layout(qwen.layout)

# %% [markdown]
# A state is as large as the keys and values of 536 tokens, so the plan lets attention blocks grow
# to 544 tokens until a state fits. The rest of a state's page is padding:

# %%
plotting.plot_page(qwen.groups[0].specs[0])

# %% [markdown]
# Groups need not be equally large. Gemma 3 has 52 layers with a sliding window and 10 with full
# attention. In groups of 8, 9 and 10 layers some tensors of a block stay unused (hatched).

# %%
config = jaxkv.load_config("gemma-3-27b")
options = {"max_model_len": jaxkv.hf_config.model_len(config)}
gemma = jaxkv.plan_cache(jaxkv.layers_from_config(config), 40 * 2**30, **options)
plotting.plot_layout(gemma.layout)

# %% [markdown]
# ## Six physical orders
#
# The place of an element follows from the order of five axes: layer (L), block (B), head (H),
# token (N) and content (C, the elements of one head of one token). The order decides what is
# contiguous: the page of one layer, which kernels like, or a whole block over all layers, which
# one transfer can move. `make_cache(plan, order=...)` takes any of them.

# %%
plotting.plot_orders()

# %% [markdown]
# `describe_layer` gives the same as numbers, for kernels and connectors. In LBNHC and LHBNC,
# kernel blocks of 4 tokens are a second reading of the same bytes. In the other orders heads or
# layers would lie between them, so a cache that is made for such a kernel stores its blocks as
# **tiles** of 4 tokens. Then every order has a view.

# %%
print(f"{'order':6} {'axes':5} {'shape':18} {'strides in bytes':23} tiles")
for order in ORDERS:
    for size in (16, 4):
        # Without a pool: only the numbers are of interest here.
        cache = jaxkv.make_cache(
            plan, max_requests=1, order=order, kernel_block_sizes=[size], tables_only=True
        )
        view = jaxkv.pool.describe_layer(cache, "layers.1")
        tiles = cache.layout.buffers.tiles[0]
        print(f"{order:6} {view.axes:5} {view.shape!s:18} {view.strides_bytes!s:23} {tiles}")

# %% [markdown]
# A block of four tokens in tiles of two, once more drawn as memory:

# %%
plotting.plot_orders([PhysicalOrder("LBHNC", tile_tokens=2)])
