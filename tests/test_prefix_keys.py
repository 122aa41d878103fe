"""Block keys: equal to those of vLLM 0.33, and different for different content."""

import hashlib
import itertools
import json
import pathlib
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv._src.prefixes import ExtraKey, block_keys, root_key
from jaxkv._src.prefixes._cbor import array_head, encode, encode_tokens
from jaxkv._src.prefixes._extra_keys import check_ranges, extra_keys_by_block

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "vllm_prefixes.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["keys"]
TOKENS = st.one_of(*(st.integers(0, 2**bits - 1) for bits in (5, 8, 16, 31)))
MAX_8K_MS = 1.5


def extras_of(case: dict[str, Any]) -> list[ExtraKey]:
    extras = [ExtraKey.mm(*item) for item in case.get("mm", ())]
    if "lora" in case:
        extras.append(ExtraKey.lora(*case["lora"]))
    if "embeds" in case:
        extras.append(ExtraKey.prompt_embeds(np.array(case["embeds"], "<f4")))
    return extras[::-1]  # the order in which they are given must not matter


def keys_of(case: dict[str, Any], tokens: Any = None, **options: Any) -> list[bytes]:
    root = {"root": root_key(case["seed"])} if "seed" in case else {}
    return block_keys(
        case["tokens"] if tokens is None else tokens,
        case["block_size"],
        salt=case.get("salt"),
        extra_keys=extras_of(case),
        **root,
        **options,
    )


# --- vLLM's keys ----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_keys_are_those_that_vllm_computes(case: dict[str, Any]) -> None:
    wanted = [bytes.fromhex(key) for key in case["keys"]]
    root = root_key(case["seed"]) if "seed" in case else root_key()
    assert root.hex() == case["root"]
    assert keys_of(case) == wanted
    assert keys_of(case, np.array(case["tokens"], np.int32)) == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_chain_continues_where_it_ended(case: dict[str, Any]) -> None:
    keys = keys_of(case)
    for done in range(1, len(keys) + 1):
        start = done * case["block_size"]
        rest = keys_of(case, case["tokens"][start:], start=start, parent=keys[done - 1])
        assert rest == keys[done:]


@pytest.mark.parametrize(
    ("value", "encoded"),
    [  # RFC 8949, appendix A
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-100, "3863"),
        (-1000, "3903e7"),
        (None, "f6"),
        (b"", "40"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("", "60"),
        ("IETF", "6449455446"),
        ("ü", "62c3bc"),
        ("水", "63e6b0b4"),
        ((), "80"),
        ([1, (2, 3), [4, 5]], "8301820203820405"),
        (tuple(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_cbor_agrees_with_the_standard(value: Any, encoded: str) -> None:
    assert encode(value).hex() == encoded


@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(1, 30))
def test_blocks_of_tokens_are_encoded_as_lists_of_ints(tokens: list[int], block_size: int) -> None:
    tokens = tokens[: len(tokens) // block_size * block_size]
    blocks = [tokens[at : at + block_size] for at in range(0, len(tokens), block_size)]
    assert encode_tokens(np.array(tokens, np.uint32), block_size) == [encode(b) for b in blocks]


# --- content of keys ------------------------------------------------------------------


def test_a_key_covers_everything_before_its_end() -> None:
    tokens = np.arange(64)
    keys = block_keys(tokens, 8)
    assert len(set(keys)) == 8 and {len(key) for key in keys} == {32}
    for position in (0, 7, 8, 40, 63):
        changed = tokens.copy()
        changed[position] += 1
        same = [a == b for a, b in zip(keys, block_keys(changed, 8), strict=True)]
        assert same == [block < position // 8 for block in range(8)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {}),
        ({"salt": "sql"}, {"extra_keys": [ExtraKey.lora("sql", "")]}),
        ({"extra_keys": [ExtraKey.lora("a", "/1")]}, {"extra_keys": [ExtraKey.lora("a", "/2")]}),
        ({"extra_keys": [ExtraKey.mm("x", 2, 6)]}, {"extra_keys": [ExtraKey.mm("x", 3, 6)]}),
        ({"extra_keys": [ExtraKey.mm("x", 2, 6)]}, {"extra_keys": [ExtraKey.mm("y", 2, 6)]}),
        ({"extra_keys": [ExtraKey.mm("x", 2, 6)]}, {"extra_keys": [ExtraKey.lora("x", "")]}),
        ({"root": root_key("1")}, {}),
    ],
)
def test_other_salts_extra_keys_and_seeds_give_other_keys(one: Any, other: Any) -> None:
    tokens = [5] * 16
    assert not set(block_keys(tokens, 8, **one)) & set(block_keys(tokens, 8, **other))


def test_an_image_counts_in_the_blocks_that_it_touches_with_its_offset() -> None:
    image = ExtraKey.mm("x", 6, 16)
    assert extra_keys_by_block([image], 8, 3) == [(("mm", "x", 6),), (("mm", "x", -2),), None]
    assert extra_keys_by_block([image], 8, 2, start=8) == [(("mm", "x", -2),), None]
    assert extra_keys_by_block([image], 8, 1, start=16) == [None]
    assert extra_keys_by_block([ExtraKey.mm("x", 16, 17)], 8, 2) == [None, None]


def test_extra_keys_are_in_the_order_of_vllm() -> None:
    rows = np.arange(12, dtype=np.float16).reshape(6, 2)
    extras = [
        ExtraKey.prompt_embeds(rows),
        ExtraKey.mm("late", 3, 5),
        ExtraKey.lora("name", "path"),
        ExtraKey.mm("early", 1, 2),
    ]
    first, second, third = extra_keys_by_block(extras, 4, 3, salt="salt")
    adapter = ("lora", "name", "path")

    def embeds(part: np.ndarray) -> tuple[str, bytes]:
        return "prompt_embeds", hashlib.sha256(part.tobytes()).digest()

    media = ("mm", "early", 1), ("mm", "late", 3)
    assert first == (adapter, *media, ("cache_salt", "salt"), embeds(rows[:4]))
    assert second == (adapter, ("mm", "late", -1), embeds(rows[4:]))
    assert third == (adapter, embeds(rows[6:]))
    unsalted = (adapter, *media, embeds(rows[:4])), second, third
    for none in (None, ""):
        assert tuple(extra_keys_by_block(extras, 4, 3, salt=none)) == unsalted


def test_media_that_overlap_count_in_every_block_that_they_touch() -> None:
    """vLLM leaves out the second one, so that a prompt with another sound would hit."""
    video, sound = ExtraKey.mm("video", 0, 16), ExtraKey.mm("sound", 2, 4)
    first, second = extra_keys_by_block([video, sound], 8, 2)
    assert first == (("mm", "video", 0), ("mm", "sound", 2))
    assert second == (("mm", "video", -8),)
    ends = [ExtraKey.mm(name, 2, end) for name, end in (("image", 4), ("sound", 3))]
    for keys in (ends, ends[::-1]):  # in one order, however they are given
        assert extra_keys_by_block(keys, 8, 1) == [(("mm", "image", 2), ("mm", "sound", 2))]


def test_media_of_a_prompt_come_in_any_order_and_lie_apart() -> None:
    media = [ExtraKey.mm("a", 0, 4), ExtraKey.mm("b", 4, 6), ExtraKey.mm("c", 8, 12)]
    for keys in itertools.permutations(media):
        check_ranges(keys, 12)
        with pytest.raises(ValueError, match=r"'c'.* reaches past the 11 tokens"):
            check_ranges(keys, 11)
        with pytest.raises(ValueError, match="overlaps another key"):
            check_ranges([*keys, ExtraKey.mm("d", 5, 9)], 12)


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "block_size=2147483648", {"block_size": 2**31}),
        (ValueError, "id 2147483648; ids are from 0", {"tokens": [2**31] * 8}),
        (ValueError, "multiple of block_size=4", {"start": 6, "parent": bytes(32)}),
        (ValueError, "without a parent", {"start": 4}),
        (ValueError, "parent must be a key of 32 bytes", {"start": 4, "parent": b"x"}),
        (ValueError, "root must be a key of 32 bytes", {"root": "vllm-none-hash"}),
    ],
)
def test_refusals_name_the_argument(
    error: type[Exception], text: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text):
        block_keys(**({"tokens": range(8), "block_size": 4} | arguments))


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, "kind='audio'", lambda: ExtraKey("audio", "x")),  # pyrefly: ignore
        (TypeError, "value of an adapter", lambda: ExtraKey("lora", "ab")),
        (ValueError, "whole sequence", lambda: ExtraKey("lora", ("a", "b"), 4)),
        (TypeError, "identifier of a medium", lambda: ExtraKey("mm", b"x", 0, 1)),
        (ValueError, "end is missing", lambda: ExtraKey("mm", "x")),
        (ValueError, "end=3 must be more than start=3", lambda: ExtraKey.mm("x", 3, 3)),
        (TypeError, "value of embeddings", lambda: ExtraKey("prompt_embeds", "x", 0, 1)),
        (ValueError, "same number of bytes", lambda: ExtraKey("prompt_embeds", b"xyz", 0, 2)),
        (ValueError, "begin at start=0", lambda: ExtraKey("prompt_embeds", b"wxyz", 1, 2)),
        (ValueError, "end=None and 4 bytes", lambda: ExtraKey("prompt_embeds", b"wxyz")),
        (TypeError, "not empty", lambda: ExtraKey.prompt_embeds(np.zeros((0, 4)))),
    ],
)
def test_an_invalid_extra_key_or_seed_is_refused(
    error: type[Exception], text: str, make: Any
) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("value", [1.5, True, {"a": 1}, ("a", 1.5)])
def test_cbor_refuses_values_of_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match="a key is made of"):
        encode(value)
    with pytest.raises(ValueError, match="64 bits"):
        array_head(2**64)


def test_keys_of_8k_tokens_take_at_most_1_5_ms() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 8192).astype(np.int32)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        keys = block_keys(tokens, 16)
        best = min(best, 1e3 * (time.perf_counter() - start))
        if best < MAX_8K_MS:
            break
    assert len(keys) == 512 and best < MAX_8K_MS
