"""Plans the pool of a model from its layers and memory, or refuses. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import get_args

from jaxkv._internal.checks import check_choice, check_positive
from jaxkv._internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv.planning._grouping import Grouping, make_groups
from jaxkv.planning._layout import Group, PoolLayout, make_layout
from jaxkv.planning._plan import (
    KVCacheCapacityError,
    Plan,
    WorkerLayers,
    ZeroPolicy,
    longest_admitted,
)
from jaxkv.planning._text import describe_groups
from jaxkv.specs import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec


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
        fits the longest request and, of those, charges a request of ``max_model_len`` the
        fewest bytes; it may make many groups.
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
    if not isinstance(layers, (Mapping, Sequence)):
        raise TypeError(f"layers must map names to specs, or list such mappings; got {layers!r}")
    workers = [_owned(w) for w in ([layers] if isinstance(layers, Mapping) else layers)]
    budgets = _check_budgets(memory_bytes, len(workers))
    check_positive(max_model_len=max_model_len, context_parallel=context_parallel)
    check_choice(get_args(ZeroPolicy), zero_policy=zero_policy)
    limits = Limits() if limits is None else limits
    if not isinstance(limits, Limits):
        raise TypeError(f"limits must be a Limits, got {limits!r}")

    def size(groups: Sequence[Group]) -> Plan:
        """Builds the plan of a grouping without checking that ``max_model_len`` fits."""
        layouts = _lay_out(groups, workers)
        counted = _count_blocks(layouts, budgets, num_blocks_override, override_beyond_memory)
        return Plan(
            groups=tuple(groups),
            layouts=layouts,
            num_blocks=counted,
            reserved_blocks=1 + sum(group.reserved_blocks for group in groups),
            max_model_len=max_model_len,
            limits=limits,
            memory_bytes=budgets,
            context_parallel=context_parallel,
            zero_policy=zero_policy,
        )

    def cost(groups: Sequence[Group]) -> tuple[int, int]:
        """Orders groupings by the length that fits, then by the bytes charged to a request."""
        plan = size(groups)
        block = sum(plan.bytes_per_block)
        return -_longest_fit(plan), block * plan.admission_blocks(max_model_len)

    groups = make_groups(_merge(workers), grouping=grouping, cost=cost)
    _check_kinds(groups, context_parallel, limits)
    plan = size(groups)
    _check_slots(groups, plan.num_blocks)
    longest = _longest_fit(plan)
    if longest < (1 if fit_max_model_len else max_model_len):
        raise _capacity_error(plan, longest, overridden=num_blocks_override is not None)
    if longest > INT32_MAX:
        raise ValueError(
            f"max_model_len={longest:,} has positions beyond int32; set it to at most {INT32_MAX:,}"
        )
    return dataclasses.replace(plan, max_model_len=longest)


def _longest_fit(plan: Plan) -> int:
    if plan.num_blocks <= NULL_BLOCK + 1:
        return 0
    return longest_admitted(
        plan.groups,
        plan.usable_blocks,
        plan.max_model_len,
        plan.limits,
        context_parallel=plan.context_parallel,
    )


def _lay_out(
    groups: Sequence[Group], workers: Sequence[tuple[dict[str, LayerSpec], dict[str, str]]]
) -> tuple[PoolLayout, ...]:
    """Makes a layout per worker; ranks with the same layers share one."""
    known: dict[object, PoolLayout] = {}
    layouts = []
    for own, shared in workers:
        key = tuple(own), tuple(shared.items())
        if key not in known:
            known[key] = make_layout(groups, tuple(own), shared=shared)
        layouts.append(known[key])
    return tuple(layouts)


def _owned(worker: WorkerLayers) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """Returns the layers of a worker that own a cache, and layer -> owner for those that share."""
    if not isinstance(worker, Mapping):
        raise TypeError(f"layers must map names to specs, or list such mappings; got {worker!r}")
    own: dict[str, LayerSpec] = {}
    shared: dict[str, str] = {}
    for name, spec in worker.items():
        match spec:
            case LayerSpec():
                own[name] = spec
            case SharedKVSpec():
                shared[name] = spec.layer
            case EncoderOnlySpec():
                pass
            case _:
                raise TypeError(f"layers[{name!r}] must be a layer spec, got {spec!r}")
    return own, shared


def _merge(workers: Sequence[tuple[dict[str, LayerSpec], object]]) -> dict[str, LayerSpec]:
    """Merges the layers of all workers; tensor-parallel ranks name the same ones."""
    merged: dict[str, LayerSpec] = {}
    for own, _ in workers:
        for name, spec in own.items():
            known = merged.setdefault(name, spec)
            if known is not spec and known != spec:
                raise ValueError(f"layers: workers disagree about the spec of {name!r}")
    if not merged:
        raise ValueError("layers is empty: no layer of this model keeps a cache to plan")
    return merged


def _check_kinds(groups: Sequence[Group], context_parallel: int, limits: Limits) -> None:
    if not limits.max_encoder_tokens and any(group.growth.kind == "cross" for group in groups):
        raise ValueError(
            "limits.max_encoder_tokens=0, and layers with cross attention keep the encoder's "
            "tokens; say how many there are at most"
        )
    partial = [group for group in groups if not group.growth.keeps_all_tokens]
    if context_parallel > 1 and partial:
        raise ValueError(
            f"context_parallel={context_parallel} divides groups that keep all tokens, and "
            f"{describe_groups(partial)} do not; use context_parallel=1"
        )


def _check_budgets(memory_bytes: int | Sequence[int], num_workers: int) -> tuple[int, ...]:
    several = isinstance(memory_bytes, Sequence) and not isinstance(memory_bytes, str)
    budgets = tuple(memory_bytes) if several else (memory_bytes,)
    if len(budgets) != num_workers:
        raise ValueError(
            f"memory_bytes has {len(budgets)} figures for {num_workers} workers; give one each"
        )
    for budget in budgets:
        check_positive(memory_bytes=budget)
    return budgets


def _count_blocks(
    layouts: Sequence[PoolLayout],
    budgets: Sequence[int],
    override: int | None,
    beyond_memory: bool,
) -> int:
    """Returns the blocks that every worker can hold, or the override."""
    sizes = [layout.bytes_per_block for layout in layouts]
    pairs = [(budget, size) for budget, size in zip(budgets, sizes, strict=True) if size]
    measured = min(budget // size for budget, size in pairs)
    if override is None:
        return measured
    check_positive(num_blocks_override=override)
    if override < 2:
        raise ValueError(
            f"num_blocks_override={override} leaves no usable block next to the null block; "
            "use at least 2"
        )
    if override > measured and not beyond_memory:
        raise ValueError(
            f"num_blocks_override={override} is more than the {measured} blocks that "
            "memory_bytes can hold; lower it, or pass override_beyond_memory=True"
        )
    return override


def _check_slots(groups: Sequence[Group], num_blocks: int) -> None:
    """Raises unless the slots of a layer, ``block_id * block_size + offset``, fit into int32."""
    sizes = [group.block_size for group in groups if group.growth.stores != "state"]
    if num_blocks * max(sizes, default=0) > INT32_MAX:
        raise ValueError(
            f"a pool of {num_blocks:,} blocks of {max(sizes)} tokens has slots beyond int32; "
            f"set num_blocks_override to at most {INT32_MAX // max(sizes):,}"
        )


def _capacity_error(plan: Plan, longest: int, *, overridden: bool) -> KVCacheCapacityError:
    needed = plan.admission_blocks(plan.max_model_len)
    total = needed + plan.reserved_blocks
    bytes_wanted = total * max(plan.bytes_per_block)
    shorter = f"set max_model_len to at most {longest:,} or " if longest else ""
    more = (
        f"num_blocks_override to at least {total:,}"
        if overridden
        else f"memory_bytes to at least {bytes_wanted:,} ({total:,} blocks)"
    )
    return KVCacheCapacityError(
        f"max_model_len={plan.max_model_len:,} needs {needed:,} blocks and the pool has "
        f"{plan.usable_blocks:,} usable ones; {shorter}raise {more}",
        needed_blocks=needed,
        usable_blocks=plan.usable_blocks,
        longest_len=longest,
        plan=plan,
    )
