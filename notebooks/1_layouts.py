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
# each layer that uses it. This notebook draws where the bytes lie. Nothing here needs a GPU, and
# nothing here allocates memory. All four want `pip install ".[notebooks]"`, from a clone.

# %%
from jaxkv import plotting
from jaxkv.kernel_blocks import (
    LAYOUT_ORDERS,
    AcceptedSizes,
    CacheLayout,
    blocks_per_kv_block,
    select_kernel_block_size,
)
from jaxkv.models import layers_from_config, load_config, model_len
from jaxkv.planning import plan_cache
from jaxkv.specs import FullAttentionSpec

# %% [markdown]
# ## A page
#
# A layer is described by a *spec*. This one keeps keys and values of two heads, 16 tokens to a
# block. The **slot** of a token is `block_id * block_size + offset`: one number that says where
# in the pool its row goes.

# %%
spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bf16")
plotting.plot_page(spec, block_id=3)

# %% [markdown]
# ## Kernel blocks
#
# Attention kernels have block sizes of their own. If two kernels read a layer, one size has to
# suit both and divide the block. Block `b` is then the kernel blocks `b * k .. b * k + k - 1`.
# No byte moves and slots stay what they are: it is a second reading of the same memory.

# %%
backends = {
    "kernel A": AcceptedSizes(multiples_of=4),
    "kernel B": AcceptedSizes(exact={4}),
}
size = select_kernel_block_size(spec.block_size, backends)
k = blocks_per_kv_block(spec, size)
print(f"kernel blocks of {size} tokens; block 3 is kernel blocks {list(range(3 * k, 4 * k))}")
plotting.plot_page(spec, block_id=3, kernel_block_size=size)

# %% [markdown]
# ## Groups
#
# Layers that need the same blocks for the same request share one block table. They are a
# **group**. Qwen3-Next has 36 layers with a recurrent state and 12 with attention. They make four
# groups of 12, and a block belongs to one group at a time. What lies above each other in the
# picture is the same memory. A block is cut into **slots of the pool** (black lines; not the slots
# of tokens above), and one layer of each group lies on each. Numbers in boxes are layers, and
# `12 state @ 544` is twelve state layers in blocks of 544 tokens.

# %%
config = load_config("qwen3-next-80b-a3b")
plan = plan_cache(layers_from_config(config), 40 * 2**30, max_model_len=model_len(config))
plotting.plot_layout(plan.layout)

# %% [markdown]
# A state is as large as the keys and values of 536 tokens, so the attention block has grown
# to 544 tokens to fill the same page. What a state does not fill is padding:

# %%
state = plan.groups[0].specs[0]
plotting.plot_page(state)

# %% [markdown]
# Groups need not be equally large. Gemma 3 has 52 layers with a sliding window and 10 with full
# attention. Groups of 8 and 9 layers leave slots of a block unused (hatched).

# %%
config = load_config("gemma-3-27b")
gemma = plan_cache(layers_from_config(config), 40 * 2**30, max_model_len=model_len(config))
plotting.plot_layout(gemma.layout)

# %% [markdown]
# ## Six physical orders
#
# Where an element lies is a matter of the order of five axes: layer (L), block (B), head (H),
# token (N) and content (C, what one head stores for one token). The order decides what is
# contiguous: the page of one layer, which kernels like, or a whole block over all layers, which
# one transfer can move. The pictures come from the strides that `CacheLayout` returns.

# %%
plotting.plot_orders()

# %% [markdown]
# The same as numbers, for the spec above, 100 blocks and 2 layers. A kernel view needs one stride
# from each kernel block to the next. Where other heads or layers lie between, there is none, and
# it is refused.

# %%
for order in LAYOUT_ORDERS:
    layout = CacheLayout(order)
    view = layout.view(spec, num_blocks=100, num_layers=2)
    try:
        layout.view(spec, num_blocks=100, num_layers=2, kernel_block_size=4)
        kernel_view = "yes"
    except ValueError:
        kernel_view = "no"
    print(f"{order}  {view.axes} {view.shape!s:18} strides {view.strides!s:22} ", end="")
    print(f"kernel blocks of 4: {kernel_view}")

# %% [markdown]
# A pool that is made for a kernel has its blocks cut into **tiles** of that kernel's size. Then
# every order has the view, and whole blocks are moved as bytes.

# %%
plotting.plot_order(CacheLayout("LBHNC", tile_tokens=2))
