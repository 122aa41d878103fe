"""The memory of GPUs, and the part of it that is left for a cache. No jax."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from jaxkv._src.hf_config import Weights, count_weights
from jaxkv._src.internal.checks import (
    check_flag,
    check_kind,
    check_number,
    check_positive,
    plain_ints,
)
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.text import gib, shown

# GiB that CUDA gives a process: the total of `cudaMemGetInfo`; engines take a share of it. These
# are the smallest totals seen in PyTorch's out-of-memory errors ("GPU 0 has a total capacity of
# 139.80 GiB"). nvidia-smi also counts the driver's own memory: 143,771 MiB on an H200. Of GB10 (DGX
# Spark) and VR200 none was seen: it is what nvidia-smi tells less what the driver reserves.
GPUS = {
    "a10": "22.04",
    "a100-40g": "39.39",
    "a100-80g": "79.14",
    "b200": "178.35",
    "b300": "267.69",
    "gb10": "119.67",
    "gb200": "184.31",
    "gb300": "276.50",
    "gh200": "94.50",
    "h100": "79.10",
    "h200": "139.80",
    "l4": "22.03",
    "l40s": "44.39",
    "rtx3090": "23.56",
    "rtx4090": "23.52",
    "rtx5090": "31.34",
    "rtx-pro-6000": "94.97",
    "vr200": "278.56",
}
GIB = 2**30


def gpu_bytes(name: str) -> int:
    """Returns the bytes that CUDA gives a process on a GPU.

    Raises:
      ValueError: the GPU is not in the table.
    """
    check_kind(str, "the name of a GPU", gpu=name)
    key = name.lower()
    if key.endswith("gb"):  # a100-80gb
        key = key[:-1]
    if key not in GPUS:
        kind = re.split(r"[^a-z0-9]", key)[0]
        near = [gpu for gpu in GPUS if kind == gpu.partition("-")[0]]
        near = near or difflib.get_close_matches(key, GPUS, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(
            f"gpu={shown(name)} is not in the table: {', '.join(sorted(GPUS))}{hint} For another "
            "GPU, give the bytes that are left for the cache"
        )
    return int(Fraction(GPUS[key]) * GIB)


class NoMemoryLeftError(ValueError):
    """The weights leave no memory of a GPU for the cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory for a cache on each GPU: given, or left by the weights.

    memory_bytes: bytes for the cache; None: all that weights leave of the engine's share.
    gpu: name of the GPU.
    utilization: the engine's share of the GPU.
    weights: the weights of the whole model; if only their bytes are known, they count as divided
      evenly among its GPUs.
    """

    memory_bytes: int | None = None
    gpu: str = ""
    utilization: Fraction = Fraction(9, 10)
    weights: Weights | int = 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of the whole model."""
        return self.weights if isinstance(self.weights, int) else self.weights.num_bytes

    def weights_per_gpu(self, tensor_parallel: int, pipeline_parallel: int) -> tuple[int, ...]:
        """Returns the bytes of weights on each GPU of each pipeline stage."""
        if isinstance(self.weights, int):
            each = cdiv(self.weights, tensor_parallel * pipeline_parallel)
            return (each,) * pipeline_parallel
        return self.weights.bytes_per_gpu(
            tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel
        )

    def for_cache(self, tensor_parallel: int, pipeline_parallel: int) -> tuple[int, ...]:
        """Returns the bytes for the cache on each GPU of each pipeline stage.

        Raises:
          NoMemoryLeftError: the weights leave none on some GPU.
        """
        check_positive(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        if self.memory_bytes is not None:
            return (self.memory_bytes,) * pipeline_parallel
        usable = self.usable_bytes
        weights = self.weights_per_gpu(tensor_parallel, pipeline_parallel)
        if max(weights) >= usable:
            raise NoMemoryLeftError(
                f"gpu={self.gpu} has no memory for a cache: {gib(usable)} at "
                f"utilization={float(self.utilization):g}, and weights of "
                f"{fullest_text(weights, tensor_parallel)}; divide them among more GPUs "
                "(tensor_parallel, pipeline_parallel)"
            )
        return tuple(usable - size for size in weights)

    @property
    def usable_bytes(self) -> int:
        """The bytes of the engine's share of a GPU."""
        return int(gpu_bytes(self.gpu) * self.utilization)


def fullest_text(weights: Sequence[int], tensor_parallel: int) -> str:
    """Returns the weights of a GPU of the fullest stage as text, and where that is."""
    most, gpus = max(weights), tensor_parallel * len(weights)
    if gpus == 1:
        return gib(most)
    if len(set(weights)) == 1:
        return f"{gib(most)} on each of {gpus} GPUs"
    where = f"stage {weights.index(most)}, the fullest of {len(weights)}"
    return f"{gib(most)} on {'each GPU of ' if tensor_parallel > 1 else ''}{where}"


@plain_ints
def memory_for(
    gpu: str,
    config: Mapping[str, object] | None = None,
    *,
    weights: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    utilization: float = 0.9,
    drafts: bool = False,
) -> tuple[int, ...]:
    """Returns the bytes for a cache on a GPU of each pipeline stage, next to the model's weights.

    The memory that ``python -m jaxkv plan --gpu`` plans with::

        config = jaxkv.load_config("qwen3-32b")
        memory = jaxkv.planning.memory_for("h100", config, tensor_parallel=2)
        layers = jaxkv.layers_from_config(config, tensor_parallel=2)
        plan = jaxkv.plan_cache(layers, memory, max_model_len=40960, request_len=4096)

    This is all that weights leave of ``utilization``; activations and logits take theirs from the
    rest of the GPU. jax takes no more than three quarters of a GPU by default, so start it with a
    share above ``utilization``, such as ``XLA_CLIENT_MEM_FRACTION=0.95``.

    Args:
      gpu: its name, such as ``"h100"``; ``python -m jaxkv plan --help`` lists them.
      config: the content of a ``config.json``; only its weights are counted.
      weights: the bytes of all weights, in even parts, for a model whose weights cannot be counted;
        None: counted.
      tensor_parallel: ranks among which heads and weights are divided.
      pipeline_parallel: stages among which layers are divided.
      utilization: the share of the GPU for weights and cache, more than 0.0 and up to 1.0.
      drafts: whether to count the layers that draft tokens.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: an unknown GPU, weights that cannot be counted, or that leave no memory.
    """
    check_kind(str, "the name of a GPU", gpu=gpu)
    check_number(utilization=utilization)
    check_flag(drafts=drafts)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization={utilization} must be more than 0.0 and up to 1.0")
    if weights is not None:
        check_positive(weights=weights)
    counted = _count(config, drafts=drafts) if weights is None else weights
    budget = Budget(gpu=gpu, utilization=Fraction(str(utilization)), weights=counted)
    return budget.for_cache(tensor_parallel, pipeline_parallel)


def _count(config: Mapping[str, object] | None, *, drafts: bool) -> Weights:
    if config is None:
        raise TypeError("config is missing: pass the content of a config.json, or weights")
    try:
        return count_weights(config, drafts=drafts)
    except ValueError as error:
        raise ValueError(f"{error}; pass their bytes as weights") from error
