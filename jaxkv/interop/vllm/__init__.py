"""vLLM's plan of a KV cache and its scheduler's block ids, taken over. No jax, and no vLLM.

For engines that keep vLLM's planner and scheduler and compute in JAX::

    plan = vllm.plan_from_config(kv_cache_config, max_model_len=8192)
    cache = jaxkv.make_cache(plan, max_requests=256, order=vllm.cache_order(kv_cache_config))
    tables = vllm.SchedulerTables(plan, max_requests=256)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=8192)

    *earlier, upload = tables.pack(shape, scheduler_output)  # in every step

Objects are read by attribute and mappings by key, as `KVCacheConfig` and `SchedulerOutput` of
vLLM 0.33 name them. A mapping that stands for a spec says its class as ``"type"``. Groups and
block ids keep their numbers. What would change bytes, or what attention sees, and has no
counterpart here is refused by name.
"""

from jaxkv.interop.vllm._config import cache_order, layer_specs, plan_from_config
from jaxkv.interop.vllm._steps import SchedulerTables, StepChanges

__all__ = ["SchedulerTables", "StepChanges", "cache_order", "layer_specs", "plan_from_config"]
