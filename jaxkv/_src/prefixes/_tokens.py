"""Codes of tokens, which combine token ids with extra keys. NumPy only."""

import array
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxkv._src.internal.checks import check_known, check_not_masked
from jaxkv._src.prefixes._extra_keys import ExtraKey, check_ranges

MAX_TOKEN = 2**31 - 1
NUMBER_BITS = 30
STARTS = 1 << 32 + NUMBER_BITS  # marks the first token of a medium


class SupportsArray(Protocol):
    """An array of NumPy, jax or another library."""

    def __array__(self) -> np.ndarray: ...


TokenIds = Sequence[int] | SupportsArray


class TokenCodes:
    """Integer codes of tokens: two are equal if both the token ids and their extra keys are.

    All images have the same placeholder tokens, so the codes of such tokens also contain a number
    for the image. With embeddings, the code of each token contains a number for its vector.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether too many extra keys have numbers, and the caller should start over."""
        return len(self._numbers) >= 1 << NUMBER_BITS - 10

    def encode(self, tokens: Sequence[int] | np.ndarray, keys: Sequence[ExtraKey]) -> np.ndarray:
        """Returns the codes of tokens as a new array: int32[N] without keys, else int64[N].

        Args:
          tokens: token ids, [N].
          keys: extra keys, at most one for each token.

        Raises:
          TypeError, ValueError: as `as_tokens`, or keys that overlap or reach past the tokens.
        """
        codes = as_tokens("tokens", tokens, np.int64 if keys else np.int32)
        check_ranges(keys, codes.size)
        for key in keys:
            part = codes[key.start : key.end]
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


def as_tokens(name: str, tokens: TokenIds, dtype: type[np.signedinteger] = np.int64) -> np.ndarray:
    """Returns token ids as a new array [N].

    Raises:
      TypeError: values that are not ints.
      ValueError: an array that is not flat, or an id below 0 or past int32.
    """
    check_not_masked(**{name: tokens})
    array = tokens if isinstance(tokens, np.ndarray) and tokens.size else _as_array(name, tokens)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a flat list, got an array of shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise _no_ids(name, array)
    # MAX_TOKEN has all lower bits set: the OR of all ids is in range only if each of them is.
    if array.size and not 0 <= np.bitwise_or.reduce(array) <= MAX_TOKEN:
        bad = array.min() if array.min() < 0 else array.max()
        raise _out_of_range(name, bad)
    return array.astype(dtype)


def _as_array(name: str, tokens: Any) -> np.ndarray:
    is_odd = isinstance(tokens, (str, bytes, set, frozenset, dict))
    if is_odd or not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0:
        remedy = "; tokenize first" if isinstance(tokens, str | bytes) else ""
        kind = type(tokens).__name__
        raise TypeError(f"{name} must be token ids, a sequence of ints, got {kind}{remedy}")
    check_known(**{name: tokens})
    if isinstance(tokens, (list, tuple)) and tokens and type(tokens[0]) is int:
        try:  # in a third of the time that NumPy takes
            return np.asarray(array.array("q", tokens))
        except OverflowError:
            return np.asarray(tokens, object)  # NumPy makes floats of some
        except TypeError:
            pass  # NumPy tells what is odd
    try:
        return np.asarray(tokens) if len(tokens) else np.zeros(0, np.int64)
    except ValueError:
        raise ValueError(f"{name} must be a flat list of ints, got nested ones") from None


def _no_ids(name: str, array: np.ndarray) -> Exception:
    """Returns the refusal of an array that does not hold ints."""
    odd: list[object] = [array.dtype]
    if array.dtype == object:
        odd = [type(token).__name__ for token in array.tolist() if type(token) is not int]
    if odd:
        return TypeError(f"{name} must be token ids, ints, got {odd[0]}")
    farthest = max(array.tolist(), key=abs)  # past int64
    return _out_of_range(name, farthest)


def _out_of_range(name: str, token: object) -> ValueError:
    return ValueError(f"{name} holds the token id {token}; ids are from 0 to {MAX_TOKEN:,}")
