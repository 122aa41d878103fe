"""Layers and plans from vLLM's `KVCacheConfig`. No jax."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from jaxkv._src.internal.checks import check_choice, check_positive
from jaxkv._src.interop.vllm._fields import get
from jaxkv._src.interop.vllm._specs import convert_spec
from jaxkv._src.layout import ORDERS, Order
from jaxkv._src.planning import Group, Plan, PoolLayout, ZeroPolicy, admit, make_layout
from jaxkv._src.specs import LayerSpec, Limits

Layers = dict[str, LayerSpec]


def layer_specs(
    kv_cache_config: object, *, kv_dtype: str | None = None, value_size: int | None = None
) -> Layers:
    """Returns the layers of a `KVCacheConfig`, in the order of its groups: name -> spec.

    Args:
      kv_cache_config: vLLM's object, or a mapping with its fields.
      kv_dtype: dtype of elements that vLLM calls fp8 and stores as bytes: "fp8_e4m3", which is
        its "fp8", or "fp8_e5m2".
      value_size: leading elements of a latent vector that attention reads as the value
        (``kv_lora_rank``), because vLLM's specs do not have it; by default the whole vector.

    Raises:
      TypeError: a missing field.
      ValueError: a group, a spec or a field without a counterpart in jaxkv; pages of another size
        than vLLM's.
    """
    groups = _read_worker(kv_cache_config, kv_dtype, value_size).groups
    return {name: spec for group in groups for name, spec in group.items()}


def plan_from_config(
    kv_cache_config: object | Sequence[object],
    *,
    max_model_len: int,
    fit_max_model_len: bool = False,
    limits: Limits | None = None,
    kv_dtype: str | None = None,
    value_size: int | None = None,
    shared: Mapping[str, str] | None = None,
    context_parallel: int = 1,
    zero_policy: ZeroPolicy = "when_needed",
) -> Plan:
    """Returns vLLM's plan as a `Plan`: the same groups, and the same number of blocks.

    The location of each layer inside a block may differ from vLLM's; see ``plan.layout``.

    Args:
      kv_cache_config: vLLM's object or a mapping with its fields; or a list of one per worker.
      max_model_len: longest request, in tokens: ``model_config.max_model_len`` of vLLM.
      fit_max_model_len: shorten ``max_model_len`` to the longest that fits. vLLM counts windows and
        chunks differently, and may admit a request that runs out of blocks.
      limits: the most that the scheduler asks of one step: ``max_in_flight_tokens`` of vLLM's
        config. None: the defaults of `Limits`.
      kv_dtype, value_size: as for `layer_specs`.
      shared: layer -> the layer whose cache it reads: ``shared_kv_cache_layers`` of vLLM.
      context_parallel: ``decode_context_parallel_size`` of vLLM.
      zero_policy: as for `jaxkv.plan_cache`.

    Raises:
      KVCacheCapacityError: a request of ``max_model_len`` needs more blocks than there are.
      TypeError: as for `layer_specs`.
      ValueError: as for `layer_specs`; workers that disagree.
    """
    several = isinstance(kv_cache_config, Sequence) and not isinstance(kv_cache_config, str)
    configs = list(kv_cache_config) if several else [kv_cache_config]
    check_positive(max_model_len=max_model_len)
    if context_parallel > 1:
        _check_sharded(configs)
    workers = [_read_worker(config, kv_dtype, value_size) for config in configs]
    groups = _merge([worker.groups for worker in workers])
    plan = Plan(
        groups=groups,
        layouts=_lay_out(groups, workers, shared or {}),
        num_blocks=_same("num_blocks", [worker.num_blocks for worker in workers]),
        reserved_blocks=1,
        max_model_len=max_model_len,
        limits=Limits() if limits is None else limits,
        memory_bytes=tuple(worker.memory_bytes for worker in workers),
        context_parallel=context_parallel,
        zero_policy=zero_policy,
    )
    return admit(plan, fit_max_model_len=fit_max_model_len, blocks_argument="num_blocks")


def _lay_out(
    groups: Sequence[Group], workers: Sequence["_Worker"], shared: Mapping[str, str]
) -> tuple[PoolLayout, ...]:
    """Makes a layout per worker; a layer that shares a cache is on the worker of its owner."""
    names = [[name for group in worker.groups for name in group] for worker in workers]
    if unknown := set(shared.values()).difference(*names):
        raise ValueError(
            f"shared names {sorted(unknown)}, which own no cache; name layers of kv_cache_groups"
        )
    owners = [{name: own for name, own in shared.items() if own in here} for here in names]
    return tuple(
        make_layout(groups, here, shared=own) for here, own in zip(names, owners, strict=True)
    )


def cache_order(kv_cache_config: object) -> Order:
    """Returns the physical order of vLLM's cache, for `jaxkv.make_cache`.

    Raises:
      ValueError: an unknown order.
    """
    name = get(kv_cache_config, "kv_cache_layout", None) or "LBNHC"  # vLLM's own default
    check_choice(tuple(ORDERS), kv_cache_layout=name)
    return name


class _Worker(NamedTuple):
    groups: list[Layers]
    num_blocks: int
    memory_bytes: int


def _read_worker(config: Any, kv_dtype: str | None, value_size: int | None) -> _Worker:
    if get(config, "hisparse_host_num_blocks", None) is not None:
        raise ValueError(
            "hisparse_host_num_blocks puts blocks into host memory, and jaxkv keeps all blocks on "
            "the device; plan without it"
        )
    num_blocks = get(config, "num_blocks")
    check_positive(num_blocks=num_blocks)
    given = [_given_specs(i, group) for i, group in enumerate(get(config, "kv_cache_groups"))]
    groups = [
        {
            name: convert_spec(name, spec, kv_dtype=kv_dtype, value_size=value_size)
            for name, spec in group.items()
        }
        for group in given
    ]
    tensors = list(get(config, "kv_cache_tensors"))
    aligned = {
        name
        for group in given
        for name, spec in group.items()
        if get(spec, "block_stride_alignment", None) is not None
    }
    _check_tensors(tensors, num_blocks, groups, aligned)
    sizes = [get(tensor, "size") for tensor in tensors] or [0]
    return _Worker(groups, num_blocks, _same("size of kv_cache_tensors", sizes))


def _check_tensors(
    tensors: Sequence[Any], num_blocks: int, groups: Sequence[Layers], aligned: Set[str]
) -> None:
    """Raises ValueError unless vLLM's tensors hold every layer, in pages of the same size.

    Args:
      tensors: vLLM's ``kv_cache_tensors``.
      num_blocks: blocks of the pool.
      groups: the layers of every group.
      aligned: layers whose blocks vLLM may pad to a larger stride.
    """
    layers = {name: spec for group in groups for name, spec in group.items()}
    for tensor in tensors:
        _check_pages(tensor, num_blocks, layers, aligned)
    placed = {name for tensor in tensors for name in get(tensor, "layers")}
    if placed != set(layers):
        raise ValueError(
            f"kv_cache_tensors has no {sorted(set(layers) - placed)}, which kv_cache_groups names"
        )


def _given_specs(index: int, group: Any) -> dict[str, Any]:
    """Returns vLLM's spec of every layer of a group."""
    if get(group, "host_resident", False):
        raise ValueError(
            f"kv_cache_groups[{index}] is host_resident, and jaxkv keeps all groups on the device; "
            "plan without such groups"
        )
    spec = get(group, "kv_cache_spec")
    each = get(spec, "kv_cache_specs", None)
    return {name: spec if each is None else each[name] for name in get(group, "layer_names")}


def _check_pages(tensor: Any, num_blocks: int, layers: Layers, aligned: Set[str]) -> None:
    """Raises ValueError unless the pages of a tensor's layers have the same size as in vLLM.

    A ``layer_stride`` spans all blocks of a layer where layers are outermost; else one page or, in
    the order BHLNC, one head of a page.
    """
    stride = get(tensor, "layer_stride")
    for name in get(tensor, "layers"):
        if name not in layers:
            raise ValueError(f"kv_cache_tensors names {name!r}, which is in no group")
        page, heads = layers[name].page_bytes, getattr(layers[name], "num_kv_heads", 1)
        padded = name in aligned and page < stride // num_blocks
        if page not in (stride // num_blocks, stride, stride * heads) and not padded:
            raise ValueError(
                f"{name!r} has pages of {page:,} bytes here, and a layer_stride of {stride:,} for "
                f"{num_blocks:,} blocks in vLLM's kv_cache_tensors; check the fields of its spec"
            )


def _merge(workers: Sequence[Sequence[Layers]]) -> tuple[Group, ...]:
    """Merges the groups of all workers; tensor-parallel ranks name the same layers."""
    count = _same("number of kv_cache_groups", [len(worker) for worker in workers])
    merged = []
    for index in range(count):
        layers: Layers = {}
        for worker in workers:
            for name, spec in worker[index].items():
                if layers.setdefault(name, spec) != spec:
                    raise ValueError(f"workers disagree about the spec of {name!r}")
        if len({spec.growth for spec in layers.values()}) != 1:
            raise ValueError(
                f"kv_cache_groups[{index}] must have layers that need the same blocks, got "
                f"{ {name: spec.kind for name, spec in layers.items()} }"
            )
        merged.append(Group(tuple(layers), tuple(layers.values())))
    if not merged:
        raise ValueError("kv_cache_groups is empty: no layer of this model keeps a cache")
    return tuple(merged)


def _check_sharded(configs: Sequence[object]) -> None:
    for config in configs:
        for index, group in enumerate(get(config, "kv_cache_groups")):
            if not get(get(group, "kv_cache_spec"), "dcp_sharded", False):
                raise ValueError(
                    f"kv_cache_groups[{index}] is not dcp_sharded, and context_parallel here "
                    "divides the tokens of all groups; use context_parallel=1"
                )


def _same(what: str, values: Sequence[int]) -> int:
    if len(set(values)) != 1:
        raise ValueError(f"{what} must be the same for all, got {list(values)}")
    return values[0]
