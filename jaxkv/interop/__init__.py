"""Plans and steps of other engines, taken over: `jaxkv.interop.vllm`. No jax."""

from jaxkv.interop import vllm as vllm

__all__ = ["vllm"]
