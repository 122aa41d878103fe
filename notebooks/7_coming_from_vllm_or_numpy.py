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
# # 7. Coming from vLLM, or from a NumPy table
#
# You have a working engine that already assigns blocks to requests. There are two ways to keep its
# allocator and compute in JAX:
#
# - **vLLM plans and schedules.** `jaxkv.interop.vllm` turns its `KVCacheConfig` into a plan with
#   the same groups and block ids, and each `SchedulerOutput` into an upload.
# - **You have a block table in NumPy**, `[requests, blocks]`, with `seq_lens` next to it. You pass
#   its changes as `TableEntry` objects to `pack_step`, which makes the upload.
#
# In both cases, `jaxkv` allocates no blocks. The end of [notebook 5](5_your_own_engine.ipynb) lists
# the names of vLLM and NumPy next to those of `jaxkv`.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import plotting
from jaxkv.interop import vllm

jax.config.update("jax_default_matmul_precision", "highest")  # results are compared below


def attend_in_numpy(x, window):
    """Returns the attention of one request to itself, for comparison with every step below."""
    scores = np.einsum("qhd,khd->hqk", x, x) / np.sqrt(x.shape[-1])
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), x)


# %% [markdown]
# ## From vLLM
#
# ### The plan
#
# In vLLM 0.33, a worker gets its `KVCacheConfig` in `initialize_kv_cache`. Pass that object
# unchanged. This notebook does not need vLLM, so it passes a mapping with the same fields, in which
# a spec names its class as `"type"`. The model has two layers with a window of 12 tokens and two
# with full attention.

# %%
NUM_BLOCKS, PAGE = 20, 8 * 2 * (16 + 16) * 4  # tokens, heads, a key and a value, float32
heads = {"block_size": 8, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}
specs = [
    {"type": "SlidingWindowSpec", **heads, "sliding_window": 12},
    {"type": "FullAttentionSpec", **heads},
]
names = [["layers.0", "layers.2"], ["layers.1", "layers.3"]]
kv_cache_config = {
    "num_blocks": NUM_BLOCKS,
    "kv_cache_groups": [
        {"layer_names": layers, "kv_cache_spec": spec}
        for layers, spec in zip(names, specs, strict=True)
    ],
    "kv_cache_tensors": [
        {
            "size": NUM_BLOCKS * 2 * PAGE,
            "layers": layers,
            "layer_stride": NUM_BLOCKS * PAGE,
            "block_stride": PAGE,
        }
        for layers in names
    ],
    "kv_cache_layout": "LBNHC",
}

plan = vllm.plan_from_config(
    kv_cache_config,
    max_model_len=64,  # vLLM's model_config.max_model_len
    limits=jaxkv.Limits(max_in_flight_tokens=16),  # vLLM's max_in_flight_tokens
)
print(plan)

# %% [markdown]
# Groups and block ids keep their numbers. Layers with a window share the same two tensors with
# layers of full attention, as they do in vLLM:

# %%
plotting.plot_layout(plan.layout)

# %% [markdown]
# A spec without a counterpart is refused by name, and so is an unknown field, because it may change
# the bytes of a block. A wrong guess would not crash: attention would read wrong bytes.

# %%
for change in ({"type": "SinkFullAttentionSpec"}, {"kv_quant_mode": 9}, {"num_kv_heads": 4}):
    group = {"layer_names": names[1], "kv_cache_spec": specs[1] | change}
    groups = [kv_cache_config["kv_cache_groups"][0], group]
    try:
        vllm.plan_from_config(kv_cache_config | {"kv_cache_groups": groups}, max_model_len=64)
    except ValueError as error:
        print("-", error)

# %% [markdown]
# ### The steps
#
# A model runner gets a `SchedulerOutput` in `execute_model`. It lists only **new** block ids, and
# the worker must remember the others. `SchedulerTables` remembers them, and packs the step.
#
# Here are five steps. Request `a` computes a prompt of 13 tokens and decodes. Request `b` joins,
# and is preempted because `a` needs blocks. When `a` is finished, `b` is resumed with other blocks
# and computes its 12 tokens again.


# %%
def scheduled(work, *, new=(), running=(), resumed=(), finished=(), preempted=()):
    """Returns a mapping with the fields of `SchedulerOutput` that `SchedulerTables` reads."""
    cached = [*running, *resumed]
    return {
        "scheduled_new_reqs": [
            {"req_id": name, "block_ids": ids, "num_computed_tokens": 0} for name, ids in new
        ],
        "scheduled_cached_reqs": {
            "req_ids": [name for name, _, _ in cached],
            "resumed_req_ids": {name for name, _, _ in resumed},
            "new_block_ids": [ids for _, ids, _ in cached],
            "num_computed_tokens": [computed for _, _, computed in cached],
        },
        "num_scheduled_tokens": work,
        "finished_req_ids": set(finished),
        "preempted_req_ids": set(preempted),
    }


steps = [
    scheduled({"a": 13}, new=[("a", ([1, 2], [3, 4]))]),
    scheduled({"a": 1, "b": 11}, new=[("b", ([5, 6], [7, 8]))], running=[("a", None, 13)]),
    scheduled({"a": 1, "b": 1}, running=[("a", None, 14), ("b", None, 11)]),
    scheduled({"a": 2}, running=[("a", ([9], [10]), 15)], preempted=["b"]),
    scheduled({"b": 12}, resumed=[("b", ([11, 2], [7, 4]), 0)], finished=["a"]),
]

# %% [markdown]
# The jitted step is that of any engine: it applies the upload, then runs the layers. `pack` returns
# a tuple of uploads, because after a prefix hit a step may list more blocks than the shape has room
# for. The earlier uploads then have no requests, and run through the same compiled step.

# %%
tables = vllm.SchedulerTables(plan, max_requests=4)
cache = jaxkv.make_cache(plan, max_requests=4, order=vllm.cache_order(kv_cache_config))
shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=16, extra=16)
embeddings = jax.random.normal(jax.random.key(0), (100, 2, 16))
texts = {"a": list(range(20)), "b": list(range(40, 60))}  # the token ids of each request
WINDOWS = {"layers.0": 12, "layers.1": 64, "layers.2": 12, "layers.3": 64}


@jax.jit(donate_argnums=0)
def step(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    x = embeddings[batch.extra]  # the token ids travel with the upload
    outs = []
    for layer in WINDOWS:
        cache, out = jaxkv.attend(cache, layer, batch, x, x, x)
        outs.append(out)
    return cache, batch, outs


for number, output in enumerate(steps):
    new_requests, cached = output["scheduled_new_reqs"], output["scheduled_cached_reqs"]
    computed = {each["req_id"]: each["num_computed_tokens"] for each in new_requests}
    computed |= dict(zip(cached["req_ids"], cached["num_computed_tokens"], strict=True))
    work = output["num_scheduled_tokens"]
    ids = [i for name, n in work.items() for i in texts[name][computed[name] : computed[name] + n]]
    for upload in tables.pack(shape, output, extra=ids):
        cache, batch, outs = step(cache, upload)
    start = 0
    for name, count in work.items():  # each request against NumPy, in every layer
        seen = np.asarray(embeddings)[texts[name][: computed[name] + count]]
        for out, window in zip(outs, WINDOWS.values(), strict=True):
            expected = attend_in_numpy(seen, window)[computed[name] :]
            np.testing.assert_allclose(out[start : start + count], expected, atol=1e-5)
        start += count
    print(f"step {number}: {work}, rows {tables.rows}, equal to NumPy")
jaxkv.check_errors(cache)
print("compilations:", step._cache_size())

# %% [markdown]
# These are the tables on the device after the last step. Request `b` was resumed in row 0, which
# `a` had before, and the second block of each group was also one of `a`. Row 1 still lists the
# blocks that `b` had before it was preempted.

# %%
plotting.plot_block_tables(cache, batch=batch)

# %% [markdown]
# Details:
#
# - **Prefix hits** need no extra code: a new request lists the ids of shared blocks, and its
#   `num_computed_tokens` counts their tokens. Block copies (`kv_cache_block_copies`) are part of
#   the upload; give the shape room for them with `StepShape.for_plan(forks=)`.
# - **Zeroing** follows `plan.groups_to_zero`; of `new_block_ids_to_zero`, only the blocks of failed
#   loads count.
# - **fp8**: vLLM stores it as bytes without its kind, so pass `kv_dtype="fp8_e4m3"`.
#   **MLA**: pass `value_size=kv_lora_rank`, or attention reads the whole row as the value.
# - **Several workers**: pass a list with one config per pipeline stage, and call
#   `make_cache(worker=)` for each.
# - The requests of a batch are in the order of `num_scheduled_tokens`; `extra` must be too.
#
# ## From a block table in NumPy
#
# ### Your engine today
#
# It has a table, lengths, a free list, and pages of keys in one NumPy array. Every request of a
# step gathers its pages and attends to them.

# %%
BLOCK = 8
table = np.zeros((4, 6), np.int32)  # [requests, blocks]; 0: no block
seq_lens = np.zeros(4, int)
free = [3, 9, 1, 7, 5, 2, 8, 4, 6]  # your allocator; block 0 is padding
pages = np.zeros((10, BLOCK, 2, 16), np.float32)
vectors = np.asarray(embeddings)


def token_vectors(row, start, end):
    return vectors[(np.arange(start, end) + 25 * row) % 100]


def allocate(row, count):
    """Allocates the blocks for the next tokens of a row, and returns their ids."""
    first, last = -(-seq_lens[row] // BLOCK), -(-(seq_lens[row] + count) // BLOCK)
    fresh = [free.pop(0) for _ in range(first, last)]
    table[row, first:last] = fresh
    return fresh


def numpy_step(work):
    """Writes the new tokens of every row, and returns their attention."""
    outs = []
    for row, count in work.items():
        positions = np.arange(seq_lens[row], seq_lens[row] + count)
        slots = table[row, positions // BLOCK], positions % BLOCK
        pages[slots] = token_vectors(row, positions[0], positions[-1] + 1)
        seen = pages[table[row]].reshape(-1, 2, 16)[: positions[-1] + 1]
        outs.append(attend_in_numpy(seen, 64)[positions[0] :])
    return np.concatenate(outs)


# %% [markdown]
# ### The same with jaxkv
#
# The plan gets the blocks of your allocator, and block 0. Your table stays as it is: after
# `allocate`, you tell `pack_step` which columns of which rows are new.

# %%
spec = jaxkv.FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype="f32")
own_plan = jaxkv.plan_cache({"kv": spec}, 2**20, max_model_len=48, num_blocks_override=10)
own_shape = jaxkv.StepShape.for_plan(own_plan, max_requests=4, max_tokens=16)
own_cache = jaxkv.make_cache(own_plan, max_requests=4)
print(own_plan)


def pack_table_step(work):
    """Allocates blocks, and packs the new table entries with the requests of a step."""
    entries = []
    for row, count in work.items():
        column = -(-int(seq_lens[row]) // BLOCK)
        fresh = allocate(row, count)
        if fresh:
            entries.append(jaxkv.TableEntry(row, [fresh], starts=[column]))
    return jaxkv.pack_step(
        own_shape,
        entries=entries,
        rows=list(work),
        num_computed_tokens=[int(seq_lens[row]) for row in work],
        num_new_tokens=list(work.values()),
    )


@jax.jit(donate_argnums=0)
def own_step(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    x = jnp.asarray(vectors)[
        (batch.positions + 25 * batch.request_rows[batch.token_requests]) % 100
    ]
    cache, out = jaxkv.attend(cache, "kv", batch, x, x, x)
    return cache, batch, out


# %% [markdown]
# Two requests prefill and decode past the end of a block. Then one ends, and another request gets
# its row. The device need not know that a request ended: an entry that starts at column 0 replaces
# the row.

# %%
worst = 0.0
for work in ({0: 9, 2: 7}, {0: 1, 2: 1}, {0: 7, 2: 1}, "row 2 ends", {0: 1, 2: 11}, {0: 3, 2: 6}):
    if isinstance(work, str):
        free += [int(block) for block in table[2] if block]
        table[2], seq_lens[2] = 0, 0
        continue
    upload = pack_table_step(work)
    own_cache, batch, out = own_step(own_cache, upload)
    expected = numpy_step(work)
    np.testing.assert_allclose(out[: len(expected)], expected, atol=1e-5)
    worst = max(worst, float(np.abs(out[: len(expected)] - expected).max()))
    for row, count in work.items():
        seq_lens[row] += count
    np.testing.assert_array_equal(batch.kernel_block_tables("kv")[:2], table[list(work)])
    print(upload)
jaxkv.check_errors(own_cache)
print(f"all outputs equal NumPy's within {worst:.1g}; compilations: {own_step._cache_size()}")

# %% [markdown]
# Your table and that of the device agree. Past the length of a row, the device keeps old ids, which
# no step reads, because gathered tables are 0 there.

# %%
print(table)
plotting.plot_block_tables(own_cache, batch=batch)

# %% [markdown]
# The pool holds the bytes that your engine has written:

# %%
keys, values = jax.jit(jaxkv.read_tokens, static_argnums=1)(own_cache, "kv", batch)
for index, row in enumerate(work):
    length = int(seq_lens[row])
    np.testing.assert_array_equal(
        keys[index, :length], pages[table[row]].reshape(-1, 2, 16)[:length]
    )
print("keys of", dict(zip(work, np.asarray(batch.seq_lens)[:2].tolist(), strict=True)), "are equal")

# %% [markdown]
# ### What you can replace next
#
# 1. **The upload of the table** is replaced already: a step uploads only its changes.
# 2. **The slots** (`table[row, pos // 8] * 8 + pos % 8`) are `batch.slot_mapping(layer)`, which is
#    -1 for padding.
# 3. **The allocator**: `BlockManager` also handles windows, states and several groups, and changes
#    nothing if it raises.
# 4. **The scheduler**: `jaxkv.Scheduler` admits requests, chunks prompts and preempts.
#
# Mind two things if you write your own table entries. With a **window**, a request gives blocks
# back while it runs: their ids stay in your row and may belong to another request, but are not
# read. If groups of different layers **share bytes** (`plan.groups_to_zero`), list fresh blocks in
# `pack_step(zero_ids=)` ([notebook 4](4_zeroing_and_nan.ipynb)).
#
# Whatever you keep, `jaxkv.testing.CacheStateMachine` can test it: a short subclass drives your
# cache with random requests, and finds leaks, blocks that two requests write, and bytes that are
# lost ([example](../tests/test_example_suite.py)).
