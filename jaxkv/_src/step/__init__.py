"""The device side of a step: `apply_step`, `StepContext`, uploads by a ring or to processes."""

from jaxkv._src.step._apply import apply_step
from jaxkv._src.step._context import StepContext
from jaxkv._src.step._options import COMPILER_OPTIONS
from jaxkv._src.step._processes import broadcast_upload, check_same_upload
from jaxkv._src.step._ring import UploadRing

__all__ = [
    "COMPILER_OPTIONS",
    "StepContext",
    "UploadRing",
    "apply_step",
    "broadcast_upload",
    "check_same_upload",
]
