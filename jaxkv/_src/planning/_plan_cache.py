"""Plans the pool of a model from its layers and its memory. No jax."""

import dataclasses
from collections.abc import Sequence

from jaxkv._src.internal.checks import check_flag, check_positive, plain_ints
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.planning._admission import admit, check_kinds
from jaxkv._src.planning._choice import (
    choose_groups,
    compare,
    in_small_blocks,
    may_waste_states,
    remedy,
    warning,
)
from jaxkv._src.planning._grouping import Grouping, make_groups
from jaxkv._src.planning._layout import Group
from jaxkv._src.planning._plan import Plan, ZeroPolicy
from jaxkv._src.planning._workers import (
    WorkerLayers,
    check_budgets,
    count_blocks,
    lay_out_workers,
    merge_workers,
    read_workers,
)
from jaxkv._src.specs import Limits


@knows_remedies()
@plain_ints
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
    """Plans the pool of a model: groups of layers, number of blocks, and the longest request.

    Example::

        layers = jaxkv.layers_from_config(jaxkv.load_config("qwen3-8b"))
        plan = jaxkv.plan_cache(layers, 40 * 2**30, max_model_len=40960)
        print(plan)

    Args:
      layers: mapping from layer names to specs; or one such mapping per worker (pipeline stage or
        tensor-parallel rank). A worker may have no layers, but the model must have some.
      memory_bytes: bytes for the KV cache; with several workers, a list with the bytes of each.
      max_model_len: longest request that the pool must hold, in tokens; at most the model's own
        length (`jaxkv.hf_config.model_len`).
      fit_max_model_len: True: shortens ``max_model_len`` to the longest that fits.
      num_blocks_override: number of blocks, instead of as many as memory holds; at least 2
        (the null block and one more).
      override_beyond_memory: True: accepts an override that ``memory_bytes`` cannot hold.
      limits: upper bounds of one step of the scheduler; by default `Limits()`.
      grouping: as for `jaxkv.planning.make_groups`. ``"least_waste"`` takes, of the groupings that
        fit the longest request, the one that runs the most requests of ``request_len`` tokens at
        once; it may make many groups. ``plan.compared`` has the figures.
      request_len: tokens of a usual request. With it, ``"auto"`` also compares its rule with
        packing, and takes the one that runs more such requests at once. None:
        ``"least_waste"`` counts requests of ``max_model_len``, and ``"auto"`` compares nothing.
      context_parallel: ranks among which the tokens of each request are divided; only for models
        in which every group keeps all tokens.
      zero_policy: the groups whose fresh blocks are zeroed before a layer reads them.
        ``"when_needed"``: groups whose bytes another group interprets differently. ``"always"``:
        all, so that no tenant reads another's bytes. ``"never"``: none.

    Returns:
      A plan that holds at least one request of its ``max_model_len``.

    Raises:
      KVCacheCapacityError: a request of ``max_model_len`` (with fitting: of one token, or of
        ``request_len``) needs more blocks than the pool has.
      TypeError: an argument of the wrong type.
      ValueError: memory, lengths or an override out of range; pages that cannot share a pool; a
        pool with more slots than int32 counts; context parallelism for groups that drop tokens.
    """
    workers = read_workers(layers)
    budgets = check_budgets(memory_bytes, len(workers))
    check_positive(max_model_len=max_model_len)
    check_flag(fit_max_model_len=fit_max_model_len, override_beyond_memory=override_beyond_memory)
    _check_request_len(request_len, max_model_len)
    limits = Limits() if limits is None else limits
    overridden = num_blocks_override is not None

    def plan_groups(groups: Sequence[Group]) -> Plan:
        """Makes the plan of a grouping without checking that ``max_model_len`` fits."""
        layouts = lay_out_workers(groups, workers)
        plan = Plan(
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
        check_kinds(plan.groups, plan.context_parallel, plan.limits)
        return plan

    merged = merge_workers(workers)
    groupings = choose_groups(merged, grouping, request_len, plan_groups, overridden=overridden)
    plan = plan_groups(next(iter(groupings.values())))
    small = None
    if not overridden and may_waste_states(plan.groups):
        same = "packed" if grouping == "packed" else "auto"
        small = plan_groups(make_groups(in_small_blocks(merged), grouping=same))
    plan = admit(
        plan,
        fit_max_model_len=fit_max_model_len,
        blocks_argument="num_blocks_override" if overridden else None,
        remedy=remedy(small),
    )
    return dataclasses.replace(
        plan,
        compared=compare(plan, groupings, plan_groups),
        warning=warning(plan, small),
    )


def _check_request_len(request_len: int | None, max_model_len: int) -> None:
    if request_len is None:
        return
    check_positive(request_len=request_len)
    if request_len > max_model_len:
        raise ValueError(
            f"request_len={request_len:,} is beyond max_model_len={max_model_len:,}; usual "
            "requests are not longer than the longest"
        )
