"""`Schedule`, the work of one step. No jax."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks import PrefixHit, RowWork
from jaxkv._src.internal.named_ints import NamedInts


class Wanted(NamedTuple):
    """Tokens that wait to be computed.

    tokens: known ones, of the requests that run and of waiting requests that fit.
    has_backlog: whether requests wait that do not fit.
    """

    tokens: int
    has_backlog: bool


class SampledRequests(NamedInts):
    """The requests that get a token from a step, and the index in the batch to sample it from.

    index: int64[S], of each request in `Scheduler.index`.
    """

    def __init__(self, names: np.ndarray, index: np.ndarray, positions: np.ndarray):
        super().__init__(names, positions)
        self.index = index


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one step. Its mappings never change.

    work: new tokens by request, for `BlockManager.step`, which reads them by row.
    samples: requests to sample the next token of, and the index in the batch of the request whose
      last token's logits to sample it from. The index is a request's own, except that samples of
      one prompt (`Scheduler.add`) get their first tokens from the one that computes it. Answer
      each with `Scheduler.append` or `Scheduler.finish`.
    preempted: requests that lost their blocks and wait to be computed again: from the start, or
      from where the cache still holds what they computed.
    hits: requests that start in this step, and the prefix hit of each. One that waits for host
      memory is not in the work yet.
    index: int64[N], `Scheduler.index` of each request of the work.
    num_computed: int64[N], tokens of each that are computed before the step.
    """

    work: RowWork
    samples: SampledRequests
    preempted: tuple[Hashable, ...]
    hits: Mapping[Hashable, PrefixHit]
    index: np.ndarray = dataclasses.field(repr=False, compare=False)
    num_computed: np.ndarray = dataclasses.field(repr=False, compare=False)
    _ids: Callable[["Schedule"], np.ndarray] = dataclasses.field(repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.work.batch.num_tokens

    @property
    def token_ids(self) -> np.ndarray:
        """The token ids of the step from the scheduler's ``tokens``, int32[sum(work)].

        They lie as in the upload: request by request, in the order of ``work``. An id is -1 if a
        step in flight samples it (``lookahead_steps`` of `Scheduler`): take that token from the
        device.

        Raises:
          TypeError, ValueError: the scheduler was made without ``tokens``, or they hold something
            that is not a token id.
        """
        return self._ids(self)
