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
# # 11. Rollouts with a flax model
#
# Reinforcement learning samples groups of answers to each prompt, rewards them, takes a gradient
# step, and samples with the new weights. `jaxkv.Engine` does the sampling:
#
# | you need | you write |
# |---|---|
# | G answers to each prompt, computed once | `Sampling(n=G)` |
# | answers that can be drawn again | `seed=`: a sample depends on its seed, never on the batch |
# | the log-probability of each token | `logprobs=True` |
# | new weights, and no old keys under them | `engine.update(params)` |
#
# The model is a flax `nnx.Module` that is told by an argument where its attention reads: from the
# `step` in the engine, from all tokens in training.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv

VOCAB, HIDDEN, HEADS, LAYERS, GROUP = 32, 32, 2, 2, 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(HIDDEN, 3 * HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x, attend):
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (y.reshape(*x.shape[:-1], HEADS, -1) for y in (q, k, v))
        x = x + self.out(attend(q, k, v).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.places = nnx.Embed(64, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, ids, positions, attends):
        x = self.embed(ids) + self.places(jnp.maximum(positions, 0))
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)
        return x


graphdef, params = nnx.split(Model(nnx.Rngs(0)))

# %% [markdown]
# ## The engine
#
# `forward` is five lines. The arguments of the jitted step are the weights, so that new ones need
# no compilation.

# %%
spec = jaxkv.FullAttentionSpec(
    block_size=8, num_kv_heads=HEADS, head_size=HIDDEN // HEADS, dtype="f32"
)
plan = jaxkv.plan_cache({f"layers.{i}": spec for i in range(LAYERS)}, 2**20, max_model_len=64)


def forward(params, step):
    model = nnx.merge(graphdef, params)
    attends = [
        lambda q, k, v, layer=f"layers.{i}": step.attend(layer, q, k, v) for i in range(LAYERS)
    ]
    x = model(step.token_ids, step.positions, attends)
    return model.head(x[step.last_tokens])


engine = jaxkv.Engine(forward, params, plan, max_requests=32, max_tokens=64)

# %% [markdown]
# ## The loss
#
# In training there is no cache: attention sees all tokens of an answer. The engine's
# log-probabilities are those of this very model, so the ratio of the first gradient step is 1.


# %%
def logprobs_of(params, ids):
    """f32[B, L - 1], the log-probability of each token after the first."""
    model = nnx.merge(graphdef, params)
    seen = jnp.tri(ids.shape[1], dtype=bool)

    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / q.shape[-1] ** 0.5
        scores = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bhqs,bshd->bqhd", scores, v)

    x = model(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), [attend] * LAYERS)
    logits = jax.nn.log_softmax(model.head(x[:, :-1]))
    return jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]


@jax.jit
def train(params, ids, is_answer, old_logprobs, advantages):
    """One step of GRPO: the clipped ratio to what was sampled, times the group's advantage."""

    def loss(params):
        ratio = jnp.exp(logprobs_of(params, ids) - old_logprobs)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -(gain * is_answer).sum() / is_answer.sum()

    gradient = jax.grad(loss)(params)
    return jax.tree.map(lambda weight, slope: weight - 0.3 * slope, params, gradient)


# %% [markdown]
# ## The loop
#
# The reward is the share of even tokens in an answer. Each round samples 4 prompts, 8 answers each,
# and the prompts are computed once for all 8.

# %%
PROMPT, ANSWER = 12, 10
rng = np.random.default_rng(0)
prompts = rng.integers(0, VOCAB, (4, PROMPT))
rewards_by_round = []
for round_ in range(8):
    sampling = [
        jaxkv.Sampling(
            n=GROUP, temperature=1.0, max_tokens=ANSWER, logprobs=True, seed=100 * round_ + i
        )
        for i in range(len(prompts))
    ]
    outputs = sorted(
        engine.generate(prompts, sampling), key=lambda output: (output.request, output.sample)
    )
    ids = np.array([[*prompts[o.request], *o.tokens] for o in outputs])
    rewards = (ids[:, PROMPT:] % 2 == 0).mean(axis=1).reshape(-1, GROUP)
    spread = rewards.std(axis=1, keepdims=True) + 1e-6
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread

    old_logprobs = np.zeros((len(ids), PROMPT + ANSWER - 1), np.float32)
    old_logprobs[:, PROMPT - 1 :] = [output.logprobs for output in outputs]
    is_answer = (np.arange(PROMPT + ANSWER - 1) >= PROMPT - 1)[None].astype(np.float32)
    is_answer = np.repeat(is_answer, len(ids), axis=0)
    if round_ == 0:
        again = np.asarray(jax.jit(logprobs_of)(params, ids))
        print("engine and training differ by", np.abs((again - old_logprobs) * is_answer).max())

    advantages = advantages.reshape(-1, 1).astype(np.float32)
    params = train(params, ids, is_answer, old_logprobs, advantages)
    engine.update(params)
    rewards_by_round.append(rewards.mean())

print("mean reward by round", np.round(rewards_by_round, 2).tolist())
print(engine.stats)

# %% [markdown]
# The reward rises from a half. Without `update` the engine would answer with old weights, and with
# new weights but old keys it would answer something in between: `update` forgets all prefixes, so
# that neither can happen. If weights come while answers are in flight,
# `engine.update(params, in_flight="restart")` starts these answers again.
#
# Between two phases, `engine.sleep(level=2)` gives the memory of the cache to the trainer, and
# `engine.wake_up()` takes it back, without compiling anything.
