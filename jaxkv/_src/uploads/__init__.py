"""The integers of a step in one array, and the static sizes that it is padded to. No jax."""

from jaxkv._src.uploads._pack import TableEntry, list_entries, pack_step
from jaxkv._src.uploads._shape import Ring, StepShape, Upload, register_upload
from jaxkv._src.uploads._write import (
    Batch,
    Ints,
    as_int32,
    check_fits,
    put,
    write_batch,
    write_copies,
)

__all__ = [
    "Batch",
    "Ints",
    "Ring",
    "StepShape",
    "TableEntry",
    "Upload",
    "as_int32",
    "check_fits",
    "list_entries",
    "pack_step",
    "put",
    "register_upload",
    "write_batch",
    "write_copies",
]
