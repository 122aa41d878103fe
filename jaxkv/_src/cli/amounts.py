"""Amounts in the arguments of a command: bytes, lengths, counts, shares. No jax."""

import re
from fractions import Fraction

from jaxkv._src.internal.text import shown

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNIT_OF = {unit.lower(): size for unit, size in UNITS.items()}  # as people write them: 80gb
LENGTHS = {"": 1, "k": 2**10, "m": 2**20}


def parse_bytes(text: str, flag: str = "--memory") -> int:
    """Returns the bytes of ``"80GiB"``, ``"71.3gib"``, ``"141GB"`` or a whole number of bytes.

    A fraction of a byte is dropped.

    Raises:
      ValueError: not a number, an unknown unit, or a fraction without a unit.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]{0,3})\s*", text)
    if not match or match[2].lower() not in UNIT_OF:
        units = ", ".join(filter(None, UNITS))
        raise ValueError(
            f"{flag}={shown(text)} is not understood; give a number and one of {units}"
        )
    if "." in match[1] and not match[2]:
        raise ValueError(
            f"{flag}={shown(text)} is a fraction without a unit; give {match[1]}GiB, say"
        )
    return int(Fraction(match[1]) * UNIT_OF[match[2].lower()])


def parse_length(text: str, flag: str) -> int:
    """Returns the tokens of ``"8k"`` (8,192), ``"1m"`` (1,048,576) or ``"8192"``.

    Raises:
      ValueError: not a number with or without a suffix, or less than one token.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kKmM]?)", text)
    tokens = Fraction(match[1]) * LENGTHS[match[2].lower()] if match else Fraction(0)
    if tokens < 1 or tokens.denominator != 1:
        raise ValueError(
            f"{flag}={shown(text)} is not understood; give tokens, such as 8192 or 8k (k: 1,024, "
            "m: 1,048,576)"
        )
    return int(tokens)


def parse_count(text: str, flag: str) -> int:
    """Returns the int of ``"16"``.

    Raises:
      ValueError: not a whole number.
    """
    if not re.fullmatch(r"-?\d{1,15}", text):
        raise ValueError(f"{flag}={shown(text)} is not understood; give a whole number")
    return int(text)


def parse_share(text: str, flag: str) -> Fraction:
    """Returns the share of ``"0.9"`` or ``"90%"``, exactly.

    Raises:
      ValueError: not a share above 0 and up to 1.
    """
    match = re.fullmatch(r"(\d{0,15}\.?\d{1,15})(%?)", text)
    share = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"{flag}={shown(text)} is not understood; give a share such as 0.9 or 90%")
    return share


def round_up_gib(num_bytes: int) -> str:
    """Returns bytes rounded up to hundredths of a GiB, such as ``"42.29GiB"``."""
    hundredths = -(-num_bytes * 100 // 2**30)
    return f"{hundredths // 100}.{hundredths % 100:02}GiB"
