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
# # 8. Prefixes, forks and RL rollouts
#
# Two prompts that begin with the same tokens need the same keys, values and states there. The
# `BlockManager` keeps what requests computed until the blocks are needed, finds it again by the
# tokens, and says why it found no more. This notebook shows
#
# | you want | you call |
# |---|---|
# | chats whose turns go on from each other | `start(name, tokens)`, `finish(name, answer)` |
# | hits in models with recurrent states | `start(..., boundaries=)` |
# | tenants, adapters and images kept apart | `start(..., salt=, extra_keys=)` |
# | n samples of one prompt | `fork(name, into)` |
# | nothing old after new weights | `new_epoch()` |
# | all of that chosen for you | `Scheduler(manager, tokens=, forks=)` |
#
# It happens in the host's books. The device only sees block tables that name a block twice, and
# copies of blocks that somebody is about to write into.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import plotting
from jaxkv.prefixes import EventLog

rng = np.random.default_rng(0)
full = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="f32")


def make_manager(layers, num_blocks, **options):
    plan = jaxkv.plan_cache(layers, 2**40, max_model_len=360, num_blocks_override=num_blocks)
    manager = jaxkv.BlockManager(plan, max_requests=8, **options)
    shape = jaxkv.StepShape.for_plan(
        plan, max_requests=8, max_tokens=360, forks=8, cached_tokens=360
    )
    return manager, shape


def random_tokens(count):
    return rng.integers(0, 50_000, count)


# %% [markdown]
# ## A chat
#
# Give `start` the token ids of the prompt (an array is quickest). It returns a `PrefixHit`: the
# first step of the request computes what is left. Give `finish` the tokens of the answer, so that
# the next turn, whose prompt holds all that was said, finds them too. A step's shape needs room for
# the table entries of a hit: `cached_tokens`, and for copies: `forks`.

# %%
manager, shape = make_manager({"layers.0": full}, num_blocks=40)
system = random_tokens(100)
said, uses = {"Ann": system, "Bob": system}, []
for turn in range(4):
    for name in said:
        prompt = said[name] = np.concatenate([said[name], random_tokens(20)])
        hit = manager.start(name, prompt)
        print(
            f"turn {turn}, {name}: {hit.num_cached_tokens:3} of {len(prompt)} tokens cached,",
            end=" ",
        )
        print(hit.reasons)
        manager.step(shape, {name: len(prompt) - hit.num_cached_tokens})
        uses.append(manager.block_use)
    answers = {name: random_tokens(30) for name in said}
    for _ in range(30):  # both answer
        manager.step(shape, dict.fromkeys(said, 1))
        uses.append(manager.block_use)
    for name, answer in answers.items():
        manager.finish(name, answer)
        said[name] = np.concatenate([said[name], answer])
    uses += [manager.block_use] * 10  # and both think
assert hit.num_cached_tokens == 240

# %% [markdown]
# A hit ends at a whole block, and leaves at least the last token to compute, because its logits are
# wanted. Blocks between requests are **warm**: free, and kept. They count as free everywhere (in
# `num_free_blocks`, in admission), and are taken last, the least recently used first and the ends
# of prompts before their beginnings.

# %%
plotting.plot_block_use(uses)

# %% [markdown]
# Ann and Bob begin with the same system prompt. Bob's first turn comes one step after Ann's, and
# finds the prompt already. Had both been in one step, each would have computed it, and one of the
# two copies would have been kept.
#
# ## Why there is no longer hit
#
# There is one reason for each group of layers; `help(jaxkv.blocks.PrefixHit)` has all of them. Here
# are those of a model with one group:


# %%
def show(what, hit, reason):
    print(f"{what:<42} {hit.num_cached_tokens:4} tokens  {', '.join(hit.reasons)}")
    assert reason in hit.reasons


adapter = jaxkv.ExtraKey.lora("summaries", "adapters/summaries-v2")
text = random_tokens(90)
manager, shape = make_manager({"layers.0": full}, num_blocks=40)


def serve(name, prompt, **options):
    """Computes a prompt, and leaves it behind."""
    hit = manager.start(name, prompt, **options)
    manager.step(shape, {name: len(prompt) - hit.num_cached_tokens})
    manager.finish(name)
    return hit


serve("text", text)
show("known to its last whole block", manager.start("a", text), "complete")
show("nobody asked that", manager.start("b", random_tokens(90)), "never_seen")
show("parts after 40 tokens", manager.start("c", [*text[:40], *text]), "shorter_than_a_block")
show("another tenant", manager.start("d", text, salt="tenant 7"), "other_salt")
show("an adapter", manager.start("e", text, extra_keys=[adapter]), "other_keys")
show("no token ids", manager.start("f"), "not_looked_up")
for name in "abcdef":
    manager.finish(name)
for name in ("long", "longer"):  # they take nearly all 39 blocks
    serve(name, random_tokens(300))
show("its blocks were needed", manager.start("a", text), "evicted")
manager.finish("a")
serve("text", text)
manager.new_epoch()
show("from before new weights", manager.start("a", text), "other_epoch")
print(manager.prefix_stats())

# %% [markdown]
# The blocks of an answer depend on everything before it, so a salt or an adapter separates whole
# prompts. An image separates prompts from its first placeholder token on: its tokens are compared
# together with the image's identifier (a hash of its bytes, say).

# %%
placeholders = [7] * 32
cat, dog = (jaxkv.ExtraKey.mm(name, start=48, end=80) for name in ("hash of a cat", "of a dog"))
question = np.array([*text[:48], *placeholders, *text[:20]])
for extra, tokens in ((cat, 0), (cat, 96), (dog, 48)):
    hit = serve("image", question, extra_keys=[extra])
    print(f"{extra.value:<14} {hit.num_cached_tokens} of {len(question)} tokens cached")
    assert hit.num_cached_tokens == tokens

# %% [markdown]
# ## Windows and states
#
# Every group must have what the next token reads: all blocks (full attention), the last window, or
# the recurrent **state** at exactly that token. Blocks of keys and values are there for every
# token, but a state is overwritten by the next one. So states are kept, as *checkpoints*, at few
# places: where a prompt ends, where two prompts were seen to part, and where you say that others
# will go on, such as after a system prompt. A `PrefixHit` lists them in `chunk_ends`: end a chunk
# there, and the state is kept.

# %%
state = jaxkv.StateSpec(block_size=16, shapes=((512,),), dtypes=("f32",))
system = random_tokens(100)
for boundaries in ((), (100,)):
    manager, shape = make_manager({"layers.0": full, "layers.1": state}, num_blocks=120)
    print(f"boundaries={boundaries}")
    for question in range(3):
        prompt = np.concatenate([system, random_tokens(60)])
        hit = manager.start(question, prompt, boundaries=boundaries)
        done = hit.num_cached_tokens
        for end in (*hit.chunk_ends, len(prompt)):
            manager.step(shape, {question: end - done})
            done = end
        manager.finish(question)
        print(f"   {hit.num_cached_tokens:3} cached, chunk ends {hit.chunk_ends}, {hit.reasons}")
assert hit.num_cached_tokens == 100

# %% [markdown]
# Without boundaries the first prompt leaves a state only where it ends, which helps nobody else
# (`no_checkpoint`). The second one parts from it after 100 tokens and keeps a state there, and the
# third one hits. With the boundary, the second one hits already. A hit at a checkpoint need not be
# a multiple of the block size: the half-full block is shared as well, and copied when it is written
# into. The `Scheduler` ends chunks at these places by itself. (Windows have a reason of their own,
# `left_window`: the blocks were given back before they could be kept.)
#
# Here is the load of [vLLM issue 45238](https://github.com/vllm-project/vllm/issues/45238): 64
# prompts over 8 system prompts, on a Qwen3-Next with 640 usable blocks. At most 56 can hit, because
# each system prompt is new once. The checkpoints take at most a tenth of the pool
# (`BlockManager(checkpoint_share=0.1)`).

# %%
qwen = jaxkv.layers_from_config(jaxkv.load_config("qwen3-next-80b-a3b"))
plan = jaxkv.plan_cache(qwen, 2**60, max_model_len=4096, num_blocks_override=641)
prompts = [
    np.append(s, random_tokens(700)) for s in rng.integers(0, 50_000, (8, 1500)).repeat(8, 0)
]
prompts = [prompts[i] for i in rng.permutation(64)]


def serve_load(boundaries):
    tokens = dict(enumerate(prompts))
    manager = jaxkv.BlockManager(plan, max_requests=4)
    scheduler = jaxkv.Scheduler(manager, max_tokens=8192, forks=4, tokens=tokens)
    shape = scheduler.shape(extra=0)
    most_kept = 0
    for name, prompt in tokens.items():
        scheduler.add(name, len(prompt), boundaries=boundaries)
        while work := scheduler.schedule().work:
            manager.step(shape, work)
            most_kept = max(most_kept, manager.prefix_stats().checkpoint_blocks)
        scheduler.finish(name)
    stats = manager.prefix_stats()
    print(f"boundaries={boundaries}: {stats.hits} of {stats.requests} hit, {stats.hit_rate:.0%} of")
    print(f"   all tokens; at most {most_kept} blocks in checkpoints; {stats.reasons}")
    return stats.hits


assert serve_load(boundaries=()) == 48
assert serve_load(boundaries=(1500,)) == 56

# %% [markdown]
# ## Samples of one prompt
#
# `fork` starts requests that share all that another one has computed. They take no blocks until
# they write: full blocks stay shared to the end, and the half-full last block (and each state) is
# copied by the step in which a sample writes into it. Here are four samples of a prompt of 90
# tokens in a pool of 24 blocks, where only three such requests of their own would fit.

# %%
manager, shape = make_manager({"layers.0": full}, num_blocks=25)
manager.start("prompt", text)
manager.step(shape, {"prompt": 90})
samples = ["prompt", "s1", "s2", "s3"]
manager.fork("prompt", samples[1:])
snapshots = [plotting.snapshot_blocks(manager)]
for step in range(36):
    upload = manager.step(shape, dict.fromkeys(samples, 1))
    if step == 0:
        print("copies of the last block:", upload.parts()["copy_sources"].size)
    snapshots.append(plotting.snapshot_blocks(manager))
print(manager, "for", sum(manager.allocated_blocks()), "blocks of the samples' tables")
plotting.plot_pool_over_time(manager.plan, snapshots)

# %% [markdown]
# An RL step then changes the weights. What the old weights computed must never be hit again, also
# not what requests still compute that began with them: `new_epoch` sees to both, and the next miss
# says so.

# %%
manager.new_epoch()
for name in samples:
    manager.finish(name)
hit = manager.start("next step", text)
print(hit.num_cached_tokens, hit.reasons)
assert hit.reasons == ("other_epoch",)

# %% [markdown]
# With a `Scheduler`, call `scheduler.fork(name, samples)` after the step that computed the prompt.
# A sample for which there is no room waits, and finds the prompt warm later.
#
# ## Preempted requests come back warm
#
# When blocks run out, the `Scheduler` preempts the youngest request, which gives its blocks back.
# With `tokens=`, it finds those again that nobody needed in the meantime.

# %%
plan = jaxkv.plan_cache({"layers.0": full}, 2**40, max_model_len=360, num_blocks_override=32)
manager = jaxkv.BlockManager(plan, max_requests=4)
tokens = {name: random_tokens(80).tolist() for name in "abcd"}
scheduler = jaxkv.Scheduler(manager, max_tokens=128, tokens=tokens)
shape = scheduler.shape(extra=0)
for name in tokens:
    scheduler.add(name, 80)
uses, preemptions = [], []
while scheduler.has_work:
    schedule = scheduler.schedule()
    for name in schedule.preempted:
        print(f"step {len(uses)}: {name} is preempted with {len(tokens[name])} tokens")
        preemptions.append(len(uses))
    for name, hit in schedule.hits.items() if preemptions else ():
        print(f"step {len(uses)}: {name} is back, {hit.num_cached_tokens} tokens are there")
    manager.step(shape, schedule.work)
    uses.append(manager.block_use)
    for name in schedule.samples:
        tokens[name] += random_tokens(1).tolist()
        if len(tokens[name]) == 130:
            scheduler.finish(name)
        else:
            scheduler.append({name: 1})
plotting.plot_block_use(uses, preemptions=preemptions)

# %% [markdown]
# ## Warm equals cold
#
# What a hit shares was computed from the same tokens in the same order, so its bytes are those that
# the request would have computed. For the rest to be equal to the bit, it must be computed by the
# same program on the same shapes. `Scheduler(chunk_tokens=8)` ends the chunks of prompts at
# multiples of 8, wherever a hit begins. Below, a hybrid computes a prompt of 40 tokens in such
# chunks: cold, and after a hit of 32 tokens. `attend` finds the keys and values in shared blocks,
# and `gated_delta` goes on from a copy of the state that the checkpoint holds.

# %%
delta = jaxkv.StateSpec(block_size=16, shapes=((3, 96), (2, 16, 16)), dtypes=("f32", "f32"))
hybrid = {"layers.0": full, "layers.1": delta}
plan = jaxkv.plan_cache(hybrid, 2**40, max_model_len=360, num_blocks_override=32)
shape = jaxkv.StepShape.for_plan(
    plan, max_requests=4, max_tokens=8, forks=1, cached_tokens=360, extra=8
)
table = jax.random.normal(jax.random.key(0), (50_000, 2, 16))
conv = jax.random.normal(jax.random.key(1), (4, 96)) / 2


@jax.jit(donate_argnums=0)
def hybrid_step(cache, upload, table):
    cache, batch = jaxkv.apply_step(cache, upload)
    x = table[batch.extra]
    cache, out = jaxkv.attend(cache, "layers.0", batch, queries=x, keys=jnp.roll(x, 1), values=x)
    x = x + out
    qkv, each = jnp.tile(x.reshape(8, 32), 3), x.mean(axis=-1)  # your projections
    cache, out = jaxkv.gated_delta(
        *(cache, "layers.1", batch, qkv, -jax.nn.softplus(each), jax.nn.sigmoid(each)),
        conv_weights=conv,
        num_key_heads=2,
    )
    return cache, x + out


manager = jaxkv.BlockManager(plan, max_requests=4)
cache = jaxkv.make_cache(plan, max_requests=4)
prompt, outputs = random_tokens(40), []
for name in ("cold", "warm"):
    hit = manager.start(name, prompt, boundaries=(32,))
    for start in range(hit.num_cached_tokens, 40, 8):
        upload = manager.step(shape, {name: 8}, extra=prompt[start : start + 8])
        cache, out = hybrid_step(cache, upload, table)
    outputs.append(np.asarray(out))
    print(f"{name}: {hit.num_cached_tokens} tokens cached")
jaxkv.check_errors(cache)
assert hit.num_cached_tokens == 32
np.testing.assert_array_equal(*outputs)
print("the last chunk's outputs are equal to the bit")

# %% [markdown]
# Other chunks, or other requests in the batch, may make XLA sum in another order. In float32 the
# difference is rounding. In bf16 it can be large enough to change the likeliest token, with any
# cache and without one.
#
# ## Events for routers
#
# Give the manager an `EventLog`, and it hears of whole blocks that are kept, evicted and cleared,
# by the same keys as vLLM's (SHA-256 over CBOR, chained). `jaxkv.prefixes.encode_events` and
# `event_frames` make the messages that routers such as Dynamo's and llm-d's read.

# %%
log = EventLog()
manager, shape = make_manager({"layers.0": full, "layers.1": state}, num_blocks=40, events=log)
serve("a", text)
manager.new_epoch()
for event in log.take(timestamp=0.0).events:
    kind = getattr(event, "group", None)
    keys = [key.hex()[:8] for key in getattr(event, "block_keys", ())]
    counted = "" if kind is None else f"of a {kind.kind} group, counted: {kind.is_counted}"
    print(type(event).__name__, counted, *keys)

# %% [markdown]
# A router that sees only these blocks cannot know whether a hybrid has the state that goes with
# them, so what it counts is an upper bound for a hit.
