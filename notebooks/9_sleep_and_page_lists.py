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
# # 9. Sleep and page lists
#
# Two things that an engine wants from a cache besides steps: its memory back for a while (to train,
# or to load other weights), and lists of pages for attention kernels that walk pages by tiles of
# queries.
#
# ## Sleep
#
# `sleep` takes a cache and returns a handle; `wake_up` takes the handle and returns a cache.
#
# | | level 1 | level 2 |
# |---|---|---|
# | keys, values, states | in page-locked host memory | dropped; zero afterwards |
# | block tables | on the host | on the host |
# | scales | stay on the device | stay on the device |
# | requests | go on after `wake_up` | compute everything again |
# | prefixes that the manager keeps | are there | `manager.reset_prefixes()` |
#
# Steps that are compiled stay so: the cache that wakes has the shapes, dtypes and devices that it
# had. The cache must have been an *argument* of the step, because what a function closes over
# becomes a constant of its program, and is never released.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import plotting
from jaxkv.layout import page_list_bytes
from jaxkv.testing import count_compilations

full = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="f32")
window = jaxkv.SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype="f32", sliding_window=24
)
layers = {"full": full, "window": window}
plan = jaxkv.plan_cache(layers, 2**20, max_model_len=128)
manager = jaxkv.BlockManager(plan, max_requests=4)
cache = jaxkv.make_cache(plan, max_requests=4)
shape = jaxkv.StepShape.for_plan(
    plan, max_requests=4, max_tokens=64, cached_tokens=128, forks=4, extra=64
)
table = jax.random.normal(jax.random.key(0), (100, 2, 32))
rng = np.random.default_rng(0)


@jax.jit(donate_argnums=0)
def step(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    x = table[batch.extra]
    for layer in layers:
        cache, out = jaxkv.attend(cache, layer, batch, queries=x, keys=x, values=x)
        x = x + out
    return cache, batch, x[batch.last_tokens]


def serve(name, prompt):
    """Computes what the cache lacks of a prompt. Returns the hit, and the last token's output."""
    global cache
    hit = manager.start(name, prompt)
    rest = prompt[hit.num_cached_tokens :]
    cache, _, out = step(cache, manager.step(shape, {name: len(rest)}, extra=rest))
    manager.finish(name)
    return hit, np.asarray(out[0])


prompt = rng.integers(0, 100, 60)
hit, cold = serve("cold", prompt)
print(f"{hit.num_cached_tokens} tokens cached; the pool: {cache.buffers[0].nbytes:,} bytes")
plotting.plot_block_tables(cache)

# %% [markdown]
# Level 1, in the middle of serving. Nothing is lost, so a prompt still finds its prefix:

# %%
with count_compilations() as compilations:
    sleeping = jaxkv.sleep(cache)
    print(sleeping)
    print(f"on the host: {sleeping.host_bytes:,} bytes")
    cache = jaxkv.wake_up(sleeping)
    hit, warm = serve("warm", prompt)
print(f"{hit.num_cached_tokens} tokens cached; steps compiled again: {len(compilations)}")
np.testing.assert_allclose(warm, cold, atol=1e-5)
assert hit.num_cached_tokens == 48

# %% [markdown]
# A sleeping cache cannot be used by mistake: jax refuses it, and so do its attributes. The cache
# that fell asleep is gone, too.

# %%
sleeping = jaxkv.sleep(cache, level=2)
for use in (lambda: sleeping.buffers, lambda: step(sleeping, shape.idle())):
    try:
        use()
    except jaxkv.sleeping.SleepError as error:
        print(f"SleepError: {error}")

# %% [markdown]
# ## Level 2, and the prefixes that it loses
#
# After level 2 the pool is zero, and the manager cannot know that. Finish all requests, and call
# `reset_prefixes`. Below is the mistake first: the prompt hits blocks of zeros, and the output is
# wrong, without any error.

# %%
cache = jaxkv.wake_up(sleeping)
hit, wrong = serve("wrong", prompt)
print(f"{hit.num_cached_tokens} tokens of zeros: off by {np.abs(wrong - cold).max():.2f}")
assert not np.allclose(wrong, cold, atol=0.01)

print("before", manager.block_use)
manager.reset_prefixes()
print("after ", manager.block_use)
hit, right = serve("right", prompt)
difference = np.abs(right - cold).max()
print(f"{hit.num_cached_tokens} tokens cached, {hit.reasons}: off by {difference:.1g}")
np.testing.assert_allclose(right, cold, atol=1e-5)

# %% [markdown]
# After new weights at level 1 the bytes are there, but old: call `new_epoch` then
# ([notebook 8](8_prefixes_and_rollouts.ipynb)). An RL loop that trains on the same GPU needs both
# memory and a fresh cache:
#
# ```python
# sleeping = jaxkv.sleep(cache, level=2)      # memory for the optimizer
# ...                                         # train
# cache = jaxkv.wake_up(sleeping)
# manager.reset_prefixes()
# ```
#
# `sleep(cache, parts=["kv_cache"])` leaves the small tables on the device. For other *processes* to
# get the memory, jax's allocator must not keep it: see `help(jaxkv.sleeping)`.
# `jaxkv.sleeping.check_not_closed_over(cache, step, cache, upload)` finds caches that a step closes
# over.
#
# ## Page lists
#
# `attend` and kernels like ragged paged attention take block tables. Others walk *tiles*: groups of
# queries that stand next to each other in the flat batch, and for each the pages that any of them
# sees. `build_page_lists` makes padded lists, `build_page_csr` the same end to end with offsets.
# Both follow the rule of the layer: causal, window or chunks.

# %%
prompts = {"a": rng.integers(0, 100, 48), "b": rng.integers(0, 100, 40)}
for name, tokens in prompts.items():
    manager.start(name, tokens)
for work in ({"a": 40}, {"b": 38, "a": 8}):
    extra = np.concatenate(
        [prompts[n][(d := manager.num_computed_tokens(n)) : d + count] for n, count in work.items()]
    )
    upload = manager.step(shape, work, extra=extra)
    cache, batch, _ = step(cache, upload)
print("query_start_loc", batch.query_start_loc, " seq_lens", batch.seq_lens)
plotting.plot_block_tables(cache, batch=batch)

# %%
for layer in layers:
    csr = jaxkv.attention.build_page_csr(cache, layer, batch, q_block_tokens=16)
    jaxkv.check_errors(csr)
    print(f"{layer}: tables")
    print(batch.kernel_block_tables(layer)[:2])
    for tile in range(3):
        at = slice(int(csr.offsets[tile]), int(csr.offsets[tile + 1]))
        pairs = list(zip(csr.requests[at].tolist(), csr.logical_pages[at].tolist(), strict=True))
        print(f"   queries {16 * tile:2} to {16 * tile + 15:2}: pages {csr.pages[at]}", end=" ")
        print("(request, its page):", *pairs)

# %% [markdown]
# The third tile holds the last tokens of `b` and those of `a`, so it lists pages of both. In the
# layer with a window it lists fewer. A page that two requests share is listed for each of them, so
# a kernel counts no key twice if tokens see only pages of their own request.
#
# ## An attention over page lists
#
# That is all a kernel needs: here is one in NumPy, for each tile, over nothing but the lists. It is
# `attend`, with and without the window.


# %%
def tile_attention(csr, view, queries, sliding_window, tile_tokens=16):
    """Attends from [T, H, D] to the pages [P, page_tokens, H, 2 D] of each query's tile."""
    view, out, page_tokens = np.asarray(view), np.zeros_like(queries), view.shape[1]
    requests, positions = np.asarray(csr.token_requests), np.asarray(csr.positions)
    for tile in range(len(csr.offsets) - 1):
        at = slice(int(csr.offsets[tile]), int(csr.offsets[tile + 1]))
        keys, values = np.split(view[np.asarray(csr.pages[at])], 2, axis=-1)
        keys, values = (part.reshape(-1, *part.shape[2:]) for part in (keys, values))
        logical = np.asarray(csr.logical_pages[at])[:, None] * page_tokens
        key_positions = (logical + np.arange(page_tokens)).reshape(-1)
        key_requests = np.asarray(csr.requests[at]).repeat(page_tokens)
        for token in range(tile * tile_tokens, (tile + 1) * tile_tokens):
            position = positions[token]
            seen = (key_requests == requests[token]) & (key_positions <= position)
            seen &= key_positions > position - sliding_window
            if position < 0 or not seen.any():  # padding
                continue
            scores = np.einsum("hd,nhd->hn", queries[token], keys[seen]) / np.sqrt(32)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[token] = np.einsum("hn,nhd->hd", weights, values[seen])
    return out


queries = np.asarray(jax.random.normal(jax.random.key(1), (64, 2, 32)))
for layer, sees in (("full", 10**6), ("window", 24)):
    csr = jaxkv.attention.build_page_csr(cache, layer, batch, q_block_tokens=16)
    view = jaxkv.layer_view(cache, layer)
    _, expected = jax.jit(jaxkv.attend, static_argnums=1)(cache, layer, batch, jnp.asarray(queries))
    out = tile_attention(csr, view, queries, sees)
    np.testing.assert_allclose(out[:46], expected[:46], atol=1e-4)
    print(f"{layer}: differs from attend by {np.abs(out[:46] - expected[:46]).max():.0e}")

# %% [markdown]
# ## FlexAttention and FlashInfer
#
# PyTorch's **FlexAttention** walks distinct pages of the pool and asks a mask function about each
# pair of query and slot. `block_mask_indices` makes `kv_num_blocks` and `kv_indices` for
# `BlockMask.from_kv_blocks`, and `physical_to_logical` the map that its mask function needs. That
# map is the largest array here (requests times pages of the pool); kernels that read the lists
# above need none.

# %%
lists = jaxkv.attention.build_page_lists(cache, "full", batch, q_block_tokens=16)
indices = jaxkv.attention.block_mask_indices(lists)
back = jaxkv.attention.physical_to_logical(cache, "full", batch)
for made in (lists, indices, back):
    jaxkv.check_errors(made)
print("kv_num_blocks", indices.kv_num_blocks)
print("kv_indices of the third tile", indices.kv_indices[2, : int(indices.kv_num_blocks[2])])
print("size of the map", back.logical_pages.shape)

# %% [markdown]
# **FlashInfer** wants one list per request (`kv_indptr`, `kv_indices`, `kv_last_page_len`), a few
# lines from `batch.kernel_block_tables(layer)` in [notebook 5](5_your_own_engine.ipynb).
#
# ## Sizes, before you serve
#
# The arrays have static shapes. `page_list_sizes` works them out for a step shape, before anything
# is allocated. In small pools lists are shorter if no two requests share a block
# (`pages_are_shared=False`), but prefix caching and forks share blocks.

# %%
for layer in layers:
    sizes = jaxkv.attention.page_list_sizes(cache, layer, shape, q_block_tokens=16)
    print(f"{layer:<6} {sizes.num_query_groups} tiles:", end=" ")
    print(f"lists of {sizes.list_width} pages, {page_list_bytes(sizes):,} bytes; CSR of", end=" ")
    print(f"{sizes.csr_capacity} pages, {page_list_bytes(sizes, 'csr'):,} bytes")
