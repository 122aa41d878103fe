"""The fields of vLLM's `SchedulerOutput`. No jax."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.interop.vllm._fields import get


class Arrival(NamedTuple):
    """News of one request.

    block_ids: per group, its new ones; None: none.
    replaces: whether they stand in the place of all that it had, instead of behind them.
    """

    request: str
    block_ids: Sequence[Sequence[int]] | None
    num_computed_tokens: int
    replaces: bool


def read_arrivals(output: Any) -> Iterator[Arrival]:
    """Yields the news of new, running and resumed requests."""
    for new in get(output, "scheduled_new_reqs"):
        computed = get(new, "num_computed_tokens")
        yield Arrival(get(new, "req_id"), get(new, "block_ids"), computed, replaces=True)
    cached = get(output, "scheduled_cached_reqs")
    resumed = get(cached, "resumed_req_ids")
    fields = (get(cached, name) for name in ("req_ids", "new_block_ids", "num_computed_tokens"))
    for request, block_ids, computed in zip(*fields, strict=True):
        yield Arrival(request, block_ids, computed, replaces=request in resumed)


def read_work(output: Any, computed: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns the requests of a step, the tokens that each has computed, and those of the step.

    Args:
      computed: tokens that requests have computed, of all that there is news of.

    Raises:
      ValueError: a request that there is no news of.
    """
    work = get(output, "num_scheduled_tokens")
    if unknown := [request for request in work if request not in computed]:
        raise ValueError(f"num_scheduled_tokens names {unknown}, which have no request data")
    return [(request, computed[request], count) for request, count in work.items()]


def read_copies(output: Any) -> list[tuple[int, int]]:
    """Returns copies of blocks: source and target."""
    return [(source, target) for source, target in get(output, "kv_cache_block_copies", None) or ()]
