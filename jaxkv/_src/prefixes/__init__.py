"""Prefix caching: a radix tree of prompts, block keys, and events for routers. No jax."""

from jaxkv._src.prefixes._beginnings import PrefixGroup, group_by_beginning
from jaxkv._src.prefixes._block_events import KeyChain, PrefixEvents
from jaxkv._src.prefixes._checkpoints import Checkpoint
from jaxkv._src.prefixes._event_encoding import (
    END_OF_REPLAY,
    EventFormat,
    EventFrames,
    GroupChoice,
    KeyFormat,
    encode_events,
    event_frames,
)
from jaxkv._src.prefixes._events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    EventGroup,
    EventLog,
    GroupKind,
    Medium,
)
from jaxkv._src.prefixes._extra_keys import (
    BlockExtras,
    ExtraKey,
    ExtraKind,
    check_boundaries,
    check_content,
    check_ranges,
    extra_keys_by_block,
)
from jaxkv._src.prefixes._keys import block_keys, root_key
from jaxkv._src.prefixes._lookup import CachedPrefix, Reason, SharedBlocks, find
from jaxkv._src.prefixes._namespaces import KnownNamespaces, Namespace
from jaxkv._src.prefixes._nodes import Node
from jaxkv._src.prefixes._policies import PrefixPolicy
from jaxkv._src.prefixes._tokens import MAX_TOKEN, TokenCodes, TokenIds, as_tokens
from jaxkv._src.prefixes._tree import PrefixTree

__all__ = [
    "END_OF_REPLAY",
    "MAX_TOKEN",
    "AllBlocksCleared",
    "BlockExtras",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "CachedPrefix",
    "Checkpoint",
    "EventBatch",
    "EventFormat",
    "EventFrames",
    "EventGroup",
    "EventLog",
    "ExtraKey",
    "ExtraKind",
    "GroupChoice",
    "GroupKind",
    "KeyChain",
    "KeyFormat",
    "KnownNamespaces",
    "Medium",
    "Namespace",
    "Node",
    "PrefixEvents",
    "PrefixGroup",
    "PrefixPolicy",
    "PrefixTree",
    "Reason",
    "SharedBlocks",
    "TokenCodes",
    "TokenIds",
    "as_tokens",
    "block_keys",
    "check_boundaries",
    "check_content",
    "check_ranges",
    "encode_events",
    "event_frames",
    "extra_keys_by_block",
    "find",
    "group_by_beginning",
    "root_key",
]
