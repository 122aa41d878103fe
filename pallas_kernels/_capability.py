"""Devices that run the Mosaic GPU kernels, dtypes and grids of these. Does not import Mosaic."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels._arguments import check_choice

Implementation = Literal["mosaic_gpu", "xla"]

DTYPES = (
    "float32",
    "int32",
    "uint32",
    "bfloat16",
    "float16",
    "int16",
    "uint16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
)
MIN_JAX = (0, 11)
MIN_COMPUTE_CAPABILITY = 9.0
SMS_WITHOUT_GPU = 132  # an H100's and H200's


def default_implementation() -> Implementation:
    """Returns the implementation that ``None`` stands for on the default device."""
    return "xla" if why_unsupported() else "mosaic_gpu"


def why_unsupported(any_platform: bool = False) -> str | None:
    """Returns why the Mosaic kernels cannot run on the default device, or None if they can.

    Args:
      any_platform: True: accept a machine without a GPU, where kernels can be lowered for CUDA or
        interpreted.
    """
    if jax.__version_info__ < MIN_JAX:
        return f"Mosaic kernels need jax >= 0.11, and this is jax {jax.__version__}"
    if jax.default_backend() != "gpu":
        return None if any_platform else "the default device is not a GPU"
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if float(capability) < MIN_COMPUTE_CAPABILITY:
        return (
            f"Mosaic kernels need compute capability {MIN_COMPUTE_CAPABILITY} or higher, and this "
            f"GPU has {capability}"
        )
    return None


def import_mosaic(implementation: Implementation | None) -> None:
    """Imports Mosaic if a call with this ``implementation`` may use it.

    An import while jax traces a function makes it trace again what it has traced before.
    """
    check_choice(get_args(Implementation), implementation=implementation)
    if implementation != "xla" and not why_unsupported(implementation == "mosaic_gpu"):
        import pallas_kernels._mosaic  # noqa: F401


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
