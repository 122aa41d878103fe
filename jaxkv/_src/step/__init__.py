"""The device side of a step: `apply_step`, page-locked uploads, uploads of several processes."""

from jaxkv._src.step._apply import apply_step
from jaxkv._src.step._options import COMPILER_OPTIONS
from jaxkv._src.step._processes import broadcast_upload, check_same_upload
from jaxkv._src.step._ring import UploadRing

__all__ = [
    "COMPILER_OPTIONS",
    "UploadRing",
    "apply_step",
    "broadcast_upload",
    "check_same_upload",
]
