"""The fields of vLLM's `SchedulerOutput`. No jax."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv._src.interop.vllm._fields import get


class Arrival(NamedTuple):
    """One request's entry in a `SchedulerOutput`.

    request: id of the request.
    block_ids: new block ids, per group; None if there are none.
    num_computed_tokens: tokens computed before this step.
    replaces: whether the block ids replace all earlier ones; else they are appended.
    """

    request: str
    block_ids: Sequence[Sequence[int]] | None
    num_computed_tokens: int
    replaces: bool


def read_arrivals(output: Any) -> Iterator[Arrival]:
    """Yields the entries of new, running and resumed requests."""
    for new in get(output, "scheduled_new_reqs"):
        computed = get(new, "num_computed_tokens")
        yield Arrival(get(new, "req_id"), get(new, "block_ids"), computed, replaces=True)
    cached = get(output, "scheduled_cached_reqs")
    resumed = get(cached, "resumed_req_ids")
    fields = (get(cached, name) for name in ("req_ids", "new_block_ids", "num_computed_tokens"))
    for request, block_ids, computed in zip(*fields, strict=True):
        yield Arrival(request, block_ids, computed, replaces=request in resumed)


def read_work(output: Any, computed: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns the work of a step: requests, their computed tokens and their new tokens.

    Args:
      output: vLLM's `SchedulerOutput`.
      computed: request -> tokens computed before this step, for all requests with an entry.

    Raises:
      ValueError: a request without an entry.
    """
    work = get(output, "num_scheduled_tokens")
    if unknown := [request for request in work if request not in computed]:
        raise ValueError(
            f"num_scheduled_tokens names {unknown}, which are neither in scheduled_new_reqs nor in "
            "scheduled_cached_reqs"
        )
    return [(request, computed[request], count) for request, count in work.items()]


def read_copies(output: Any) -> list[tuple[int, int]]:
    """Returns the block copies of a step as (source, target) pairs."""
    return [(source, target) for source, target in get(output, "kv_cache_block_copies", None) or ()]
