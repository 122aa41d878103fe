"""Conversion of plans and steps of other engines: `jaxkv.interop.vllm`. No jax."""

from jaxkv.interop import vllm as vllm

__all__ = ["vllm"]
