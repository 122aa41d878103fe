"""The content that every block must have while a manager serves, from the definitions.

The content of a token is its group, the salt and the adapter of its request, and all token ids,
media and epochs up to it. The content of a state is that of the last token that it has seen.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv import BlockManager
from jaxkv._src.offload._host_pool import UNFLUSHED
from jaxkv.blocks import ExportedBlocks, Upload
from tests.simulation.device import Device, Group, Stories


@dataclasses.dataclass(eq=False)
class Known:
    """A request as its engine knows it.

    tokens: its token ids, those that the host does not know yet and drafts included.
    media: identifier, start and end of each medium.
    encoder: a number for its encoder tokens, which forks have, too.
    story: the stories of its computed tokens; the first is that of its namespace.
    states: by group, the column of the state after each number of tokens that can be resumed.
    partial: by group, the content of the last row of a compressed layer.
    verified: first tokens that are no drafts.
    row: in which it took its last step.
    resumed, reached: tokens that were computed before and after its last step.
    unsent: cached tokens, or those of its donor, until it first computes.
    epoch: in which it, or the request that it was forked from, started.
    """

    name: Hashable
    tokens: list[int]
    salt: str | None = None
    adapter: str | None = None
    media: Sequence[tuple[str, int, int]] = ()
    encoder_tokens: int = 0
    encoder: int = 0
    story: list[int] = dataclasses.field(default_factory=list)
    states: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    partial: dict[int, int] = dataclasses.field(default_factory=dict)
    verified: int = 0
    row: int = -1
    resumed: int = 0
    reached: int = 0
    unsynced: int = 0
    epoch: int = 0

    @property
    def computed(self) -> int:
        return len(self.story) - 1


class Oracle:
    """Follows a manager's requests, and checks each upload against what they must read."""

    def __init__(self, manager: BlockManager):
        self.manager, plan = manager, manager.plan
        self.device = Device(plan, manager.max_requests)
        self.groups, self.zeroed = self.device.groups, plan.groups_to_zero
        self.stories = Stories()
        self.sinks = sum(map(len, manager.sink_block_ids))
        self.epoch = 0
        self.is_fresh_epoch = True  # whether no request has started in it
        self.seen: Counter[str] = Counter()

    # --- requests ---------------------------------------------------------------------

    def begin(self, request: Known, cached: int) -> None:
        """Starts a request whose first tokens were found in the cache."""
        self._begin(request, cached)
        self.seen["hits"] += cached > 0
        self.seen["cached tokens"] += cached

    def receive(self, request: Known, exported: ExportedBlocks) -> None:
        """Starts a request whose first tokens another cache has computed, and writes their blocks.

        The moves that make room for them come first.
        """
        self.transfer()
        self._begin(request, exported.num_tokens)
        self.device.lose_all(np.concatenate(exported.block_ids).tolist())
        for block, offset, content in self._exported_tokens(request, exported):
            self.device.blocks.setdefault(block, {})[offset] = content
        self.seen["imports"] += 1

    def check_export(self, request: Known, exported: ExportedBlocks) -> None:
        """Checks that the blocks of a request hold all that another cache needs."""
        assert exported.num_tokens == request.computed, "exported tokens"
        for block, offset, content in self._exported_tokens(request, exported):
            found = self.device.blocks.get(block, {}).get(offset)
            assert found == content, f"block {block}: WRONG BYTES are exported"
        self.seen["exports"] += 1

    def fits(self, num_tokens: int) -> bool:
        """Returns whether blocks are free for tokens of another cache.

        Blocks that the next upload copies are not, whoever has given them back.
        """
        ids = {
            *itertools.chain(*(i for n in self.manager.requests for i in self.manager.block_ids(n)))
        }
        copies = self.manager._state.copies._of
        needed = len({cell.block_id for block, cell in copies.items() if block in ids})
        for group in self.groups:
            end, oldest = -(-num_tokens // group.block), group.oldest_visible(num_tokens)
            if group.open:
                needed += num_tokens % group.open > 0
            else:
                needed += 1 if group.is_state else end - oldest // group.block
        return needed <= self.manager.num_free_blocks

    def _exported_tokens(
        self, request: Known, exported: ExportedBlocks
    ) -> Iterator[tuple[int, int, int]]:
        """Yields block, offset and content of all tokens in exported blocks.

        Those that the next token does not see are read again after a rewind.
        """
        count = exported.num_tokens
        each = zip(self.groups, exported.first_logical_blocks, exported.block_ids, strict=True)
        for group, first, ids in each:
            if group.is_state:
                assert (first, len(ids)) == (group.newest_block(count), 1), "exported states"
                yield int(ids[0]), 0, self._content(group, request.story[count])
                continue
            if group.open:
                assert (first, len(ids)) == (0, int(count % group.open > 0)), "exported rings"
                for position in group.ring_positions(count):
                    content = self._content(group, request.story[position + 1])
                    yield int(ids[0]), position % group.block, content
                continue
            ratio = group.ratio
            assert first == group.oldest_visible(count) // group.block, "exported columns"
            assert len(ids) == -(-count // group.block) - first, "exported columns"
            for row in range(first * group.block // ratio, -(-count // ratio)):
                content = request.partial[group.index]
                if (end := (row + 1) * ratio) <= count:
                    content = self._content(group, request.story[end])
                column, offset = divmod(row * ratio, group.block)
                yield int(ids[column - first]), offset // ratio, content

    def _begin(self, request: Known, cached: int) -> None:
        may_copy = self.manager.may_copy_by_row[self.manager.requests[request.name]]
        assert cached or not may_copy, "a request that shares nothing may copy"
        self.is_fresh_epoch, request.epoch = False, self.epoch
        request.resumed = request.reached = request.unsynced = cached
        request.story = [self.stories.begin((request.salt, request.adapter))]
        self._compute(request, cached)
        request.states = {g.index: {} for g in self.groups if g.is_state}
        for group in self.groups:
            if group.is_state and cached:
                request.states[group.index][cached] = group.newest_block(cached)
        request.partial = {g.index: self._content(g, request.story[-1]) for g in self.groups}

    def fork(self, donor: Known, request: Known, num_tokens: int, prompt: int = 0) -> None:
        """Starts a request with the first tokens of another, of whose prompt it has more."""
        request.story = donor.story[: num_tokens + 1]
        request.resumed = request.reached = request.unsynced = num_tokens
        request.media = _cut(donor.media, max(num_tokens, prompt))
        request.encoder = donor.encoder
        request.epoch = donor.epoch
        request.partial = {
            g.index: self._partial(g, donor, num_tokens) for g in self.groups if g.ratio > 1
        }
        request.states = {g.index: {} for g in self.groups if g.is_state}
        for group in self.groups:
            if group.is_state and num_tokens:
                columns = donor.states[group.index]
                column = group.newest_block(num_tokens)
                assert columns.get(num_tokens) == column, (
                    f"group {group.index}: a fork shares the state after {num_tokens} tokens, "
                    f"and the donor's states are in columns {columns}"
                )
                request.states[group.index] = {
                    n: column
                    for n, column in columns.items()
                    if n == num_tokens or (group.mode == "all" and n < num_tokens)
                }
        self.seen["forks"] += 1

    def resume(self, request: Known) -> None:
        """Lets a request that was parked go on, with no states but those that forks have."""
        count = request.resumed = request.reached = request.unsynced = request.computed
        for group in self.groups if count else ():
            if group.is_state:
                columns = request.states[group.index]
                assert columns.get(count) == group.newest_block(count), "a state of a draft"
                request.states[group.index] = {
                    n: c
                    for n, c in columns.items()
                    if n == count or (group.mode == "all" and n < count)
                }
        self.seen["resumed"] += 1

    def rewind(self, request: Known, num_tokens: int) -> None:
        """Takes back computed tokens; those that follow are plain ones."""
        request.media = _cut(request.media, num_tokens)
        if num_tokens >= request.computed:
            return
        for group in self.groups:
            if group.ratio > 1:
                request.partial[group.index] = self._partial(group, request, num_tokens)
            if group.is_state and num_tokens:
                self._rewind_state(request, group, num_tokens)
        del request.story[num_tokens + 1 :]
        self.seen["rewinds"] += 1

    def may_resume(self, request: Known, num_tokens: int) -> bool:
        """Returns whether blocks may hold the states after ``num_tokens`` tokens."""
        for group in self.groups:
            at_end, most = num_tokens % group.block == 0, 1 + group.drafts
            if not group.is_state or num_tokens in (0, request.computed):
                continue
            if request.resumed < num_tokens and request.reached - request.resumed <= most:
                continue
            if group.mode == "all" and at_end:
                continue
            if group.mode != "align" or not at_end or num_tokens != request.resumed:
                return False
        return True

    def _rewind_state(self, request: Known, group: Group, num_tokens: int) -> None:
        columns = request.states[group.index]
        assert num_tokens in columns, (
            f"group {group.index}: no block holds the state after {num_tokens} tokens, only after "
            f"{sorted(columns)}"
        )
        if group.mode != "none" and num_tokens > request.resumed:
            # The step that accepted the tokens wrote their state into the running block.
            block = self.device.block(request.row, group.index, columns[num_tokens])
            self.device.blocks[block] = {0: self._content(group, request.story[num_tokens])}

    def _partial(self, group: Group, request: Known, num_tokens: int) -> int:
        """Returns the content of the row that ``num_tokens`` tokens end in."""
        end = -(-num_tokens // group.ratio) * group.ratio
        if end > request.computed:
            return request.partial.get(group.index, 0)
        return self._content(group, request.story[end])

    def _compute(self, request: Known, total: int) -> None:
        for position in range(request.computed, total):
            inside = [
                (m, position - start) for m, start, end in request.media if start <= position < end
            ]
            code = request.tokens[position], tuple(inside), self.epoch
            request.story.append(self.stories.go_on(request.story[-1], code))

    def _content(self, group: Group, story: int) -> int:
        return story * len(self.groups) + group.index

    # --- steps ------------------------------------------------------------------------

    def step(self, upload: Upload, requests: Mapping[Hashable, Known], work: Mapping) -> None:
        """Applies an upload, checks all that the step reads, and writes its tokens."""
        self.transfer()
        parts = self.device.apply(upload)
        if self.manager.offload_stats() is not None:
            self._poison()
        rows, named = self.manager.requests, [requests[name] for name in work]
        assert parts["request_rows"].tolist() == [rows[name] for name in work], "rows"
        computed = [request.computed for request in named]
        assert parts["num_computed_tokens"].tolist() == computed, "computed tokens"
        lens = [
            b - a
            for a, b in zip(parts["query_start_loc"], parts["query_start_loc"][1:], strict=False)
        ]
        assert lens == list(work.values()), "query lengths"
        if any(group.kind == "cross" for group in self.groups):
            assert parts["encoder_lens"].tolist() == [r.encoder_tokens for r in named], "encoder"
        block_ids = {name: self.manager.block_ids(name) for name in rows}
        holders: dict[int, list[Known]] = {}
        for name, of_groups in block_ids.items():
            for block in {block for ids in of_groups for block in ids if block}:
                holders.setdefault(block, []).append(requests[name])
        for request, count in zip(named, work.values(), strict=True):
            request.row = rows[request.name]
            _Step(self, request, request.computed + count, block_ids).read()
        if copied := set(parts["copy_destinations"].tolist()):
            assert copied <= {*self._read_blocks(requests, block_ids)}, "a copy that nobody reads"
        written: dict[int, Hashable] = {}
        for request, count in zip(named, work.values(), strict=True):
            self._check_widths(upload, request, request.computed + count)
            before = request.resumed = request.computed
            self._compute(request, before + count)
            request.reached, request.unsynced = request.computed, 0
            step = _Step(self, request, before + count, block_ids, before)
            for block, position in step.write().items():
                assert written.setdefault(block, request.name) == request.name, "two writers"
                others = [other for other in holders[block] if other is not request]
                assert all(other.computed <= position for other in others), (
                    f"block {block} is written from position {position} on, and others read it"
                )
            assert self.manager.num_computed_tokens(request.name) == request.computed
        self.seen["steps"] += 1
        self.seen["copies"] += parts["copy_sources"].size

    def transfer(self) -> None:
        """Carries out the moves before a step, or before another cache writes."""
        transfers = self.manager.take_transfers()
        if transfers is not None:
            self.device.transfer(transfers)
            self.seen["stored"] += sum(chunk.block_ids.size for chunk in transfers.stores)
            self.seen["loaded"] += sum(int((c.block_ids >= 0).sum()) for c in transfers.loads)
            self.seen["copied early"] += len(transfers.lookahead)
            self._check_host()

    def _read_blocks(self, requests: Mapping[Hashable, Known], block_ids: Mapping) -> Iterator[int]:
        """Yields the blocks of requests that hold computed tokens, or did before a rewind."""
        for name, of_groups in block_ids.items():
            for group, ids in zip(self.groups, of_groups, strict=True):
                yield from ids[: -(-requests[name].reached // group.block)]

    def _check_widths(self, upload: Upload, request: Known, total: int) -> None:
        """Checks that the tables of a step have a column for each block that a token reads."""
        for group, width in zip(self.groups, upload.shape.widths, strict=True):
            if group.kind == "cross":
                columns = -(-request.encoder_tokens // group.block)
            elif group.is_state:
                newest = group.newest_block(total)
                first = request.computed // group.block if group.mode == "all" else newest
                columns = 2 + newest + group.drafts - first  # that of the source comes first
            elif group.open:
                columns = 1
            else:
                first = group.oldest_visible(request.computed) // group.block
                columns = -(-total // group.block) - first
            assert columns <= width, f"group {group.index}: {columns} columns in {width}"

    def _check_host(self) -> None:
        """Checks that host memory holds what the manager counts, within its bytes."""
        stats, pool = self.manager.offload_stats(), self.manager._offload.pool
        sizes = {n: pool.block_bytes[g] * len(of) for n, (g, of) in self.device.host.items()}
        assert sum(sizes.values()) <= stats.num_bytes, "more bytes on the host than it has"
        # What the step itself has evicted is stored by the next moves, and dropped by them.
        waiting = np.array([*self.manager._offload._stores], np.int64)
        used = sum(sizes.values()) - sum(sizes[number] for number in pool._dropped)
        used += pool.block_bytes[pool.groups(waiting)].sum()
        assert used == stats.used_bytes <= stats.num_bytes, "bytes on the host"
        offload, first = self.manager._offload, pool.first_id
        of_use = (offload._tree.read_only_until[first:] > 0) | (offload._copy_of[first:] > 0)
        assert (pool.is_alive == of_use).all(), "host blocks that are of no use, or are lost"
        alive = Counter(pool._chunk_of[pool.is_alive].tolist()) + Counter(offload._pins())
        del alive[UNFLUSHED]
        assert alive == pool._num_alive, "chunks that nobody uses, or that are dropped early"

    def _poison(self) -> None:
        """Spoils the blocks that nobody holds or keeps; a step has to write them first."""
        ids = np.arange(1, self.manager.plan.num_blocks)
        pool = self.manager.block_pool
        is_cold = (pool.references_of(ids) == 0) & (pool.read_only_until[ids] == 0)
        is_cold &= ~np.isin(
            ids, [*self.manager._offload._stores.values()]
        )  # stored before it is reused
        self.device.poison(ids[is_cold].tolist())

    def _contents(self, block: int) -> dict[int, int]:
        """Returns the contents of a cached block, in either memory, after the pending transfers."""
        offload = self.manager._offload
        if block >= self.manager.plan.num_blocks:
            if block in offload._stores:
                return self.device.blocks[offload._stores[block]]
            at = block - offload.pool.first_id
            return self.device.host[offload.pool._chunk_of[at]][1][offload.pool._index_of[at]]
        if offload is not None and block in offload._loads:
            return self._contents(offload._loads[block])
        for number, _, blocks in () if offload is None else (*offload._lookahead, *offload._later):
            if block in blocks:
                return self.device.host[number][1][blocks.tolist().index(block)]
        return self.device.blocks.get(block, {})

    def new_epoch(self) -> None:
        """Notes that the cache has forgotten all prefixes."""
        self.epoch += 1
        self.is_fresh_epoch = True

    def check_cached(self, request: Known, keys: Mapping[str, Any]) -> None:
        """Checks all that the cache would give to a prompt with the tokens of a request."""
        found = self.manager.find_prefix(request.tokens, **keys).found
        tokens = Known(None, request.tokens, request.salt, request.adapter, request.media)
        tokens.story = [self.stories.begin((tokens.salt, tokens.adapter))]
        self._compute(tokens, found.num_tokens)
        for group, columns in zip(
            self.groups, found.shared if tokens.computed else (), strict=False
        ):
            blocks = [self._contents(i) for i in columns.block_ids.tolist()]
            if group.open:
                assert not blocks and not tokens.computed % group.open, "a cached ring"
                continue
            if group.is_state:
                assert blocks[-1].get(0) == self._content(group, tokens.story[-1]), "a cached state"
                continue
            for row in range(group.oldest_visible(tokens.computed) // group.ratio, tokens.computed):
                if (end := (row + 1) * group.ratio) > tokens.computed:
                    break
                column, offset = divmod(row * group.ratio, group.block)
                content = blocks[column - columns.first].get(offset // group.ratio)
                assert content == self._content(group, tokens.story[end]), f"cached token {end - 1}"
        self.seen["checked tokens"] += tokens.computed

    def check_tree(self) -> None:
        """Checks the records of cached prompts against each other."""
        tree, of_rows = self.manager._prefixes._tree, self.manager._prefixes.cached._of.values()
        assert all(prompt.num_cached <= prompt.tokens.size for prompt in of_rows), "cached tokens"
        for block in tree.read_only_until.nonzero()[0].tolist():
            frozen = tree.read_only_until[block]
            assert frozen == tree._until(block), f"block {block} is frozen before {frozen}"
        nodes = [node for node in tree.prompts.nodes if node is not None]
        assert tree.prompts._num_tokens == sum(node.tokens.size for node in nodes), "tokens"
        for node in nodes:
            parent = node.parent
            assert parent.children[int(node.tokens[0])] is node, "a node that nobody finds"
            assert node.start == parent.end, "a node that begins elsewhere"
            for of_group, policy in zip(node.blocks, tree.policies, strict=True):
                size = node.end // policy.block - node.start // policy.block
                assert of_group.size == size, "blocks of other columns than those of a node"
        in_turn = [made for queue in tree.checkpoints._queues.values() for made in queue]
        assert sum(made.num_blocks for made in in_turn) == tree.checkpoints.num_blocks
        assert all(made.is_cached and made not in in_turn for made in tree.swapped), (
            "parked requests"
        )

    def check_rows(self) -> None:
        """Checks what rows hold, and that nothing is left of the requests that had free ones."""
        state, rows = self.manager._state, self.manager.requests.values()
        is_free = np.ones(state.computed.size, bool)
        is_free[list(rows)] = False
        assert not state._numbers[:, is_free].any(), "numbers of a free row"
        assert not (state.is_stale | state.may_share)[is_free].any(), "marks of a free row"
        assert state.has_stale == state.is_stale.any(), "rows that lag"
        for group, growth in enumerate(state.growth.growths):
            source, first, end = state._allocated[:, group, :, None]
            at = np.arange(state.row_blocks[group])
            is_allocated = (at == source) | ((first <= at) & (at < end))
            ids = state.table[:, state.starts[group] : state.starts[group + 1]]
            assert ((ids > 0) == is_allocated).all(), (
                "blocks in other columns than the allocated ones"
            )
            assert (first <= end).all() and (end <= at.size).all(), "columns of no row"
            assert growth.cache_mode == "align" or (source == -1).all(), "a source of no state"

    def check_pool(self) -> None:
        """Checks that each block is free or allocated, and counted so."""
        manager, use = self.manager, self.manager.block_use
        holders: Counter[int] = Counter()
        for name in manager.requests:
            allocated = [[i for i in group if i] for group in manager.block_ids(name)]
            assert manager.allocated_blocks(name) == tuple(map(len, allocated)), "allocated_blocks"
            ids = list(itertools.chain(*allocated))
            assert len(set(ids)) == len(ids), f"{name!r} holds a block twice"
            holders.update(ids)
        total = manager.plan.num_blocks - 1
        free = manager.num_free_blocks
        assert free + len(holders) + self.sinks == total, (free, len(holders), total)
        shared = sum(count > 1 for count in holders.values())
        assert (use.own, use.shared) == (len(holders) + self.sinks - shared, shared), use
        ids, pool = np.arange(1, total + 1), manager.block_pool
        is_cached, is_free = pool.read_only_until[ids] > 0, pool.references_of(ids) == 0
        assert (use.evictable, use.uncached) == (
            (is_cached & is_free).sum(),
            (~is_cached & is_free).sum(),
        ), use
        assert manager.prefix_stats().cached_blocks == is_cached.sum()
        assert not (self.is_fresh_epoch and is_cached.any()), "blocks of an older epoch are cached"


def _cut(media: Sequence[tuple[str, int, int]], end: int) -> list[tuple[str, int, int]]:
    """Returns the media of the tokens before ``end``."""
    return [(name, start, min(stop, end)) for name, start, stop in media if start < end]


class _Step:
    """The reads and the writes of one request in a step."""

    def __init__(self, oracle: Oracle, request: Known, total: int, block_ids, before=None):
        self.oracle, self.request, self.row = oracle, request, request.row
        self.before = request.computed if before is None else before
        self.total, self.block_ids = total, block_ids[request.name]

    def read(self) -> None:
        for group in self.oracle.groups:
            if group.kind == "cross":
                if self.before:
                    self._read_encoder(group)
            elif group.is_state:
                if self.before:
                    self._read_state(group)
            elif group.open:
                self._read_ring(group)
            else:
                self._read_tokens(group)

    def write(self) -> dict[int, int]:
        """Writes the tokens of the step; returns the position from which each block changed."""
        written: dict[int, int] = {}
        for group in self.oracle.groups:
            if group.kind == "cross":
                if not self.before:
                    self._write_encoder(group)
            elif group.is_state:
                written |= self._write_states(group)
            elif group.open:
                written |= self._write_ring(group)
            else:
                written |= self._write_tokens(group)
        return written

    # --- tokens -----------------------------------------------------------------------

    def _read_tokens(self, group: Group) -> None:
        oldest, ratio = group.oldest_visible(self.before), group.ratio
        self.oracle.seen["cells"] += self.before - oldest
        story = self.request.story
        for row in range(oldest // ratio, -(-self.before // ratio)):
            end = (row + 1) * ratio
            if end <= self.before:
                content = self.oracle._content(group, story[end])
            else:
                content = self.request.partial[group.index]
            column, offset = divmod(row * ratio, group.block)
            self._check(group, column, offset // ratio, content, f"token {end - 1}")
        for column in range(oldest // group.block, -(-self.total // group.block)):
            self._check_stale(group, column)

    def _write_tokens(self, group: Group) -> dict[int, int]:
        ratio, story, written = group.ratio, self.request.story, dict[int, int]()
        for row in range(self.before // ratio, -(-self.total // ratio)):
            content = self.oracle._content(group, story[min((row + 1) * ratio, self.total)])
            column, offset = divmod(row * ratio, group.block)
            block = self._block(group, column)
            self.oracle.device.blocks.setdefault(block, {})[offset // ratio] = content
            written.setdefault(block, max(row * ratio, self.before))
            self.request.partial[group.index] = content
        return written

    # --- rings ------------------------------------------------------------------------

    def _read_ring(self, group: Group) -> None:
        for position in group.ring_positions(self.before):
            content = self.oracle._content(group, self.request.story[position + 1])
            self._check(group, 0, position % group.block, content, f"token {position} in a ring")
        self._check_stale(group, 0)

    def _write_ring(self, group: Group) -> dict[int, int]:
        block = self._block(group, 0)
        for position in range(max(self.before, self.total - group.block), self.total):
            content = self.oracle._content(group, self.request.story[position + 1])
            blocks = self.oracle.device.blocks.setdefault(block, {})
            blocks[position % group.block] = content
        return {block: 0}

    # --- the encoder ------------------------------------------------------------------

    def _encoder_contents(self, group: Group) -> list[tuple[int, int, int]]:
        """Returns column, offset and content of the encoder's tokens."""
        story = self.oracle.stories.begin(("encoder", self.request.encoder))
        content = self.oracle._content(group, story)
        cells = [divmod(i, group.block) for i in range(self.request.encoder_tokens)]
        return [(column, offset, content) for column, offset in cells]

    def _read_encoder(self, group: Group) -> None:
        for column, offset, content in self._encoder_contents(group):
            self._check(group, column, offset, content, "the encoder")

    def _write_encoder(self, group: Group) -> None:
        for column, offset, content in self._encoder_contents(group):
            block = self._block(group, column)
            self.oracle.device.blocks.setdefault(block, {})[offset] = content

    # --- states -----------------------------------------------------------------------

    def _read_state(self, group: Group) -> None:
        columns = self.request.states[group.index]
        assert self.before in columns, f"group {group.index}: no state after {self.before} tokens"
        column = columns[self.before]
        assert column in group.state_blocks(self.before, self.total), (
            f"group {group.index}: a step cannot read column {column}"
        )
        content = self.oracle._content(group, self.request.story[self.before])
        self._check(group, column, 0, content, f"the state after {self.before} tokens")

    def _write_states(self, group: Group) -> dict[int, int]:
        known, written = self.request.states[group.index], dict[int, int]()
        new = self._state_columns(group)
        for num_tokens, column in new.items():
            block = self._block(group, column)
            content = self.oracle._content(group, self.request.story[num_tokens])
            self.oracle.device.blocks[block] = {0: content}
            written[block] = 0
        kept = {}
        if group.mode == "all":
            kept = {n: c for n, c in known.items() if n % group.block == 0 and n <= self.before}
            kept = {n: c for n, c in kept.items() if c == group.newest_block(n)}
        elif group.mode == "align" and self.before % group.block == 0 and not group.drafts:
            kept = {n: c for n, c in known.items() if n == self.before}
            kept = {n: c for n, c in kept.items() if c not in new.values()}
        known.clear()
        known.update(kept | new)
        if group.mode == "align":  # `Oracle.rewind` writes the accepted one there
            last = group.newest_block(self.total)
            known.update(dict.fromkeys(self._to_verify(), last))
        return written

    def _to_verify(self) -> list[int]:
        """Returns the numbers of tokens that may turn out to be accepted."""
        certain = max(self.before + 1, self.request.verified)
        assert certain == self.before + 1 or certain >= self.total, "drafts next to other tokens"
        return list(range(certain, self.total + 1))

    def _state_columns(self, group: Group) -> dict[int, int]:
        """Returns the columns into which a step writes states, by numbers of tokens."""
        before, total, last = self.before, self.total, group.newest_block(self.total)
        counts = self._to_verify() or [total]
        if group.mode == "align" or (group.mode == "none" and len(counts) == 1):
            return {total: last}
        if len(counts) > 1:  # read with at=, after drafts were rejected; wherever blocks end
            first = group.newest_block(counts[0])
            return {n: first + n - counts[0] for n in counts}
        ends = range((before // group.block + 1) * group.block, total + 1, group.block)
        return {end: end // group.block - 1 for end in ends} | {total: last}

    # --- blocks -----------------------------------------------------------------------

    def _block(self, group: Group, column: int) -> int:
        block = self.oracle.device.block(self.row, group.index, column)
        ids = self.block_ids[group.index]
        host = ids[column] if column < len(ids) else 0
        assert block and block == host, (
            f"group {group.index}, column {column}: the device has block {block}, the host {host}"
        )
        return block

    def _check(self, group: Group, column: int, offset: int, content: int, what: str) -> None:
        block = self._block(group, column)
        found = self.oracle.device.blocks.get(block, {}).get(offset)
        assert found == content, f"group {group.index}, block {block}: WRONG BYTES of {what}"

    def _check_stale(self, group: Group, column: int) -> None:
        """Checks that a block to zero holds bytes of its group, and of its tenant, alone."""
        oracle = self.oracle
        if not oracle.zeroed[group.index]:
            return
        space, size = oracle.stories.namespaces, len(oracle.groups)
        for content in oracle.device.blocks.get(self._block(group, column), {}).values():
            story, index = divmod(content, size)
            assert index == group.index, "stale bytes of another group"
            assert space[story] == space[self.request.story[0]], "stale bytes of another tenant"
