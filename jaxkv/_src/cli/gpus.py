"""The memory of GPUs, and the part of it that is left for a cache. No jax."""

import dataclasses
from fractions import Fraction

from jaxkv._src.cli.amounts import gib
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.text import shown

# GiB that CUDA gives a process: the total of `cudaMemGetInfo`, of which engines take a share. These
# are the smallest totals seen in PyTorch's out-of-memory errors ("GPU 0 has a total capacity of
# 139.80 GiB"). nvidia-smi also counts the driver's own memory: 143,771 MiB on an H200.
GPUS = {
    "a10": "22.04",
    "a100-40g": "39.39",
    "a100-80g": "79.14",
    "b200": "178.35",
    "b300": "267.69",
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
}
GIB = 2**30


def gpu_bytes(name: str) -> int:
    """Returns the bytes that CUDA gives a process on a GPU.

    Raises:
      ValueError: the GPU is not in the table.
    """
    key = name.lower()
    if key.endswith("gb"):  # a100-80gb
        key = key[:-1]
    if key not in GPUS:
        raise ValueError(
            f"--gpu={shown(name)} is not in the table: {', '.join(sorted(GPUS))}. For another GPU, "
            "give the bytes that are left for the cache, such as --memory 71.3GiB"
        )
    return int(Fraction(GPUS[key]) * GIB)


class NoRoomError(ValueError):
    """The weights leave no memory of a GPU for the cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory for a cache on each GPU: given, or left by the weights.

    memory_bytes: bytes for the cache; None: all that weights leave of the engine's share.
    gpu: name of the GPU.
    utilization: the engine's share of the GPU.
    weights_bytes: bytes of the whole model; they divide evenly among its GPUs.
    """

    memory_bytes: int | None = None
    gpu: str = ""
    utilization: Fraction = Fraction(9, 10)
    weights_bytes: int = 0

    def for_cache(self, num_gpus: int) -> int:
        """Returns the bytes for the cache on each GPU.

        Raises:
          NoRoomError: the weights leave none.
        """
        if self.memory_bytes is not None:
            return self.memory_bytes
        usable, weights = self.usable_bytes, cdiv(self.weights_bytes, num_gpus)
        if weights >= usable:
            raise NoRoomError(
                f"--gpu={self.gpu} has no room for a cache: {gib(usable)} at "
                f"--utilization={float(self.utilization):g}, and weights of {gib(weights)}"
                f"{f' on each of {num_gpus}' if num_gpus > 1 else ''}; divide them among more GPUs "
                "(--tensor-parallel, --pipeline-parallel)"
            )
        return usable - weights

    @property
    def usable_bytes(self) -> int:
        """The bytes of the engine's share of a GPU."""
        return int(gpu_bytes(self.gpu) * self.utilization)
