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
# # 3. Planning: what fits, and what binds
#
# A plan says how many blocks a memory budget gives, how long a request can be, and how many run
# at once. It needs a `config.json` and a number of bytes. It never touches a device: this
# notebook does not import jax.

# %%
import jaxkv
from jaxkv import plotting

GIB = 2**30


def plan_model(name, memory_gib, *, kv_dtype=None, max_in_flight_tokens=8192, **options):
    config = jaxkv.load_config(name)  # a preset by name, or the path of your own config.json
    layers = jaxkv.layers_from_config(config, kv_dtype=kv_dtype)
    limits = jaxkv.Limits(max_in_flight_tokens=max_in_flight_tokens)
    options = {"max_model_len": jaxkv.hf_config.model_len(config), "limits": limits} | options
    return jaxkv.plan_cache(layers, int(memory_gib * GIB), **options)


# %% [markdown]
# ## Three figures that must not be mixed
#
# - **Admission** charges a request the most blocks that it can ever hold, while a full step of its
#   tokens is in flight (`plan.admission_blocks`). A plan is accepted if its longest request fits.
# - While a request **decodes**, with one token in flight, it holds fewer (`plan.steady_blocks`).
# - As many requests **fit** as find room while one prefills and the others decode
#   (`plan.requests_that_fit`).
#
# If all layers of a model keep all tokens, the first two are the same. For Gemma 3, with its
# windows, they differ.

# %%
plotting.plot_memory(plan_model("gemma-3-27b", 40))

# %% [markdown]
# The same as a table. `print` shows it as text, and so does `python -m jaxkv plan`.

# %%
plan_model("gemma-3-27b", 40)

# %% [markdown]
# ## Models side by side
#
# The same 40 GiB, models of very different kinds.

# %%
names = ["llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v3"]
plans = {name: plan_model(name, 40, fit_max_model_len=True) for name in names}
print(f"{'model':20} {'groups':>6} {'bytes per block':>16} {'longest':>9} {'at once':>8}")
for name, plan in plans.items():
    fit = plan.requests_that_fit(plan.max_model_len)
    print(f"{name:20} {len(plan.groups):6} {sum(plan.bytes_per_block):16,} ", end="")
    print(f"{plan.max_model_len:9,} {fit:8,}")
plotting.plot_length_against_requests(plans)

# %% [markdown]
# ## Memory sizes
#
# Twice the memory runs at least twice the requests, and up to three times as many where few run,
# because what is set aside for the one in prefill is counted once.

# %%
sizes = {
    f"{size} GiB": plan_model("gemma-3-27b", size, fit_max_model_len=True)
    for size in (10, 20, 40, 80)
}
plotting.plot_length_against_requests(sizes)

# %% [markdown]
# ## What does not fit is refused
#
# The error says what to change. `fit_max_model_len=True` shortens the longest request to what the
# memory holds.

# %%
try:
    plan_model("llama-3.1-70b", 12)
except jaxkv.KVCacheCapacityError as error:
    print(error)
    shorter = plan_model("llama-3.1-70b", 12, fit_max_model_len=True)
    print(f"\nfitted: {shorter.max_model_len:,} tokens; fp8 keys and values: ", end="")
    quantised = plan_model("llama-3.1-70b", 12, fit_max_model_len=True, kv_dtype="fp8_e4m3")
    print(f"{quantised.max_model_len:,}")

# %% [markdown]
# ## Why hybrids surprise: short requests
#
# A recurrent state has the same size for one token and for a million. Blocks are handed out whole,
# and here a block is large enough for a state. So the shortest request of Qwen3-Next takes four
# blocks, one for each group: that is the flat left end of its curve above.

# %%
for name in ("llama-3.1-8b", "qwen3-next-80b-a3b"):
    plan = plans[name]
    for length in (16, 1024, 131072):
        charged = plan.steady_blocks(length) * sum(plan.bytes_per_block)
        print(f"{name:20} {length:7,} tokens: {charged / 2**20:9,.1f} MiB each")

# %% [markdown]
# ## Why hybrids surprise: tokens in flight
#
# A window of 1,024 tokens does not mean that a request holds 1,024 tokens. A step holds all the
# tokens that it computes, so a large prefill chunk costs blocks in every group of windows. In a
# small memory that decides how many requests run.

# %%
chunks = {
    f"{chunk:,} in flight": plan_model(
        "gemma-3-27b", 5, max_in_flight_tokens=chunk, fit_max_model_len=True
    )
    for chunk in (512, 2048, 8192)
}
plotting.plot_length_against_requests(chunks)

# %%
plotting.plot_memory(chunks["8,192 in flight"])

# %% [markdown]
# ## Why hybrids surprise: unused bytes
#
# Groups of unequal size leave a part of their blocks unused: hatched below, for requests of 1,024
# tokens. `grouping="least_waste"` takes the grouping that fits the longest request and runs the
# most requests of `request_len` tokens at once (without it, of the longest). It may make many more
# groups, each with a block table; the plan says what that buys.

# %%
groupings = {
    name: plan_model("gemma-3-27b", 40, grouping=name, request_len=1024)
    for name in ("rule", "least_waste")
}
for name, plan in groupings.items():
    short, long = (plan.requests_that_fit(length) for length in (1024, 131072))
    print(f"{name:12} {len(plan.groups):3} groups; ", end="")
    print(f"at once {short} of 1,024 tokens or {long} of 131,072")
print(str(groupings["least_waste"]).splitlines()[-1])
plotting.plot_memory(groupings["rule"], 1024)
