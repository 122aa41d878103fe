"""Devices that run the Mosaic GPU kernels, dtypes and grids of these. Does not import Mosaic."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels._arguments import check_choice, shown

Implementation = Literal["mosaic_gpu", "xla"]

DTYPES = (
    *("float32", "int32", "uint32", "bfloat16", "float16", "int16", "uint16"),
    *("float8_e4m3fn", "float8_e5m2", "int8", "uint8"),
)
MIN_JAX = (0, 11)
SMS_WITHOUT_GPU = 132  # an H100's and H200's

Capability = tuple[int, int]  # compute capability of a GPU: major, minor


class Capabilities(NamedTuple):
    """Compute capabilities from ``least`` on, and below ``end`` if there is one."""

    least: Capability
    end: Capability | None = None

    def include(self, capability: Capability) -> bool:
        """Returns whether a GPU of this compute capability is among them."""
        return self.least <= capability and (self.end is None or capability < self.end)

    def __str__(self) -> str:
        least = f"{self.least[0]}.{self.least[1]}"
        return f"{least} or newer" if self.end is None else f"from {least} to below {self.end[0]}.0"


ANY = Capabilities((8, 0))
TMA = Capabilities((9, 0))  # also stores by TMA, and stmatrix
WGMMA = Capabilities((9, 0), (10, 0))  # instructions of Hopper alone

Kernel = Literal[
    "zero_blocks",
    "copy_blocks",
    "write_rows",
    "convolution",
    "recurrent_step",
    "recurrent_prompt",
    "decode",
    "prefill",
    "combine",
    "latents",
    "combine_latents",
]
# The GPUs for which each kernel compiles; `make lane-gpus` compiles them for all kinds of GPUs.
CAPABILITIES: dict[Kernel, Capabilities] = {
    "zero_blocks": ANY,
    "copy_blocks": ANY,
    "write_rows": ANY,
    "convolution": ANY,
    "recurrent_step": TMA,
    "recurrent_prompt": WGMMA,
    "decode": WGMMA,
    "prefill": WGMMA,
    "combine": TMA,
    "latents": WGMMA,
    "combine_latents": ANY,
}


def default_implementation(*kernels: Kernel) -> Implementation:
    """Returns the implementation that ``None`` stands for on the default device.

    Args:
      kernels: names of kernels, like ``"decode"``: ``"mosaic_gpu"`` if the device runs all of them.
        Without names: all that there are.

    Raises:
      ValueError: an unknown kernel.
    """
    for kernel in kernels:
        if kernel not in get_args(Kernel):
            listed = ", ".join(map(repr, CAPABILITIES))
            raise ValueError(f"kernels: {shown(kernel)} is none of {listed}")
    return "xla" if why_unsupported(kernels or CAPABILITIES) else "mosaic_gpu"


def compute_capability() -> Capability | None:
    """Returns the compute capability of the default device; None without a GPU, (0, 0) of others.

    All choices go by this function.
    """
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    is_number = major.isdecimal() and minor.isdecimal()
    return (int(major), int(minor)) if is_number else (0, 0)


def why_unsupported(kernels: Iterable[Kernel], any_platform: bool = False) -> str | None:
    """Returns why the default device cannot run Mosaic kernels, or None if it runs all of them.

    Args:
      any_platform: True: accept a machine without a GPU, where kernels can be lowered for CUDA or
        interpreted.
    """
    if jax.__version_info__ < MIN_JAX:
        return f"Mosaic kernels need jax >= 0.11, and this is jax {jax.__version__}"
    capability = compute_capability()
    if capability is None:
        return None if any_platform else "the default device is not a GPU"
    for kernel in kernels:
        if not CAPABILITIES[kernel].include(capability):
            return (
                f"the kernel {kernel!r} needs compute capability {CAPABILITIES[kernel]}, and this "
                f"GPU has {capability[0]}.{capability[1]}"
            )
    return None


def import_mosaic(implementation: Implementation | None) -> None:
    """Imports Mosaic if a call with this ``implementation`` may use it.

    An import while jax traces a function makes it trace again what it has traced before.
    """
    check_choice(get_args(Implementation), implementation=implementation)
    reasons = [why_unsupported([kernel], implementation == "mosaic_gpu") for kernel in CAPABILITIES]
    if implementation != "xla" and not all(reasons):
        import pallas_kernels._mosaic  # noqa: F401


def shared_memory_bytes() -> int:
    """Returns the shared memory that a thread block may have on the default device.

    Without a GPU: on a Hopper.
    """
    capability = compute_capability() or (9, 0)
    if capability in ((8, 6), (8, 9)) or capability[0] == 12:
        return 99 * 1024
    return (163 if capability[0] == 8 else 227) * 1024


def can_store(dtype: jnp.dtype) -> bool:
    """Returns whether the Mosaic kernels load and store this dtype."""
    return dtype.name in DTYPES


def max_thread_blocks(per_sm: int) -> int:
    """Returns the largest grid: ``per_sm`` thread blocks on every SM of the default device.

    Without a GPU, where kernels are only lowered or interpreted, assumes `SMS_WITHOUT_GPU` SMs;
    kernels are correct on any grid.
    """
    if jax.default_backend() != "gpu":
        return per_sm * SMS_WITHOUT_GPU
    return per_sm * getattr(jax.devices()[0], "core_count", SMS_WITHOUT_GPU)
