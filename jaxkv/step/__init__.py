"""One upload and one dispatch per serving step.

Knows how a step's integers lie in one int32 buffer, and how to take them out again
inside a jitted function. Knows nothing of models.

On the host, `pack_step` writes everything the device has to learn into a fresh NumPy
array (fresh each time: an asynchronous call may still be reading the last one). On the
device, `apply_step` updates the tables, zeroes and copies blocks, and returns what the
step's kernels need. Call it inside your own jitted step, where it costs least and where
you donate tables and pool; or use `apply_step_donating`, which is jitted and does so.
"""

from jaxkv.step._apply import apply_step as apply_step
from jaxkv.step._apply import apply_step_donating as apply_step_donating
from jaxkv.step._apply import lay_out_tokens as lay_out_tokens
from jaxkv.step._apply import warm_up as warm_up
from jaxkv.step._pack import compose_entries as compose_entries
from jaxkv.step._pack import pack_entries as pack_entries
from jaxkv.step._pack import pack_step as pack_step
from jaxkv.step._ring import UploadRing as UploadRing
from jaxkv.step._shape import StepBatch as StepBatch
from jaxkv.step._shape import StepShape as StepShape
