"""One step on the device: `apply_step`, and a ring of page-locked uploads."""

from jaxkv.step._apply import apply_step
from jaxkv.step._ring import UploadRing

__all__ = ["UploadRing", "apply_step"]
