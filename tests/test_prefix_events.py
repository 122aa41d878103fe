"""Events: their order, the bytes of vLLM's messages, and what a router learns from them."""

import builtins
import itertools
import json
import pathlib
import random
from collections import Counter
from typing import Any

import msgpack
import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.prefixes import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    EventGroup,
    EventLog,
    ExtraKey,
    block_keys,
    encode_events,
    event_frames,
)
from jaxkv._src.prefixes._block_events import KeyChain, PrefixEvents
from jaxkv._src.prefixes._extra_keys import extra_keys_by_block
from tests.test_prefixes import plan_of

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "vllm_prefixes.json").read_text())
PLAIN = next(case for case in GOLDEN["keys"] if case["name"] == "plain")
TOKENS = PLAIN["tokens"]
KEYS = block_keys(TOKENS, 4)

STATES = EventGroup(0, "state", 4)
WINDOWS = EventGroup(1, "sliding", 4, window=1024)
FULL = EventGroup(3, "full", 4)
# The golden messages are these events, encoded with vLLM's own structs.
RECORDED: tuple[CacheEvent, ...] = (
    BlocksStored(FULL, tuple(KEYS[:2]), None, tuple(TOKENS[:8])),
    BlocksStored(
        WINDOWS,
        tuple(KEYS[1:3]),
        KEYS[0],
        tuple(TOKENS[4:12]),
        medium="CPU",
        extra_keys=(
            (("lora", "sql", "/a"), ("mm", "f00d", 2), ("cache_salt", "s")),
            (("lora", "sql", "/a"), ("mm", "f00d", -2), ("prompt_embeds", b"\x01\xff" * 16)),
        ),
        adapter="sql",
        adapter_id=7,
    ),
    BlocksRemoved(FULL, (KEYS[0],)),
    BlocksRemoved(STATES, tuple(KEYS[1:3]), medium="STORAGE"),
    AllBlocksCleared(),
)
BATCH = EventBatch(5, 1795330800.25, RECORDED)

STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
FIELDS = {
    "BlockStored": STORED_FIELDS,
    "BlockRemoved": ("type", "block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("type",),
}


def decoded(payload: bytes) -> list[dict[str, Any]]:
    """Returns the events of a message in either format, as maps by field name."""
    timestamp, events, rank = msgpack.unpackb(payload)
    assert isinstance(timestamp, float) and isinstance(rank, int)
    named = []
    for event in events:
        if isinstance(event, list):
            event = dict(zip(FIELDS[event[0]], event, strict=True))
        named.append({name: event.get(name) for name in FIELDS[event["type"]]})
    return named


# --- vLLM's messages ------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["int", "bytes"])
@pytest.mark.parametrize("format", ["tagged", "positional"])
def test_messages_are_those_that_vllm_sends(format: Any, keys: Any) -> None:
    recorded = bytes.fromhex(GOLDEN["events"][f"{format} {keys}"])
    payload = encode_events(BATCH, format=format, keys=keys, rank=2)
    assert msgpack.unpackb(payload) == msgpack.unpackb(recorded)
    if format == "positional":  # vLLM's encoder writes the length of a map in more bytes
        assert payload == recorded


@pytest.mark.parametrize(
    ("kind", "name", "counted"),
    [
        ("full", "full_attention", True),
        ("mla", "mla_attention", True),
        ("sliding", "sliding_window", False),
        ("sliding_mla", "sliding_window_mla", False),
        ("chunked", "chunked_local_attention", False),
        ("state", "mamba", False),
        ("cross", "cross_attention", False),
    ],
)
def test_groups_that_no_router_should_count_are_marked(kind: Any, name: str, counted: bool) -> None:
    group = EventGroup(0, kind, 4)
    assert group.is_counted == counted
    stored = BlocksStored(group, (KEYS[0],), None, tuple(TOKENS[:4]))
    batch = EventBatch(0, 0.0, (stored, BlocksRemoved(group, (KEYS[0],)), AllBlocksCleared()))
    assert decoded(encode_events(batch))[0]["kv_cache_spec_kind"] == name
    left = [event["type"] for event in decoded(encode_events(batch, groups="counted"))]
    assert left == ["BlockStored", "BlockRemoved"] * counted + ["AllBlocksCleared"]


def test_frames_are_topic_number_and_payload() -> None:
    frames = event_frames(258, b"payload", topic="kv-events")
    assert frames == (b"kv-events", b"\0\0\0\0\0\0\1\2", b"payload")
    assert END_OF_REPLAY == (b"", b"\xff" * 8, b"")
    assert event_frames(2**64 - 2, b"").sequence < END_OF_REPLAY.sequence
    with pytest.raises(ValueError, match="sequence must be at least 0"):
        event_frames(-1, b"")


# --- order and replay -----------------------------------------------------------------


class Router:
    """A router that follows the events: the keys that are stored, per group and medium."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], set[bytes]] = {}
        self.expected = 0

    def read(self, frames: tuple[bytes, bytes, bytes]) -> None:
        assert int.from_bytes(frames[1], "big") == self.expected
        self.expected += 1
        for event in decoded(frames[2]):
            if event["type"] == "AllBlocksCleared":
                self.held = {}
                continue
            blocks = self.held.setdefault((event["group_idx"], event["medium"]), set())
            if event["type"] == "BlockStored":
                blocks.update(event["block_hashes"])
            else:
                assert blocks.issuperset(event["block_hashes"])
                blocks.difference_update(event["block_hashes"])


@pytest.mark.parametrize("format", ["tagged", "positional"])
@pytest.mark.parametrize("seed", range(10))
def test_a_router_that_missed_batches_learns_the_same_from_a_replay(seed: int, format: Any) -> None:
    draw = random.Random(seed)
    log, live, late = EventLog(), Router(), Router()
    held: dict[tuple[int, str], set[bytes]] = {}
    missed = draw.randrange(20)
    for step in range(30):
        for _ in range(draw.randrange(4)):
            group = draw.choice([STATES, WINDOWS, FULL])
            blocks = held.setdefault((group.index, "GPU"), set())
            if draw.random() < 0.05:
                log.append(AllBlocksCleared())
                held = {}
            elif blocks and draw.random() < 0.4:
                gone = tuple(draw.sample(sorted(blocks), draw.randint(1, len(blocks))))
                log.append(BlocksRemoved(group, gone))
                blocks.difference_update(gone)
            else:
                first, count = draw.randrange(7), draw.randint(1, 2)
                keys, tokens = KEYS[first : first + count], TOKENS[4 * first : 4 * (first + count)]
                parent = KEYS[first - 1] if first else None
                log.append(BlocksStored(group, tuple(keys), parent, tuple(tokens)))
                blocks.update(keys)
        batch = log.take(timestamp=float(step))
        if batch is not None:
            frames = event_frames(batch.sequence, encode_events(batch, format=format, keys="bytes"))
            live.read(frames)
            if batch.sequence < missed:
                late.read(frames)
    for batch in log.since(late.expected):
        late.read(event_frames(batch.sequence, encode_events(batch, format=format, keys="bytes")))
    wanted = {place: keys for place, keys in held.items() if keys}
    for router in (live, late):
        assert {place: keys for place, keys in router.held.items() if keys} == wanted
        assert router.expected == log.next_sequence


def test_a_log_numbers_its_batches_and_keeps_the_last() -> None:
    log = EventLog(max_batches=3)
    assert log.take() is None and log.since(0) == ()
    batches = []
    for seconds, event in enumerate(RECORDED):
        log.append(event)
        batches.append(log.take(timestamp=float(seconds)))
    assert [batch and batch.sequence for batch in batches] == [0, 1, 2, 3, 4]
    assert [batch and batch.timestamp for batch in batches] == [0, 1, 2, 3, 4]
    assert log.take() is None and log.next_sequence == 5
    assert list(log.since(2)) == batches[2:] and log.since(5) == ()
    with pytest.raises(ValueError, match="batches 2 to 4 are kept"):
        log.since(1)
    log.append(AllBlocksCleared())
    batch = log.take()
    assert batch is not None and batch.timestamp > 1e9
    assert repr(log) == "EventLog(6 batches taken, the last 3 kept, 0 events pending)"


# --- events of a manager --------------------------------------------------------------


Told = tuple[bytes | None, tuple[int, ...], Any, str | None]  # what an event tells of a key


def told_of(event: BlocksStored) -> dict[bytes, Told]:
    """Returns, of each key, the key before it, its tokens, its extra keys and the adapter."""
    keys, size, found = event.block_keys, event.group.block_size, dict[bytes, Told]()
    extras, parents = event.extra_keys or (None,) * len(keys), (event.parent_key, *keys)
    for i, (key, parent, extra) in enumerate(zip(keys, parents, extras, strict=False)):
        found[key] = parent, event.token_ids[i * size : (i + 1) * size], extra, event.adapter
    return found


def test_a_key_is_cached_where_a_block_of_it_is() -> None:
    """In both memories, of several blocks with one key, stored and removed in any order.

    Block sizes may have another divisor than the smallest of them.
    """
    sql, cat = ExtraKey.lora("sql", "/a"), ExtraKey.mm("f00d", 5, 10)
    prompts: list[tuple[list[int], str | None, tuple[ExtraKey, ...]]] = [
        ([], None, (sql, cat)),
        ([7, 8] * 3, None, (sql, ExtraKey.mm("f00d", 5, 14))),  # an image of another size
        ([3] * 4, "s", (sql, cat)),
        ([5] * 9, None, ()),
        ([6] * 9, None, ()),
    ]
    seen = Counter[str]()
    for seed in range(20):
        draw, log, ids = random.Random(seed), EventLog(), itertools.count(1)
        one, other = (4, 8) if seed % 2 else (8, 12)
        groups = [EventGroup(0, "full", one), EventGroup(1, "sliding", other)]
        events, wanted = PrefixEvents(log, groups), dict[tuple[int, bytes], Told]()
        chains = [KeyChain(salt, extra_keys) for _, salt, extra_keys in prompts]
        chains[-1] = chains[-2].copy()  # of a fork, which goes on otherwise
        blocks: dict[int, tuple[str, int, bytes]] = {}
        held = set[tuple[str, int, bytes]]()
        for _ in range(40):
            what = draw.choice([*["store", "store", "host", "remove"] * 6, "clear"])
            if what == "store":
                (tail, salt, extra_keys), chain = draw.choice([*zip(prompts, chains, strict=True)])
                group = draw.choice(groups)
                index, size = group.index, group.block_size
                tokens = np.array([*range(14), *tail][: draw.randint(1, 23)])
                keys = block_keys(tokens, 4, salt=salt, extra_keys=extra_keys)
                keys = keys[size // 4 - 1 :: size // 4]
                extras = extra_keys_by_block(extra_keys, size, len(keys), salt=salt)
                for i, key in enumerate(keys):
                    own = tuple(tokens[i * size : (i + 1) * size].tolist())
                    adapter = "sql" if extra_keys else None
                    wanted[index, key] = keys[i - 1] if i else None, own, extras[i], adapter
                first = draw.randint(0, len(keys))
                given = [draw.choice([0, next(ids), next(ids)]) for _ in range(4)]
                named = zip(given, keys[first:], strict=False)
                blocks |= {block: ("GPU", index, key) for block, key in named if block}
                for _ in range(draw.randint(1, 2)):  # those that are recorded are skipped
                    events.stored(chain, tokens, index, first, given)
            elif what == "host":
                here = [block for block, (medium, *_) in blocks.items() if medium == "GPU"]
                given = draw.sample([*here, next(ids)], draw.randint(0, len(here) + 1))
                copies = [(block, next(ids)) for block in given]
                events.stored_on_host(given, [copy for _, copy in copies])
                blocks |= {copy: ("CPU", *blocks[b][1:]) for b, copy in copies if b in blocks}
            elif what == "clear":
                events.cleared()
                blocks = {}
            else:
                given = draw.sample([*blocks, next(ids)], draw.randint(0, min(6, len(blocks))))
                events.removed(given)
                blocks = {block: name for block, name in blocks.items() if block not in given}
            batch = log.take()
            for event in () if batch is None else batch.events:
                if isinstance(event, AllBlocksCleared):
                    held = set()
                    continue
                names = {(event.medium, event.group.index, key) for key in event.block_keys}
                if isinstance(event, BlocksRemoved):
                    assert names <= held
                    held -= names
                    continue
                assert not names & held
                held |= names
                for key, told in told_of(event).items():
                    assert told == wanted[event.group.index, key]
                seen[event.medium] += len(names) > 1
                if event.medium == "GPU":
                    assert event.extra_keys is None or any(event.extra_keys)
            assert held == set(blocks.values())
            on_gpu = {(index, key) for medium, index, key in held if medium == "GPU"}
            assert events._places.keys() == on_gpu, "tokens of blocks that nobody keeps"
            seen["shared"] += len(held) < len(blocks)
    assert min(seen[name] for name in ("GPU", "CPU", "shared")) > 3, seen


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("block_keys is empty", lambda: BlocksStored(FULL, (), None, ())),
        *(
            (
                f"token_ids has {count} tokens; {blocks} blocks of 4 have {4 * blocks}$",
                lambda blocks=blocks, count=count: BlocksStored(
                    FULL, tuple(KEYS[:blocks]), None, (1,) * count
                ),
            )
            for blocks, count in ((1, 0), (1, 8), (2, 4), (2, 7), (2, 9))
        ),
        (
            "extra_keys has 1 entries",
            lambda: BlocksStored(FULL, tuple(KEYS[:2]), None, (1,) * 8, extra_keys=(None,)),
        ),
        ("medium='gpu'", lambda: BlocksRemoved(FULL, (KEYS[0],), "gpu")),  # pyrefly: ignore
        ("sequence=18446744073709551615", lambda: event_frames(2**64 - 1, b"")),
    ],
)
def test_refusals_name_the_argument(text: str, make: Any) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_two_managers_on_one_log_are_refused() -> None:
    log, plan = EventLog(), plan_of("full")
    BlockManager(plan, max_requests=1, events=log)
    with pytest.raises(ValueError, match=r"another BlockManager.*; give each an"):
        BlockManager(plan, max_requests=1, events=log)


def test_without_msgpack_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "msgpack":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"jaxkv\[events\]"):
        encode_events(BATCH)
