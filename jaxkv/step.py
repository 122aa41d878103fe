"""The device side of a step: `apply_step`, page-locked uploads, uploads of several processes."""

from jaxkv._src.step import (
    broadcast_upload,
    check_same_upload,
)

__all__ = [
    "broadcast_upload",
    "check_same_upload",
]
