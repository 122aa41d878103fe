"""Prefix caching: the blocks of prompts, and the search for them. No jax."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np

from jaxkv._src.blocks._caching import CachedPrompts
from jaxkv._src.blocks._prompts import (
    CachedPrompt,
    PrefixHit,
    PrefixMatch,
    PrefixStats,
)
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.blocks._swapping import HostLoads
from jaxkv._src.internal.checks import check_count, check_left_out
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.offload import OffloadManager
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import (
    MAX_TOKEN,
    CachedPrefix,
    EventGroup,
    EventLog,
    ExtraKey,
    GroupKind,
    KeyChain,
    Namespace,
    Node,
    PrefixEvents,
    PrefixPolicy,
    PrefixTree,
    TokenCodes,
    check_boundaries,
    check_content,
    find,
)
from jaxkv._src.uploads import Ints


class Prefixes:
    """The prompts that the manager remembers, and their cached blocks.

    events: of blocks that are cached, evicted and cleared; None: nobody wants them.
    cached: the prompts of rows, and their cached blocks.
    loads: from host memory.
    """

    def __init__(
        self,
        state: RequestState,
        plan: Plan,
        *,
        checkpoint_blocks: int,
        events: EventLog | PrefixEvents | None,
        offload: OffloadManager | None,
    ):
        if isinstance(events, EventLog):
            events = PrefixEvents(events, _event_groups(plan))
        self.events = events
        self._state, self._offload, self._tree = state, offload, _tree(state, plan)
        if offload is not None:
            offload.attach(self._tree, self.events)
        self.cached = CachedPrompts(state, self._tree, checkpoint_blocks, self.events, offload)
        self.loads = HostLoads(state, self._tree, self.cached, offload)
        self._has_encoder, self._longest = bool(state.growth.crossed.size), plan.max_model_len
        self._codes = TokenCodes()
        self._counts = Counter(
            requests=0,
            hits=0,
            host_hits=0,
            prompt_tokens=0,
            cached_tokens=0,
            host_tokens=0,
            evicted_blocks=0,
        )
        self._reasons: Counter[str] = Counter()
        on_take = state.copies.forget if offload is None else self.loads.on_take
        state.pool.connect(on_take=on_take, on_evict=self._evicted)

    # --- requests -----------------------------------------------------------------

    def find(
        self,
        tokens: Ints | PrefixMatch,
        salt: str | None,
        extra_keys: Sequence[ExtraKey],
        max_cached_tokens: int | None,
        *,
        longest: int = INT32_MAX,
    ) -> PrefixMatch:
        """Finds the longest cached prefix of a prompt; reuses a `PrefixMatch` that is valid."""
        if isinstance(tokens, PrefixMatch):
            known = tokens
            if salt is not None or extra_keys:
                raise ValueError("salt and extra_keys are those of find_prefix; leave them out")
            if known.state is self._tree.state and known.num_tokens <= longest:
                self._tree.prompts.touch(known.path)
                limit = _limit(known.tokens, max_cached_tokens)
                if limit == known.limit:
                    return known
                found = self._find(known.path, known.found.num_seen, limit)
                return known._replace(limit=limit, found=found)
            tokens, salt, extra_keys = known.tokens & MAX_TOKEN, known.salt, known.extra_keys
        namespace, encoded = self._encode(tokens, salt, extra_keys)
        if encoded.size > longest:
            raise ValueError(
                f"tokens holds {encoded.size} token ids, more than the plan's "
                f"max_model_len={longest}; cut the prompt, or plan for longer ones"
            )
        limit = _limit(encoded, max_cached_tokens)
        path, seen = self._tree.prompts.walk(namespace, encoded)
        found = self._find(path, seen, limit)
        of_prompt = namespace, encoded, salt, tuple(extra_keys)
        return PrefixMatch(*of_prompt, path, limit, found, self._tree.state, self._state.pool)

    def _find(self, path: Sequence[Node], num_seen: int, limit: int) -> CachedPrefix:
        """Returns the longest cached prefix, including blocks on the host that are worth a load."""
        find_it = functools.partial(find, self._tree, path, num_seen, limit)
        return find_it() if self._offload is None else self._offload.choose(find_it)

    def look_up(
        self,
        tokens: Ints | PrefixMatch | None,
        salt: str | None,
        extra_keys: Sequence[ExtraKey],
        max_cached_tokens: int | None,
        boundaries: Sequence[int],
    ) -> tuple[CachedPrompt, CachedPrefix] | None:
        """Finds the prefix of a prompt, for `start`; the arguments are of `BlockManager.start`.

        Returns None if it shares nothing: without tokens, or if a group stores encoder tokens.
        """
        if tokens is None:
            check_left_out(
                "pass the token ids of the prompt as tokens=",
                salt=salt,
                extra_keys=extra_keys,
                boundaries=boundaries,
                max_cached_tokens=max_cached_tokens,
            )
            return None
        prefix = self.find(tokens, salt, extra_keys, max_cached_tokens, longest=self._longest)
        namespace, encoded, found = prefix.namespace, prefix.tokens, prefix.found
        check_boundaries(boundaries, encoded.size)
        if self._has_encoder:
            return None
        if found.num_host_tokens and not self.loads.fits(found.shared):
            found = find(self._tree, prefix.path, found.num_seen, prefix.limit, on_device=True)
            found = found._replace(reasons=("on_host",) * len(found.reasons))
        found = found._replace(reasons=self.cached.known.reasons(namespace, encoded, found))
        if found.checkpoint is not None:
            self._tree.checkpoints.touch(found.checkpoint, is_wanted=True)
        counts = self._counts
        counts["requests"] += 1
        counts["hits"] += found.num_tokens > 0
        counts["host_hits"] += found.num_host_tokens > 0
        counts["prompt_tokens"] += encoded.size
        counts["cached_tokens"] += found.num_tokens
        counts["host_tokens"] += found.num_host_tokens
        for reason in {*found.reasons} - {"complete", "other_groups"}:
            self._reasons[reason] += 1
        ends, wanted = self._chunk_ends(encoded.size, found, boundaries)
        prompt = CachedPrompt(
            namespace,
            encoded,
            chunk_ends=ends,
            wanted=wanted,
            num_cached=found.num_tokens,
            checkpoints=[] if found.checkpoint is None else [found.checkpoint],
            chain=None if self.events is None else KeyChain(prefix.salt, prefix.extra_keys),
        )
        return prompt, found

    def start(self, row: int, prompt: CachedPrompt, found: CachedPrefix) -> PrefixHit:
        """Gives a row that was just started its prompt, and the blocks of its prefix."""
        self.cached.start(row, prompt)
        if found.num_host_tokens:
            shared = self.loads.load(found.shared, found.num_tokens, prompt)
            found = found._replace(shared=tuple(shared))
        if found.num_tokens:
            self._state.share(row, found.num_tokens, found.shared)
        self.cached.bound_checkpoints()  # a load may have brought one
        shared = tuple([blocks.block_ids.size for blocks in found.shared])
        numbers = row, found.num_tokens, shared
        return PrefixHit(*numbers, found.reasons, prompt.chunk_ends, found.num_host_tokens)

    def _chunk_ends(
        self, num_tokens: int, found: CachedPrefix, boundaries: Sequence[int]
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """Returns the numbers of tokens after which the states of a prompt are to be cached.

        Returns:
          The ``chunk_ends`` and ``wanted`` of a `CachedPrompt`.
        """
        if not self._tree.has_states:
            return (), frozenset()
        whole = self._tree.whole_groups
        limit = (num_tokens - 1) // whole * whole
        wanted = {end // whole * whole for end in boundaries}
        if found.num_seen - found.num_tokens >= self.cached.smallest_block:
            wanted.add(min(found.num_seen, limit) // whole * whole)
        ends = sorted(end for end in {*wanted, limit} if found.num_tokens < end <= limit)
        return tuple(ends), frozenset(wanted)

    def _evicted(self, ids: np.ndarray) -> np.ndarray:
        """Forgets evicted blocks. Returns other blocks whose content is useless without theirs."""
        self._counts["evicted_blocks"] += ids.size
        return self.cached.forget(ids)

    # --- resetting and counting ---------------------------------------------------

    def new_epoch(self) -> None:
        """Forgets all cached blocks, but remembers that their prompts were cached."""
        self.cached.epoch += 1
        self.loads.swapped.clear()
        pool, kept = self._state.pool, self._tree.clear()
        pool.uncache(kept if self._offload is None else self._offload.clear(kept))
        pool.has_cached = False
        if self.events is not None:
            self.events.cleared()

    def reset(self) -> None:
        """Forgets everything."""
        self.new_epoch()
        self.cached.known.clear()
        self._codes = TokenCodes()

    def follow(self, before: "Prefixes") -> None:
        """Counts on from another object, all of whose blocks are forgotten."""
        self._counts, self._reasons = before._counts, before._reasons
        self.cached.epoch = before.cached.epoch + 1
        if self.events is not None:
            self.events.cleared()

    def stats(self) -> PrefixStats:
        """Returns the counts so far."""
        return PrefixStats(
            **self._counts,
            reasons=dict(self._reasons),
            cached_blocks=int(np.count_nonzero(self._state.pool.read_only_until)),
            checkpoint_blocks=self._tree.checkpoints.num_blocks,
        )

    # --- tokens -------------------------------------------------------------------

    def _encode(
        self, tokens: Ints, salt: str | None, extra_keys: Sequence[ExtraKey]
    ) -> tuple[Namespace, np.ndarray]:
        """Returns the namespace of a prompt, and the codes of its tokens, int[N]."""
        check_content(salt, extra_keys)
        if self._codes.is_full:
            self.reset()
        codes = self._codes.encode(tokens, [key for key in extra_keys if key.end is not None])
        if not codes.size:
            raise ValueError("tokens is empty; give the token ids of the prompt, at least one")
        adapters = frozenset([key for key in extra_keys if key.end is None])
        return Namespace(self.cached.epoch, salt, adapters), codes


def _tree(state: RequestState, plan: Plan) -> PrefixTree:
    """Returns an empty tree of prompts, over the ids of the device's blocks and of the host's."""
    pool, growths = state.pool, state.growth.growths
    shares_rows = [
        any(getattr(spec, "compress_ratio", 1) > 1 for spec in group.specs) for group in plan.groups
    ]
    blocks = [n for n, g in zip(state.block_tokens, growths, strict=True) if g.stores != "ring"]
    sizes = [
        math.lcm(growth.group_size, min(blocks, default=1)) if growth.stores == "ring" else size
        for size, growth in zip(state.block_tokens, growths, strict=True)
    ]
    policies = [PrefixPolicy(*of) for of in zip(growths, sizes, shares_rows, strict=True)]
    smallest = min(policy.block for policy in policies)
    most = 4 * pool.all_read_only_until.size * smallest
    return PrefixTree(policies, pool.all_read_only_until, max_tokens=most, host_ids=pool.num_blocks)


def _event_groups(plan: Plan) -> list[EventGroup]:
    """Returns the groups of a plan as events describe them."""
    return [
        EventGroup(
            index=index,
            kind=cast(GroupKind, group.specs[0].kind),
            block_size=group.block_size * plan.context_parallel,
            window=group.growth.window if group.growth.kind == "sliding" else None,
        )
        for index, group in enumerate(plan.groups)
    ]


def _limit(tokens: np.ndarray, max_cached_tokens: int | None) -> int:
    """Returns the most tokens of a prompt that may be shared."""
    if max_cached_tokens is None:
        return tokens.size - 1
    check_count(max_cached_tokens=max_cached_tokens)
    return min(tokens.size - 1, max_cached_tokens)
