"""A router's mirror of a manager's blocks, built from events alone."""

from jaxkv import BlockManager
from jaxkv.prefixes import AllBlocksCleared, BlocksStored, EventLog


class Mirror:
    """The blocks that a router believes the cache to hold."""

    def __init__(self, manager: BlockManager, log: EventLog):
        self.manager, self.log = manager, log
        self.windows = [
            getattr(group.specs[0], "sliding_window", None) for group in manager.plan.groups
        ]
        self.stored: set[tuple[str, int, bytes]] = set()
        self.told: dict[tuple[int, bytes], tuple] = {}

    def follow(self) -> None:
        """Applies the events since the last call, and checks that they make sense."""
        batch = self.log.take()
        for event in () if batch is None else batch.events:
            if isinstance(event, AllBlocksCleared):
                self.stored.clear()
                continue
            keys = {(event.medium, event.group.index, key) for key in event.block_keys}
            assert len(keys) == len(event.block_keys), "an event names a block twice"
            assert event.group.window == self.windows[event.group.index], "window"
            if isinstance(event, BlocksStored):
                assert not keys & self.stored, "a block is stored twice"
                self._learn(event)
                self.stored |= keys
            else:
                assert keys <= self.stored, "a block that was not stored is removed"
                self.stored -= keys
        offload = self.manager._offload
        if offload is None or not offload.pool.alive.size:
            assert all(medium == "GPU" for medium, *_ in self.stored), "host memory is empty"
        self._compare()

    def _compare(self) -> None:
        """Checks that the events have told of the whole blocks that are kept, in both memories."""
        events, offload = self.manager._prefixes.events, self.manager._offload
        assert events is not None and self.stored == set(events._names.values())
        nodes = [node for node in self.manager._prefixes._tree.prompts.nodes if node is not None]
        kept = {block_id for node in nodes for ids in node.blocks for block_id in ids[ids > 0]}
        if offload is not None:
            kept |= {*offload._copy_of[[*kept]].tolist()} - {0} if kept else set()
        told = events._names.keys()
        assert told <= kept, "a block that is not kept"
        # A load names no block of which its request has a part only, or knows no token ids.
        has_parts = self.manager._prefixes._tree.has_states
        if offload is None or not (has_parts or offload.stats().swapped_in_requests):
            assert told == kept, "a kept block that no event has told of"

    def _learn(self, event: BlocksStored) -> None:
        """Checks that all events of a key tell the same of it."""
        size, parents = event.group.block_size, (event.parent_key, *event.block_keys)
        for at, (key, parent) in enumerate(zip(event.block_keys, parents, strict=False)):
            tokens = event.token_ids[at * size : (at + 1) * size]
            extras = None if event.extra_keys is None else event.extra_keys[at]
            told = parent, tokens, extras, event.adapter
            assert self.told.setdefault((event.group.index, key), told) == told
