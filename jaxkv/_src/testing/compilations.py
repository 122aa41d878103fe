"""Compilations while a piece of code runs: none, in the steady state of a serving loop.

Needs jax alone.
"""

import contextlib
import functools
from collections.abc import Generator
from typing import NamedTuple

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilation(NamedTuple):
    """One program that XLA compiled, or fetched from the persistent cache."""

    function: str  # as jax names it, "jit(step)"
    seconds: float


_counting: list[list[Compilation]] = []  # one list for each count that is open


@contextlib.contextmanager
def count_compilations() -> Generator[list[Compilation]]:
    """Collects every compilation of the process, in any thread, while it is open."""
    _listen()
    seen: list[Compilation] = []
    _counting.append(seen)
    try:
        yield seen
    finally:
        _counting[:] = [other for other in _counting if other is not seen]


@contextlib.contextmanager
def assert_no_recompilation() -> Generator[None]:
    """Wraps a steady state, after a warm-up, and fails when anything compiles in it.

    For example ``with assert_no_recompilation(): serve(uploads)``, or as a decorator,
    ``@assert_no_recompilation()``. Operations of jax outside of any ``jit`` (``x + 1``,
    ``jnp.zeros(3)``) compile too, once for each shape. To bound how often one function is traced,
    use ``chex.assert_max_traces``.

    Raises:
      AssertionError: something was compiled; names each function and how long it took.
    """
    with count_compilations() as seen:
        yield
    if seen:
        listed = ", ".join(f"{function} ({seconds:.3f} s)" for function, seconds in seen)
        raise AssertionError(
            f"{len(seen)} compilation(s) where none was expected: {listed}; a shape, dtype, static "
            "argument or device differs from the warm-up, or a function is jitted anew each time"
        )


@functools.cache
def _listen() -> None:
    """Listens once for the process: jax has no public way to take a listener away again."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **details: str | int) -> None:
    if event == COMPILE_EVENT:
        compilation = Compilation(str(details.get("fun_name", "unnamed")), duration_secs)
        for seen in _counting:
            seen.append(compilation)
