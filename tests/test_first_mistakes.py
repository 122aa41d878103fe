"""What people get wrong in their first hour, and what they are told."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.block_tables import make_block_tables
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.models import encoder_len, layers_from_config, model_len
from jaxkv.pool import make_pool, write_rows, write_tokens
from jaxkv.specs import FullAttentionSpec, StateSpec
from jaxkv.step import StepShape, apply_step, apply_step_donating, pack_step
from jaxkv.testing import CacheStateMachine, assert_same_bytes, strategies
from tests.helpers import hybrid_plan

PLAN = hybrid_plan()
TABLES = make_block_tables(PLAN, max_requests=2)
POOL = make_pool(PLAN)
SHAPE = StepShape(entries=2, block_ids=8, zero_ids=4, batch=2, widths=TABLES.widths)
UPDATE = BlockManager(PLAN, max_requests=2).take_update()
UPLOAD = pack_step(SHAPE, update=UPDATE, rows=[], first_positions=[], lengths=[])
SLOTS = jnp.arange(4, 7, dtype=jnp.int32)
KEYS = jnp.ones((3, 2, 4))


class Shapeless(CacheStateMachine):
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


class Planless(Shapeless):
    plan = None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: apply_step(TABLES, POOL, UPDATE, shape=SHAPE),
            TypeError,
            "upload must be an array of int32, got TableUpdate",
        ),
        (
            lambda: apply_step_donating(POOL, TABLES, UPLOAD, shape=SHAPE),
            TypeError,
            "tables must be BlockTables, got KVPool",
        ),
        (
            lambda: apply_step(TABLES, POOL, UPLOAD.astype(np.int64), shape=SHAPE),
            TypeError,
            "upload must be an array of int32, got int64",
        ),
        (
            lambda: write_tokens(POOL, "full.0", SLOTS[None], KEYS, KEYS),
            ValueError,
            r"slots has shape \(1, 3\); wants \[T\], those of one group: batch.slots\[group\]",
        ),
        (
            lambda: write_tokens(POOL, "full.0", SLOTS, KEYS[:2], KEYS),
            ValueError,
            r"keys has shape \(2, 2, 4\); .* wants \(3, 2, 4\), one row per slot",
        ),
        (
            lambda: write_tokens(POOL, "full.0", SLOTS, KEYS.astype(jnp.int8), KEYS),
            TypeError,
            "keys has dtype int8; use write_rows",
        ),
        (
            lambda: write_rows(POOL, "full.0", SLOTS, jnp.ones((3, 16), jnp.float8_e5m2)),
            TypeError,
            "rows has dtype float8_e5m2; layer 'full.0' stores float8_e4m3fn: cast it",
        ),
        (
            lambda: dataclasses.replace(SHAPE, widths=6),
            TypeError,
            "widths=6 must be a tuple, one per group; use tables.widths",
        ),
        (
            lambda: make_block_tables(PLAN, max_requests=2, kernel_block_sizes=4),
            TypeError,
            "kernel_block_sizes=4 must be a sequence, one per group",
        ),
        (
            lambda: FullAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=4, dtype=jnp.bfloat16
            ),
            ValueError,
            "is not the name of a dtype; write a string such as 'bf16'",
        ),
        (
            lambda: StateSpec(block_size=16, shapes=((4,),), dtypes="f32"),
            TypeError,
            "dtypes='f32' must be a tuple of names; add a comma",
        ),
        *(
            (lambda read=read: read("llama-3.1-8b"), TypeError, "config must be the content of a")
            for read in (layers_from_config, model_len, encoder_len)
        ),
        (
            lambda: BlockManager(PLAN, max_requests=2).pool.allocate(10**6),
            OutOfBlocksError,
            r"preempt one \(finish it, and compute it again later\)",
        ),
        (
            lambda: strategies.plans({"a": 1}).example(),
            TypeError,
            r"layers must be a strategy; wrap one fixed model in st.just",
        ),
        (lambda: strategies.traffic(PLAN.groups), TypeError, "plan must be a Plan, got tuple"),
        (lambda: Planless().begin(0), TypeError, "set plan in Planless, to what plan_cache"),
        (
            lambda: Shapeless()._rows(1),
            TypeError,
            r"block_ids gave \[1, 2, 3\]; wanted a list of block ids for each of the plan's 5 gr",
        ),
        (lambda: assert_same_bytes(object(), object()), TypeError, "a leaf is a object, no array"),
    ],
)
@pytest.mark.filterwarnings("ignore:The `.example")
def test_the_message_says_what_to_change(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_grow_says_which_of_its_numbers_is_wrong() -> None:
    manager = BlockManager(PLAN, max_requests=2)
    manager.start("a")
    with pytest.raises(ValueError, match="num_tokens=25 is more than the plan's max_model_len=24"):
        manager.grow("a", 20, 25)
    with pytest.raises(ValueError, match="num_computed_tokens=5 is more than num_tokens=4"):
        manager.grow("a", 5, 4)


def test_a_machine_without_bytes_of_the_null_block_is_refused() -> None:
    machine = type("Machine", (Shapeless,), {"read_null_block": lambda self: []})
    with pytest.raises(ValueError, match="read_null_block gave no bytes"):
        machine().begin(0)


def test_trees_of_shardings_have_a_repr() -> None:
    shardings = jax.tree.map(lambda buffer: buffer.sharding, POOL)
    assert repr(shardings).startswith("KVPool(LBNHC, buffers=(SingleDeviceSharding")
