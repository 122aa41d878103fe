"""Drafts: tokens that a drafter proposes, and a step of the model verifies together. No jax."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from jaxkv._src.engine._samples import Sample
from jaxkv._src.internal.checks import check_positive, plain_ints
from jaxkv._src.internal.log import LOGGER
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import TokenIds, as_tokens

# Losses and gains of drafts are counted in steps. A draft that is accepted for each request saves a
# step. To wait for the tokens of a step, as each with drafts does and the one after them, costs
# WAIT: for one request of an 8B model 2.7 ms of 4.5 on an H200, and less of larger batches, for
# which more drafts cost products instead. All losses, less all gains, are at most SHARE of all
# steps, or FIRST of the first ones; of gains, MOST are left to be lost.
WAIT, SHARE, FIRST, MOST = 5 / 8, 1 / 128, 5 / 2, 8.0


class Drafter(Protocol):
    """Proposes the next tokens of requests, on the host.

    One that runs a model of its own keeps its own cache for it: the engine's plan holds the layers
    of ``forward`` alone.

    max_tokens: the most drafts of a request in a step.
    """

    max_tokens: int

    def propose(
        self, tokens: Mapping[Hashable, Int32[np.ndarray, "tokens"]], max_tokens: int
    ) -> Mapping[Hashable, TokenIds]:
        """Returns drafts, the tokens that may come next, for those samples that it has any for.

        The same tokens have to give the same drafts where several processes serve one model. Before
        a step waits for the newest token of each sample, it is asked without these: where it has
        no drafts then, the step does not wait and has none.

        Args:
          tokens: of each sample, by (request, number of the sample): the prompt, and what follows.
          max_tokens: the most that the step takes of each.
        """
        ...


class NgramDrafts:
    """Drafts what followed the last tokens of a request where they came before in it.

    For answers that repeat parts of their prompt, such as edits of code. Of several places, it is
    the last one of those where the most tokens match and enough tokens follow.
    """

    @plain_ints
    def __init__(self, max_tokens: int, *, min_match: int = 2, max_match: int = 4):
        """Creates a drafter.

        Args:
          max_tokens: the most drafts of a request in a step.
          min_match, max_match: tokens that have to match, and those that are compared.
        """
        check_positive(max_tokens=max_tokens, min_match=min_match, max_match=max_match)
        if max_match < min_match:
            raise ValueError(f"max_match={max_match} is less than min_match={min_match}")
        self.max_tokens, self.min_match, self.max_match = max_tokens, min_match, max_match

    def __repr__(self) -> str:
        sizes = f"min_match={self.min_match}, max_match={self.max_match}"
        return f"NgramDrafts({self.max_tokens}, {sizes})"

    def propose(
        self, tokens: Mapping[Hashable, Int32[np.ndarray, "tokens"]], max_tokens: int
    ) -> Mapping[Hashable, Int32[np.ndarray, "drafts"]]:
        """See `Drafter.propose`."""
        found = {name: self._following(ids, max_tokens) for name, ids in tokens.items()}
        return {name: drafts for name, drafts in found.items() if drafts.size}

    def _following(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Returns up to ``count`` tokens after the place where the most of the last ones match."""
        ends = (ids[:-1] == ids[-1:]).nonzero()[0]  # of the places
        num_matched = min(1, ends.size)
        while 0 < num_matched < self.max_match:
            longer = ends[ends >= num_matched]
            longer = longer[ids[longer - num_matched] == ids[-1 - num_matched]]
            if not longer.size:
                break
            ends, num_matched = longer, num_matched + 1
        if num_matched < self.min_match:
            return ids[:0]
        has_all = ends[ends < ids.size - count]
        end = has_all[-1] if has_all.size else ends[0]
        return ids[end + 1 :][:count]


class Drafting:
    """The drafts of an engine, and whether they pay.

    may_try: whether the next step may have drafts, whatever becomes of them.
    """

    def __init__(self, drafter: Drafter, most_tokens: int, vocab_size: int):
        """Creates it.

        Args:
          most_tokens: of a step with drafts.
        """
        self._drafter, self._most, self._vocab = drafter, most_tokens, vocab_size
        self._steps, self._lost, self.may_try = 0, 0.0, True

    def has_room_for(self, num_requests: int) -> bool:
        """Returns whether a step takes a draft of each of so many requests."""
        return 2 * num_requests <= self._most

    def propose(self, samples: Sequence[Sample]) -> dict[Sample, list[int]]:
        """Returns the drafts of samples, of which some may have none.

        Raises:
          TypeError, ValueError: the drafter returned something else.
        """
        most = min(self._drafter.max_tokens, self._most // len(samples) - 1)
        # Processors' states follow from each token, and would have to be set back.
        chosen = [one for one in samples if not one.sampling.processors]
        given: dict[Hashable, Sample] = {(one.request, one.number): one for one in chosen}
        ids: dict[Hashable, np.ndarray] = {
            name: np.array(one.tokens, np.int32) for name, one in given.items()
        }
        found: dict[Sample, list[int]] = {}
        for name, drafts in self._drafter.propose(ids, most).items():
            tokens = as_tokens(f"the drafter's tokens for {name!r}", drafts, np.int32)
            if name not in given or tokens.size > most or (tokens >= self._vocab).any():
                raise ValueError(
                    f"the drafter proposed {tokens.tolist()} for {name!r}; it may propose up to "
                    f"{most} token ids, from 0 to {self._vocab - 1}, for each of {[*given]}"
                )
            # The last token of a sample is not computed, and so there is none after it.
            room = given[name].end - 1 - len(given[name].tokens)
            if kept := tokens[: max(0, room)].tolist():
                found[given[name]] = kept
        return found

    def begin_step(self, *, waits: bool) -> None:
        """Notes that a step begins, and whether it waits for the tokens of the one before."""
        self._steps += 1
        self._lose(WAIT * waits)

    def verified(self, num_accepted: int, num_requests: int) -> None:
        """Notes how many drafts of a step were accepted."""
        self._lose(-num_accepted / num_requests)

    def _lose(self, steps: float) -> None:
        most = max(FIRST, SHARE * self._steps)
        self._lost = max(self._lost + steps, most - MOST)
        might_pay, self.may_try = self.may_try, self._lost + 2 * WAIT <= most
        if might_pay and not self.may_try:
            LOGGER.info("drafts have to save more steps than they cost, and are left for a while")


def check_drafts(
    drafts: Drafter, plan: Plan, *, max_tokens: int, has_head: bool, others: Mapping[str, object]
) -> None:
    """Raises TypeError or ValueError unless an engine can verify a drafter's drafts.

    Args:
      max_tokens: of a step of the engine.
      others: arguments of the engine that it cannot have then, those that are set.
    """
    if isinstance(drafts, type) or not callable(getattr(drafts, "propose", None)):
        raise TypeError(
            "drafts must be an object with a method propose, such as jaxkv.drafts.NgramDrafts("
            f"max_tokens=4), got {drafts!r}"
        )
    count = getattr(drafts, "max_tokens", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"drafts.max_tokens={count!r} must be an int of at least 1")
    if not has_head:
        raise ValueError(
            "drafts need logits of several tokens of a request: return hidden states from forward, "
            "and pass head="
        )
    for name, value in others.items():
        if value:
            raise ValueError(f"drafts do not go with {name}={value}; leave one of them out")
    longest = min(max_tokens, plan.limits.max_in_flight_tokens)
    if count >= longest:
        raise ValueError(
            f"drafts.max_tokens={count} and the token before them are more than the {longest} "
            "tokens of a request in a step: max_tokens of the engine, and max_in_flight_tokens of "
            "the plan's limits"
        )
    for group in plan.groups:
        growth, is_short = group.growth, False
        if growth.stores == "ring":
            is_short = growth.block_size < growth.group_size + count
        elif growth.stores == "state":
            is_short = growth.cache_mode != "none" or growth.max_drafts < count
        if is_short:
            raise ValueError(
                f"layer {group.layers[0]!r} cannot be set back by {count} rejected drafts; "
                f'plan states with cache_mode="none" and speculative_blocks={count}, or '
                f"speculative_tokens={count} with replay "
                f"(layers_from_config(speculative_tokens={count})), and rings with block_size of "
                f"group_size + {count}"
            )
