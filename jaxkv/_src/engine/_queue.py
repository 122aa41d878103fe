"""`Queue`, a scheduler for samples whose newest tokens only the device knows. No jax."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from jaxkv._src.blocks import BlockManager, PrefixHit, StepShape
from jaxkv._src.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one step; see `jaxkv.scheduler.Schedule`.

    samples: requests and samples to draw a token for, and the index of each in the batch.
    token_ids: int32[tokens]; -1 for an id that the device knows.
    """

    work: dict[Any, int]
    samples: dict[Any, int]
    preempted: tuple[Any, ...]
    hits: dict[Any, PrefixHit]
    token_ids: np.ndarray


class Queue:
    """A `Scheduler` that forks samples of a prompt once it is computed."""

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_tokens: int,
        forks: int,
        tokens: dict[Hashable, list[int]],
        chunk_tokens: int | None,
    ):
        self._manager, self._tokens, self._max_tokens = manager, tokens, max_tokens
        self._forks = forks
        self._scheduler = Scheduler(
            manager,
            max_tokens=max_tokens,
            forks=forks,
            tokens=tokens,
            chunk_tokens=chunk_tokens,
            steps_ahead=max_tokens,
        )
        self._waiting: dict[Hashable, list[Hashable]] = {}  # samples, by what computes the prompt
        self._options: dict[Hashable, dict[str, Any]] = {}

    def __repr__(self) -> str:
        return repr(self._scheduler)

    def shape(self, **sizes: Any) -> StepShape:
        """Returns a step shape with room for what this may schedule."""
        plan, sizes = self._manager.plan, {"max_tokens": self._max_tokens} | sizes
        return StepShape.for_plan(
            plan,
            max_requests=self._manager.max_requests,
            forks=self._forks,
            cached_tokens=plan.max_model_len,
            extra=sizes["max_tokens"],
            **sizes,
        )

    def add(self, request: Hashable, num_tokens: int, *, samples: int, **options: Any) -> None:
        """Queues a request and the samples ``(request, 1)`` and so on of its prompt."""
        self._scheduler.add(request, num_tokens, **options)
        self._options[request] = options
        self._waiting[request] = [(request, i) for i in range(1, samples)]

    def schedule(self) -> Schedule:
        """Chooses the work of the next step; see `Scheduler.schedule`."""
        chosen = self._scheduler.schedule()
        samples, room = chosen.samples, self._manager.max_requests - len(self._scheduler.running)
        for name in list(samples):
            fitting = self._waiting.get(name, [])[: max(0, room)]
            samples |= dict.fromkeys(fitting, samples[name])
            room -= len(fitting)
        ids = np.full(sum(chosen.work.values()), -1, np.int32)
        at = 0
        for name, count in chosen.work.items():
            start = self._manager.num_computed_tokens(name)
            known = self._tokens[name][start : start + count]
            ids[at : at + len(known)] = known
            at += count
        return Schedule(chosen.work, samples, chosen.preempted, chosen.hits, ids)

    def append(self, num_tokens: Mapping[Any, int]) -> None:
        """Gives requests a drawn token each, and starts the samples that were drawn with them."""
        for name in list(num_tokens):
            waiting = self._waiting.pop(name, [])
            fitting = [sample for sample in waiting if sample in num_tokens]
            if fitting:
                self._scheduler.fork(name, fitting)
            for sample in waiting[len(fitting) :]:
                options = self._options[name]
                self._scheduler.add(sample, len(self._tokens[sample]), **options)
        if num_tokens:
            self._scheduler.append(num_tokens)

    def finish(self, request: Hashable) -> None:
        """Removes a request or a sample."""
        for waiting in self._waiting.values():
            if request in waiting:
                waiting.remove(request)
                return
        first, *others = self._waiting.pop(request, []) or [None]
        self._scheduler.finish(request)
        options = self._options.pop(request, {})
        if first is not None:  # it computes the prompt instead
            self._scheduler.add(first, len(self._tokens[first]), **options)
            self._waiting[first], self._options[first] = others, options

    def restart(self) -> None:
        """Lets all running requests wait, to be computed again with the tokens that are known."""
        for name in self._scheduler.running:
            self._scheduler.finish(name)
            self._scheduler.add(name, len(self._tokens[name]))
