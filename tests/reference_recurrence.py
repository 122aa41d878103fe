"""Recurrent layers in NumPy and float64, token by token, as the papers define them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RecurrentCase(NamedTuple):
    """The arguments of a recurrence over requests, in float64.

    queries, keys: [T, value_heads, K], one for each value head.
    values: [T, value_heads, V].
    decay: [T, value_heads, 1 or K].
    beta: [T, value_heads].
    delta: whether what the state holds for a key is taken away first.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    delta: bool

    def run(self, state: np.ndarray, tokens: range) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the state after each token, [value_heads, V, K], and the outputs."""
        states, outputs = [], []
        for t in tokens:
            state = state * self.decay[t][:, None]
            held = np.einsum("hvk,hk->hv", state, self.keys[t]) if self.delta else 0
            added = self.beta[t][:, None] * (self.values[t] - held)
            state = state + added[:, :, None] * self.keys[t][:, None]
            states.append(state)
            outputs.append(np.einsum("hvk,hk->hv", state, self.queries[t]))
        return states, outputs


def normalized(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def convolve(
    inputs: np.ndarray,
    before: np.ndarray,
    weights: np.ndarray,
    bias: np.ndarray | None,
    with_silu: bool,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Convolves the tokens of one request, [n, channels].

    Args:
      before: [width - 1, channels], the last inputs of earlier steps, oldest first.

    Returns:
      The last inputs after each token, and the outputs.
    """
    window = np.concatenate([before, inputs])
    kept, windows = len(before), []
    outputs = np.zeros_like(inputs)
    for t in range(len(inputs)):
        outputs[t] = (window[t : t + kept + 1] * weights).sum(0)
        windows.append(window[t + 1 : t + 1 + kept])
    outputs = outputs if bias is None else outputs + bias
    return windows, silu(outputs) if with_silu else outputs


def replayed(checkpoint: np.ndarray, ring: Sequence[np.ndarray], tokens: int) -> np.ndarray:
    """Returns the state after the tokens of a ring, [value_heads, V, K], as `Replay` defines it.

    Args:
      ring: of one page, keys [key_heads, L, K], added [value_heads, L, V] and log_decay
        [value_heads, n, L or more].
      tokens: of the ring.
    """
    keys, added, log_decay = ring
    keys, total = np.repeat(keys, len(added) // len(keys), axis=0), log_decay.sum(axis=1)
    last = total[:, tokens - 1] if tokens else np.zeros(len(added))
    state = checkpoint * np.exp(last)[:, None, None]
    for i in range(tokens):
        weight = np.exp(last - total[:, i])[:, None, None]
        state = state + weight * added[:, i, :, None] * keys[:, i, None]
    return state


def state_of(pages: np.ndarray, page: int) -> np.ndarray:
    """Returns the array of a page, or zeros for an id that is out of range."""
    return pages[page] if 0 <= page < len(pages) else np.zeros_like(pages[0])


def write_states(
    pages: np.ndarray, states: Sequence[np.ndarray], ids: np.ndarray, after: np.ndarray
) -> None:
    """Writes to each page the state after so many tokens, from 1 on; bad ids write nothing."""
    for page, tokens in zip(ids, after, strict=True):
        if 0 <= page < len(pages) and 1 <= tokens <= len(states):
            pages[page] = states[tokens - 1]
