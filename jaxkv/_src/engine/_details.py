"""The details that requests ask for besides tokens, from steps to outputs. NumPy only."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from jaxkv._src.engine._outputs import TopLogprobs
from jaxkv._src.engine._sampling import Sampling


class Rows:
    """Rows of arrays by position. Rows that are written again take the place of what was there.

    structure: of the pytree of the arrays, of jax; None: there is none yet.
    size: one more than the last position that was written.
    """

    def __init__(self) -> None:
        self.structure: Any = None
        self._arrays: list[np.ndarray] = []
        self.size = 0

    def write(self, start: int, arrays: Sequence[np.ndarray]) -> None:
        """Writes rows from a position on."""
        end = start + len(arrays[0])
        if not self._arrays:
            self._arrays = [np.zeros((0, *new.shape[1:]), new.dtype) for new in arrays]
        for at, new in enumerate(arrays):
            rows = self._arrays[at]
            if end > len(rows):
                grown = np.zeros((max(end, 2 * len(rows)), *rows.shape[1:]), rows.dtype)
                grown[: len(rows)] = rows
                self._arrays[at] = rows = grown
            rows[start:end] = new
        self.size = max(self.size, end)

    def read(self, start: int, end: int) -> list[np.ndarray]:
        """Returns the rows of positions that were written, as copies."""
        return [rows[start : min(end, self.size)].copy() for rows in self._arrays]


class PromptDetails:
    """Details of a prompt, which all of its samples share.

    logprobs: f32[P]; NaN of the first token, and of those that are not computed yet.
    top: int32[P, 2, k], ids of the most likely tokens, and the bits of their log-probabilities.
    side: of all tokens.
    """

    def __init__(self, num_tokens: int, num_top: int):
        self.logprobs = np.empty(num_tokens, np.float32)
        self.top = np.empty((num_tokens, 2, num_top), np.int32)
        self.forget()

    def forget(self) -> None:
        """Forgets all, because it is computed again."""
        self.logprobs[:], self.side = np.nan, Rows()
        self.top[:, 0], self.top[:, 1] = -1, np.float32(np.nan).view(np.int32)


@dataclasses.dataclass(slots=True, eq=False)
class Details:
    """Details of a sample.

    top: as in `PromptDetails`, of the tokens after the prompt.
    side: of these tokens.
    """

    sampling: Sampling
    num_prompt: int
    prompt: PromptDetails
    top: Rows = dataclasses.field(default_factory=Rows)
    side: Rows = dataclasses.field(default_factory=Rows)

    @classmethod
    def of_samples(cls, sampling: Sampling, num_prompt: int) -> list[Self] | list[None]:
        """Returns the details of each sample of a request; None if it asks for none."""
        if not sampling.asks:
            return [None] * sampling.n
        prompt = PromptDetails(num_prompt, sampling.prompt_logprobs or 0)
        return [cls(sampling, num_prompt, prompt) for _ in range(sampling.n)]

    def add_top(self, position: int, top: np.ndarray) -> None:
        """Adds the most likely tokens at a position after the prompt, int32[2, K]."""
        self.top.write(position - self.num_prompt, [top[None, :, : self.sampling.logprobs]])

    def add_prompt(self, position: int, rows: np.ndarray) -> None:
        """Adds the log-probabilities of the tokens after those from a position on.

        Args:
          rows: int32[N, 1 + 2 * K]; the bits of the log-probability, then as in `PromptDetails`.
        """
        of, start = self.prompt, position + 1
        rows = rows[: max(0, self.num_prompt - start)]
        if not len(rows):
            return
        of.logprobs[start:][: len(rows)] = rows[:, 0].view(np.float32)
        of.top[start:][: len(rows)] = rows[:, 1:].reshape(len(rows), 2, -1)[..., : of.top.shape[2]]

    def add_side(self, position: int, structure: Any, arrays: Sequence[np.ndarray]) -> None:
        """Adds the side outputs of tokens from a position on."""
        count = self.num_prompt - position  # of the prompt's
        self.prompt.side.structure = structure
        if count > 0:
            self.prompt.side.write(position, [array[:count] for array in arrays])
        if count < len(arrays[0]):
            self.side.write(max(-count, 0), [array[max(count, 0) :] for array in arrays])

    def output(self, start: int, end: int) -> tuple[Any, ...]:
        """Returns what an output holds besides the tokens from position ``start`` to ``end``.

        That is ``prompt_logprobs``, ``top_logprobs``, ``prompt_top_logprobs`` and ``side``.
        """
        sampling, num, logprobs, top, prompt_top = self.sampling, self.num_prompt, None, None, None
        if sampling.prompt_logprobs is not None and start == num:
            logprobs = self.prompt.logprobs.copy()
            if sampling.prompt_logprobs:
                prompt_top = _top_logprobs(self.prompt.top.copy())
        if sampling.logprobs:
            rows = self.top.read(start - num, end - num)
            top = _top_logprobs(rows[0] if rows else np.zeros((0, 2, sampling.logprobs), np.int32))
        side = self._side(0 if start == num else start - 1, end - 1) if sampling.side else None
        return logprobs, top, prompt_top, side

    def _side(self, start: int, end: int) -> Any:
        """Returns the side outputs of positions; None: there are none yet."""
        num, structure = self.num_prompt, self.prompt.side.structure
        if structure is None:
            return None
        arrays = self.prompt.side.read(start, min(end, num))
        if own := self.side.read(max(start - num, 0), max(end - num, 0)):
            arrays = [np.concatenate(pair) for pair in zip(arrays, own, strict=True)]
        return structure.unflatten(arrays)

    def forget(self) -> None:
        """Forgets all, because other weights compute it again."""
        self.prompt.forget()
        self.top, self.side = Rows(), Rows()


def _top_logprobs(rows: np.ndarray) -> TopLogprobs:
    """Returns int32[N, 2, k], ids and bits, as tokens and log-probabilities."""
    return TopLogprobs(rows[:, 0], rows[:, 1].view(np.float32))


class Asked(NamedTuple):
    """The details that the requests of a step ask for.

    wants: of the step, bits of `StepOptions.at`.
    rows: details of requests of the step, the position of the first token of each, where its tokens
      begin among those of the step, and how many they are.
    """

    wants: int = 0
    rows: Sequence[tuple[Details, int, int, int]] = ()
