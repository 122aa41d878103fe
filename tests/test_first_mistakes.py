"""Mistakes of the first hour: each error names the argument, what was given and what to change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.blocks import BlockManager, OutOfBlocksError
from jaxkv._src.cache import make_cache
from jaxkv._src.planning import KVCacheCapacityError, plan_cache
from jaxkv._src.prefixes import ExtraKey
from jaxkv._src.sleeping import ClosedOverError
from jaxkv._src.specs import FullAttentionSpec
from jaxkv._src.uploads import StepShape, TableEntry, pack_step
from jaxkv.testing import CacheStateMachine, assert_same_bytes, strategies
from tests.helpers import hybrid_plan

PLAN = hybrid_plan(kv_dtype="bf16")
FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
KEYS = jnp.ones((8, 2, 4))
plan_one = functools.partial(plan_cache, {"full.0": FULL}, 2**20, max_model_len=24)


class Setting:
    """A step of 8 tokens, 5 of them of request "r", which may go on with 8 more."""

    def __init__(self) -> None:
        self.manager = BlockManager(PLAN, max_requests=2)
        self.shape = StepShape.for_plan(PLAN, max_requests=2, max_tokens=8)
        self.manager.start("r")
        self.upload = self.manager.step(self.shape, {"r": 5})
        self.fresh = make_cache(PLAN, max_requests=2)
        step = jax.jit(jaxkv.apply_step)
        self.cache, self.batch = step(self.fresh, self.upload)
        self.twice, _ = step(self.cache, self.upload)
        self.manager.start("s")
        self.manager.step(self.shape, {"s": 1})
        self.gapped, _ = step(self.cache, self.manager.step(self.shape, {"s": 1}))

    def step(self, work, shape=None, **options):
        return self.manager.step(self.shape if shape is None else shape, work, **options)

    def prompt(self, tokens, **options):
        return BlockManager(PLAN, max_requests=1).start("q", tokens, **options)

    def write(self, layer="full.0", keys=KEYS, values=KEYS, batch=None, **options):
        batch = self.batch if batch is None else batch
        return jaxkv.write_tokens(self.cache, layer, batch, keys, values, **options)

    def attend(self, *arrays, layer="full.0", **options):
        return jaxkv.attend(self.cache, layer, self.batch, *arrays, **options)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


def donated() -> jaxkv.KVCache:
    cache = make_cache(PLAN, max_requests=2)
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    return cache


class Flat(CacheStateMachine):
    """Gives a flat list of blocks, as caches of one group have it."""

    plan = PLAN

    def make_cache(self):
        pass

    def num_free_blocks(self):
        return PLAN.usable_blocks

    def read_null_block(self):
        return [np.zeros(4)]

    def start(self, request):
        pass

    def block_ids(self, request):
        return [1, 2, 3]


class Planless(Flat):
    plan = None


class Bytesless(Flat):
    def read_null_block(self):
        return []


MISTAKES = {
    # --- planning ---
    "a model's name for its configuration": (
        lambda s: jaxkv.layers_from_config("llama-3.1-8b"),
        TypeError,
        r"config must be the content of a config.json, got str; read it with load_config\(path",
    ),
    "a preset that does not exist": (
        lambda s: jaxkv.load_config("llama-9"),
        ValueError,
        "config='llama-9' is neither a preset nor .*No such file.*; did you mean llama-3.1-8b or",
    ),
    "a configuration that is read already": (
        lambda s: jaxkv.load_config({"model_type": "llama"}),
        TypeError,
        "config must be the name of a preset or a path, got dict; what is read already goes to",
    ),
    "a file that is not JSON": (
        lambda s: jaxkv.load_config(__file__),
        ValueError,
        r"test_first_mistakes.py' is neither .* .not JSON: Extra data: line 1 column 3 .char 2..$",
    ),
    "a dtype that no page holds": (
        lambda s: FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype="int4"),
        ValueError,
        "dtype='int4' is not a cache dtype; use one of bf16, bfloat16, ",
    ),
    "a model that is too long for the memory": (
        lambda s: plan_one(max_model_len=10**6),
        KVCacheCapacityError,
        "max_model_len=1,000,000 needs 250,000 blocks and the pool has 8,191 usable ones; set "
        "max_model_len to at most 32,764 or raise memory_bytes to at least 32,000,128",
    ),
    # --- cache, manager and shape ---
    **{
        f"more rows than int32 counts, to {name}": (
            call,
            ValueError,
            "max_requests=1,099,511,627,776 rows have more cells than int32 counts; set it to at "
            "most 85,899,345, the requests that run at the same time",
        )
        for name, call in {
            "make_cache": lambda s: make_cache(PLAN, max_requests=2**40),
            "BlockManager": lambda s: BlockManager(PLAN, max_requests=2**40),
            "for_plan": lambda s: StepShape.for_plan(PLAN, max_requests=2**40, max_tokens=8),
        }.items()
    },
    "a size that is traced": (
        lambda s: jax.eval_shape(lambda n: make_cache(PLAN, max_requests=n), 2),
        TypeError,
        "max_requests must be an int, got .*; it is traced, .* pass it from outside of jit",
    ),
    "a scale of zero": (
        lambda s: make_cache(PLAN, max_requests=2, scales=(0.0, 1.0)),
        ValueError,
        r"scales must be finite float32 greater than 0, got \(0.0, 1.0\)",
    ),
    "a size without its name": (
        lambda s: make_cache(PLAN, 4),
        TypeError,
        "make_cache takes its options by name; write max_requests=4",
    ),
    "a step without a size": (
        lambda s: StepShape.for_plan(PLAN, max_requests=2),
        TypeError,
        "max_tokens is missing: pass the tokens of a step over all its requests",
    ),
    # --- steps on the host ---
    "a prompt for a name": (
        lambda s: s.manager.start([1, 15043, 3186]),
        TypeError,
        r"request=\[1, 15043, 3186\] must be a hashable name, such as an int or a str",
    ),
    "token ids for their number": (
        lambda s: s.step({"r": [1, 15043]}),
        TypeError,
        r"work must count tokens in ints, got \[1, 15043\]; give the number of new tokens of each",
    ),
    "a chunk beyond the limits of the plan": (
        lambda s: s.step({"r": 9}),
        ValueError,
        "request 'r' computes 9 tokens in a step; give 1 to limits.max_in_flight_tokens=8 of the "
        "plan: leave the request out, split its tokens, or plan with larger limits",
    ),
    "no forks in the shape": (
        lambda s: pack_step(s.shape, copies=[[(1, 2)], *[[]] * (len(PLAN.groups) - 1)]),
        ValueError,
        r"needs block_copies=1 and its shape has 0; use more forks= \(see StepShape.for_plan\)",
    ),
    "more blocks than are free": (
        lambda s: s.manager.block_pool.allocate(10**6),
        OutOfBlocksError,
        r"1000000 blocks needed and \d+ free; finish a request, or preempt one \(finish it, and",
    ),
    # --- prompts ---
    "a text for its token ids": (
        lambda s: s.prompt("hello"),
        TypeError,
        "tokens must be token ids, a sequence of ints, got str; tokenize first",
    ),
    "token ids that are traced": (
        lambda s: jax.eval_shape(s.prompt, jnp.ones(4, jnp.int32)),
        TypeError,
        "tokens is a .*Tracer; it is traced, .* pass it from outside of jit",
    ),
    "no token ids": (
        lambda s: s.prompt([]),
        ValueError,
        "tokens is empty; give the token ids of the prompt, at least one",
    ),
    **{
        f"{name} without its prompt": (
            lambda s, name=name, value=value: s.prompt(None, **{name: value}),
            ValueError,
            f"{name}=.* has no effect without tokens; pass the token ids of the prompt as tokens=",
        )
        for name, value in {
            "salt": 5,
            "boundaries": [2],
            "extra_keys": [ExtraKey.lora("a", "/a")],
            "max_cached_tokens": 0,
        }.items()
    },
    "the name of an adapter for its key": (
        lambda s: s.prompt([1], extra_keys=["my-adapter"]),
        TypeError,
        r"extra_keys\[0\] must be created by ExtraKey.lora, ExtraKey.mm or ExtraKey.prompt_embeds, "
        "got 'my-adapter'",
    ),
    "more cached blocks than fit into the shape": (
        lambda s: pack_step(s.shape, entries=[TableEntry(0, [range(99)] * 5)]),
        ValueError,
        r"the step needs block_ids=495 and its shape has \d+; use more cached_tokens=, for prompts",
    ),
    "token ids for a scheduler": (
        lambda s: jaxkv.Scheduler(BlockManager(PLAN, max_requests=2), max_tokens=8).add("q", [1]),
        TypeError,
        r"num_tokens must be an int, the length of the prompt, got list; token ids go into "
        r"Scheduler\(tokens=\)",
    ),
    "a boundary behind the prompt": (
        lambda s: jaxkv.Scheduler(
            BlockManager(PLAN, max_requests=2), max_tokens=8, tokens={"q": [1] * 4}
        ).add("q", 4, boundaries=[5]),
        ValueError,
        r"boundaries=\[5\] must be in 1..4, the length of the prompt in tokens",
    ),
    # --- ids of your own ---
    "block ids of one group": (
        lambda s: pack_step(s.shape, entries=[TableEntry(0, [[1, 2]])]),
        ValueError,
        "entries: row 0 has ids for 1 groups and starts for 5; the tables have 5 groups",
    ),
    "block ids without groups": (
        lambda s: pack_step(s.shape, entries=[TableEntry(0, [1, 2, 3, 4, 5])]),
        TypeError,
        r"entries: row 0 has block_ids=\[1, 2, 3, 4, 5\]; give a list for each group",
    ),
    # --- steps on the device ---
    "an upload applied twice": (
        lambda s: jaxkv.check_errors(s.twice),
        jaxkv.CacheError,
        "at upload 1 or before: an upload was applied twice, or to another cache. Run every",
    ),
    "an upload that was dropped": (
        lambda s: jaxkv.check_errors(s.gapped),
        jaxkv.CacheError,
        "an upload was lost: the numbers of two uploads in a row have a gap",
    ),
    "a cache from outside of the step": (
        lambda s: jaxkv.sleeping.check_not_closed_over(
            s.cache, jax.jit(lambda u: jaxkv.apply_step(s.cache, u)), s.upload
        ),
        ClosedOverError,
        r"closes over int32\[2, 25\] \(as cache.rows\), .*: pass the cache as an argument",
    ),
    # --- layers ---
    "the number of a layer": (
        lambda s: s.write(layer=0),
        TypeError,
        "layer must be the name of a layer, got 0; in a loop over layers pass the name of any "
        "layer of the group and the traced index as layer_index=",
    ),
    "keys without padding": (
        lambda s: s.write(keys=KEYS[:5], values=KEYS[:5]),
        ValueError,
        r"keys has shape \(5, 2, 4\); layer 'full.0' wants \(8, 2, 4\), padded to the step's shape",
    ),
    "a scale for each head": (
        lambda s: s.attend(KEYS, KEYS, KEYS, scale=jnp.ones(2)),
        TypeError,
        "scale must be a number, got Array",
    ),
    "keys that were quantised before": (
        lambda s: s.write(keys=KEYS.astype(jnp.int8)),
        TypeError,
        "keys has dtype int8; pass floats, or stored rows to write_rows",
    ),
    "rows of another dtype": (
        lambda s: jaxkv.write_rows(s.cache, "full.0", s.batch, jnp.ones((8, 2, 8), jnp.float16)),
        TypeError,
        "rows has dtype float16; layer 'full.0' stores bfloat16: cast it, or pass its bytes",
    ),
    "keys without values": (
        lambda s: s.attend(KEYS, KEYS),
        ValueError,
        "values is None; layer 'full.0' stores keys and values: pass both, or neither to attend",
    ),
    "queries of too few heads": (
        lambda s: s.attend(jnp.ones((8, 3, 4)), KEYS, KEYS),
        ValueError,
        r"\(8, 3, 4\); .* want \(8, heads, head_size=4\), heads a multiple of num_kv_heads=2",
    ),
    "a cache that was donated": (
        lambda s: jaxkv.layer_view(donated(), "full.0"),
        ValueError,
        "cache is used up: an earlier call took it, by donate_argnums, an engine or sleep; use",
    ),
    # --- testing kit ---
    "a fixed model for a strategy": (
        lambda s: strategies.plans({"a": FULL}).example(),
        TypeError,
        r"layers must be a strategy; wrap one fixed model in st.just",
    ),
    "a machine without a plan": (
        lambda s: Planless().begin(0),
        TypeError,
        "set plan in Planless, to what plan_cache returned",
    ),
    "a machine without a null block": (
        lambda s: Bytesless().begin(0),
        ValueError,
        "read_null_block gave no bytes; wanted those of block 0",
    ),
    "a machine of one group": (
        lambda s: Flat()._rows(1),
        TypeError,
        r"block_ids gave \[1, 2, 3\]; wanted a list of block ids for each of the plan's 5 groups",
    ),
    "trees that hold no arrays": (
        lambda s: assert_same_bytes(object(), object()),
        TypeError,
        "not an array; pass its arrays",
    ),
}


# --- mistakes that would give wrong tokens, or a loop without an end --------------------------


class Loop:
    """An engine's loop over one request of 20 tokens, in steps of 16, with a `silent` mistake."""

    def __init__(self, *, steps: int = 2, forks: int = 0):
        plan = plan_cache({"a": FULL, "b": FULL}, 2**20, max_model_len=64)
        self.manager, self.tokens = BlockManager(plan, max_requests=4), {"r": list(range(20))}
        self.scheduler = jaxkv.Scheduler(
            self.manager, max_tokens=16, tokens=self.tokens, forks=forks
        )
        self.scheduler.add("r", 20)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        chosen = self.scheduler.schedule()
        self.manager.step(self.scheduler.shape(), chosen.work, extra=chosen.token_ids)

    def append(self, *names: str, noted: int = 1) -> "Loop":
        self.tokens["r"] += [7] * noted
        for name in names:
            self.scheduler.append({name: 1})
        return self


def stale_batch(is_dropped: bool) -> None:
    """Attends by the batch of the step before, or to the cache of before the step."""
    plan = plan_cache({"a": FULL}, 2**20, max_model_len=64)
    manager, cache = BlockManager(plan, max_requests=1), make_cache(plan, max_requests=1)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=8)
    manager.start("r")

    @jax.jit
    def two_steps(cache, first, second):
        cache, old = jaxkv.apply_step(cache, first)
        new_cache, new = jaxkv.apply_step(cache, second)
        pair = (cache, new) if is_dropped else (new_cache, old)
        return jaxkv.attend(pair[0], "a", pair[1], KEYS, KEYS, KEYS)[0]

    uploads = [manager.step(shape, {"r": 4}) for _ in range(2)]
    jaxkv.check_errors(two_steps(cache, *uploads))


SILENT = {
    "the cache that apply_step returned is dropped": (
        lambda: stale_batch(True),
        jaxkv.CacheError,
        "a batch of another step than the cache's",
    ),
    "the batch of another step": (
        lambda: stale_batch(False),
        jaxkv.CacheError,
        "a batch of another step than the cache's",
    ),
    "a token sampled from the middle of a prompt": (
        lambda: Loop(steps=1).append("r"),
        ValueError,
        "request='r' has computed 16 of its 20 tokens; append to each request once",
    ),
    "append twice": (
        lambda: Loop().append("r", "r"),
        ValueError,
        "request='r' has computed 20 of its 21 tokens; append to each request once",
    ),
    "a token that is not noted": (
        lambda: Loop().append("r", noted=0).step(),
        ValueError,
        "request='r' has 21 tokens, and the scheduler's tokens hold 20 token ids of it",
    ),
    "append forgotten": (
        lambda: Loop(steps=4),
        ValueError,
        "request='r' was in the samples of a schedule and got no token since",
    ),
    "a fork whose tokens are unknown": (
        lambda: Loop(forks=2).scheduler.fork("r", ["q"]),
        ValueError,
        "request='q' has 20 tokens, and the scheduler's tokens hold 0 token ids of it",
    ),
    "a fork without copies in the shape": (
        lambda: Loop().scheduler.fork("r", ["q"]),
        ValueError,
        "samples share no blocks with forks=0; pass forks= to the Engine or Scheduler",
    ),
}


@pytest.mark.parametrize("slip", SILENT)
def test_a_mistake_is_an_error(slip: str) -> None:
    call, error, message = SILENT[slip]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.filterwarnings("ignore:The `.example")
def test_the_message_says_what_to_change(mistake: str, setting: Setting) -> None:
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call(setting)
    assert setting.manager.num_computed_tokens("r") == 5, "nothing was changed"
