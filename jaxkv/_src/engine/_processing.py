"""The logits processors of an engine, and the states of its samples on the device."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding

from jaxkv._src.engine._outputs import LogprobsMode
from jaxkv._src.engine._sampling import Sampling
from jaxkv._src.internal.indexing import take
from jaxkv._src.logits_processors import LogitsProcessor

SMALLEST_LIST = 64  # tokens that are folded into a state by one compiled call
States = tuple[tuple[Array, Any], ...]  # of each processor: bool[R], and a pytree of [R, ...]


class Processing:
    """Logits processors, in the order in which they are applied.

    Row 0 of states belongs to no sample. A row says for each processor whether its sample asks for
    it; the logits of others stay as they are.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor[Any, Any]],
        *,
        num_rows: int,
        max_model_len: int,
        logprobs_mode: LogprobsMode,
        sharding: Sharding,
    ):
        """Creates them without states.

        Args:
          num_rows: samples that have a state at the same time.
          max_model_len: tokens of a sample at most.
          logprobs_mode: as for `Engine`.
          sharding: of the states.
        """
        self._processors, self._num_rows, self._sharding = tuple(processors), num_rows, sharding
        self.logprobs_mode = logprobs_mode
        nothing = np.zeros(0, np.int32)
        self._templates = [_as_arrays(one.init(None, nothing)) for one in self._processors]
        self._sizes = [SMALLEST_LIST]
        while self._sizes[-1] < max_model_len:
            self._sizes.append(8 * self._sizes[-1])
        self._set = jax.jit(self._set_row, donate_argnums=0, out_shardings=sharding)

    def __bool__(self) -> bool:
        return bool(self._processors)

    def make(self) -> States:
        """Returns states of no sample."""

        def rows(like: Any) -> Array:
            return jnp.zeros((self._num_rows + 1, *like.shape), like.dtype)

        states = [(rows(np.zeros((), bool)), jax.tree.map(rows, one)) for one in self._templates]
        return jax.device_put(tuple(states), self._sharding) if states else ()

    # --- in a step --------------------------------------------------------------------

    def apply(self, states: States, rows: Array, logits: Array) -> Array:
        """Returns the logits of S samples to draw from, f32[S, vocab]; rows: int32[S]."""
        for one, (is_asked, state) in zip(self._processors, states, strict=True):
            try:
                changed = jax.vmap(one.apply)(_rows_of(state, rows), logits)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{type(one).__name__} fails for logits of {logits.shape[1]} tokens, the "
                    f"vocab_size of the model: {error}"
                ) from error
            if jnp.shape(changed) != logits.shape or changed.dtype != logits.dtype:
                raise ValueError(
                    f"{type(one).__name__}.apply returns {changed.dtype}{list(changed.shape[1:])} "
                    f"for logits float32[{logits.shape[1]}], and has to return their like"
                )
            logits = jnp.where(take(is_asked, rows)[:, None], changed, logits)
        return logits

    def advance(self, states: States, rows: Array, tokens: Array) -> States:
        """Returns the states after one more token of S samples, int32[S]."""
        return tuple(
            [
                (is_asked, _with_rows(one, state, rows, tokens))
                for one, (is_asked, state) in zip(self._processors, states, strict=True)
            ]
        )

    # --- between steps ------------------------------------------------------------------

    def start(
        self, states: States, row: int, sampling: Sampling, ids: np.ndarray, at: int
    ) -> States:
        """Returns states with one of a sample, int32[N] tokens, the first ``at`` of its prompt."""
        new: list[tuple[np.ndarray, Any]] = []
        asked = sampling.processors or {}
        for one, template in zip(self._processors, self._templates, strict=True):
            data = asked.get(type(one))
            state = template if data is None else _as_arrays(one.init(data, ids[:at]))
            new.append((np.asarray(data is not None), state))
        count = ids.size - at
        size = next(size for size in self._sizes if size >= count)
        tokens = np.zeros(size, np.int32)
        tokens[:count] = ids[at:]
        return self._set(states, np.int32(row), tuple(new), tokens, np.int32(count))

    def warm_up(self, states: States) -> States:
        """Compiles `start`; nothing is changed."""
        for size in self._sizes:
            states = self.start(states, 0, Sampling(), np.zeros(size, np.int32), 0)
        return states

    def _set_row(
        self, states: States, row: Array, new: States, tokens: Array, count: Array
    ) -> States:
        def put(into: Array, value: Array) -> Array:
            return into.at[row].set(value)

        result = []
        for one, old, (is_asked, state) in zip(self._processors, states, new, strict=True):
            state = lax.fori_loop(
                0, count, lambda i, state, one=one: one.advance(state, tokens[i]), state
            )
            result.append((put(old[0], is_asked), jax.tree.map(put, old[1], state)))
        return tuple(result)


def check_processors(
    processors: Sequence[LogitsProcessor[Any, Any]], sampling: Sampling, prompt: Sequence[int]
) -> None:
    """Raises TypeError or ValueError unless an engine's processors take what a request asks for."""
    if not sampling.processors:
        return
    ids = np.array(prompt, np.int32)
    known = {type(one): one for one in processors}
    for kind, data in sampling.processors.items():
        if kind not in known:
            names = ", ".join(one.__name__ for one in known) or "none"
            raise ValueError(
                f"processors holds {kind.__name__}, and the engine has {names}; pass it to Engine "
                "in logits_processors"
            )
        if data is None:
            raise TypeError(f"processors[{kind.__name__}] is None; leave it out")
        given, wanted = (known[kind].init(one, ids) for one in (data, None))
        kinds = [jax.tree.map(_kind_of, _as_arrays(state)) for state in (given, wanted)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{kind.__name__}.init returns arrays {kinds[0]}, and {kinds[1]} for other requests"
            )


def check_distinct(processors: Sequence[LogitsProcessor[Any, Any]]) -> None:
    """Raises TypeError or ValueError for what is no processor, or for two of a class."""
    for at, one in enumerate(processors):
        if isinstance(one, type) or not all(
            callable(getattr(one, name, None)) for name in ("init", "apply", "advance")
        ):
            raise TypeError(
                f"logits_processors[{at}] must be an object with the methods init, apply and "
                f"advance, got {one!r}"
            )
    kinds = [type(one) for one in processors]
    if len({*kinds}) < len(kinds):
        raise ValueError("logits_processors holds two of a class, by which requests ask for them")


def _rows_of(state: Any, rows: Array) -> Any:
    return jax.tree.map(functools.partial(take, indices=rows), state)


def _with_rows(one: LogitsProcessor[Any, Any], state: Any, rows: Array, tokens: Array) -> Any:
    """Returns states after a token of some rows; writes no array that no token changes."""
    before = _rows_of(state, rows)

    def put(into: Array, was: Array, new: Array) -> Array:
        return into if new is was else into.at[rows].set(new)

    return jax.tree.map(put, state, before, jax.vmap(one.advance)(before, tokens))


def _as_arrays(state: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, jnp.result_type(leaf)), state)


def _kind_of(leaf: np.ndarray) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
