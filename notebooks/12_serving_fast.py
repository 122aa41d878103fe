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
# # 12. Making a served model fast
#
# A step of a served model has three parts: the host chooses and packs its work, jax starts it, and
# the GPU computes it. The engine works on the next step while the GPU computes this one, so a step
# takes as long as the slowest part. For a model of some billion weights that is the GPU, and the
# other two cost nothing. For a small one it is the start of the step.
#
# | you see | do |
# |---|---|
# | the first tokens take half a minute | `warm_up`, jax's compilation cache, fewer traced layers |
# | GPU idle between steps | `decode_steps=`, fewer arrays of weights |
# | `stats.padded_tokens` is a large share | another `max_requests` or `max_tokens` |
# | decoding is as slow as reading the cache | `kv_dtype` fp8, windows, more heads a group |
# | `stats.preemptions` rise | fewer `max_requests`, shorter ones, more `XLA_CLIENT_MEM_FRACTION` |
# | answers of others stutter while a prompt is computed | a smaller `max_tokens` |
#
# All figures below were measured on one H200 with jax 0.11.2 and Llama-3.1-8B in bf16, by
# `python -m tests.benchmarks served`, unless they say otherwise. The cells run anywhere.

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp

import jaxkv

LAYERS = tuple(f"layers.{i}" for i in range(2))
spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="f32")
plan = jaxkv.plan_cache(dict.fromkeys(LAYERS, spec), 2**22, max_model_len=256)
embed, *weights = jax.random.normal(jax.random.key(0), (1 + len(LAYERS), 64, 64)) / 8
params = {"embed": embed, "layers": jnp.stack(weights)}


def forward(params, step):
    x = params["embed"][step.token_ids]
    for layer, weight in zip(LAYERS, params["layers"], strict=True):
        q = (x @ weight).reshape(-1, 2, 32)
        x = x + step.attend(layer, q, q, q).reshape(x.shape)
    return x[step.last_tokens] @ params["embed"].T


# %% [markdown]
# ## The first token
#
# Each shape of a step is compiled once: at first use, or before serving by `warm_up`, several at
# a time. jax can keep what it has compiled for later processes, in a directory that you name.

# %%
directory = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", directory.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # 1 s if you leave it out

engine = jaxkv.Engine(forward, params, plan, max_requests=8, max_tokens=16)
engine.warm_up(jaxkv.Sampling(temperature=0.8))  # the kinds of sampling that will come
print(engine)
programs = [path for path in pathlib.Path(directory.name).iterdir() if "run_steps" in path.name]
print(len(programs) > 0, "that compiled steps are kept")

# %% [markdown]
# - A ladder of shapes covers all steps: decodes of 8, 32, 64 requests and so on up to
#   `max_requests`, other steps of up to `max_tokens` tokens. A smaller `max_requests` means fewer
#   shapes.
# - A start took 45 s cold and 9 s with that directory, with the 10 shapes of `max_requests=256`
#   and `max_tokens=8192`. jax keeps what the compiler made of a step. The engine keeps what jax
#   made of its layers before, in a folder `jaxkv` of the same directory: jax takes 2 to 6 s a shape
#   to trace and lower their kernels, and 0.2 s with them. (On one core without a GPU, jax 0.12
#   takes 5.2 s for a step of 2,048 tokens, and 0.11 takes 6.4.)
# - The engine does so on one GPU, and needs the package `flatbuffers` for it, which the extras
#   `cuda12` and `cuda13` bring; without it a start took 35 s. What is kept is taken by the same
#   code of this library, the same jax, settings, device and shapes only. It is JSON and StableHLO,
#   checked, and nothing that Python runs. It is code for your GPU all the same, as what jax keeps
#   in that directory is: share it with people whom you trust.
# - Your model is traced for each shape. A function that all layers call, under a `jax.jit` of its
#   own, is traced once; so are layers in a `lax.scan`, or in a `jax.jit` of one layer that takes
#   `layer_index=` ([notebook 5](5_your_own_engine.ipynb)).
# - Without `warm_up`, the first token came 17 s after the process began.
#
# ## What a step computes
#
# `max_requests` bounds how many samples decode together: more of them share each read of the
# weights, until the cache is what takes the time. `max_tokens` bounds a step: larger steps compute
# prompts at a better rate, and let those who decode wait longer for their next token. The engine
# gives each step as many tokens as fill its shape.

# %%
prompts = [[1 + i, 2, 3, 4 + i] * (1 + i % 5) for i in range(40)]
outputs = list(engine.generate(prompts, jaxkv.Sampling(max_tokens=24)))
stats = engine.stats
print(stats)
print(f"{stats.padded_tokens / (stats.padded_tokens + stats.computed_tokens):.0%} padding")

# %% [markdown]
# Prompts that begin alike are computed once (`stats.cached_tokens`): put what they share first.
# Samples of one prompt are asked for together, by `Sampling(n=8)`. Where their prompts are long,
# `shared_prefixes=` of the engine lets a decode step read the blocks that they share once for all.
#
# ## Small models
#
# To start a step takes jax 1 to 2.5 ms where a model has 300 arrays of weights, whatever the step
# computes. A step of a small model takes less on the GPU, which then waits. `decode_steps=8` runs
# eight steps in one call, each over the tokens that the one before drew. Samples that draw one of
# their first four stop tokens write nothing more; the steps that are left in the call are lost for
# them.

# %%
several = jaxkv.Engine(forward, params, plan, max_requests=8, max_tokens=16, decode_steps=8)
again = list(several.generate(prompts, jaxkv.Sampling(max_tokens=24)))
key = lambda output: (output.request, output.tokens)  # noqa: E731
assert sorted(map(key, again)) == sorted(map(key, outputs))
print(f"{stats.steps} steps in {stats.calls} calls")
print(f"{several.stats.steps} steps in {several.stats.calls} calls, and the same tokens")

# %% [markdown]
# Stacked weights, one array for all layers as in `params["layers"]` here, make a call cheaper, too.
# Dividing all arrays of a model by layers is what makes them 300.
#
# ## XLA
#
# The engine sets these by itself. In a loop of your own, pass them to the `jax.jit` of the step.
#
# - `jaxkv.step.COMPILER_OPTIONS`, because XLA counts a donated pool up to three times. It otherwise
#   believes that memory runs out, warns of `hlo_rematerialization`, and computes small arrays anew
#   in every layer.
# - `xla_gpu_enable_triton_gemm`, True for steps of up to 32 tokens, in which XLA's own matrix
#   products read weights faster (1 x 8k: 4.6 ms, and 5.9 with cuBLAS), and False for larger ones
#   (64 x 2k: cuBLAS was 7 % faster).
#
# Keep matrices that multiply the same input (queries, keys and values; gate and up) in one array.
# XLA otherwise may join them anew in every step. A single row is multiplied without tensor cores,
# and with `preferred_element_type=float32` after the matrix was converted to float32 as a whole:
# let logits be cast after the product.
#
# Two more have good defaults, and are worth knowing when a profile looks odd. **Command buffers**
# record the kernels of a step as one CUDA graph; in an earlier measurement they saved 8 % of a
# decode step. A loop or a condition in your model that waits for a value of the device cuts the
# graph, and keeps the host from working ahead. **Autotuning** tries kernels for every matrix
# product while it compiles; `--xla_gpu_autotune_level=0` compiles faster, and prefill of 4 x 2k
# took 191 ms with it, 188 without.
#
# ## The cache in fp8
#
# A decode step reads all keys and values of its requests. In fp8 they are half the bytes, and
# twice as many requests fit: give the layers `dtype="fp8_e4m3"` (in `layers_from_config`,
# `kv_dtype=`), and calibrated factors by `jaxkv.set_scales`. Attention of 64 requests over 8k
# tokens took 280 us instead of 500 (two H200s, the worse of both). Logits are then within 0.03 of
# those in f32, and not within 0.003 as in bf16.
#
# ## What to read in a profile
#
# ```python
# with jax.profiler.trace("/tmp/profile"):
#     for _ in range(8):
#         engine.step()
# ```
#
# `xprof --logdir /tmp/profile` shows it. Look, in this order, at
#
# 1. **gaps** between steps on the GPU's row: the host or the start of a step is the slowest part;
# 2. the **kernels** of a step, summed by name. In a decode step of 64 x 2k, 4.1 ms of 9.0 were
#    attention, 4.2 matrix products, 0.1 the join of its parts and 0.05 writes. Copies of the pool,
#    `remat` and many small fusions should not be there;
# 3. **`paged_attention`** in these names: without it XLA computes attention. `jaxkv` takes a
#    kernel for 16-bit queries on Hopper GPUs;
# 4. bytes over time: weights and cache of a decode step, divided by 4.8 TB/s, are the least time
#    that it can take.
