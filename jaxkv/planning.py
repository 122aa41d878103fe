"""How many blocks a memory budget gives, how long a request fits, how many fit at once.

Knows groups, bytes and blocks. Takes the budget as an argument and never probes a
device; knows nothing of arrays or requests, and never imports jax.

Everything is counted in blocks, because blocks are what the allocator hands out: a
budget in bytes that ignores rounding or the null block admits requests which then wait
for ever. Block 0 is the null block: reserved, never handed out, the padding of tables.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jaxkv.checks import check_count, check_positive
from jaxkv.groups import Group, PoolLayout, make_groups, make_layout
from jaxkv.specs import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec, StateSpec

NULL_BLOCKS = 1  # block 0
MAX_SLOTS = 2**31 - 1  # slot ids are int32
WorkerLayers = Mapping[str, LayerSpec | SharedKVSpec | EncoderOnlySpec]


class KVCacheCapacityError(ValueError):
    """The pool cannot hold one request of the length asked for.

    needed_blocks: what such a request needs at most.
    usable_blocks: what the pool has, without the null block.
    longest_len: the longest request that fits; 0 when none does.
    plan: what was refused; its groups and figures hold, only the length does not fit.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_blocks: int,
        usable_blocks: int,
        longest_len: int,
        plan: "Plan",
    ):
        super().__init__(message)
        self.needed_blocks = needed_blocks
        self.usable_blocks = usable_blocks
        self.longest_len = longest_len
        self.plan = plan

    def __reduce__(self):  # from one process of a serving stack to another
        return functools.partial(type(self), **vars(self)), self.args


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A pool that is known to hold a request of ``max_model_len`` tokens.

    groups: over the layers of all workers.
    layouts: one per worker; they share group indices and block ids.
    num_blocks: blocks in every worker's pool, null block included.
    reserved_blocks: blocks that no request gets: the null block, attention sinks, and
      what the caller keeps back for copies on write.
    max_model_len: longest request the pool admits, at most the model's own length.
    limits: what the scheduler promised; the admission figure depends on it.
    memory_bytes: the budget of each worker.
    context_parallel: ranks among which the tokens of a request are divided.
    """

    groups: tuple[Group, ...]
    layouts: tuple[PoolLayout, ...]
    num_blocks: int
    reserved_blocks: int
    max_model_len: int
    limits: Limits
    memory_bytes: tuple[int, ...]
    context_parallel: int = 1

    @property
    def layout(self) -> PoolLayout:
        """The layout of the only worker."""
        if len(self.layouts) != 1:
            raise ValueError(f"this plan has {len(self.layouts)} workers; use plan.layouts[i]")
        return self.layouts[0]

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can get."""
        return max(0, self.num_blocks - self.reserved_blocks)

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Pool bytes that one block takes, on each worker."""
        return tuple(layout.bytes_per_block for layout in self.layouts)

    @property
    def unused_bytes_per_block(self) -> tuple[int, ...]:
        """Per group: bytes of a block that carry no data while the group owns it.

        Over all workers: padding of its pages, and slots in which it has no layer.
        """
        total = sum(self.bytes_per_block)
        per_group = zip(*(layout.groups for layout in self.layouts), strict=True)
        return tuple(
            total - sum(spec.data_bytes for group in groups for spec in group.specs)
            for groups in per_group
        )

    @property
    def groups_to_zero(self) -> tuple[bool, ...]:
        """Per group: must its fresh blocks be zeroed, on any worker?"""
        flags = [layout.groups_to_zero() for layout in self.layouts]
        return tuple(any(per_worker) for per_worker in zip(*flags, strict=True))

    def local_tokens(self, num_tokens: int) -> int:
        """Tokens of a request that one context-parallel rank keeps: ``ceil(L / ranks)``."""
        return -(-num_tokens // self.context_parallel)

    def blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Most blocks of each group that one request of this length ever holds."""
        local = self.local_tokens(num_tokens)
        return tuple(group.spec.max_blocks(local, self.limits) for group in self.groups)

    def admission_blocks(self, num_tokens: int) -> int:
        """What admission charges: ``sum_g max_blocks_g(L)`` with a full step in flight."""
        return sum(self.blocks_per_group(num_tokens))

    def steady_blocks(self, num_tokens: int) -> int:
        """What a request of this length holds while it decodes: ``sum_g max_blocks_g(L)``
        with one token in flight."""
        limits = dataclasses.replace(self.limits, max_in_flight_tokens=1)
        return _needed_blocks(self.groups, self.local_tokens(num_tokens), limits)

    def admits(self, num_tokens: int) -> bool:
        """Can a request of this length, alone, always get its blocks?"""
        check_count(num_tokens=num_tokens)
        return num_tokens <= self.max_model_len

    def requests_that_fit(self, num_tokens: int) -> int:
        """Requests of this length that run at once, one prefilling and the rest decoding.

        ``(usable - in_flight_share) // steady`` where the in-flight share, admission
        minus steady blocks, is counted once. Several that prefill side by side may each
        straddle a block more; then one is preempted, and waits.
        """
        check_positive(num_tokens=num_tokens)
        if num_tokens > self.max_model_len:
            return 0
        steady = self.steady_blocks(num_tokens)
        share = self.admission_blocks(num_tokens) - steady
        return max(0, self.usable_blocks - share) // max(steady, 1)

    def tokens_that_fit(self, num_tokens: int) -> int:
        """Tokens that run at once in requests of this length and one shorter one.

        ``R * L + r`` where R = `requests_that_fit` and r is the longest request, below L,
        whose admission need the blocks left over can hold.
        """
        count = self.requests_that_fit(num_tokens)
        if not count:
            return 0
        left = self.usable_blocks - count * self.steady_blocks(num_tokens)
        return count * num_tokens + self._longest(left, num_tokens - 1)

    def _longest(self, usable_blocks: int, max_model_len: int) -> int:
        ranks = self.context_parallel
        return longest_admitted(
            self.groups, usable_blocks, max_model_len, self.limits, context_parallel=ranks
        )

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
            "block": f"{max(self.bytes_per_block):,} bytes in {slots} slot{'s' * (slots != 1)}, "
            f"{_describe_unused(self.unused_bytes_per_block)}",
            "memory": f"{given:,} bytes ({_readable(given)}) given, {_difference(given - used)}",
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "longest request": f"{length:,} tokens: admission charges {need:,} blocks",
            "such requests": f"{fit:,} run at once, {steady:,} blocks each once they decode; "
            f"{self.tokens_that_fit(length):,} tokens in all",
            "zero new blocks": _describe_zeroing(self.groups_to_zero),
        }
        return "\n".join(f"{name:<16} {text}" for name, text in rows.items())


def _readable(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def _difference(num_bytes: int) -> str:
    return f"{num_bytes:,} left over" if num_bytes >= 0 else f"{-num_bytes:,} too few"


def _describe_unused(unused: Sequence[int]) -> str:
    least, most = min(unused), max(unused)
    if most == 0:
        return "all used"
    return f"{most:,} unused" if least == most else f"{least:,} to {most:,} unused by group"


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
    groups: Sequence[Group],
    usable_blocks: int,
    max_model_len: int,
    limits: Limits,
    *,
    context_parallel: int = 1,
) -> int:
    """Largest length in ``[0, max_model_len]`` whose need is at most ``usable_blocks``.

    Exact: the need of every group never falls as the length grows, so bisection finds
    the last length that fits. 0 when not even one token does.
    """
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _needed_blocks(groups, -(-middle // context_parallel), limits) <= usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def plan_cache(
    layers: WorkerLayers | Sequence[WorkerLayers],
    memory_bytes: int | Sequence[int],
    *,
    max_model_len: int,
    fit_max_model_len: bool = False,
    num_blocks_override: int | None = None,
    override_beyond_memory: bool = False,
    limits: Limits | None = None,
    grouping: str = "auto",
    context_parallel: int = 1,
    copy_on_write_blocks: int = 0,
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
      grouping: of `jaxkv.groups.make_groups`. ``"least_waste"`` takes the grouping that fits
        the longest request and, of those, charges a request of ``max_model_len`` the
        fewest bytes; it may make many groups.
      context_parallel: ranks among which each request's tokens are divided; for models
        whose every group keeps all tokens.
      copy_on_write_blocks: blocks to keep back so that a shared block can be copied
        before it is written even when requests hold everything else.

    Raises:
      KVCacheCapacityError: a request of ``max_model_len`` (with fitting: of one token)
        needs more blocks than there are.
      ValueError: memory, lengths or an override that make no sense; pages that cannot
        share a pool; a pool whose slots pass int32; context parallelism for groups
        that do not keep all tokens.
    """
    if not isinstance(layers, Mapping | Sequence):
        raise TypeError(f"layers must map names to specs, or list such mappings; got {layers!r}")
    workers = [_owned(w) for w in ([layers] if isinstance(layers, Mapping) else layers)]
    budgets = _check_budgets(memory_bytes, len(workers))
    check_positive(max_model_len=max_model_len, context_parallel=context_parallel)
    check_count(copy_on_write_blocks=copy_on_write_blocks)
    limits = Limits() if limits is None else limits
    if not isinstance(limits, Limits):
        raise TypeError(f"limits must be a Limits, got {limits!r}")

    def size(groups: Sequence[Group]) -> Plan:
        """The pool of a grouping, before anybody asks whether the length fits."""
        layouts = _lay_out(groups, workers)
        counted = _count_blocks(layouts, budgets, num_blocks_override, override_beyond_memory)
        return Plan(
            groups=tuple(groups),
            layouts=layouts,
            num_blocks=counted,
            reserved_blocks=NULL_BLOCKS
            + copy_on_write_blocks
            + sum(group.reserved_blocks for group in groups),
            max_model_len=max_model_len,
            limits=limits,
            memory_bytes=budgets,
            context_parallel=context_parallel,
        )

    def cost(groups: Sequence[Group]) -> tuple[int, int]:
        """First the length that fits, then the bytes that a request is charged."""
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
    return dataclasses.replace(plan, max_model_len=longest)


def _longest_fit(plan: Plan) -> int:
    if plan.num_blocks <= NULL_BLOCKS:
        return 0
    return plan._longest(plan.usable_blocks, plan.max_model_len)


def _lay_out(
    groups: Sequence[Group], workers: Sequence[tuple[dict[str, LayerSpec], dict[str, str]]]
) -> tuple[PoolLayout, ...]:
    """A layout per worker; ranks with the same layers have the same one."""
    known: dict[object, PoolLayout] = {}
    layouts = []
    for own, shared in workers:
        key = tuple(own), tuple(shared.items())
        if key not in known:
            known[key] = make_layout(groups, tuple(own), shared=shared)
        layouts.append(known[key])
    return tuple(layouts)


def _owned(worker: WorkerLayers) -> tuple[dict[str, LayerSpec], dict[str, str]]:
    """The layers of a worker that own a cache, and for those that share one, whose."""
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
    """The layers of all workers; tensor-parallel ranks name the same ones."""
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
    if not limits.max_encoder_tokens and any(group.spec.kind == "cross" for group in groups):
        raise ValueError(
            "limits.max_encoder_tokens=0, and layers with cross attention keep the encoder's "
            "tokens; say how many there are at most"
        )
    partial = [str(group) for group in groups if group.spec.kind not in ("full", "mla")]
    if context_parallel > 1 and partial:
        raise ValueError(
            f"context_parallel={context_parallel} divides groups that keep all tokens, and "
            f"{', '.join(partial)} do not; use context_parallel=1"
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
    """Blocks that every worker can hold, or the override."""
    sizes = [layout.bytes_per_block for layout in layouts]
    pairs = [(budget, size) for budget, size in zip(budgets, sizes, strict=True) if size]
    measured = min(budget // size for budget, size in pairs)
    if override is None:
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
