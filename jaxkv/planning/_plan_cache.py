"""Plans the pool of a model from its layers and memory, or refuses. No jax."""

import dataclasses
from collections.abc import Sequence

from jaxkv._internal.checks import check_positive
from jaxkv.planning._admission import admit
from jaxkv.planning._choice import (
    choose_groups,
    compare,
    in_small_blocks,
    may_waste_states,
    remedy,
    warn,
)
from jaxkv.planning._grouping import Grouping, make_groups
from jaxkv.planning._layout import Group
from jaxkv.planning._plan import Plan, ZeroPolicy
from jaxkv.planning._workers import (
    Worker,
    WorkerLayers,
    check_budgets,
    count_blocks,
    lay_out_workers,
    merge_workers,
    read_workers,
)
from jaxkv.specs import Limits


def plan_cache(
    layers: WorkerLayers | Sequence[WorkerLayers],
    memory_bytes: int | Sequence[int],
    *,
    max_model_len: int,
    fit_max_model_len: bool = False,
    num_blocks_override: int | None = None,
    override_beyond_memory: bool = False,
    limits: Limits | None = None,
    grouping: Grouping = "auto",
    request_len: int | None = None,
    context_parallel: int = 1,
    zero_policy: ZeroPolicy = "when_needed",
) -> Plan:
    """Plans the pool of a model, or refuses.

    Args:
      layers: layer name -> spec; or one such mapping per worker (pipeline stage or
        tensor-parallel rank). A worker may be empty, the model may not.
      memory_bytes: bytes for the KV cache; or one figure per worker.
      max_model_len: the model's own longest request, in tokens.
      fit_max_model_len: shorten ``max_model_len`` to the longest that fits.
      num_blocks_override: use this many blocks instead of what memory gives, before
        fitting and admission; at least 2 (the null block and one more).
      override_beyond_memory: accept an override that the memory given cannot hold.
      limits: the most that the scheduler asks of one step; None: the defaults of `Limits`.
      grouping: as for `jaxkv.planning.make_groups`. ``"least_waste"`` takes the grouping that
        fits the longest request and, of those, runs the most requests of ``request_len``
        tokens at once; it may make many groups. ``plan.compared`` says what that buys.
      request_len: tokens of a usual request. With it, ``"auto"`` too takes what runs more of
        them at once, the rule or packing. None: ``max_model_len`` for ``"least_waste"``, and
        ``"auto"`` compares nothing.
      context_parallel: ranks among which each request's tokens are divided; for models
        whose every group keeps all tokens.
      zero_policy: groups whose fresh blocks are zeroed before a layer reads them.
        ``"when_needed"``: those whose bytes another group reads differently. ``"always"``:
        all, so that no tenant reads another's bytes. ``"never"``: none.

    Raises:
      KVCacheCapacityError: a request of ``max_model_len`` (with fitting: of one token)
        needs more blocks than there are.
      ValueError: memory, lengths or an override that make no sense; pages that cannot
        share a pool; a pool whose slots pass int32; context parallelism for groups
        that do not keep all tokens.
    """
    workers = read_workers(layers)
    budgets = check_budgets(memory_bytes, len(workers))
    check_positive(max_model_len=max_model_len)
    if request_len is not None:
        check_positive(request_len=request_len)
        if request_len > max_model_len:
            raise ValueError(
                f"request_len={request_len:,} is beyond max_model_len={max_model_len:,}; usual "
                "requests are no longer than the longest"
            )
    limits = Limits() if limits is None else limits

    def size(groups: Sequence[Group], workers: Sequence[Worker] = workers) -> Plan:
        """Makes the plan of a grouping without checking that ``max_model_len`` fits."""
        layouts = lay_out_workers(groups, workers)
        return Plan(
            groups=tuple(groups),
            layouts=layouts,
            num_blocks=count_blocks(layouts, budgets, num_blocks_override, override_beyond_memory),
            reserved_blocks=1 + sum(group.reserved_blocks for group in groups),
            max_model_len=max_model_len,
            limits=limits,
            memory_bytes=budgets,
            context_parallel=context_parallel,
            zero_policy=zero_policy,
            request_len=request_len,
        )

    def smaller_blocks() -> Plan | None:
        """Returns a plan in smaller blocks where states share blocks that are mostly unused."""
        if overridden or not may_waste_states(plan.groups):
            return None
        small, same = in_small_blocks(workers), "packed" if grouping == "packed" else "auto"
        return size(make_groups(merge_workers(small), grouping=same), small)

    merged = merge_workers(workers)
    overridden = num_blocks_override is not None
    groupings = choose_groups(merged, grouping, request_len, size, overridden=overridden)
    plan = size(next(iter(groupings.values())))
    other = smaller_blocks()
    plan = admit(
        plan,
        fit_max_model_len=fit_max_model_len,
        blocks_argument="num_blocks_override" if overridden else None,
        remedy=remedy(other),
    )
    if len(groupings) < 2 and other is None:
        return plan
    return dataclasses.replace(
        plan,
        compared=compare(plan, groupings, size),
        warning="" if other is None else warn(plan, other),
    )
