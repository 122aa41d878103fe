"""``python -m jaxkv env``: what is installed, and which kernels run here."""

import argparse
import platform
import shutil
import subprocess
from importlib import metadata

import jax

import pallas_kernels

PACKAGES = "jaxkv", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy"
QUERY = "--query-gpu=name,compute_cap,memory.total,driver_version"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments: there are none."""


def run(options: argparse.Namespace) -> int:
    """Prints packages, GPUs, and for each kernel what runs on the default device."""
    del options
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(filter(None, map(_version, PACKAGES))))
    print("\n".join(_gpus()) or "no NVIDIA driver: nvidia-smi is not there")
    devices = jax.devices()
    print(f"jax uses {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")
    told = pallas_kernels.explain_default()
    width = max(map(len, told))
    for kernel, path in told.items():
        print(f"  {kernel:{width}}  {path}")
    return 0


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    """Returns a line for each GPU that the driver knows."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", QUERY, "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (found.stdout or found.stderr).strip().splitlines()
