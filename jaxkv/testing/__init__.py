"""References to test against, written from the definitions: lists and loops.

Slow and plain on purpose. Use them to check a serving stack that builds on jaxkv.
"""

from jaxkv.testing.reference import ReferencePool as ReferencePool
from jaxkv.testing.reference import ReferenceTables as ReferenceTables
from jaxkv.testing.reference_kernels import reference_copy_blocks as reference_copy_blocks
from jaxkv.testing.reference_kernels import reference_write_rows as reference_write_rows
from jaxkv.testing.reference_kernels import reference_zero_blocks as reference_zero_blocks

__all__ = [
    "ReferencePool",
    "ReferenceTables",
    "reference_copy_blocks",
    "reference_write_rows",
    "reference_zero_blocks",
]
