"""Every kernel lowers for a GPU with arguments on a mesh, whatever its axes are."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import _capability
from tests import gpu_targets
from tests.helpers import needs_mosaic

# Other dtypes of the same kernels are left out, except where these have code of their own.
CASES = {
    name: (run, arguments)
    for name, run, arguments in itertools.chain(
        gpu_targets.moving(), gpu_targets.attention(), gpu_targets.recurrences()
    )
    if not name.endswith(("int8", "f16", "f32"))
}

# jax's sharding rules refuse XLA's loop over the chunks of a prompt; `jaxkv` uses shard_map.
NOT_DIRECT = [("Explicit", "gated delta of 256, decay per key")]


def in_shard_map(run: Callable[..., Any], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    everywhere = PartitionSpec()
    return jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


@needs_mosaic
@pytest.mark.parametrize("name", CASES)
def test_kernels_lower_with_arguments_on_a_mesh(name: str, monkeypatch) -> None:
    """Inside of shard_map axes are the same, whatever they are outside."""
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    run, arguments = CASES[name]
    expected = gpu_targets.lower(run, arguments)[1]
    assert expected
    for axes in ("Explicit",) if name.endswith(("fp8", "packed")) else ("Auto", "Explicit"):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(getattr(jax.sharding.AxisType, axes),))
        where = NamedSharding(mesh, PartitionSpec())
        if (axes, name) not in NOT_DIRECT:
            assert gpu_targets.lower(run, arguments, where)[1] == expected
    assert gpu_targets.lower(in_shard_map(run, mesh), arguments, where)[1] == expected
