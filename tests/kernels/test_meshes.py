"""Every kernel lowers for a GPU with arguments on a mesh, whatever its axes are."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import _capability
from tests import gpu_targets
from tests.helpers import needs_mosaic

ALL = {
    name: (run, arguments)
    for name, run, arguments in itertools.chain(
        gpu_targets.moving(), gpu_targets.attention(), gpu_targets.recurrences()
    )
}
SPLIT = {"paged_attention_decode", "paged_attention_combine"}
PROMPTS = "gated delta of 256, decay per key"
# A case for each kernel and each way to it; a lowering takes a second or two.
CASES = {
    "zero": {"zero_blocks"},
    "copy, odd": {"copy_blocks"},
    "write": {"write_rows"},
    "write of int4_per_token_head": {"write_token_heads"},
    "decode of 64/8 x 64, bfloat16": SPLIT,
    "prompts of 32/8 x 128, int4_per_token_head": {
        *(*SPLIT, "paged_attention_prefill", "paged_attention_widen"),
    },
    "rows of latents": {"paged_attention_mla_decode", "paged_attention_mla_combine"},
    "convolution": {"causal_conv1d"},
    "convolution, prompts": {"causal_conv1d_tiles", "zero_blocks"},
    "gated delta of 4": {"recurrent_step"},
    PROMPTS: {"recurrent_step", "recurrent_prompt_parts", "recurrent_prompt_states", "zero_blocks"},
    "replay, bf16": {"recurrent_replay"},
}

IN_SHARD_MAP, *DIRECT = "shard_map", AxisType.Auto, AxisType.Explicit


def test_each_kernel_has_a_case() -> None:
    assert set().union(*CASES.values()) == set(gpu_targets.KERNELS)


def in_shard_map(run: Callable[..., Any], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    everywhere = PartitionSpec()
    return jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


@needs_mosaic
@pytest.mark.parametrize("name", CASES)
def test_kernels_lower_with_arguments_on_a_mesh(name: str, monkeypatch) -> None:
    """Inside of shard_map axes are the same, whatever they are outside.

    jax's sharding rules refuse XLA's loop over the chunks of a prompt; `jaxkv` uses shard_map.
    """
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    run, arguments = ALL[name]
    for how in (IN_SHARD_MAP,) if name == PROMPTS else (IN_SHARD_MAP, *DIRECT):
        axes = AxisType.Explicit if how == IN_SHARD_MAP else how
        mesh = jax.make_mesh((1,), ("x",), axis_types=(axes,))
        function = in_shard_map(run, mesh) if how == IN_SHARD_MAP else run
        where = NamedSharding(mesh, PartitionSpec())
        assert set(gpu_targets.lower(function, arguments, where)[1]) == CASES[name]
