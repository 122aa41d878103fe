"""The device side of a step: `apply_step`, page-locked uploads, uploads of several processes."""

from jaxkv.step._apply import apply_step
from jaxkv.step._processes import broadcast_upload, check_same_upload
from jaxkv.step._ring import UploadRing

__all__ = ["UploadRing", "apply_step", "broadcast_upload", "check_same_upload"]
