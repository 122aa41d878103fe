"""One upload and one dispatch per serving step.

Knows how a step's integers lie in one int32 buffer, and how to take them out again
inside a jitted function. Knows nothing of models.

On the host, `pack_step` writes everything the device has to learn into a fresh NumPy
array (fresh each time: an asynchronous call may still be reading the last one). On the
device, `apply_step` updates the tables, zeroes and copies blocks, and returns what the
step's kernels need. Call it inside your own jitted step, where it costs least and where
you donate tables and pool; or use `apply_step_donating`, which is jitted and does so.
"""

from jaxkv.step._apply import apply_step, apply_step_donating, lay_out_tokens, warm_up
from jaxkv.step._pack import compose_entries, pack_entries, pack_step
from jaxkv.step._ring import UploadRing
from jaxkv.step._shape import StepBatch, StepShape

__all__ = [
    "StepBatch",
    "StepShape",
    "UploadRing",
    "apply_step",
    "apply_step_donating",
    "compose_entries",
    "lay_out_tokens",
    "pack_entries",
    "pack_step",
    "warm_up",
]
