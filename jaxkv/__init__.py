"""Paged KV-cache management for JAX serving stacks on NVIDIA GPUs.

Plan a cache, allocate it, keep the books of its blocks on the host, and step it on the device::

    plan = jaxkv.plan_cache(layers, memory_bytes, max_model_len=8192)
    cache = jaxkv.make_cache(plan, max_requests=256)
    manager = jaxkv.BlockManager(plan, max_requests=256)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=8192)

    @jax.jit(donate_argnums=1)
    def step(params, cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        ...
        cache, out = jaxkv.attend(cache, layer, batch, queries, keys, values)
        ...

    manager.start("a")
    upload = manager.step(shape, {"a": 40})

Names are imported when they are first used: planning and the books need no jax.

Layers
    FullAttentionSpec, SlidingWindowSpec, ChunkedAttentionSpec, CrossAttentionSpec, MLASpec,
    SlidingWindowMLASpec, StateSpec, SharedKVSpec, EncoderOnlySpec, layers_from_config,
    load_config, model_len, encoder_len
Planning
    plan_cache, Plan, Limits, KVCacheCapacityError
Books on the host
    BlockManager, OutOfBlocksError, Scheduler, Schedule, StepShape, Upload, UploadRing,
    TableEntry, pack_step, PrefixHit, ExtraKey
The cache on the device
    make_cache, KVCache, apply_step, StepBatch, append_block_ids, expand_blocks, set_scales,
    check_errors, CacheError
Reads, writes, attention
    attend, write_tokens, read_tokens, write_rows, read_rows, write_state, read_state, quantize,
    layer_view, with_layer_view, describe_layer
Several processes
    check_same_upload, broadcast_upload
Sleep
    sleep, wake_up, SleepingCache, SleepError, check_not_closed_over

Rooms with more: `jaxkv.layout`, `jaxkv.attention` (page lists), `jaxkv.block_tables`,
`jaxkv.prefixes` (keys and events), `jaxkv.interop.vllm`, `jaxkv.testing`, `jaxkv.plotting`;
kernels over plain arrays are in `pallas_kernels`.
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

__all__ = sorted(_ROOM_OF)  # pyrefly: ignore


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
