"""How many blocks a memory budget gives, how long a request fits, how many fit at once.

Knows groups, bytes and blocks. Takes the budget as an argument and never probes a
device; knows nothing of arrays or requests, and never imports jax.

Everything is counted in blocks, because blocks are what the allocator hands out: a
budget in bytes that ignores rounding or the null block admits requests which then wait
for ever. Block 0 is the null block: reserved, never handed out, the padding of tables.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxkv.checks import check_positive
from jaxkv.groups import Group, PoolLayout, make_groups, make_layout
from jaxkv.specs import LayerSpec, Limits, StateSpec

NULL_BLOCKS = 1  # block 0
MAX_SLOTS = 2**31 - 1  # slot ids are int32


class KVCacheCapacityError(ValueError):
    """The pool cannot hold one request of the length asked for.

    needed_blocks: what such a request needs at most.
    usable_blocks: what the pool has, without the null block.
    longest_len: the longest request that fits; 0 when none does.
    """

    def __init__(self, message: str, *, needed_blocks: int, usable_blocks: int, longest_len: int):
        super().__init__(message)
        self.needed_blocks = needed_blocks
        self.usable_blocks = usable_blocks
        self.longest_len = longest_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A pool that is known to hold a request of ``max_model_len`` tokens.

    groups: over the layers of all workers.
    layouts: one per worker; they share group indices and block ids.
    num_blocks: blocks in every worker's pool, null block included.
    max_model_len: longest request the pool admits, at most the model's own length.
    limits: what the scheduler promised; the admission figure depends on it.
    memory_bytes: the budget of each worker.
    """

    groups: tuple[Group, ...]
    layouts: tuple[PoolLayout, ...]
    num_blocks: int
    max_model_len: int
    limits: Limits
    memory_bytes: tuple[int, ...]

    @property
    def layout(self) -> PoolLayout:
        """The layout of the only worker."""
        if len(self.layouts) != 1:
            raise ValueError(f"this plan has {len(self.layouts)} workers; use plan.layouts[i]")
        return self.layouts[0]

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - NULL_BLOCKS

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Pool bytes that one block takes, on each worker."""
        return tuple(layout.bytes_per_block for layout in self.layouts)

    @property
    def groups_to_zero(self) -> tuple[bool, ...]:
        """Per group: must its fresh blocks be zeroed, on any worker?"""
        flags = [layout.groups_to_zero() for layout in self.layouts]
        return tuple(any(per_worker) for per_worker in zip(*flags, strict=True))

    def blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Most blocks of each group that one request of this length ever holds."""
        return tuple(group.spec.max_blocks(num_tokens, self.limits) for group in self.groups)

    def admission_blocks(self, num_tokens: int) -> int:
        """What admission charges: ``sum_g max_blocks_g(L)`` with a full step in flight."""
        return sum(self.blocks_per_group(num_tokens))

    def steady_blocks(self, num_tokens: int) -> int:
        """What a request of this length holds while it decodes, one token in flight."""
        limits = dataclasses.replace(self.limits, max_in_flight_tokens=1)
        return _needed_blocks(self.groups, num_tokens, limits)

    def admits(self, num_tokens: int) -> bool:
        return self.admission_blocks(num_tokens) <= self.usable_blocks

    def requests_that_fit(self, num_tokens: int) -> int:
        """Requests of this length that run at once, one prefilling and the rest decoding.

        ``(usable - in_flight_share) // steady`` where the in-flight share, admission
        minus steady blocks, is counted once: a step's tokens are in flight for all
        requests together, not for each of them.
        """
        steady = self.steady_blocks(num_tokens)
        share = self.admission_blocks(num_tokens) - steady
        return max(0, self.usable_blocks - share) // max(steady, 1)

    def __str__(self) -> str:
        """The plan in eight lines."""
        length = self.max_model_len
        need, steady = self.admission_blocks(length), self.steady_blocks(length)
        fit, given = self.requests_that_fit(length), sum(self.memory_bytes)
        used = sum(self.num_blocks * size for size in self.bytes_per_block)
        slots = max(len(layout.slots) for layout in self.layouts)
        rows = {
            "layers": f"{sum(len(group.layers) for group in self.groups)} with a cache",
            "groups": _describe_groups(self.groups),
            "block": f"{max(self.bytes_per_block):,} bytes in {slots} slot{'s' * (slots != 1)}",
            "memory": f"{given:,} bytes ({_readable(given)}) given, {given - used:,} left over",
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "longest request": f"{length:,} tokens: admission charges {need:,} blocks",
            "such requests": f"{fit:,} run at once, {steady:,} blocks each once they decode",
            "zero new blocks": _describe_zeroing(self.groups_to_zero),
        }
        return "\n".join(f"{name:<16} {text}" for name, text in rows.items())


def _readable(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def _describe_groups(groups: Sequence[Group]) -> str:
    counts: dict[str, int] = {}
    for group in groups:
        counts[str(group)] = counts.get(str(group), 0) + 1
    return " + ".join(f"{count} x ({name})" for name, count in counts.items())


def _describe_zeroing(groups_to_zero: Sequence[bool]) -> str:
    if not any(groups_to_zero):
        return "no: every block keeps one meaning"
    listed = ", ".join(str(i) for i, needed in enumerate(groups_to_zero) if needed)
    return f"yes: groups {listed} overlay bytes of another meaning"


def _needed_blocks(groups: Sequence[Group], num_tokens: int, limits: Limits) -> int:
    return sum(group.spec.max_blocks(num_tokens, limits) for group in groups)


def longest_admitted(
    groups: Sequence[Group], usable_blocks: int, max_model_len: int, limits: Limits
) -> int:
    """Largest length in ``[0, max_model_len]`` whose need is at most ``usable_blocks``.

    Exact: the need of every group never falls as the length grows, so bisection finds
    the last length that fits. 0 when not even one token does.
    """
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _needed_blocks(groups, middle, limits) <= usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def plan_cache(
    layers: Mapping[str, LayerSpec] | Sequence[Mapping[str, LayerSpec]],
    memory_bytes: int | Sequence[int],
    *,
    max_model_len: int,
    fit_max_model_len: bool = False,
    num_blocks_override: int | None = None,
    override_beyond_memory: bool = False,
    limits: Limits | None = None,
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
      limits: what the scheduler promises; None: `Limits` defaults.

    Raises:
      KVCacheCapacityError: a request of ``max_model_len`` (with fitting: of one token)
        needs more blocks than there are.
      ValueError: memory, lengths or an override that make no sense; pages that cannot
        share a pool; a pool whose slots pass int32.
    """
    workers = [layers] if isinstance(layers, Mapping) else list(layers)
    budgets = _check_budgets(memory_bytes, len(workers))
    check_positive(max_model_len=max_model_len)
    limits = limits or Limits()
    groups = make_groups(_merge(workers))
    layouts = tuple(make_layout(groups, tuple(worker)) for worker in workers)
    num_blocks = _count_blocks(layouts, budgets, num_blocks_override, override_beyond_memory)
    _check_slots(groups, num_blocks)
    usable = num_blocks - NULL_BLOCKS
    longest = longest_admitted(groups, usable, max_model_len, limits)
    if longest < (1 if fit_max_model_len else max_model_len):
        raise _capacity_error(groups, usable, max_model_len, longest, limits)
    return Plan(
        groups=groups,
        layouts=layouts,
        num_blocks=num_blocks,
        max_model_len=longest,
        limits=limits,
        memory_bytes=budgets,
    )


def _merge(workers: Sequence[Mapping[str, LayerSpec]]) -> dict[str, LayerSpec]:
    """The layers of all workers; tensor-parallel ranks name the same ones."""
    merged: dict[str, LayerSpec] = {}
    for worker in workers:
        for name, spec in worker.items():
            if merged.setdefault(name, spec) != spec:
                raise ValueError(f"layers: workers disagree about the spec of {name!r}")
    if not merged:
        raise ValueError("layers is empty: no layer of this model keeps a cache to plan")
    return merged


def _check_budgets(memory_bytes: int | Sequence[int], num_workers: int) -> tuple[int, ...]:
    several = isinstance(memory_bytes, Sequence)
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
    """Blocks that every worker can hold, or the override."""
    sizes = [layout.bytes_per_block for layout in layouts]
    pairs = [(budget, size) for budget, size in zip(budgets, sizes, strict=True) if size]
    measured = min(budget // size for budget, size in pairs)
    if override is None:
        if measured <= NULL_BLOCKS:
            raise ValueError(
                f"memory_bytes gives {measured} blocks, and a pool needs at least 2 (the null "
                f"block and one more); give at least {2 * max(sizes):,} bytes"
            )
        return measured
    check_positive(num_blocks_override=override)
    if override <= NULL_BLOCKS:
        raise ValueError(
            f"num_blocks_override={override} leaves no usable block beside the null block; "
            "use at least 2"
        )
    if override > measured and not beyond_memory:
        raise ValueError(
            f"num_blocks_override={override} is more than the {measured} blocks that "
            "memory_bytes can hold; lower it, or pass override_beyond_memory=True"
        )
    return override


def _check_slots(groups: Sequence[Group], num_blocks: int) -> None:
    sizes = [group.block_size for group in groups if not isinstance(group.spec, StateSpec)]
    if num_blocks * max(sizes, default=0) > MAX_SLOTS:
        raise ValueError(
            f"a pool of {num_blocks:,} blocks of {max(sizes)} tokens has slots beyond int32; "
            f"set num_blocks_override to at most {MAX_SLOTS // max(sizes):,}"
        )


def _capacity_error(
    groups: Sequence[Group], usable: int, max_model_len: int, longest: int, limits: Limits
) -> KVCacheCapacityError:
    needed = _needed_blocks(groups, max_model_len, limits)
    advice = (
        f"set max_model_len to at most {longest:,} or give memory for {needed + NULL_BLOCKS:,} "
        "blocks"
        if longest
        else "give more memory, or lower limits.max_in_flight_tokens"
    )
    return KVCacheCapacityError(
        f"max_model_len={max_model_len:,} needs {needed:,} blocks and the pool has {usable:,} "
        f"usable ones; {advice}",
        needed_blocks=needed,
        usable_blocks=usable,
        longest_len=longest,
    )
