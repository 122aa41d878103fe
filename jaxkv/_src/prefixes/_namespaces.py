"""Namespaces of prompts, and the ones in which a prompt is known. NumPy only."""

from typing import NamedTuple

import numpy as np

from jaxkv._src.prefixes._extra_keys import ExtraKey
from jaxkv._src.prefixes._lookup import CachedPrefix, Reason


class Namespace(NamedTuple):
    """Everything besides tokens that cached content depends on; only equal namespaces share it."""

    epoch: int
    salt: str | None
    keys: frozenset[ExtraKey]  # of the whole sequence, such as adapters


class KnownNamespaces:
    """The namespaces in which prompts were cached, by the first tokens of the prompts."""

    def __init__(self, *, num_tokens: int, max_prompts: int):
        """Remembers nothing yet.

        Args:
          num_tokens: tokens that identify a prompt.
          max_prompts: prompts to remember; beyond it, the oldest one is forgotten.
        """
        self._num_tokens, self._max_prompts = num_tokens, max_prompts
        self._of: dict[bytes, dict[Namespace, None]] = {}

    def add(self, namespace: Namespace, tokens: np.ndarray) -> None:
        """Remembers that a prompt was cached in a namespace."""
        if tokens.size >= self._num_tokens:
            self._of.setdefault(self._key(tokens), {})[namespace] = None
            if len(self._of) > self._max_prompts:
                del self._of[next(iter(self._of))]

    def reasons(
        self, namespace: Namespace, tokens: np.ndarray, found: CachedPrefix
    ) -> tuple[Reason, ...]:
        """Returns the reasons of a lookup, corrected if another namespace has the prompt."""
        if found.num_seen >= self._num_tokens:
            return found.reasons
        others = [other for other in self._of.get(self._key(tokens), ()) if other != namespace]
        if not others or "complete" in found.reasons:
            return found.reasons
        now = [other for other in others if other.epoch == namespace.epoch]
        reason: Reason = "other_keys" if now else "other_epoch"
        if any(other.keys == namespace.keys for other in now):
            reason = "other_salt"
        return (reason,) * len(found.reasons)

    def clear(self) -> None:
        """Forgets all prompts."""
        self._of.clear()

    def _key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self._num_tokens].astype(np.int64).tobytes()
