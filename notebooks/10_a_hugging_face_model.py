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
# # 10. A model from a Hugging Face folder
#
# You have a folder with a `config.json` and `*.safetensors` of a Llama or a Qwen3, and want tokens.
# The model is [`hugging_face.py`](hugging_face.py) next to this notebook: 120 lines of plain JAX,
# to be copied and changed. Its logits are those of `transformers`
# ([test](../tests/test_hugging_face.py)).
#
# Without a folder of yours this notebook writes a tiny one, with random weights.

# %%
import functools
import json
import os
import pathlib
import tempfile

import jax
import random_checkpoint
from hugging_face import forward, load

import jaxkv

folder = os.environ.get("MODEL")  # say ~/models/Qwen3-0.6B
if folder is None:
    folder = tempfile.mkdtemp()
    random_checkpoint.write_folder("qwen3", pathlib.Path(folder))

config, params = load(folder)
print(config["model_type"], "of", sum(x.size for x in jax.tree.leaves(params)), "weights")

# %% [markdown]
# ## Plan
#
# The layers of the cache come from the same `config.json`. On a GPU, give the plan what is left
# next to the weights, and leave a few GiB to the model's own arrays. (In a shell,
# `python -m jaxkv plan FOLDER/config.json --gpu h200` says what will fit.)

# %%
layers = jaxkv.layers_from_config(config)
weights = sum(x.nbytes for x in jax.tree.leaves(params))
memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
plan = jaxkv.plan_cache(
    layers,
    2**20 if memory is None else int(0.9 * memory) - weights - 4 * 2**30,
    max_model_len=min(config["max_position_embeddings"], 8192),
)
print(plan)

# %% [markdown]
# ## Generate
#
# `forward(config, params, step)` is the whole connection of model and cache: it takes token ids and
# positions from the `step`, and calls `step.attend` in each layer.

# %%
tiny = memory is None
engine = jaxkv.Engine(
    functools.partial(forward, config),
    params,
    plan,
    max_requests=4 if tiny else 64,
    max_tokens=16 if tiny else 2048,
)

prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], [3, 1, 4, 1]]
sampling = jaxkv.Sampling(temperature=0.7, top_p=0.95, max_tokens=8)
for output in engine.generate(prompts, sampling):
    print(output.request, output.tokens, output.finish_reason)

# %% [markdown]
# `jaxkv.Sampling()` alone takes the likeliest token each time.
#
# Every shape of a step was compiled when it came first. `engine.warm_up()` compiles all of them
# before; jax keeps them for the next process, if you tell it where:
# `jax.config.update("jax_compilation_cache_dir", "/somewhere")`.
#
# ## Texts
#
# A tokenizer is no part of this project. The folder's own is in `tokenizer.json`, which the package
# `tokenizers` reads; the tokens that end an answer are in `generation_config.json`.


# %%
def of_folder(name):
    path = pathlib.Path(folder, name)
    return path if path.exists() else None


if path := of_folder("tokenizer.json"):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    encode, decode = (lambda text: tokenizer.encode(text).ids), tokenizer.decode
else:  # letters, for the tiny model

    def encode(text):
        return [ord(letter) % config["vocab_size"] for letter in text]

    def decode(ids):
        return "".join(chr(97 + i % 26) for i in ids)


path = of_folder("generation_config.json")
stops = json.loads(path.read_text())["eos_token_id"] if path else []
sampling = jaxkv.Sampling(
    temperature=0.7,
    top_p=0.95,
    max_tokens=10,
    seed=0,
    n=2,
    stop_token_ids=stops if isinstance(stops, list) else [stops],
)
for output in engine.generate([encode("The cache is paged because")], sampling):
    print(output.sample, repr(decode(output.tokens)))
print(engine.stats)

# %% [markdown]
# ## Streaming
#
# `add` and `step` are `generate`, taken apart: requests come and go while others run.

# %%
engine.add("first", encode("one, two"), jaxkv.Sampling(max_tokens=6))
for number in range(100):
    for output in engine.step():
        print(f"step {number}: {output.request} {output.tokens} {output.finish_reason or ''}")
    if number == 2:
        engine.add("second", encode("three"), jaxkv.Sampling(max_tokens=3))
    if not engine.has_work:
        break
