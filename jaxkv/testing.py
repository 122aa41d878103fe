"""Tests for caches: references in NumPy and lists, strategies, a state machine, assertions.

Slow and plain on purpose. The references are written from the definitions and need jax alone;
the rest needs the extra, ``pip install "jaxkv[testing]"``, and is imported when it is first
used.

- `ReferenceTables`, `reference_copy_blocks`, `reference_write_rows`, `reference_zero_blocks`:
  tables and kernels, as lists and loops, to compare an implementation with, step by step.
- `ReferenceCache`: the content that every request must read, to check a whole cache, however it is
  made. A `Write` is one of its writes, and `locate_in_row` says where an array of a layer begins.
- `count_compilations`, `assert_no_recompilation`: a steady state compiles nothing.
- ``strategies``: specs, models, plans, table entries and more, for Hypothesis.
- `CacheStateMachine`: drives a cache of your own; subclass it.
- `assert_in_place`, `assert_same_bytes`, `assert_unchanged`: pointers, temporary memory, bytes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxkv._src.testing.compilations import assert_no_recompilation as assert_no_recompilation
from jaxkv._src.testing.compilations import count_compilations as count_compilations
from jaxkv._src.testing.reference_cache import ReferenceCache as ReferenceCache
from jaxkv._src.testing.reference_cache import Write as Write
from jaxkv._src.testing.reference_cache import locate_in_row as locate_in_row
from jaxkv._src.testing.reference_kernels import reference_copy_blocks as reference_copy_blocks
from jaxkv._src.testing.reference_kernels import reference_write_rows as reference_write_rows
from jaxkv._src.testing.reference_kernels import reference_zero_blocks as reference_zero_blocks
from jaxkv._src.testing.reference_tables import ReferenceTables as ReferenceTables

if TYPE_CHECKING:
    from jaxkv._src.testing import strategies as strategies
    from jaxkv._src.testing.assertions import assert_in_place as assert_in_place
    from jaxkv._src.testing.assertions import assert_same_bytes as assert_same_bytes
    from jaxkv._src.testing.assertions import assert_unchanged as assert_unchanged
    from jaxkv._src.testing.state_machine import CacheStateMachine as CacheStateMachine

_NEED_THE_EXTRA = {
    "assert_in_place": "assertions",
    "assert_same_bytes": "assertions",
    "assert_unchanged": "assertions",
    "CacheStateMachine": "state_machine",
}

__all__ = [
    "CacheStateMachine",
    "ReferenceCache",
    "ReferenceTables",
    "Write",
    "assert_in_place",
    "assert_no_recompilation",
    "assert_same_bytes",
    "assert_unchanged",
    "count_compilations",
    "locate_in_row",
    "reference_copy_blocks",
    "reference_write_rows",
    "reference_zero_blocks",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Imports a name that needs the extra when it is first used."""
    if name == "strategies":
        return importlib.import_module("jaxkv._src.testing.strategies")
    if name in _NEED_THE_EXTRA:
        module = importlib.import_module(f"jaxkv._src.testing.{_NEED_THE_EXTRA[name]}")
        value = getattr(module, name)
        value.__module__ = __name__
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
