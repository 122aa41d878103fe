"""Finds arrays of a cache that a step closes over instead of taking as arguments."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from jaxkv._src.cache import KVCache
from jaxkv._src.internal.checks import check_kind


class ClosedOverError(ValueError):
    """A step closes over arrays of the cache; the message names them."""


def check_not_closed_over(
    cache: KVCache, step: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
) -> None:
    """Raises if a step closes over a buffer or table of the cache instead of taking it.

    Example::

        step = jax.jit(jaxkv.apply_step, donate_argnums=0)
        jaxkv.sleeping.check_not_closed_over(cache, step, cache, upload)

    Matches captured constants by identity and, for arrays of two axes or more, by shape and dtype,
    so false positives are possible. Does not find arrays that were computed from the cache outside
    the step, such as a `layer_view`: make views inside. Ignores scales, because they stay on the
    device.

    Args:
      cache: awake, from any step; its arrays may be deleted already.
      step: a function, jitted or not; it is traced, not run.
      args, kwargs: arguments of the step.

    Raises:
      ClosedOverError: the step closes over arrays of the cache.
      TypeError: not a KVCache.
      RuntimeError: jax's own, for a step that was never traced before and closes over arrays
        that are deleted.
    """
    check_kind(KVCache, "a KVCache that is awake", cache=cache)
    if not callable(step):
        raise TypeError(f"step must be a function, got {type(step).__name__}")
    trace = getattr(step, "trace", None) or jax.jit(step).trace
    constants = list(_constants(trace(*args, **kwargs).jaxpr))
    found = [
        f"{array.dtype}{list(array.shape)} (as {name})"
        for name, array in _named_arrays(cache)
        if any(_is_like(constant, array) for constant in constants)
    ]
    if found:
        raise ClosedOverError(
            f"{getattr(step, '__name__', 'step')} closes over {', '.join(found)}; it would read "
            "them as they are now, even after steps or wake_up: pass the cache as an argument"
        )


def _named_arrays(cache: KVCache) -> Iterator[tuple[str, jax.Array]]:
    for path, array in jax.tree.leaves_with_path(dataclasses.replace(cache, scales=None)):
        yield f"cache{jax.tree_util.keystr(path)}", array


def _is_like(constant: Any, array: jax.Array) -> bool:
    # Scalars and vectors of equal shapes are common, so these must be the same array.
    alike = array.ndim > 1 and constant.shape == array.shape and constant.dtype == array.dtype
    return constant is array or alike


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a traced program captured, including those of nested programs."""
    if hasattr(jaxpr, "consts"):
        yield from (constant for constant in jaxpr.consts if hasattr(constant, "shape"))
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if hasattr(getattr(v, "val", None), "shape"))
        for parameter in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                yield from _constants(parameter)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")
