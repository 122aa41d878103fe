"""Devices that run the Mosaic GPU kernels, dtypes and grids of these. Does not import Mosaic."""

import os
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
WITHOUT_GPU: Capability = (9, 0)  # what kernels are lowered for, and interpreted as
VARIABLE = "PALLAS_MOSAIC_CAPABILITY"  # as in 8.0: a GPU takes the kernels of another one


# jaxlib's compiler ends the process for a GPU that it does not know, so that one that is not listed
# here takes XLA.
KNOWN: tuple[Capability, ...] = (
    *((8, 0), (8, 6), (8, 7), (8, 9), (9, 0)),
    *((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
)


class Capabilities(NamedTuple):
    """The `KNOWN` compute capabilities from ``least`` on, and below ``end``."""

    least: Capability
    end: Capability

    def include(self, capability: Capability) -> bool:
        """Returns whether a GPU of this compute capability is among them."""
        return capability in KNOWN and self.least <= capability < self.end


END = (KNOWN[-1][0] + 1, 0)
ALL = Capabilities((8, 0), END)
AMPERE = Capabilities((8, 0), (9, 0))  # and Ada
HOPPER = Capabilities((9, 0), (10, 0))
BLACKWELL = Capabilities((10, 0), END)
SINCE_HOPPER = Capabilities((9, 0), END)

Kernel = Literal[
    "zero_blocks",
    "copy_blocks",
    "write_rows",
    "write_token_heads",
    "convolution",
    "recurrent_step",
    "recurrent_replay",
    "recurrent_prompt",
    "decode",
    "prefill",
    "combine",
    "latents",
    "packed_latents",
    "latent_rows",
    "combine_latents",
]
# What a kernel moves and multiplies with; "plain": loads and stores of threads.
Instructions = Literal[
    "plain",
    "cp.async",
    "TMA",
    "mma, cp.async",
    "mma, TMA",
    "mma or wgmma, TMA",
    "wgmma, TMA",
    "wgmma, cp.async",
]
# The one table of kernels, GPUs and instructions, of which a GPU takes the first that it has.
# `make lane-gpus` compiles all of it.
KERNELS: dict[Kernel, dict[Instructions, Capabilities]] = {
    "zero_blocks": {"plain": ALL},
    "copy_blocks": {"plain": ALL},
    "write_rows": {"plain": ALL},
    "write_token_heads": {"plain": ALL},
    "convolution": {"plain": ALL},
    "recurrent_step": {"cp.async": AMPERE, "TMA": SINCE_HOPPER},
    "recurrent_replay": {"TMA": SINCE_HOPPER},
    "recurrent_prompt": {
        "mma, cp.async": AMPERE,
        "wgmma, TMA": HOPPER,
        "mma, TMA": BLACKWELL,
    },
    "decode": {
        "mma, cp.async": AMPERE,
        "mma or wgmma, TMA": HOPPER,
        "mma, TMA": BLACKWELL,
    },
    "prefill": {
        "mma, cp.async": AMPERE,
        "wgmma, TMA": HOPPER,
        "mma, TMA": BLACKWELL,
    },
    "combine": {"plain": AMPERE, "TMA": SINCE_HOPPER},
    "latents": {
        "mma, cp.async": AMPERE,
        "wgmma, TMA": HOPPER,
        "mma, TMA": BLACKWELL,
    },
    "packed_latents": {"wgmma, TMA": HOPPER, "mma, cp.async": ALL},
    "latent_rows": {"wgmma, cp.async": HOPPER, "mma, cp.async": ALL},
    "combine_latents": {"plain": ALL},
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
            listed = ", ".join(map(repr, KERNELS))
            raise ValueError(f"kernels: {shown(kernel)} is none of {listed}")
    return "xla" if why_unsupported(kernels or KERNELS) else "mosaic_gpu"


def explain_default() -> dict[Kernel, str]:
    """Returns for each kernel what the default device runs, and why.

    ``"mosaic_gpu: "`` and the instructions that the kernel takes, or ``"xla: "`` and the reason.
    """
    told: dict[Kernel, str] = {}
    for kernel in KERNELS:
        reason = why_unsupported([kernel])
        told[kernel] = f"xla: {reason}" if reason else f"mosaic_gpu: {instructions_of(kernel)}"
    return told


def compute_capability() -> Capability | None:
    """Returns the compute capability of the default device; None without a GPU, (0, 0) of others.

    All choices go by this function. Where `VARIABLE` is set, a GPU takes the kernels of another
    one; it has to know their instructions.
    """
    if jax.default_backend() != "gpu":
        return None
    if (forced := forced_capability()) is not None:
        return forced
    return _parse(str(getattr(jax.devices()[0], "compute_capability", ""))) or (0, 0)


def forced_capability() -> Capability | None:
    """Returns the compute capability that the environment asks for, if any.

    Raises:
      ValueError: it is not one of `KNOWN`.
    """
    if not (text := os.environ.get(VARIABLE, "")):
        return None
    if (capability := _parse(text)) not in KNOWN:
        listed = ", ".join(f"{major}.{minor}" for major, minor in KNOWN)
        raise ValueError(f"{VARIABLE}={text}: it must be one of {listed}")
    return capability


def _parse(text: str) -> Capability | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def instructions_of(kernel: Kernel) -> Instructions | None:
    """Returns the instructions that a kernel takes on the default device, or None.

    Without a GPU, where kernels are lowered or interpreted: on a Hopper.
    """
    capability = compute_capability() or WITHOUT_GPU
    for instructions, capabilities in KERNELS[kernel].items():
        if capabilities.include(capability):
            return instructions
    return None


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
        if instructions_of(kernel) is None:
            ranges = KERNELS[kernel].values()
            known = [one for one in KNOWN if any(some.include(one) for some in ranges)]
            listed = ", ".join(f"{major}.{minor}" for major, minor in known)
            return (
                f"the kernel {kernel!r} needs compute capability {listed}, and this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
    return None


def import_mosaic(implementation: Implementation | None) -> None:
    """Imports Mosaic if a call with this ``implementation`` may use it.

    An import while jax traces a function makes it trace again what it has traced before.
    """
    check_choice(get_args(Implementation), implementation=implementation)
    reasons = [why_unsupported([kernel], implementation == "mosaic_gpu") for kernel in KERNELS]
    if implementation != "xla" and not all(reasons):
        import pallas_kernels._mosaic  # noqa: F401


def shared_memory_bytes() -> int:
    """Returns the shared memory that a thread block may have on the default device.

    Without a GPU: on a Hopper.
    """
    capability = compute_capability() or WITHOUT_GPU
    if capability in ((8, 6), (8, 9)) or capability[0] == 12:
        return 99 * 1024
    return (163 if capability[0] == 8 else 227) * 1024


def widens_8_bits(dtype: jnp.dtype) -> bool:
    """Returns whether the default device has an instruction that widens this dtype of 8 bits."""
    capability = compute_capability() or WITHOUT_GPU
    return capability >= ((9, 0) if dtype == jnp.int8 else (8, 9))


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
