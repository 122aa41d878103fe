"""The kernel block size that every attention backend of a group accepts.

Knows sizes in tokens and what backends say of themselves. Knows nothing of layouts:
whether a view of such blocks exists is `CacheLayout.view`'s to say.
"""

import math
from collections.abc import Mapping, Sequence

from jaxkv.checks import check_positive
from jaxkv.groups import Group
from jaxkv.kernel_blocks._accepted import AcceptedSizes
from jaxkv.kernel_blocks._rows import tokens_per_row
from jaxkv.specs import EncoderOnlySpec, LayerSpec, SharedKVSpec, StateSpec

Backends = Mapping[str, AcceptedSizes]
Cacheless = EncoderOnlySpec | SharedKVSpec | None


def select_kernel_block_size(
    block_size: int, backends: Backends, *, compress_ratio: int = 1
) -> int:
    """The largest kernel block, in tokens, that divides a block and suits every backend.

    That is the block size itself if all accept it, and else one of the sizes that they
    list: a multiple that all accept would make the block size one, too.

    Args:
      block_size: tokens per block.
      backends: name -> what it accepts; at least one.
      compress_ratio: tokens per stored row; a kernel block holds whole rows.

    Raises:
      ValueError: no size suits all of them; the message names what each accepts and the
        block sizes that would do.
    """
    return _select(block_size, backends, compress_ratio, "")


def select_kernel_block_sizes(
    groups_or_specs: Sequence[Group | LayerSpec | Cacheless],
    backends_per_group: Sequence[Backends],
) -> list[int | None]:
    """One kernel block size per group, at the group's own index.

    Args:
      groups_or_specs: what each group stores. All specs of a `Group` count: a block
        table is common to layers that compress differently.
      backends_per_group: for each group the backends that read it; for a group of states
        or without cache they are not looked at and may be empty.

    Returns:
      Tokens per group: the block size for states, which are read whole; None for an
      entry that owns no cache (encoder-only, shared, None). Without such entries it is
      the ``kernel_block_sizes`` of `make_block_tables`.

    Raises:
      ValueError: as `select_kernel_block_size`, with the index of the group; or lists
        of different lengths.
    """
    if len(groups_or_specs) != len(backends_per_group):
        raise ValueError(
            f"backends_per_group has {len(backends_per_group)} entries for "
            f"{len(groups_or_specs)} groups; give one each, empty for groups without cache"
        )
    pairs = zip(groups_or_specs, backends_per_group, strict=True)
    return [_of_group(entry, backends, i) for i, (entry, backends) in enumerate(pairs)]


def _of_group(entry: Group | LayerSpec | Cacheless, backends: Backends, index: int) -> int | None:
    if entry is None or isinstance(entry, EncoderOnlySpec | SharedKVSpec):
        return None
    if not isinstance(entry, Group | LayerSpec):
        raise TypeError(
            f"groups_or_specs[{index}]={entry!r} is neither a Group, a layer spec nor None"
        )
    specs = entry.specs if isinstance(entry, Group) else (entry,)
    if not specs:  # no layer of the group lives on this worker
        return None
    if isinstance(specs[0], StateSpec):
        return specs[0].block_size
    return _select(specs[0].block_size, backends, tokens_per_row(specs), f"group {index}: ")


def _select(block_size: int, backends: Backends, compress_ratio: int, where: str) -> int:
    check_positive(block_size=block_size, compress_ratio=compress_ratio)
    _check_backends(backends, where)
    if block_size % compress_ratio:
        raise ValueError(
            f"{where}block_size={block_size} is not a multiple of "
            f"compress_ratio={compress_ratio}; a block must hold whole rows"
        )
    accepted = backends.values()
    listed = sorted({size for sizes in accepted for size in sizes.exact}, reverse=True)
    for size in (block_size, *listed):
        whole = block_size % size == 0 and size % compress_ratio == 0
        if whole and all(sizes.accepts(size) for sizes in accepted):
            return size
    stated = "; ".join(f"{name} accepts {sizes}" for name, sizes in backends.items())
    rows = f" with whole rows of {compress_ratio} tokens" if compress_ratio > 1 else ""
    raise ValueError(
        f"{where}no kernel block size divides block_size={block_size}{rows} and suits all "
        f"backends ({stated}); {_remedy(backends, compress_ratio)}"
    )


def _check_backends(backends: Backends, where: str) -> None:
    if not isinstance(backends, Mapping):
        raise TypeError(f"{where}backends must map names to AcceptedSizes, got {backends!r}")
    if not backends:  # "all of none" would accept anything, and hide a forgotten backend
        raise ValueError(
            f"{where}backends is empty; name the backends that read these blocks, or one with "
            "AcceptedSizes(multiples_of=1) if any size will do"
        )
    for name, sizes in backends.items():
        if not isinstance(sizes, AcceptedSizes):
            raise TypeError(f"{where}backends[{name!r}] must be AcceptedSizes, got {sizes!r}")


def _remedy(backends: Backends, compress_ratio: int) -> str:
    """Block sizes that would do, as advice."""
    accepted = backends.values()
    steps = {size for sizes in accepted for size in sizes.exact}
    steps.add(math.lcm(compress_ratio, *(sizes.multiples_of or 1 for sizes in accepted)))
    common = sorted(
        size
        for size in steps
        if size % compress_ratio == 0 and all(sizes.accepts(size) for sizes in accepted)
    )
    if not common:
        return "no block size suits them together: change a backend"
    listed = " or ".join(map(str, common))
    return f"choose a block_size that is a multiple of {listed}, or change a backend"
