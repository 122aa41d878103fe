"""Plans and steps from vLLM: its KV cache configuration and its scheduler's block ids. No jax.

For engines that keep vLLM's planner and scheduler and compute in JAX::

    plan = vllm.plan_from_config(kv_cache_config, max_model_len=max_model_len)
    cache = jaxkv.make_cache(plan, max_requests=256, order=vllm.cache_order(kv_cache_config))
    tables = vllm.SchedulerTables(plan, max_requests=256)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=8192)

    *earlier, upload = tables.pack(shape, scheduler_output)  # in every step

vLLM need not be installed. `KVCacheConfig` and `SchedulerOutput` of vLLM 0.33 are read by
attribute, and mappings with the same fields by key; a mapping for a spec names its class as
``"type"``. Groups and block ids keep their numbers. A field without a counterpart in jaxkv raises
an error that names it if it changes the bytes of a block or the tokens that attention sees.
"""

from jaxkv._src.interop.vllm import (
    SchedulerTables,
    cache_order,
    layer_specs,
    plan_from_config,
)

__all__ = [
    "SchedulerTables",
    "cache_order",
    "layer_specs",
    "plan_from_config",
]
