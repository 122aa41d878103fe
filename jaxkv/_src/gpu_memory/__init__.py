"""The memory of GPUs, and what the weights of a model leave of it for a cache. No jax."""

from jaxkv._src.gpu_memory._budget import (
    GPUS,
    Budget,
    NoMemoryLeftError,
    fullest_text,
    gpu_bytes,
    memory_for,
)

__all__ = ["GPUS", "Budget", "NoMemoryLeftError", "fullest_text", "gpu_bytes", "memory_for"]
