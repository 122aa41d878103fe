"""The kernel block size that every attention backend of a group accepts. No jax."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxkv._src.internal.checks import check_each, check_positive
from jaxkv._src.internal.text import shown
from jaxkv._src.layout._rows import tokens_per_row
from jaxkv._src.planning import Group
from jaxkv._src.specs import EncoderOnlySpec, LayerSpec, RingSpec, SharedKVSpec, StateSpec


@dataclasses.dataclass(frozen=True)
class AcceptedSizes:
    """Kernel block sizes, in tokens, that a backend accepts.

    exact: sizes accepted one by one.
    multiples_of: every multiple of it is accepted too; None: only `exact` is. A backend
      that accepts any size says ``multiples_of=1``.

    Raises:
      ValueError: neither is given, so that no size would do.
    """

    exact: tuple[int, ...] = ()
    multiples_of: int | None = None

    def __post_init__(self) -> None:
        check_each(int, "a number of tokens", exact=self.exact)
        object.__setattr__(self, "exact", tuple(self.exact))
        check_positive(**{f"exact[{i}]": size for i, size in enumerate(self.exact)})
        if self.multiples_of is not None:
            check_positive(multiples_of=self.multiples_of)
        elif not self.exact:
            raise ValueError(
                "AcceptedSizes accepts nothing; give exact sizes, or multiples_of=1 for any"
            )

    def accepts(self, tokens: int) -> bool:
        """Returns whether the backend works on blocks of that many tokens."""
        multiple = self.multiples_of is not None and tokens % self.multiples_of == 0
        return multiple or tokens in self.exact

    def __str__(self) -> str:
        listed = [str(size) for size in sorted(self.exact)]
        if self.multiples_of is not None:
            listed.append(f"multiples of {self.multiples_of}")
        return " or ".join(listed)


Backends = Mapping[str, AcceptedSizes]
Cacheless = EncoderOnlySpec | SharedKVSpec | None


def select_kernel_block_size(
    block_size: int, backends: Backends, *, compress_ratio: int = 1
) -> int:
    """Returns the largest kernel block, in tokens, that divides a block and suits every backend.

    It is the block size itself if all accept it, and else one of their exact sizes: if they
    all accepted a divisor as a multiple, they would accept the block size too.

    Args:
      block_size: tokens per block.
      backends: name -> accepted sizes; at least one.
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
    """Returns one kernel block size per group, at the group's own index.

    Args:
      groups_or_specs: the groups, or one layer's spec for each. All specs of a `Group` count,
        because layers that compress differently may share its block table.
      backends_per_group: for each group the backends that read it; for a group of states
        or without cache they are ignored and may be empty.

    Returns:
      Tokens per group: the block size for states, which are read whole; None for an
      entry that owns no cache (encoder-only, shared, None). Without such entries it is
      the ``kernel_block_sizes`` of `jaxkv.make_cache`.

    Raises:
      ValueError: as for `select_kernel_block_size`, with the index of the group; or lists
        of different lengths.
    """
    check_each(object, "a Group, a spec or None", groups_or_specs=groups_or_specs)
    check_each(object, "a mapping of backends", backends_per_group=backends_per_group)
    if len(groups_or_specs) != len(backends_per_group):
        raise ValueError(
            f"backends_per_group has {len(backends_per_group)} entries for "
            f"{len(groups_or_specs)} groups; give one each, empty for groups without cache"
        )
    pairs = zip(groups_or_specs, backends_per_group, strict=True)
    return [_for_entry(entry, backends, i) for i, (entry, backends) in enumerate(pairs)]


def _for_entry(entry: Group | LayerSpec | Cacheless, backends: Backends, index: int) -> int | None:
    if entry is None or isinstance(entry, EncoderOnlySpec | SharedKVSpec):
        return None
    if not isinstance(entry, Group | LayerSpec):
        raise TypeError(
            f"groups_or_specs[{index}]={shown(entry)} is neither a Group, a layer spec nor None"
        )
    specs = entry.specs if isinstance(entry, Group) else (entry,)
    if not specs:  # no layer of the group lives on this worker
        return None
    if isinstance(specs[0], StateSpec | RingSpec):
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
        raise TypeError(f"{where}backends must map names to AcceptedSizes, got {shown(backends)}")
    if not backends:  # "all of none" would accept anything, and hide a forgotten backend
        raise ValueError(
            f"{where}backends is empty; name the backends that read these blocks, or one with "
            "AcceptedSizes(multiples_of=1) if any size will do"
        )
    for name, sizes in backends.items():
        if not isinstance(sizes, AcceptedSizes):
            raise TypeError(f"{where}backends[{name!r}] must be AcceptedSizes, got {shown(sizes)}")


def _remedy(backends: Backends, compress_ratio: int) -> str:
    """Returns the block sizes that would do, as advice."""
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
