"""Groupings and block sizes, compared by the requests that run at once. No jax."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv._src.planning._admission import longest_fit
from jaxkv._src.planning._grouping import Grouping, GroupingFigures, make_groups
from jaxkv._src.planning._layout import Group
from jaxkv._src.planning._pages import Layers, grow_for_states, unifiable
from jaxkv._src.planning._plan import Plan
from jaxkv._src.specs import LayerSpec, MLASpec, RingSpec

PlanGroups = Callable[[Sequence[Group]], Plan]  # makes a plan, whether its length fits or not
Groups = tuple[Group, ...]

SMALL_BLOCK = 16  # tokens; next to states, the planner enlarges such blocks where needed
SHORT_REQUEST = 8192  # tokens of a usual request where the caller names none


def choose_groups(
    layers: Layers,
    grouping: Grouping,
    request_len: int | None,
    plan_groups: PlanGroups,
    *,
    overridden: bool,
) -> dict[str, Groups]:
    """Returns groupings by name: the chosen one first, then those it was compared with.

    Args:
      layers: the layers of all workers.
      grouping, request_len: as for `plan_cache`.
      plan_groups: makes the plan of a grouping.
      overridden: whether the number of blocks is fixed. More requests at once then only mean
        larger blocks, so that groupings compare by the bytes of a request.
    """

    def cost(groups: Sequence[Group]) -> tuple[int, ...]:
        """Ranks a grouping: the longest request, then requests at once, bytes of each, groups."""
        plan = plan_groups(groups)
        longest = longest_fit(plan)
        length = request_len or longest or plan.max_model_len
        requests = 0 if overridden or not longest else plan.requests_that_fit(length)
        bytes_each = sum(plan.bytes_per_block) * plan.steady_blocks(length)
        return -longest, -requests, bytes_each, len(groups)

    compares = not overridden and (
        grouping == "least_waste" or (grouping == "auto" and request_len)
    )
    usual: Grouping = "rule" if unifiable(grow_for_states(layers)) else "packed"
    if grouping == "least_waste":
        least = {grouping: make_groups(layers, grouping=grouping, cost=cost)}
        return least | {usual: make_groups(layers, grouping=usual)} if compares else least
    if compares and usual == "rule":
        named = {name: make_groups(layers, grouping=name) for name in ("rule", "packed")}
        # Between equals the rule wins, even if packing saves bytes: vLLM has the same groups.
        return dict(sorted(named.items(), key=lambda item: cost(item[1])[:2]))
    return {grouping: make_groups(layers, grouping=grouping)}


def compare(
    plan: Plan, groupings: dict[str, Groups], plan_groups: PlanGroups
) -> tuple[GroupingFigures, ...]:
    """Returns the figures of groupings, the chosen one first; () if none differ."""
    if len(groupings) < 2 or len(plan.groups) < 2:
        return ()
    figures = []
    for name, groups in groupings.items():
        other = plan_groups(groups)
        requests = other.requests_that_fit(plan.compared_len)
        figures.append(GroupingFigures(name, len(groups), requests, longest_fit(other)))
    return tuple(figures)


def in_small_blocks(layers: Layers) -> dict[str, LayerSpec]:
    """Returns the layers in small blocks, which planning grows, and without padding."""
    return {name: _in_small_blocks(spec) for name, spec in layers.items()}


def _in_small_blocks(spec: LayerSpec) -> LayerSpec:
    if isinstance(spec, MLASpec) and spec.compress_ratio > 1:
        return spec  # its blocks hold whole vectors
    if isinstance(spec, RingSpec):
        return dataclasses.replace(spec, page_bytes_padded=None)
    return dataclasses.replace(spec, block_size=SMALL_BLOCK, page_bytes_padded=None)


def may_waste_states(groups: Sequence[Group]) -> bool:
    """Returns whether states share blocks with attention, and over half of a page is unused."""
    states = {group.growth.stores == "state" for group in groups}
    if len(states) < 2:
        return False
    widest = max(group.page_bytes for group in groups)
    first = (group.specs[0] for group in groups)
    return any(2 * group.page_bytes < widest for group in groups) or any(
        2 * spec.data_bytes < spec.page_bytes for spec in first
    )


def remedy(small: Plan | None) -> str:
    """Returns the advice to use small blocks, for a refusal; "" unless they hold the request."""
    if small is None or longest_fit(small) < small.max_model_len:
        return ""
    return f", or give all layers block_size={SMALL_BLOCK} and no page_bytes_padded"


def warning(plan: Plan, small: Plan | None) -> str:
    """Returns a warning if the plan in small blocks runs over twice the requests, else ""."""
    if small is None:
        return ""
    length = plan.request_len or min(plan.max_model_len, SHORT_REQUEST)
    now, then = plan.requests_that_fit(length), small.requests_that_fit(length)
    if then <= 2 * now:
        return ""
    return (
        f"{now:,} requests of {length:,} tokens run at once, and {then:,} would with "
        f"block_size={SMALL_BLOCK} and no page_bytes_padded: blocks then grow to what states need"
    )
