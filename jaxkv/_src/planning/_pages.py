"""Pages of one size: larger blocks where that divides, padding where it does not. No jax."""

import dataclasses
import math
from collections.abc import Mapping

from jaxkv._src.internal.checks import check_kind, check_positive
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, MLASpec, RingSpec, StateSpec

Layers = Mapping[str, LayerSpec]


def unify_pages(layers: Layers) -> dict[str, LayerSpec]:
    """Gives every layer a page of the same bytes, the largest among them.

    Attention blocks first grow until their page holds a whole state page (`hybrid_block_size`).
    Then a smaller page grows by taking more tokens per block where that divides; state pages, rings
    and attention pages that do not divide, are padded instead.

    Args:
      layers: layer name -> spec.

    Raises:
      ValueError: no layers, or an MLA page that neither divides nor may be padded.
    """
    if not layers:
        raise ValueError("layers is empty: there is no page to unify")
    return unify_grown(grow_for_states(layers))


def unify_grown(layers: Layers) -> dict[str, LayerSpec]:
    """Unifies the pages of layers from `grow_for_states`."""
    page_bytes = max(spec.page_bytes for spec in layers.values())
    unified: dict[LayerSpec, LayerSpec] = {}  # models repeat few specs over many layers
    for name, spec in layers.items():
        if spec not in unified:
            unified[spec] = _with_page(name, spec, page_bytes)
    return {name: unified[spec] for name, spec in layers.items()}


def grow_for_states(layers: Layers) -> dict[str, LayerSpec]:
    """Enlarges attention blocks until their page holds the largest page of a state or a ring.

    States in blocks of the same size get the new size too, so that states kept at block
    boundaries stay aligned with attention. Attention pages that the caller padded stay as they
    are.
    """
    specs = set(layers.values())
    states = {spec for spec in specs if isinstance(spec, StateSpec)}
    fixed = {spec for spec in specs if isinstance(spec, StateSpec | RingSpec)}
    largest = max((spec.page_bytes for spec in fixed), default=0)
    grown: dict[LayerSpec, LayerSpec] = {spec: spec for spec in specs}
    sizes: dict[int, int] = {}  # given block size -> the largest that it became
    for spec in specs - fixed:
        is_attention = isinstance(spec, FullAttentionSpec | MLASpec)
        if is_attention and spec.page_bytes_padded is None and spec.page_bytes < largest:
            size = hybrid_block_size(spec, largest)
            grown[spec] = dataclasses.replace(spec, block_size=size)
            sizes[spec.block_size] = max(size, sizes.get(spec.block_size, 0))
    for spec in states:
        if spec.block_size in sizes:
            grown[spec] = dataclasses.replace(spec, block_size=sizes[spec.block_size])
    return {name: grown[spec] for name, spec in layers.items()}


def _with_page(name: str, spec: LayerSpec, page_bytes: int) -> LayerSpec:
    if spec.page_bytes == page_bytes:
        return spec
    if _scales_to(spec, page_bytes):
        return dataclasses.replace(spec, block_size=spec.block_size * page_bytes // spec.page_bytes)
    if isinstance(spec, MLASpec):
        raise ValueError(
            f"layers[{name!r}]: its {spec.page_bytes}-byte MLA page does not divide the "
            f"{page_bytes}-byte page of the pool, and MLA kernels take no padding; choose a "
            'block_size whose page divides it, or grouping="packed"'
        )
    return dataclasses.replace(spec, page_bytes_padded=page_bytes)


def _scales_to(spec: LayerSpec, page_bytes: int) -> bool:
    """Returns whether a block of more tokens has exactly this page."""
    grows = not isinstance(spec, StateSpec | RingSpec) and spec.page_bytes == spec.data_bytes
    return grows and page_bytes % spec.page_bytes == 0


def unifiable(layers: Layers) -> bool:
    """Returns whether `unify_grown` accepts the layers."""
    page_bytes = max(spec.page_bytes for spec in layers.values())
    return all(
        spec.page_bytes == page_bytes or not isinstance(spec, MLASpec)
        for spec in set(layers.values())
        if not _scales_to(spec, page_bytes)
    )


def hybrid_block_size(spec: FullAttentionSpec | MLASpec, state_page_bytes: int) -> int:
    """Returns the smallest multiple of the attention block whose data fill a whole state page.

    A state page is far larger than 16 tokens of keys and values. So that both can overlay one
    pool, the attention block grows to ``a * ceil(state_page / (a * token_bytes))``, where ``a``
    is the given block size (for MLA, its least common multiple with 128), as in vLLM 0.33.

    Args:
      spec: the spec of the attention layer.
      state_page_bytes: bytes of the largest state page.
    """
    check_kind((FullAttentionSpec, MLASpec), "an attention spec", spec=spec)
    check_positive(state_page_bytes=state_page_bytes)
    is_mla = isinstance(spec, MLASpec)
    step = math.lcm(spec.block_size, 128) if is_mla else spec.block_size
    step_bytes = dataclasses.replace(spec, block_size=step, page_bytes_padded=None).data_bytes
    return step * cdiv(state_page_bytes, step_bytes)
