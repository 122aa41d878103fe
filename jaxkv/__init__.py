"""Paged KV caches for LLM serving in JAX on NVIDIA GPUs.

jaxkv plans the cache memory of a model, allocates it on the device, and keeps track on the host of
the blocks that each request holds. One array of integers per step, the upload, brings the device up
to date. On the device all work is done by pure functions over one pytree, the cache, inside your
own ``jit``::

    import jax
    import jaxkv

    spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
    plan = jaxkv.plan_cache({"layer": spec}, memory_bytes=2**30, max_model_len=8192)
    cache = jaxkv.make_cache(plan, max_requests=256)        # on the device: block tables, pool
    manager = jaxkv.BlockManager(plan, max_requests=256)    # on the host: blocks of requests
    shape = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=64)

    @jax.jit(donate_argnums=0)
    def step(cache, upload, x):                             # a model of one attention layer
        cache, batch = jaxkv.apply_step(cache, upload)
        return jaxkv.attend(cache, "layer", batch, queries=x, keys=x, values=x)

    manager.start("a")
    upload = manager.step(shape, {"a": 40})                 # the first 40 tokens of request "a"
    cache, out = step(cache, upload, jax.numpy.ones((64, 8, 128)))

Call ``help(jaxkv.attend)`` to read about one name. Names, by task:

Describe the layers of a model, or read them from its config.json
    FullAttentionSpec, SlidingWindowSpec, ChunkedAttentionSpec, CrossAttentionSpec, MLASpec,
    SlidingWindowMLASpec, StateSpec, SharedKVSpec, EncoderOnlySpec, load_config,
    layers_from_config, model_len, encoder_len
Plan the memory: groups of layers, number of blocks, longest request
    plan_cache, Plan, Limits, KVCacheCapacityError
Choose the work of each step: admission, chunked prefill, preemption
    Scheduler, Schedule
Give blocks to requests, share prefixes, and pack the upload of a step
    BlockManager, StepShape, Upload, UploadRing, PrefixHit, ExtraKey, OutOfBlocksError
Pack uploads with the block ids of your own scheduler
    pack_step, TableEntry
Allocate the cache, and bring it up to date in each step
    make_cache, KVCache, set_scales, apply_step, StepBatch, append_block_ids, check_errors,
    CacheError
Write, read and attend in the model
    attend, write_tokens, read_tokens, write_state, read_state, write_rows, read_rows, quantize
Use your own kernels and connectors
    layer_view, with_layer_view, describe_layer, expand_blocks
Run one cache in several processes
    check_same_upload, broadcast_upload
Give device memory back for a while
    sleep, wake_up, SleepingCache, SleepError, check_not_closed_over

Modules with more: `jaxkv.layout` (physical orders), `jaxkv.attention` (page lists),
`jaxkv.block_tables`, `jaxkv.prefixes` (keys and events), `jaxkv.interop.vllm`, `jaxkv.testing`,
`jaxkv.plotting`. Kernels over plain arrays are in the package `pallas_kernels`. In a shell,
``python -m jaxkv plan --help`` says what fits into a GPU, and ``python -m jaxkv demo`` serves a
small model.

Importing jaxkv is quick: a name is imported when it is first used, and planning, the manager and
the scheduler do not load jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.attention import attend as attend
    from jaxkv.block_tables import append_block_ids as append_block_ids
    from jaxkv.blocks import BlockManager as BlockManager
    from jaxkv.blocks import OutOfBlocksError as OutOfBlocksError
    from jaxkv.blocks import PrefixHit as PrefixHit
    from jaxkv.blocks import StepShape as StepShape
    from jaxkv.blocks import TableEntry as TableEntry
    from jaxkv.blocks import Upload as Upload
    from jaxkv.blocks import pack_step as pack_step
    from jaxkv.cache import CacheError as CacheError
    from jaxkv.cache import KVCache as KVCache
    from jaxkv.cache import StepBatch as StepBatch
    from jaxkv.cache import check_errors as check_errors
    from jaxkv.cache import expand_blocks as expand_blocks
    from jaxkv.cache import make_cache as make_cache
    from jaxkv.cache import set_scales as set_scales
    from jaxkv.hf_config import encoder_len as encoder_len
    from jaxkv.hf_config import layers_from_config as layers_from_config
    from jaxkv.hf_config import load_config as load_config
    from jaxkv.hf_config import model_len as model_len
    from jaxkv.planning import KVCacheCapacityError as KVCacheCapacityError
    from jaxkv.planning import Plan as Plan
    from jaxkv.planning import plan_cache as plan_cache
    from jaxkv.pool import describe_layer as describe_layer
    from jaxkv.pool import layer_view as layer_view
    from jaxkv.pool import quantize as quantize
    from jaxkv.pool import read_rows as read_rows
    from jaxkv.pool import read_state as read_state
    from jaxkv.pool import read_tokens as read_tokens
    from jaxkv.pool import with_layer_view as with_layer_view
    from jaxkv.pool import write_rows as write_rows
    from jaxkv.pool import write_state as write_state
    from jaxkv.pool import write_tokens as write_tokens
    from jaxkv.prefixes import ExtraKey as ExtraKey
    from jaxkv.scheduler import Schedule as Schedule
    from jaxkv.scheduler import Scheduler as Scheduler
    from jaxkv.sleeping import SleepError as SleepError
    from jaxkv.sleeping import SleepingCache as SleepingCache
    from jaxkv.sleeping import check_not_closed_over as check_not_closed_over
    from jaxkv.sleeping import sleep as sleep
    from jaxkv.sleeping import wake_up as wake_up
    from jaxkv.specs import ChunkedAttentionSpec as ChunkedAttentionSpec
    from jaxkv.specs import CrossAttentionSpec as CrossAttentionSpec
    from jaxkv.specs import EncoderOnlySpec as EncoderOnlySpec
    from jaxkv.specs import FullAttentionSpec as FullAttentionSpec
    from jaxkv.specs import Limits as Limits
    from jaxkv.specs import MLASpec as MLASpec
    from jaxkv.specs import SharedKVSpec as SharedKVSpec
    from jaxkv.specs import SlidingWindowMLASpec as SlidingWindowMLASpec
    from jaxkv.specs import SlidingWindowSpec as SlidingWindowSpec
    from jaxkv.specs import StateSpec as StateSpec
    from jaxkv.step import UploadRing as UploadRing
    from jaxkv.step import apply_step as apply_step
    from jaxkv.step import broadcast_upload as broadcast_upload
    from jaxkv.step import check_same_upload as check_same_upload

__version__ = "0.1.0.dev0"

_NAMES = {
    "attention": ("attend",),
    "block_tables": ("append_block_ids",),
    "blocks": (
        *("BlockManager", "OutOfBlocksError", "PrefixHit", "StepShape", "TableEntry", "Upload"),
        "pack_step",
    ),
    "cache": (
        *("CacheError", "KVCache", "StepBatch", "check_errors", "expand_blocks", "make_cache"),
        "set_scales",
    ),
    "hf_config": ("encoder_len", "layers_from_config", "load_config", "model_len"),
    "planning": ("KVCacheCapacityError", "Plan", "plan_cache"),
    "pool": (
        *("describe_layer", "layer_view", "quantize", "read_rows", "read_state", "read_tokens"),
        *("with_layer_view", "write_rows", "write_state", "write_tokens"),
    ),
    "prefixes": ("ExtraKey",),
    "scheduler": ("Schedule", "Scheduler"),
    "sleeping": ("SleepError", "SleepingCache", "check_not_closed_over", "sleep", "wake_up"),
    "specs": (
        *("ChunkedAttentionSpec", "CrossAttentionSpec", "EncoderOnlySpec", "FullAttentionSpec"),
        *("Limits", "MLASpec", "SharedKVSpec", "SlidingWindowMLASpec", "SlidingWindowSpec"),
        "StateSpec",
    ),
    "step": ("UploadRing", "apply_step", "broadcast_upload", "check_same_upload"),
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names}
_ROOMS = {*_NAMES, "interop", "layout", "plotting", "testing"}

# There is no __all__, because with it help(jaxkv) would print every class in full.


def __getattr__(name: str) -> Any:
    """Imports a name, or a room, when it is first used."""
    if name in _ROOM_OF:
        value = getattr(importlib.import_module(f"jaxkv.{_ROOM_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"jaxkv.{name}")
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *_ROOM_OF, *_ROOMS})
