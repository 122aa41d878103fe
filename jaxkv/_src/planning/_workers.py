"""The layers of each worker: reading, merging, and laying them out. No jax."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxkv._src.internal.checks import check_kind, check_positive
from jaxkv._src.planning._layout import Group, PoolLayout, make_layout
from jaxkv._src.specs import EncoderOnlySpec, LayerSpec, SharedKVSpec

WorkerLayers = Mapping[str, LayerSpec | SharedKVSpec | EncoderOnlySpec]


class Worker(NamedTuple):
    """The layers of one worker.

    own: layers that own a cache: name -> spec.
    shared: layers that own none: name -> the layer whose cache they read.
    """

    own: dict[str, LayerSpec]
    shared: dict[str, str]


def read_workers(layers: WorkerLayers | Sequence[WorkerLayers]) -> list[Worker]:
    """Sorts the layers of every worker into those that own a cache and those that share one."""
    if not isinstance(layers, (Mapping, Sequence)):
        raise TypeError(f"layers must map names to specs, or list such mappings; got {layers!r}")
    given = [layers] if isinstance(layers, Mapping) else layers
    if not given:
        raise ValueError("layers lists no worker; give the layers of one at least")
    known = {id(worker): _read(worker) for worker in {id(w): w for w in given}.values()}
    return [known[id(worker)] for worker in given]  # a mapping given for several ranks is read once


def _read(worker: WorkerLayers) -> Worker:
    if not isinstance(worker, Mapping):
        raise TypeError(f"layers must map names to specs, or list such mappings; got {worker!r}")
    own: dict[str, LayerSpec] = {}
    shared: dict[str, str] = {}
    for name, spec in worker.items():
        check_kind(str, "mapped from names, which are str", layers=name)
        match spec:
            case LayerSpec():
                own[name] = spec
            case SharedKVSpec():
                shared[name] = spec.layer
            case EncoderOnlySpec():
                pass
            case _:
                raise TypeError(
                    f"layers[{name!r}] must be a layer spec, such as FullAttentionSpec(...), got "
                    f"{spec!r}"
                )
    return Worker(own, shared)


def merge_workers(workers: Sequence[Worker]) -> dict[str, LayerSpec]:
    """Merges the layers of all workers; tensor-parallel ranks name the same ones."""
    merged: dict[str, LayerSpec] = {}
    for own in {id(worker.own): worker.own for worker in workers}.values():
        for name, spec in own.items():
            known = merged.setdefault(name, spec)
            if known is not spec and known != spec:
                raise ValueError(f"layers: workers disagree about the spec of {name!r}")
    if not merged:
        raise ValueError("layers is empty: no layer of this model keeps a cache to plan")
    return merged


def lay_out_workers(groups: Sequence[Group], workers: Sequence[Worker]) -> tuple[PoolLayout, ...]:
    """Makes a layout per worker; ranks with the same layers share one."""
    known: dict[object, PoolLayout] = {}
    layouts = []
    for own, shared in workers:
        key = tuple(own), tuple(shared.items())
        if key not in known:
            known[key] = make_layout(groups, tuple(own), shared=shared)
        layouts.append(known[key])
    return tuple(layouts)


def check_budgets(memory_bytes: int | Sequence[int], num_workers: int) -> tuple[int, ...]:
    """Returns the memory budget of each worker, in bytes."""
    several = isinstance(memory_bytes, Sequence) and not isinstance(memory_bytes, str)
    budgets = tuple(memory_bytes) if several else (memory_bytes,)
    if len(budgets) != num_workers:
        raise ValueError(
            f"memory_bytes has {len(budgets)} entries for {num_workers} workers; give one for each"
        )
    for budget in budgets:
        check_positive(memory_bytes=budget)
    return budgets


def count_blocks(
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
