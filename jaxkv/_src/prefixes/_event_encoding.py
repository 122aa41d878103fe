"""Encoding of events as vLLM sends them to routers: MessagePack in ZeroMQ frames.

The fields are as in vLLM 0.33; the current routers of llm-d and Dynamo read both formats.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

from jaxkv._src.internal.checks import check_at_most, check_choice, check_count, check_kind
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.prefixes._events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    GroupKind,
)
from jaxkv._src.prefixes._extra_keys import BlockExtras

#: "tagged": each event is a map with a "type", as in vLLM 0.33; "positional": each event is an
#: array that begins with its type, as in vLLM up to 0.23
EventFormat = Literal["tagged", "positional"]
#: "int": the last 64 bits of a key, vLLM's default; "bytes": all 256
KeyFormat = Literal["int", "bytes"]
#: "all": events of every group, as vLLM sends; "counted": of groups with `EventGroup.is_counted`
GroupChoice = Literal["all", "counted"]

_KIND_NAMES: dict[GroupKind, str] = {
    "full": "full_attention",
    "mla": "mla_attention",
    "sliding": "sliding_window",
    "sliding_mla": "sliding_window_mla",
    "chunked": "chunked_local_attention",
    "ring": "unknown",
    "state": "mamba",
    "cross": "cross_attention",
}
_OPTIONAL = {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}


class EventFrames(NamedTuple):
    """The frames of one ZeroMQ message, for ``socket.send_multipart``.

    topic: the topic that subscribers filter by.
    sequence: number of the batch, 8 bytes, big-endian.
    payload: the batch, from `encode_events`.
    """

    topic: bytes
    sequence: bytes
    payload: bytes


#: the message that follows the last batch of a replay
END_OF_REPLAY = EventFrames(b"", (-1).to_bytes(8, "big", signed=True), b"")


def encode_events(
    batch: EventBatch,
    *,
    format: EventFormat = "tagged",
    keys: KeyFormat = "int",
    groups: GroupChoice = "all",
    rank: int = 0,
) -> bytes:
    """Returns a batch as MessagePack: an array of timestamp, events and data-parallel rank.

    Needs the extra ``events``. Events of stored blocks carry the index and the kind of their
    group, so that a router can count some groups only. For routers that ignore these fields, use
    ``groups="counted"``. Send the batch even if that leaves it without events, because a router
    takes a gap in the sequence numbers for a lost batch. As in vLLM, extra keys are written
    without tags, and an adapter as its name.

    Args:
      batch: from `EventLog.take` or `EventLog.since`.
      format: "tagged", or "positional" for readers of vLLM 0.23 or older.
      keys: "int" for the last 64 bits of each key, or "bytes" for all of it.
      groups: "all", or "counted" to leave out windows, chunks, states and encoders.
      rank: data-parallel rank of the cache.

    Raises:
      ImportError: msgpack is not installed.
      ValueError: an unknown ``format``, ``keys`` or ``groups``, or a negative ``rank``.
    """
    check_kind(EventBatch, "what EventLog.take returned", batch=batch)
    check_choice(("tagged", "positional"), format=format)
    check_choice(("int", "bytes"), keys=keys)
    check_choice(("all", "counted"), groups=groups)
    check_count(rank=rank)
    check_at_most(INT32_MAX, rank=rank)
    packb = _msgpack_packb()
    as_key = _as_int if keys == "int" else bytes
    events = [
        _as_map(event, as_key)
        for event in batch.events
        if groups == "all" or isinstance(event, AllBlocksCleared) or event.group.is_counted
    ]
    if format == "positional":
        return packb([batch.timestamp, [list(event.values()) for event in events], rank])
    return packb([batch.timestamp, [_without_defaults(event) for event in events], rank])


def event_frames(sequence: int, payload: bytes, *, topic: str = "") -> EventFrames:
    """Returns the frames of a ZeroMQ message that carries a batch, in vLLM's layout.

    Send them on a PUB socket. To replay batches, send their frames again on the ROUTER socket that
    the request came in on, and `END_OF_REPLAY` after the last::

        frames = event_frames(batch.sequence, encode_events(batch), topic="kv-events")
        socket.send_multipart(frames)

    Args:
      sequence: number of the batch.
      payload: the batch, from `encode_events`.
      topic: the topic that subscribers filter by.
    """
    check_count(sequence=sequence)
    check_at_most(2**64 - 2, sequence=sequence)  # one more is the number of `END_OF_REPLAY`
    check_kind(bytes, payload=payload)
    check_kind(str, topic=topic)
    return EventFrames(topic.encode(), sequence.to_bytes(8, "big"), payload)


def _msgpack_packb() -> Callable[[Any], bytes]:
    """Returns ``msgpack.packb``; raises ImportError with the extra to install."""
    try:
        import msgpack
    except ImportError:
        raise ImportError(
            "encoding events needs msgpack, which is not installed: pip install 'jaxkv[events]'"
        ) from None
    return cast(Callable[[Any], bytes], msgpack.packb)


def _as_int(key: bytes) -> int:
    """Returns the last 64 bits of a key."""
    return int.from_bytes(key[-8:], "big")


def _as_map(event: CacheEvent, as_key: Callable[[bytes], int | bytes]) -> dict[str, Any]:
    """Returns all fields of an event, its type first, in the order of the positional format."""
    match event:
        case BlocksStored(group=group):
            parent = event.parent_key
            return {
                "type": "BlockStored",
                "block_hashes": [as_key(key) for key in event.block_keys],
                "parent_block_hash": None if parent is None else as_key(parent),
                "token_ids": event.token_ids,
                "block_size": group.block_size,
                "lora_id": event.adapter_id,
                "medium": event.medium,
                "lora_name": event.adapter,
                "extra_keys": event.extra_keys and [_untagged(keys) for keys in event.extra_keys],
                "group_idx": group.index,
                "kv_cache_spec_kind": _KIND_NAMES[group.kind],
                "kv_cache_spec_sliding_window": group.window,
            }
        case BlocksRemoved(group=group):
            return {
                "type": "BlockRemoved",
                "block_hashes": [as_key(key) for key in event.block_keys],
                "medium": event.medium,
                "group_idx": group.index,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _without_defaults(event: dict[str, Any]) -> dict[str, Any]:
    """Returns a map without the optional fields that are None, as vLLM sends it."""
    return {
        name: value for name, value in event.items() if value is not None or name not in _OPTIONAL
    }


def _untagged(keys: BlockExtras) -> list[Any] | None:
    """Returns the extra keys of one block as vLLM publishes them: the values, without tags."""
    if keys is None:
        return None
    return [key[1:] if key[0] == "mm" else key[1] for key in keys]
