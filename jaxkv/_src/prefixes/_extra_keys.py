"""Extra keys: adapters, media, embeddings and salts that blocks depend on. NumPy only."""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Literal

import numpy as np

from jaxkv._src.internal.checks import check_choice, check_count, check_each, check_positive
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.text import shown

#: kinds of extra keys, by vLLM 0.33's tags
ExtraKind = Literal["lora", "mm", "prompt_embeds"]
_KINDS = ("lora", "mm", "cache_salt", "prompt_embeds")  # in the order of a block's keys

#: one extra key of a block: a tag, then the values that identify the content
Tagged = tuple[str | int | bytes, ...]
#: the extra keys of one block, if it has any
BlockExtras = tuple[Tagged, ...] | None


@dataclasses.dataclass(frozen=True)
class ExtraKey:
    """An adapter, a medium or embeddings that blocks depend on besides their token ids.

    Make one with `lora`, `mm` or `prompt_embeds`. Pass a salt as ``salt=`` instead.

    kind: "lora" (an adapter), "mm" (an image, a video or a sound) or "prompt_embeds".
    value: (name, path) of the adapter; the identifier of the medium, such as a hash of its
      content; the bytes of the embeddings.
    start, end: the key covers the tokens ``start .. end - 1``; ``end`` None: to the end of the
      sequence.

    Every block depends on the adapter, and a block that contains a token of a medium depends on
    that medium and its offset from the start of the block, so the same image at two offsets gives
    two block keys. Of embeddings, a block depends on the vectors of its own tokens.
    """

    kind: ExtraKind
    value: str | bytes | tuple[str, str]
    start: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        check_choice(("lora", "mm", "prompt_embeds"), kind=self.kind)
        check_count(start=self.start)
        if self.end is not None:
            check_positive(end=self.end)
            if self.end <= self.start:
                raise ValueError(f"end={self.end} must be more than start={self.start}")
        check = {"lora": self._check_lora, "mm": self._check_mm}
        check.get(self.kind, self._check_prompt_embeds)()

    def _check_lora(self) -> None:
        names = self.value
        if not isinstance(names, tuple) or [type(name) for name in names] != [str, str]:
            raise TypeError(f"value of an adapter must be (name, path), got {shown(self.value)}")
        if (self.start, self.end) != (0, None):
            raise ValueError(
                "an adapter applies to the whole sequence, got "
                f"start={self.start} and end={self.end}; leave them out"
            )

    def _check_mm(self) -> None:
        if not isinstance(self.value, str):
            raise TypeError(f"identifier of a medium must be a str, got {shown(self.value)}")
        if self.end is None:
            raise ValueError("end is missing; give the position after the last token of the medium")

    def _check_prompt_embeds(self) -> None:
        if not isinstance(self.value, bytes):
            raise TypeError(f"value of embeddings must be bytes, got {type(self.value).__name__}")
        if self.start or not self.end or len(self.value) % self.end:
            raise ValueError(
                "embeddings must begin at start=0 and have the same number of bytes for each token "
                f"before end; got start={self.start}, end={self.end} and {len(self.value)} bytes"
            )

    @classmethod
    def lora(cls, name: str, path: str) -> "ExtraKey":
        """Returns the key of a LoRA adapter.

        Args:
          name: name of the adapter.
          path: path of its weights, so that other weights under the same name miss.
        """
        return cls("lora", (name, path))

    @classmethod
    def mm(cls, identifier: str, start: int, end: int) -> "ExtraKey":
        """Returns the key of an image, a video or a sound in the prompt.

        Args:
          identifier: a str that tells two media apart, such as a hash of all their bytes.
          start, end: the placeholder tokens ``start .. end - 1`` of the prompt.
        """
        return cls("mm", identifier, start, end)

    @classmethod
    def prompt_embeds(cls, rows: np.ndarray) -> "ExtraKey":
        """Returns the key of embeddings that a request passes instead of token ids.

        Args:
          rows: [T, ...] of any dtype, one vector for each of the first T tokens.
        """
        if not isinstance(rows, np.ndarray) or not rows.size:
            raise TypeError(f"rows must be a NumPy array that is not empty, got {shown(rows)}")
        return cls("prompt_embeds", rows.tobytes(), 0, len(rows))


def extra_keys_by_block(
    extra_keys: Collection[ExtraKey],
    block_size: int,
    num_blocks: int,
    *,
    salt: str | None = None,
    start: int = 0,
) -> list[BlockExtras]:
    """Returns the extra keys of consecutive blocks, tagged and in the order of vLLM 0.33.

    An entry is ``("lora", name, path)``, ``("mm", identifier, offset)`` with the offset of the
    medium from the start of the block (negative where it began earlier), ``("cache_salt", salt)``
    in the block at position 0 only, or ``("prompt_embeds", digest)`` with the SHA-256 of the
    block's vectors. Of media that overlap, each is an entry of every block that it touches; vLLM
    leaves some of them out.

    Args:
      extra_keys: extra keys of the sequence, in any order.
      block_size: tokens per block.
      num_blocks: number of consecutive blocks, from ``start`` on.
      salt: a salt, because sequences with different salts must not share; None or "": none.
      start: position of the first token of the first block.

    Raises:
      TypeError: something that is not an `ExtraKey`, or a salt that is not a str.
    """
    check_content(salt, extra_keys)
    if not extra_keys and not (salt and start == 0):  # spares most prompts a list for each block
        return [None] * num_blocks
    found: list[list[Tagged]] = [[] for _ in range(num_blocks)]
    ordered = sorted(extra_keys, key=lambda key: (_KINDS.index(key.kind), key.start, key.value))
    before_salt = [key for key in ordered if key.kind != "prompt_embeds"]
    for key in before_salt:
        _add(key, found, block_size, start)
    if salt and start == 0 and found:
        found[0].append(("cache_salt", salt))
    for key in ordered[len(before_salt) :]:
        _add(key, found, block_size, start)
    return [tuple(entries) or None for entries in found]


def check_content(salt: str | None, extra_keys: Collection[ExtraKey]) -> None:
    """Raises TypeError for a salt that is not a str, or a key that is not an `ExtraKey`."""
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"salt must be a str or None, got {shown(salt)}; use str(...)")
    wanted = "created by ExtraKey.lora, ExtraKey.mm or ExtraKey.prompt_embeds"
    check_each(ExtraKey, wanted, extra_keys=extra_keys)


def check_ranges(extra_keys: Iterable[ExtraKey], num_tokens: int) -> None:
    """Raises ValueError for keys that overlap, or reach past a prompt of ``num_tokens``."""
    covered = 0
    for key in sorted((key for key in extra_keys if key.end), key=lambda key: key.start):
        if (key.end or 0) > num_tokens:
            raise ValueError(
                f"extra_keys: {key!r} reaches past the {num_tokens} tokens; give all tokens that "
                "it covers"
            )
        if key.start < covered:
            raise ValueError(f"extra_keys: {key!r} overlaps another key; give disjoint ranges")
        covered = key.end or 0


def check_boundaries(boundaries: Sequence[int], num_tokens: int) -> None:
    """Raises TypeError or ValueError unless each boundary is a position in the prompt."""
    check_each(Integral, "an int", boundaries=boundaries)
    for boundary in boundaries:
        if isinstance(boundary, bool):
            raise TypeError(f"boundaries={list(boundaries)} must be ints, got {boundary}")
        if not 0 < boundary <= num_tokens:
            raise ValueError(
                f"boundaries={list(boundaries)} must be in 1..{num_tokens}, the length of the "
                "prompt in tokens"
            )


def _add(key: ExtraKey, found: list[list[Tagged]], block_size: int, start: int) -> None:
    """Appends a key to the entries of the blocks that depend on it."""
    if key.kind != "mm":
        first, end = 0, len(found)
    else:
        first = max((key.start - start) // block_size, 0)
        end = min(cdiv((key.end or 0) - start, block_size), len(found))
    for block, entry in zip(
        range(first, end), _entries(key, start + first * block_size, block_size), strict=False
    ):
        found[block].append(entry)


def _entries(key: ExtraKey, position: int, block_size: int) -> Iterator[Tagged]:
    """Yields the entries of a key in the block at a position and in those after it."""
    while True:
        match key.value:
            case str(identifier):
                yield "mm", identifier, key.start - position
            case bytes(rows):
                size = len(rows) // (key.end or 1)
                own = rows[position * size : (position + block_size) * size]
                yield "prompt_embeds", hashlib.sha256(own).digest()
            case (name, path):
                yield "lora", name, path
        position += block_size
