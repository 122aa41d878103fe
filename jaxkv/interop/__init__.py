"""What other engines have planned and scheduled, taken over: `jaxkv.interop.vllm`. No jax."""

from jaxkv.interop import vllm as vllm

__all__ = ["vllm"]
