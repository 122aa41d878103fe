"""The model of an engine: what its functions return, and the checks of that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxkv._src.step import StepContext


class ModelOutput(NamedTuple):
    """The result of the ``forward`` of an `Engine`, if it is more than one array.

    result: the logits of each request's last token, float[B, vocab]; of an engine with ``head``
      the hidden states of all tokens, float[T, ...].
    step: the step, if ``forward`` carried it through a scan or a jit of its own; None: it is the
      one that ``forward`` was given.
    """

    result: Float[Array, "rows ..."]
    step: StepContext | None = None


Forward = Callable[[Any, StepContext], Array | ModelOutput]
Head = Callable[[Any, Array], Array]


class Computed(NamedTuple):
    """All that a model has computed in a step.

    step: that has ended.
    logits: float[B, vocab], of each request's last token.
    hidden: float[T, ...], of all tokens; without a head the same as ``logits``.
    """

    step: StepContext
    logits: Array
    hidden: Array


class Model(NamedTuple):
    """The functions of a model.

    head: makes logits of hidden states; None: ``forward`` does.
    """

    forward: Forward
    head: Head | None

    def run(self, params: Any, step: StepContext) -> Computed:
        """Computes the tokens of a step.

        Raises:
          TypeError, ValueError: either is something else, or of another shape.
        """
        given = self.forward(params, step)
        out = given if isinstance(given, ModelOutput) else ModelOutput(given)
        step = step if out.step is None else out.step
        tokens, requests = step.token_ids.size, step.batch.shape.batch_size
        if self.head is None:
            _check_rows("forward", out.result, requests, LOGITS)
            return Computed(step, out.result, out.result)
        _check_rows("forward", out.result, tokens, HIDDEN)
        logits = apply_head(self.head, params, out.result[step.last_tokens])
        return Computed(step, logits, out.result)


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


def _check_rows(function: str, array: Any, rows: int, wanted: tuple[int, str]) -> None:
    """Raises ValueError or TypeError unless a function returned floats of so many rows."""
    shape, (axes, text) = getattr(array, "shape", None), wanted
    if shape is None or not shape or shape[0] != rows or axes not in (0, len(shape)):
        given = type(array).__name__ if shape is None else f"an array of shape {shape}"
        raise ValueError(f"{function} returned {given}; it returns {text.format(rows=rows)}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        what = "hidden states" if wanted is HIDDEN else "logits"
        raise TypeError(f"{function} returned {what} of dtype {array.dtype}; they are floats")
