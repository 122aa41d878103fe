"""Compiles what the library chooses for each kind of GPU to machine code; needs no GPU.

`make lane-gpus` installs the compilers, and runs this.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.gpu_targets import KERNELS, TARGETS

EVERYWHERE = {"zero_blocks", "copy_blocks", "write_rows", "causal_conv1d", "causal_conv1d_tiles"}
STARTED = {capability: EVERYWHERE for capability in ("8.0", "8.6", "8.9")}
STARTED |= {capability: EVERYWHERE | {"recurrent_step"} for capability in ("10.0", "10.3", "12.0")}
STARTED |= {"9.0": set(KERNELS)}


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs jax's CUDA plugin and ptxas: make lane-gpus",
)
@pytest.mark.parametrize("capability", TARGETS)
def test_what_is_chosen_compiles(capability: str) -> None:
    """A kernel that does not fit the GPU ends the process, or raises."""
    command = [sys.executable, "-m", "tests.gpu_targets", capability]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, f"{run.stdout[-300:]}\n{run.stderr[-3000:]}"
    cases = [json.loads(line.partition('": ')[2]) for line in run.stdout.splitlines()]
    assert set().union(*cases) == STARTED[capability]
