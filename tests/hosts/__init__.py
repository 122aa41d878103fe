"""Scenes for processes of `jax.distributed` on one machine; `tests.test_hosts` judges them.

``python -m tests.hosts`` prints microseconds per step.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

WRONG = 1  # the process whose uploads differ in some steps
HEARTBEAT_S = 10  # without a sign of life, after which a process counts as dead


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...], *types: AxisType) -> Mesh:
    """A mesh of the first devices of all processes."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=types or (AxisType.Auto,) * len(names))
