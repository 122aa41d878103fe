"""Token ids with what stands behind them, as numbers to compare. NumPy only."""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv.prefixes._extra_keys import ExtraKey

MAX_TOKEN = 2**31 - 1
NUMBER_BITS = 30
STARTS = 1 << 32 + NUMBER_BITS  # marks the first token of a medium


class TokenCodes:
    """Numbers for tokens, equal where the tokens are and what their extra keys name.

    An image has the same placeholder tokens as any other, so its tokens also carry a number that
    stands for the image; rows of embeddings carry one each.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether there are so many extra keys that it is time to begin anew."""
        return len(self._numbers) >= 1 << NUMBER_BITS - 10

    def encode(self, tokens: Sequence[int] | np.ndarray, keys: Sequence[ExtraKey]) -> np.ndarray:
        """Returns a new array [N], a number for each token: int32 where no token has a key.

        Args:
          tokens: token ids.
          keys: those of some tokens; the same token has one at most.

        Raises:
          TypeError, ValueError: as `as_tokens`, or keys that overlap or reach past the tokens.
        """
        codes = as_tokens("tokens", tokens, np.int64 if keys else np.int32)
        for key in keys:
            part = codes[key.start : key.end]
            if key.end is None or part.size < key.end - key.start:
                raise ValueError(
                    f"extra_keys: {key!r} reaches past the {codes.size} tokens; give the tokens "
                    "that it stands for"
                )
            if (part > MAX_TOKEN).any():
                raise ValueError(f"extra_keys: {key!r} overlaps another key; give disjoint ranges")
            if isinstance(key.value, bytes):
                part += np.array(self._numbers_of_rows(key.value, part.size)) << 32
            else:
                part += self._number((key.kind, key.value)) << 32
                part[0] += STARTS
        return codes

    def _number(self, content: Hashable) -> int:
        return self._numbers.setdefault(content, len(self._numbers) + 1)

    def _numbers_of_rows(self, rows: bytes, count: int) -> list[int]:
        size = len(rows) // count
        parts = (rows[at : at + size] for at in range(0, len(rows), size))
        return [self._number(hashlib.sha256(part).digest()) for part in parts]


def as_tokens(
    name: str, tokens: Sequence[int] | np.ndarray, dtype: type[np.signedinteger] = np.int64
) -> np.ndarray:
    """Returns token ids as a new array [N].

    Raises:
      TypeError: values that are not ints.
      ValueError: an array that is not flat, or an id below 0 or past int32.
    """
    if isinstance(tokens, str | bytes) or not hasattr(tokens, "__len__"):
        kind = type(tokens).__name__
        raise TypeError(f"{name} must be token ids, a sequence of ints, got {kind}; tokenize first")
    array = np.asarray(tokens) if len(tokens) else np.zeros(0, np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a flat list, got an array of shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be token ids, ints, got {array.dtype}")
    # All bits of a token are those of MAX_TOKEN, so one look at the bits of all is enough.
    if array.size and not 0 <= np.bitwise_or.reduce(array) <= MAX_TOKEN:
        raise ValueError(f"{name} must be in 0..{MAX_TOKEN}, got {array.min()}..{array.max()}")
    return array.astype(dtype)
