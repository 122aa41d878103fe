"""Prefix caching: a radix tree of prompts, block keys, and events for routers. No jax.

`jaxkv.BlockManager` looks up and keeps prefixes by itself. Import from here to compute block keys,
or to publish events to routers and connectors: a `CacheEvent` is `BlocksStored`, `BlocksRemoved` or
`AllBlocksCleared`, and an `EventBatch` has those of one step, of each `EventGroup`.
"""

from jaxkv._src.prefixes import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    EventGroup,
    EventLog,
    block_keys,
    encode_events,
    event_frames,
    root_key,
)

__all__ = [
    "END_OF_REPLAY",
    "AllBlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "EventBatch",
    "EventGroup",
    "EventLog",
    "block_keys",
    "encode_events",
    "event_frames",
    "root_key",
]
