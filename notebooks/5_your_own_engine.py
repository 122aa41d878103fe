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
# # 5. An engine of your own
#
# You have a serving engine, and it has a loop, a scheduler, block ids or an attention kernel that
# it keeps. This notebook replaces the parts of `jaxkv` one at a time:
#
# | you keep | you call |
# |---|---|
# | your loop and your sampler | `Scheduler`, with `schedule.token_ids` and `scheduler.shape` |
# | your scheduler | `BlockManager.grow` for each request, then `BlockManager.step` |
# | your block ids | `pack_step` with `TableEntry` |
# | your attention kernel | `write_tokens`, `layer_view`, `batch.kernel_block_tables(layer)` |
# | your recurrent rule, unlike `gated_delta` and `mamba2` | `read_state`, `write_state` |
# | your model: `[B, T]` batches, `lax.scan` over layers | `tokens_per_request=`, `layer_index=` |
#
# The order of work in any engine:
#
# 1. **Plan** with `plan_cache`, once weights are loaded and you know the memory that is left. A
#    plan that cannot work raises and says what would help. All below is made from the plan. Say how
#    many tokens of one request a step computes at most, `limits=Limits(max_in_flight_tokens=...)`:
#    layers with a window are charged for them. With tensor parallelism the plan is that of **one**
#    device: its share of the heads (`layers_from_config(..., tensor_parallel=2)`) and its memory.
#    `make_cache(plan, mesh=mesh, axis="heads")` then makes one cache over all devices.
# 2. **Allocate** once: `make_cache` on the device, `BlockManager` on the host, one `StepShape` for
#    each bucket (say decode, and prefill of 8,192 tokens).
# 3. **Warm up**: run your step on `shape.idle()` for each shape. It compiles nothing after that.
# 4. **Step**: the cache and the upload are arguments of your jitted step, which donates the cache
#    and returns it. Never close over a cache. `apply_step` comes first.
# 5. **Write, then attend**, layer by layer. `attend` does both.
# 6. **Check** `check_errors(cache)` every hundred steps or so. It waits for the device.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

import jaxkv
from jaxkv import plotting

jax.config.update("jax_default_matmul_precision", "highest")  # results are compared below

spec = jaxkv.FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="f32")
layers = {f"layers.{i}": spec for i in range(2)}
plan = jaxkv.plan_cache(layers, 2**20, max_model_len=64, num_blocks_override=9)
shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=24)
apply_step = jax.jit(jaxkv.apply_step, donate_argnums=0)
print(plan)

# %% [markdown]
# ## Your loop
#
# `Scheduler` chooses the work of each step. It reads `tokens`, which you keep up to date, so that
# `schedule.token_ids` has the ids in the order of the upload, and `scheduler.shape` knows all sizes
# but those that you choose. The model's side is `StepContext`, as in `jaxkv.Engine`. You pick the
# tokens.

# %%
tokens = {"a": [5, 6, 7, 8, 9], "b": [5, 6, 7], "c": [1]}  # the prompts
embed = jax.random.normal(jax.random.key(0), (16, 2, 16))


@jax.jit(donate_argnums=0)
def step(cache, upload):
    context = jaxkv.StepContext(cache, upload)
    x = embed[context.token_ids]
    for layer in layers:
        x = x + context.attend(layer, x, x, x)
    logits = jnp.einsum("bhd,vhd->bv", x[context.last_tokens], embed)
    return context.done(), logits.argmax(axis=-1)  # one token for each request of the step


manager = jaxkv.BlockManager(plan, max_requests=4)
cache = jaxkv.make_cache(plan, max_requests=4)
scheduler = jaxkv.Scheduler(manager, max_tokens=6, tokens=tokens)
mixed, decode = scheduler.shape(), scheduler.shape(max_query_len=1)
for name in tokens:
    scheduler.add(name, len(tokens[name]))
while scheduler.has_work:
    schedule = scheduler.schedule()
    fitting = decode if max(schedule.work.values()) == 1 else mixed
    upload = manager.step(fitting, schedule.work, extra=schedule.token_ids)
    cache, picked = step(cache, upload)
    for name, index in schedule.samples.items():
        tokens[name].append(int(picked[index]))
        if len(tokens[name]) < 12:
            scheduler.append({name: 1})
        else:
            scheduler.finish(name)
jaxkv.check_errors(cache)
for name, ids in tokens.items():
    print(name, ids)

# %% [markdown]
# The loop waits for each token. One that does not passes `lookahead_steps=` to the scheduler, and
# takes tokens that the host has not seen (-1 in `token_ids`) from an array on the device, which is
# `newest_tokens=` of `StepContext`.
#
# ## Your scheduler, the manager's books
#
# `grow` takes the blocks for the next tokens of a request, or raises `OutOfBlocksError` and
# changes nothing. So a scheduler settles one request after the other, and preempts when it has to:
# `finish` gives the blocks back, and the request later starts again from its first token. One
# trap: a request that was settled a moment ago may be the one that is preempted. Take it out of
# the work again.
#
# Here the pool has 8 blocks, and three requests want 11 of them in the end.

# %%
manager = jaxkv.BlockManager(plan, max_requests=4)
cache = jaxkv.make_cache(plan, max_requests=4)
ends = {"a": 30, "b": 26, "c": 20}  # request -> the tokens that it will have
waiting, preempted, snapshots = list(ends), [], []
while waiting or manager.requests:
    if waiting and manager.num_free_blocks >= 4:
        manager.start(waiting.pop(0))
    work = {}
    for name, done in manager.computed_tokens.items():
        while name in manager.requests:
            try:
                work[name] = min(6, ends[name] - done)
                manager.grow({name: work[name]})
                break
            except jaxkv.OutOfBlocksError:
                preempted.append(list(manager.requests)[-1])  # the youngest
                manager.finish(preempted[-1])
                waiting.insert(0, preempted[-1])
                work.pop(preempted[-1], None)
    cache, batch = apply_step(cache, manager.step(shape, work))  # your model's step
    snapshots.append(plotting.snapshot_blocks(manager))
    for name, done in manager.computed_tokens.items():
        if done == ends[name]:
            manager.finish(name)

jaxkv.check_errors(cache)
assert manager.num_free_blocks == 8
print(len(snapshots), "steps; preempted:", preempted)
plotting.plot_pool_over_time(plan, snapshots)

# %% [markdown]
# ## Your block ids
#
# An engine that hands out block ids by itself needs no manager. A `TableEntry` says which ids a
# row gets, and from which column on; `pack_step` makes the upload. Id 0 is the null block: never
# hand it out. Where layers of different kinds share bytes (`plan.groups_to_zero`), list fresh ids
# in `zero_ids=`, too. These uploads have no number, so the device cannot tell when one is lost.
# There are also `copies=` for blocks, for which the shape needs room:
# `StepShape.for_plan(..., forks=)`.

# %%
free = [3, 1, 8, 5, 2, 7, 4, 6]  # your allocator
held = {2: [], 0: []}  # your tables: row -> block ids
computed = {2: 0, 0: 0}


def pack_own_step(new_tokens):
    entries = []
    for row, count in new_tokens.items():
        fresh = []
        while (len(held[row]) + len(fresh)) * 8 < computed[row] + count:
            fresh.append(free.pop(0))
        if fresh:
            entries.append(jaxkv.TableEntry(row, [fresh], starts=[len(held[row])]))
        held[row] += fresh
    upload = jaxkv.pack_step(
        shape,
        entries=entries,
        rows=list(new_tokens),
        num_computed_tokens=[computed[row] for row in new_tokens],
        num_new_tokens=list(new_tokens.values()),
    )
    for row, count in new_tokens.items():
        computed[row] += count
    return upload


cache = jaxkv.make_cache(plan, max_requests=4, kernel_block_sizes=[4])
uploads = [pack_own_step(new_tokens) for new_tokens in ({2: 13, 0: 6}, {2: 1, 0: 3})]
for upload in uploads:
    print(upload)
print("your tables:", held)

# %% [markdown]
# The numbers that these two steps bring to the device, and the tables afterwards. The cache is
# made for a kernel that works on blocks of 4 tokens, so tables for it name two kernel blocks per
# block: block 3 is kernel blocks 6 and 7.


# %%
def random_tokens(seed, count, heads):
    return jax.random.normal(jax.random.key(seed), (count, heads, 16))


@jax.jit(donate_argnums=0)
def write_step(cache, upload, keys, values):
    cache, batch = jaxkv.apply_step(cache, upload)
    for layer in layers:
        cache = jaxkv.write_tokens(cache, layer, batch, keys, values)
    return cache, batch


for seed, upload in enumerate(uploads):
    keys, values = random_tokens(10 + seed, 24, 2), random_tokens(20 + seed, 24, 2)
    cache, batch = write_step(cache, upload, keys, values)
print("query_start_loc", batch.query_start_loc)
print("seq_lens       ", batch.seq_lens)
tables = batch.kernel_block_tables("layers.0")
print("kernel blocks  ", *tables[:2, :6], sep="\n")
jaxkv.check_errors(cache)
assert tables[0, :4].tolist() == [6, 7, 2, 3]  # of row 2: blocks 3, 1
plotting.plot_block_tables(cache, batch=batch)

# %% [markdown]
# ## Your attention kernel
#
# `layer_view` is the memory of a layer in its own dtype, and `batch.kernel_block_tables(layer)`
# indexes its first axis (in the default order; `make_cache(order=)` has others). On a GPU the view
# costs nothing inside `jit`. Layers of one size lie in one buffer, one after the other, and the
# ids of a layer count through them, so you pass the whole view. (With `make_cache(stacked=False)`
# each has a buffer of its own.) Each head of a token has its key first and its value right after:

# %%
plotting.plot_page(spec, block_id=3, kernel_block_size=4)

# %% [markdown]
# `jaxkv.attend` is what the kernels below are compared with. Without keys it writes nothing.

# %%
view = jaxkv.layer_view(cache, "layers.1")
tables = batch.kernel_block_tables("layers.1")
queries = random_tokens(1, 24, 4)
_, expected = jax.jit(jaxkv.attend, static_argnums=1)(cache, "layers.1", batch, queries)
expected = np.asarray(expected)[:4]  # 4 tokens in this step
print("layer_view:", view.dtype, view.shape)

# %% [markdown]
# **Ragged paged attention**, the interface of jax's TPU kernels, tpu-inference and sglang-jax,
# wants keys and values of a head in turn: `[pages, page_size, 2 * heads, D]`. That is a reshape of
# the view. (For small dtypes tpu-inference packs heads: split `2 * heads` into
# `2 * heads // packing, packing`.) Here is jax's own reference:

# %%
pages = view.reshape(*view.shape[:2], 2 * 2, 16)
out = ref_ragged_paged_attention(
    queries,
    pages,
    kv_lens=batch.seq_lens,
    page_indices=tables,
    cu_q_lens=batch.query_start_loc,
    num_seqs=jnp.array([2]),
    sm_scale=16**-0.5,
)
np.testing.assert_allclose(out, expected, atol=1e-5)
print("differs from attend by", f"{np.abs(out - expected).max():.1g}")

# %% [markdown]
# **FlashInfer** takes keys and values apart, each as a pointer with strides, and the pages of all
# requests end to end with offsets (CSR). Keys and values of our pages have equal strides, and the
# first value lies `key_elements` behind the first key. `describe_layer` has the numbers, counted as
# the ids of `block_tables` count.

# %%
described = jaxkv.pool.describe_layer(cache, "layers.1")
print(described)
memory = np.asarray(view)
buffer = memory.reshape(-1)
value_offset = described.key_elements * buffer.itemsize
key_pages, value_pages = (
    np.ndarray((len(memory), 4, 2, 16), buffer.dtype, buffer, offset, described.strides_bytes)
    for offset in (described.offset_bytes, described.offset_bytes + value_offset)
)


@jax.jit
def request_csr(tables, seq_lens, first_positions, page_size=4):
    """Returns FlashInfer's kv_indptr, kv_indices and kv_last_page_len."""
    tokens = seq_lens - first_positions
    counts = -(-tokens // page_size)
    listed = jnp.arange(tables.shape[1]) < counts[:, None]
    (where,) = jnp.nonzero(listed.reshape(-1), size=tables.size, fill_value=0)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])
    return indptr, tables.reshape(-1)[where], (tokens - 1) % page_size + 1


first_positions = batch.first_positions("layers.1")  # 0; with a window, the oldest page's token
indptr, indices, last_page_len = map(
    np.asarray, request_csr(tables, batch.seq_lens, first_positions)
)
print("indptr", indptr[:3], "indices", indices[: indptr[2]], "last_page_len", last_page_len[:2])

# %% [markdown]
# The same attention in NumPy, from nothing but these arrays:

# %%
starts, seq_lens = np.asarray(batch.query_start_loc), np.asarray(batch.seq_lens)
own = np.zeros_like(expected)
for request in range(2):
    chosen = indices[indptr[request] : indptr[request + 1]]
    length = (len(chosen) - 1) * 4 + last_page_len[request]
    key, value = (part[chosen].reshape(-1, 2, 16)[:length] for part in (key_pages, value_pages))
    for token in range(starts[request], starts[request + 1]):
        seen = seq_lens[request] - (starts[request + 1] - token) + 1
        for head in range(4):
            scores = key[:seen, head // 2] @ np.asarray(queries[token, head]) / 4
            weights = np.exp(scores - scores.max())
            own[token, head] = weights / weights.sum() @ value[:seen, head // 2]
np.testing.assert_allclose(own, expected, atol=1e-5)
print("differs from attend by", f"{np.abs(own - expected).max():.1g}")

# %% [markdown]
# **Kernels over query tiles**, like FlexAttention's, want the pages that each tile of queries
# sees. `jaxkv.attention.build_page_csr` lists them by the rule of the layer (causal, window,
# chunks), with the request and the place of each page. `build_page_lists` pads them to a
# rectangle, and `page_list_sizes` says before serving how large they get.

# %%
csr = jaxkv.attention.build_page_csr(cache, "layers.1", batch, q_block_tokens=2)
jaxkv.check_errors(csr)
for tile in range(2):
    listed = slice(int(csr.offsets[tile]), int(csr.offsets[tile + 1]))
    print(f"queries {2 * tile}, {2 * tile + 1} see pages", csr.pages[listed], end=" ")
    print("of requests", csr.requests[listed])
assert set(csr.pages[: csr.offsets[2]].tolist()) == set(indices[: indptr[2]].tolist())

# %% [markdown]
# **A kernel that writes** keys and values itself takes `batch.slot_mapping(layer)`, which indexes
# pages and rows of the view taken as one axis, and gives its result back by `with_layer_view`:

# %%
slots = batch.slot_mapping("layers.1")
rows = view.reshape(-1, 2, 32).at[slots[:4]].set(7)
changed = jaxkv.with_layer_view(cache, "layers.1", rows.reshape(view.shape))
read, _ = jaxkv.read_tokens(changed, "layers.1", batch)
print("slots", slots[:4], "hold", read[0, 13, 0, 0], *read[1, 6:9, 0, 0])
assert (read[0, 13] == 7).all() and (read[1, 6:9] == 7).all() and (read[0, :13] != 7).all()

# %% [markdown]
# On a mesh, `apply_step`, `write_tokens`, `attend` and the recurrent layers call `shard_map` by
# themselves. Wrap your own kernel: `cache.partition_specs()` for the cache, `P()` for the batch,
# which every device has, and `P(None, "heads")` for queries and output.
#
# Two things to know before you trust a kernel with a hybrid pool. It should mask **values** as
# well as logits, or the plan must zero fresh blocks ([notebook 4](4_zeroing_and_nan.ipynb)). And
# for layers with a window, tables begin at `batch.first_positions(layer)` instead of token 0
# ([notebook 2](2_block_tables.ipynb)).
#
# ## Flat and rectangular batches
#
# A flat batch is `[T]`, the tokens of all requests end to end. A model that wants `[B, T]`, and
# takes positions as an argument, can run it as one row, `x[None]`. Or make the shape with
# `tokens_per_request`; nothing else changes.

# %%
rectangular = jaxkv.StepShape.for_plan(plan, max_requests=4, batch_size=2, tokens_per_request=6)
embeddings = random_tokens(3, 64, 2)


@jax.jit(donate_argnums=0)
def attend_step(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    x = embeddings[batch.positions + 8 * batch.token_requests]  # any function of a token
    cache, out = jaxkv.attend(cache, "layers.0", batch, queries=x, keys=x, values=x)
    return cache, batch.positions, out


outputs = []
for each in (shape, rectangular):
    manager = jaxkv.BlockManager(plan, max_requests=4)
    cache = jaxkv.make_cache(plan, max_requests=4)
    manager.start("a")
    manager.start("b")
    cache, positions, out = attend_step(cache, manager.step(each, {"a": 6, "b": 4}))
    print(f"positions {positions.shape}:", *np.atleast_2d(positions), sep="\n")
    outputs.append(out)
flat, boxes = outputs
np.testing.assert_allclose(flat[:6], boxes[0], atol=1e-5)
np.testing.assert_allclose(flat[6:10], boxes[1, :4], atol=1e-5)
print("equal")

# %% [markdown]
# The last token of each request, for sampling, is `out[batch.last_tokens]` in a flat batch and
# `out[jnp.arange(B), batch.last_tokens]` in a rectangular one.
#
# ## A model that scans over its layers
#
# With `lax.scan` a layer has no name while it is traced. Name any layer of the group, and let
# `layer_index` choose: it indexes the layers of the group in the order of the model. The cache
# belongs in the **carry**. As an input and output of the scan (`xs` and `ys`) it would be copied. A
# model whose layers repeat (window, window, full) names one layer of each kind in the body:
# `stacked_layers` must list the layers of a kind in the order of the periods.

# %%
print(cache.stacked_layers("layers.0"))


@jax.jit
def scanned(cache, upload, weights, x):
    cache, batch = jaxkv.apply_step(cache, upload)

    def layer(carry, inputs):
        cache, x = carry
        layer_index, weight = inputs
        cache, out = jaxkv.attend(
            cache, "layers.0", batch, x, x @ weight, x, layer_index=layer_index
        )
        return (cache, x + out), None

    (cache, x), _ = jax.lax.scan(layer, (cache, x), (jnp.arange(2), weights))
    return cache, x


@jax.jit
def by_name(cache, upload, weights, x):
    cache, batch = jaxkv.apply_step(cache, upload)
    for name, weight in zip(layers, weights, strict=True):
        cache, out = jaxkv.attend(cache, name, batch, x, x @ weight, x)
        x = x + out
    return cache, x


upload = manager.step(shape, {"a": 1, "b": 9})  # of the cache that has "a" and "b" already
weights, x = jax.random.normal(jax.random.key(4), (2, 16, 16)) / 4, random_tokens(5, 24, 2)
(after, got), (_, wanted) = (run(cache, upload, weights, x) for run in (scanned, by_name))
jaxkv.check_errors(after)
np.testing.assert_allclose(got[:10], wanted[:10], atol=1e-4)
print("scanned and by name differ by", f"{np.abs(got - wanted).max():.1g}")

# %% [markdown]
# A hybrid model scans over its periods, say a layer with states and one with attention: name one
# layer of each group in the body. `linear_attention`, `gated_delta`, `mamba2` and `short_conv` take
# the place of `attend`, and resume by themselves from the state that an earlier step left.

# %%
state = jaxkv.StateSpec(block_size=8, shapes=((2, 16, 16),), dtypes=("f32",))
kinds = {"rnn": state, "full": spec}
hybrid = {f"{kind}.{i}": each for i in range(2) for kind, each in kinds.items()}
plan = jaxkv.plan_cache(hybrid, 2**20, max_model_len=64)
shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=24)


@jax.jit
def hybrid_step(cache, upload, x):
    cache, batch = jaxkv.apply_step(cache, upload)

    def layers_of_a_period(carry, layer_index):
        cache, x = carry
        qkv = jnp.tile(x.reshape(24, -1), 3)  # your projections
        cache, out = jaxkv.linear_attention(
            cache, "rnn.0", batch, qkv, jnp.full(2, -0.5), scale=0.01, layer_index=layer_index
        )
        x = x + out
        cache, out = jaxkv.attend(cache, "full.0", batch, x, x, x, layer_index=layer_index)
        return (cache, x + out), None

    return jax.lax.scan(layers_of_a_period, (cache, x), jnp.arange(2))[0]


tokens, served = random_tokens(6, 24, 2) / 4, []
for pieces in ((9,), (4, 4, 1)):
    manager = jaxkv.BlockManager(plan, max_requests=4)
    cache = jaxkv.make_cache(plan, max_requests=4)
    manager.start("a")
    for count in pieces:
        x = jnp.roll(tokens, -manager.num_computed_tokens("a"), axis=0)
        cache, out = hybrid_step(cache, manager.step(shape, {"a": count}), x)
    served.append(out[count - 1])
np.testing.assert_allclose(*served, atol=1e-5)
print("in one piece and in three differ by", f"{np.abs(served[0] - served[1]).max():.1g}")

# %% [markdown]
# ## Coming from vLLM
#
# | vLLM | here |
# |---|---|
# | `FullAttentionSpec`, `SlidingWindowSpec`, `CrossAttentionSpec` | the same names |
# | `ChunkedLocalAttentionSpec`, `MLAAttentionSpec` | `ChunkedAttentionSpec`, `MLASpec` |
# | `MambaSpec` | `StateSpec` |
# | `KVCacheConfig`, `KVCacheGroupSpec`, `KVCacheTensor` | `Plan`, `Group`, `PoolTensor` |
# | `num_gpu_blocks_override` | `plan_cache(num_blocks_override=)` |
# | `max_model_len=auto` | `plan_cache(fit_max_model_len=True)` |
# | `KVCacheManager.allocate_slots` | `BlockManager.grow`, which raises where None is returned |
# | `KVCacheManager.free` | `BlockManager.finish` |
# | `BlockTables.append_block_ids`, `apply_staged_writes` | `BlockManager.step`, `apply_step` |
# | `gather_block_tables` | `batch.kernel_block_tables(layer)` |
# | `compute_slot_mappings`, `PAD_SLOT_ID` | `batch.slot_mapping(layer)`, `jaxkv.cache.PAD_SLOT` |
# | `query_start_loc`, `seq_lens`, `num_computed_tokens` | the same, of the batch |
# | `KVBlockZeroer`, `new_block_ids_to_zero` | `plan_cache(zero_policy=)`; `apply_step` zeroes |
# | `kv_cache_block_copies` | `BlockManager.fork`; `apply_step` copies |
# | `prepare_kernel_block_sizes` | `jaxkv.layout.select_kernel_block_sizes` |
# | `VLLM_KV_CACHE_LAYOUT=NHD`, `HND`, `LBNHC` ... | `make_cache(order=)` |
# | `dcp_world_size` | `plan_cache(context_parallel=)` |
# | `cp_kv_cache_interleave_size` | `make_cache(interleave_tokens=)` |
# | `sleep`, `wake_up` | the same |
# | `post_kv_cache_wake_up` | there is nothing to rebuild |
# | `KVCacheManager.get_computed_blocks` | `BlockManager.start(name, tokens)` |
#
# Different on purpose: blocks are counted without the null block; a table holds logical ids and
# expands them to kernel blocks when it is read; ids out of range are dropped and reported, not
# written; zeroing follows whether bytes can change their meaning, not whether dtypes differ.
#
# ## Coming from a block table in NumPy
#
# | NumPy | here |
# |---|---|
# | `table[row, n : n + len(ids)] = ids` | `TableEntry(row, [ids], starts=[n])` |
# | `table[row] = 0; table[row, : len(ids)] = ids` | `TableEntry(row, [ids])` |
# | `table[row] = 0` when a request ends | nothing: an entry without `starts` replaces the row |
# | `jnp.asarray(table[rows, :width])` each step | `batch.kernel_block_tables(layer)`, a gather |
# | `table[row, pos // 16] * 16 + pos % 16` | `batch.slot_mapping(layer)`, -1 for padding |
#
# These mistakes are then no longer possible: a NumPy buffer that is changed while a step still
# reads it; -1 that wraps to the last row; a table whose width changes and compiles anew.
