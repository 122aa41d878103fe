"""The model of an engine: what its functions return, and the checks of that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PyTree, Shaped

from jaxkv._src.step import StepContext


class ModelOutput(NamedTuple):
    """The result of the ``forward`` of an `Engine`, if it is more than one array.

    result: the logits of each request's last token, float[B, vocab]; of an engine with ``head``
      the hidden states of all tokens, float[T, ...].
    step: the step, if ``forward`` carried it through a scan or a jit of its own; None: it is the
      one that ``forward`` was given.
    side: a pytree of arrays of all tokens, [T, ...], such as the experts that each was routed to,
      for `Output.side` of requests with ``Sampling(side=True)``; None: none.
    """

    result: Float[Array, "rows ..."]
    step: StepContext | None = None
    side: PyTree[Shaped[Array, "tokens ..."]] | None = None


Forward = Callable[[PyTree, StepContext], Array | ModelOutput]
Head = Callable[[PyTree, Array], Array]


class Computed(NamedTuple):
    """All that a model has computed in a step.

    step: that has ended.
    logits: float[B, vocab], of each request's last token; with a head float[S, vocab], of the
      tokens that samples follow.
    hidden: float[T, ...], of all tokens; without a head the same as ``logits``.
    side: the pytree of arrays, [T, ...]; None: none.
    """

    step: StepContext
    logits: Array
    hidden: Array
    side: Any


class Model(NamedTuple):
    """The functions of a model.

    head: makes logits of hidden states; None: ``forward`` does.
    """

    forward: Forward
    head: Head | None

    def run(self, params: Any, step: StepContext, sampled: Array) -> Computed:
        """Computes the tokens of a step.

        Args:
          sampled: int32[S], with a head: the tokens that samples follow.

        Raises:
          TypeError, ValueError: either is something else, or of another shape.
        """
        try:
            given = self.forward(params, step)
        except (AttributeError, TypeError) as error:
            if _is_swapped(error, params):
                raise TypeError(
                    f"forward has params and step in the wrong order ({error}); it is called as "
                    "forward(params, step)"
                ) from error
            raise
        out = given if isinstance(given, ModelOutput) else ModelOutput(given)
        step = step if out.step is None else out.step
        tokens, requests = step.token_ids.size, step.batch.shape.batch_size
        side = out.side if jax.tree.leaves(out.side) else None
        _check_side(side, tokens)
        if self.head is None:
            _check_rows("forward", out.result, requests, LOGITS)
            return Computed(step, out.result, out.result, side)
        _check_rows("forward", out.result, tokens, HIDDEN)
        logits = apply_head(self.head, params, out.result[sampled])
        return Computed(step, logits, out.result, side)


def apply_head(head: Head, params: Any, hidden: Array) -> Array:
    """Returns the logits of hidden states, float[N, vocab]."""
    logits = head(params, hidden)
    _check_rows("head", logits, len(hidden), OF_HEAD)
    return logits


# Axes, if they are known, and what it is, of {rows} rows.
LOGITS = (
    2,
    (
        "the logits of each request's last token, [{rows}, vocab]: index with step.last_tokens, or "
        "pass head= to the Engine; or jaxkv.ModelOutput(logits, step)"
    ),
)
HIDDEN = (
    0,
    (
        "the hidden states of all tokens, [{rows}, ...], because the Engine has a head; or "
        "jaxkv.ModelOutput(hidden, step)"
    ),
)
OF_HEAD = 2, "the logits of the hidden states that it is given, [{rows}, vocab]"


def _check_side(side: Any, tokens: int) -> None:
    """Raises ValueError unless all side outputs are arrays of so many tokens."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(side):
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != tokens:
            given = type(leaf).__name__ if shape is None else f"an array of shape {shape}"
            raise ValueError(
                f"forward returned {given} as side{jax.tree_util.keystr(path)}; side outputs are "
                f"arrays of all tokens, [{tokens}, ...]"
            )


def _is_swapped(error: AttributeError | TypeError, params: Any) -> bool:
    """Returns whether an error of ``forward`` comes from params and step in the wrong order."""
    if isinstance(error, TypeError):
        return str(error) == "'StepContext' object is not subscriptable"
    return isinstance(error.obj, type(params)) and hasattr(StepContext, error.name or "")


def _check_rows(function: str, array: Any, rows: int, wanted: tuple[int, str]) -> None:
    """Raises ValueError or TypeError unless a function returned floats of so many rows."""
    shape, (axes, text) = getattr(array, "shape", None), wanted
    if shape is None or not shape or shape[0] != rows or axes not in (0, len(shape)):
        given = type(array).__name__ if shape is None else f"an array of shape {shape}"
        raise ValueError(f"{function} returned {given}; it must return {text.format(rows=rows)}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        what = "hidden states" if wanted is HIDDEN else "logits"
        raise TypeError(f"{function} returned {what} of dtype {array.dtype}; they are floats")
