"""Compiles what the library chooses for each kind of GPU to machine code; needs no GPU.

`make lane-gpus` installs the compilers, and runs this.
"""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from tests.gpu_targets import KERNELS, TARGETS

EVERYWHERE = {
    *("zero_blocks", "copy_blocks", "write_rows", "write_token_heads"),
    *("causal_conv1d", "causal_conv1d_tiles"),
    *("paged_attention_decode", "paged_attention_prefill", "paged_attention_combine"),
    *("recurrent_step", "recurrent_prompt_parts", "recurrent_prompt_states"),
}
STARTED = {
    **{
        capability: EVERYWHERE | {"recurrent_replay", "paged_attention_widen"}
        for capability in TARGETS
    },
    **dict.fromkeys(("8.0", "8.6", "8.9"), EVERYWHERE),
    "9.0": set(KERNELS),
}
# Bytes, at most.
MAY_SPILL = {
    "paged_attention_prefill": 650,  # some on 10.0, few of them in each step
    "recurrent_prompt_parts": 650,  # of keys with decays of their own, on 8.0; elsewhere 260
    "recurrent_prompt_states": 48,  # on 8.x
    "paged_attention_decode": 340,  # of 64 rows 80 wide on 8.0, and of chosen latents on 10.x
    "paged_attention_mla_decode": 4,  # of packed latents that are chosen
}


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or jax.default_backend() == "gpu",
    reason="needs jax's CUDA plugin and ptxas, and minutes of a CPU: make lane-gpus",
)
@pytest.mark.parametrize("capability", TARGETS)
def test_what_is_chosen_compiles(capability: str) -> None:
    """A kernel that does not fit the GPU ends the process, or raises."""
    command = [sys.executable, "-m", "tests.gpu_targets", capability]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, f"{run.stdout[-300:]}\n{run.stderr[-3000:]}"
    cases = [json.loads(line.partition('": ')[2]) for line in run.stdout.splitlines()]
    assert set().union(*[case["kernels"] for case in cases]) == STARTED[capability]
    for case in cases:
        for kernel, spilled in case["spills"].items():
            assert spilled <= MAY_SPILL.get(kernel, 0), f"{kernel} spills {spilled} bytes"
