"""The prompts of a scheduler's requests, and the lookup of their prefixes. No jax."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._src.blocks import BlockManager, PrefixHit, PrefixMatch
from jaxkv._src.prefixes import ExtraKey

Tokens = Mapping[Any, Sequence[int] | np.ndarray]


@dataclasses.dataclass(slots=True)
class Prompt:
    """The arguments of a prompt's prefix lookup, and its latest result.

    found: the latest result while the request waits; None: none yet.
    num_known: number of token ids that the request was started with; None: it had none.
    chunk_ends: numbers of tokens after which a later chunk has to end.
    """

    salt: str | None = None
    extra_keys: Sequence[ExtraKey] = ()
    boundaries: Sequence[int] = ()
    found: PrefixMatch | None = None
    num_known: int | None = None
    chunk_ends: Sequence[int] = ()


class Prompts:
    """The prompts of all requests of a scheduler.

    has_states: whether a group overwrites its states, so that a request that starts with a prefix
      copies the state at its end.
    """

    def __init__(
        self, manager: BlockManager, tokens: Tokens | None, *, chunk_tokens: int | None, forks: int
    ):
        growths = [group.growth for group in manager.plan.groups]
        self.has_states = any(g.stores == "state" and g.cache_mode != "all" for g in growths)
        self._manager, self._chunk_tokens = manager, chunk_tokens
        self._tokens = None if self.has_states and not forks else tokens
        self._of: dict[Hashable, Prompt] = {}

    def add(self, request: Hashable, num_tokens: int, prompt: Prompt) -> None:
        """Adds a new request.

        Raises:
          ValueError: the scheduler's ``tokens`` have fewer token ids of it than ``num_tokens``.
        """
        if self._tokens is not None:
            known = len(self._tokens[request]) if request in self._tokens else 0
            if known < num_tokens:
                raise ValueError(
                    f"request={request!r} has num_tokens={num_tokens}, and the scheduler's tokens "
                    f"hold {known} token ids of it; put its prompt there before you add it"
                )
        self._of[request] = prompt

    def fork(self, request: Hashable, into: Hashable) -> None:
        """Adds a sample with the prompt of another request."""
        self._of[into] = dataclasses.replace(
            self._of[request], found=None, num_known=None, chunk_ends=()
        )

    def join(self, request: Hashable, into: Hashable) -> None:
        """Records that a sample shares the token ids of its donor, as in the manager."""
        self._of[into].num_known = self._of[request].num_known

    def forget(self, request: Hashable) -> None:
        """Removes a request."""
        self._of.pop(request, None)

    # --- prefixes -----------------------------------------------------------------

    def find(self, request: Hashable, num_tokens: int) -> tuple[int, int]:
        """Returns a waiting request's cached tokens, and how many of their blocks others hold."""
        found = self._look_up(request, num_tokens)
        if found is None or not found.num_cached_tokens:
            return 0, 0
        return found.num_cached_tokens, found.num_held_blocks

    def start(
        self, request: Hashable, num_tokens: int, *, encoder_tokens: int, max_cached_tokens: int
    ) -> PrefixHit:
        """Starts a request, with the prefix that `find` has just found."""
        prompt = self._of[request]
        found = prompt.found
        hit = self._manager.start(
            request,
            found,
            boundaries=[n for n in prompt.boundaries if n <= num_tokens],
            max_cached_tokens=max_cached_tokens,
            encoder_tokens=encoder_tokens,
        )
        prompt.found, prompt.num_known = None, None if found is None else found.num_tokens
        ends = set(hit.chunk_ends)
        if self._chunk_tokens is not None:
            ends.update(range(self._chunk_tokens, num_tokens, self._chunk_tokens))
        prompt.chunk_ends = sorted(end for end in ends if end > hit.num_cached_tokens)
        return hit

    def finish(self, request: Hashable) -> None:
        """Ends a request in the manager, which keeps its blocks for later prompts."""
        prompt = self._of[request]
        more = None
        if self._tokens is not None and prompt.num_known is not None and request in self._tokens:
            more = np.array(self._tokens[request][prompt.num_known :], np.int64)
        self._manager.finish(request, more)
        prompt.num_known, prompt.chunk_ends = None, ()

    def next_chunk_end(self, request: Hashable, computed: int) -> int | None:
        """Returns the number of tokens after which the next chunk has to end; None: any."""
        prompt = self._of[request]
        prompt.chunk_ends = [end for end in prompt.chunk_ends if end > computed]
        return prompt.chunk_ends[0] if prompt.chunk_ends else None

    def _look_up(self, request: Hashable, num_tokens: int) -> PrefixMatch | None:
        """Returns the prefix of a waiting request; None if its token ids are not given.

        An earlier result is used again unless the cache has changed since.
        """
        if self._tokens is None or request not in self._tokens:
            return None
        prompt, find = self._of[request], self._manager.find_prefix
        if prompt.found is None or prompt.found.num_tokens > num_tokens:
            tokens = np.array(self._tokens[request][:num_tokens], np.int64)
            prompt.found = find(tokens, salt=prompt.salt, extra_keys=prompt.extra_keys)
        else:
            prompt.found = find(prompt.found)
        return prompt.found
