"""The device side of a step: `apply_step`, page-locked uploads, uploads of several processes.

Pass ``compiler_options=COMPILER_OPTIONS`` to the outermost ``jax.jit`` of a step. Without them XLA
warns on a GPU that it "can't reduce memory use", because it counts a donated pool up to three times
over, and computes small arrays anew in each layer to save memory that is not needed.
"""

from jaxkv._src.step import (
    COMPILER_OPTIONS,
    broadcast_upload,
    check_same_upload,
)

__all__ = [
    "COMPILER_OPTIONS",
    "broadcast_upload",
    "check_same_upload",
]
