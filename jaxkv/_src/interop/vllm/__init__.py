"""Plans and steps from vLLM: its KV cache configuration and its scheduler's block ids. No jax."""

from jaxkv._src.interop.vllm._config import cache_order, layer_specs, plan_from_config
from jaxkv._src.interop.vllm._steps import SchedulerTables, StepChanges

__all__ = ["SchedulerTables", "StepChanges", "cache_order", "layer_specs", "plan_from_config"]
