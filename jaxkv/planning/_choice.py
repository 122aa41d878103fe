"""Groupings and block sizes, compared by the requests that run at once. No jax."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv.planning._admission import longest_fit
from jaxkv.planning._grouping import Grouping, make_groups
from jaxkv.planning._layout import Group
from jaxkv.planning._pages import Layers, hold_states, unifiable
from jaxkv.planning._plan import Plan
from jaxkv.planning._text import GroupingFigures
from jaxkv.planning._workers import Worker
from jaxkv.specs import FullAttentionSpec, LayerSpec, MLASpec, StateSpec

Size = Callable[[Sequence[Group]], Plan]  # the plan of a grouping, admitted or not
Groups = tuple[Group, ...]

SMALL_BLOCK = 16  # tokens; next to states, the planner enlarges such blocks as states need it
SHORT_REQUEST = 8192  # tokens of a usual request, where nobody says


def choose_groups(
    layers: Layers, grouping: Grouping, request_len: int | None, size: Size, *, overridden: bool
) -> dict[str, Groups]:
    """Returns groupings by name: the one chosen, and then what it was chosen against.

    Args:
      layers: of all workers.
      grouping, request_len: as for `plan_cache`.
      size: makes the plan of a grouping.
      overridden: whether the blocks are counted already. Then more requests at once only mean
        larger blocks, and groupings compare by the bytes of a request.
    """

    def cost(groups: Sequence[Group]) -> tuple[int, ...]:
        """Orders groupings: the longest request, then requests at once, bytes of each, groups."""
        plan = size(groups)
        longest = longest_fit(plan)
        length = min(longest, request_len or longest) or plan.max_model_len
        requests = 0 if overridden or not longest else plan.requests_that_fit(length)
        bytes_each = sum(plan.bytes_per_block) * plan.steady_blocks(length)
        return -longest, -requests, bytes_each, len(groups)

    compares = not overridden and (
        grouping == "least_waste" or (grouping == "auto" and request_len)
    )
    usual: Grouping = "rule" if compares and unifiable(hold_states(layers)) else "packed"
    if grouping == "least_waste":
        least = {grouping: make_groups(layers, grouping=grouping, cost=cost)}
        return least | {usual: make_groups(layers, grouping=usual)} if compares else least
    if compares and usual == "rule":
        named = {name: make_groups(layers, grouping=name) for name in ("rule", "packed")}
        # Of equals the rule: the fewest bytes do not matter then, and vLLM has the same groups.
        return dict(sorted(named.items(), key=lambda item: cost(item[1])[:2]))
    return {grouping: make_groups(layers, grouping=grouping)}


def requests_at_once(plan: Plan, num_tokens: int) -> int:
    """Returns the requests of a length that run at once; 0 where not even one fits."""
    fits = num_tokens <= longest_fit(plan)
    return plan.requests_that_fit(num_tokens) if fits else 0


def compare(plan: Plan, groupings: dict[str, Groups], size: Size) -> tuple[GroupingFigures, ...]:
    """Returns what each grouping buys, the chosen one first; () if there is nothing to compare."""
    if len(groupings) < 2 or len(plan.groups) < 2:
        return ()
    figures = []
    for name, groups in groupings.items():
        other = size(groups)
        requests = requests_at_once(other, plan.compared_len)
        figures.append(GroupingFigures(name, len(groups), requests, longest_fit(other)))
    return tuple(figures)


def in_small_blocks(workers: Sequence[Worker]) -> list[Worker]:
    """Returns the layers in blocks that may grow to hold a state, and without padding."""
    return [
        worker._replace(own={name: _in_small_blocks(spec) for name, spec in worker.own.items()})
        for worker in workers
    ]


def _in_small_blocks(spec: LayerSpec) -> LayerSpec:
    grows = isinstance(spec, FullAttentionSpec | StateSpec | MLASpec)
    if not grows or (isinstance(spec, MLASpec) and spec.compress_ratio > 1):
        return spec
    return dataclasses.replace(spec, block_size=SMALL_BLOCK, page_bytes_padded=None)


def may_waste_states(groups: Sequence[Group]) -> bool:
    """Returns whether states share blocks with attention and half of a block may lie unused."""
    states = {group.growth.stores == "state" for group in groups}
    if len(states) < 2:
        return False
    widest = max(group.page_bytes for group in groups)
    first = (group.specs[0] for group in groups)
    return any(2 * group.page_bytes < widest for group in groups) or any(
        2 * spec.data_bytes < spec.page_bytes for spec in first
    )


def remedy(other: Plan | None) -> str:
    """Returns the end of a refusal's text: smaller blocks, where they hold the longest request."""
    if other is None or longest_fit(other) < other.max_model_len:
        return ""
    return f", or give all layers block_size={SMALL_BLOCK} and no page_bytes_padded"


def warn(plan: Plan, other: Plan) -> str:
    """Returns a warning if another plan, of small blocks, runs over twice the requests."""
    length = plan.request_len or min(plan.max_model_len, SHORT_REQUEST)
    now, then = requests_at_once(plan, length), requests_at_once(other, length)
    if then <= 2 * now:
        return ""
    return (
        f"{now:,} requests of {length:,} tokens run at once, and {then:,} would with "
        f"block_size={SMALL_BLOCK} and no page_bytes_padded: blocks then grow to what states need"
    )
