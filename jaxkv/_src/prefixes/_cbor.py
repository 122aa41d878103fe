"""Canonical CBOR (RFC 8949) of the values that block keys hash. NumPy only."""

import numpy as np

Encodable = int | bytes | str | None | tuple["Encodable", ...] | list["Encodable"]

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in range(5))
_NONE = b"\xf6"
_SIZES = ((24, 1), (25, 2), (26, 4), (27, 8))  # low bits of a head, bytes of its argument


def head(major: int, argument: int) -> bytes:
    """Returns the head of an item, in as few bytes as its argument allows.

    Args:
      major: the item's type, in the three highest bits of a byte.
      argument: the integer itself, or the length of a string or an array.
    """
    if argument < 24:
        return bytes((major | argument,))
    for info, size in _SIZES:
        if argument < 1 << 8 * size:
            return bytes((major | info,)) + argument.to_bytes(size, "big")
    raise ValueError(f"{argument} has more than 64 bits, the most of a CBOR integer")


def array_head(length: int) -> bytes:
    """Returns the head of an array; the encoded items follow it."""
    return head(_ARRAY, length)


def encode(value: Encodable) -> bytes:
    """Returns the canonical CBOR of a value.

    Args:
      value: an int of at most 64 bits, bytes, a str, None, or a tuple or list of these.

    Raises:
      TypeError: a value of another type.
      ValueError: an integer of more than 64 bits.
    """
    match value:
        case None:
            return _NONE
        case bytes():
            return head(_BYTES, len(value)) + value
        case str():
            text = value.encode()
            return head(_TEXT, len(text)) + text
        case tuple() | list():
            return array_head(len(value)) + b"".join(encode(item) for item in value)
        case int() if not isinstance(value, bool):
            return head(_UNSIGNED, value) if value >= 0 else head(_NEGATIVE, -1 - value)
    raise TypeError(
        f"cannot encode {value!r} ({type(value).__name__}): a key is made of int, bytes, str, "
        "None, and tuples or lists of these"
    )


def encode_tokens(tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Returns the canonical CBOR of each block of token ids, as an array of integers.

    Args:
      tokens: uint32[num_blocks * block_size].
      block_size: tokens per block.
    """
    # Five columns per token, the head and four bytes of the integer; `used` marks those to keep.
    columns = np.empty((tokens.size, 5), np.uint8)
    columns[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    one, two, four = tokens >= 24, tokens > 0xFF, tokens > 0xFFFF
    columns[:, 0] = np.where(one, 23 + one.view(np.uint8) + two + four, tokens)
    used = np.ones((tokens.size, 5), bool)
    used[:, 1] = used[:, 2] = four
    used[:, 3], used[:, 4] = two, one
    data = columns[used].tobytes()
    lengths = 1 + one.astype(np.int64) + two + 2 * four
    ends = lengths.reshape(-1, block_size).sum(1).cumsum().tolist()
    first = array_head(block_size)
    return [first + data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
