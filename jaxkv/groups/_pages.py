"""Pages of one size: larger blocks where that divides, padding where it does not."""

import dataclasses
import math
from collections.abc import Mapping

from jaxkv.checks import check_positive
from jaxkv.specs import FullAttentionSpec, LayerSpec, MLASpec, StateSpec

Layers = Mapping[str, LayerSpec]


def unify_pages(layers: Layers) -> dict[str, LayerSpec]:
    """Gives every layer a page of the same bytes, the largest among them.

    A smaller page grows by taking more tokens per block where that divides; state
    pages, and attention pages that do not divide, are padded instead.

    Raises:
      ValueError: no layers, or an MLA page that neither divides nor may be padded.
    """
    if not layers:
        raise ValueError("layers is empty: there is no page to unify")
    page_bytes = max(spec.page_bytes for spec in layers.values())
    unified: dict[LayerSpec, LayerSpec] = {}  # models repeat few specs over many layers
    for name, spec in layers.items():
        if spec not in unified:
            unified[spec] = with_page(name, spec, page_bytes)
    return {name: unified[spec] for name, spec in layers.items()}


def with_page(name: str, spec: LayerSpec, page_bytes: int) -> LayerSpec:
    if spec.page_bytes == page_bytes:
        return spec
    if scales_to(spec, page_bytes):
        return dataclasses.replace(spec, block_size=spec.block_size * page_bytes // spec.page_bytes)
    if isinstance(spec, MLASpec):
        raise ValueError(
            f"layers[{name!r}]: its {spec.page_bytes}-byte MLA page does not divide the "
            f"{page_bytes}-byte page of the pool, and MLA kernels take no padding; choose a "
            'block_size whose page divides it, or grouping="packed"'
        )
    return dataclasses.replace(spec, page_bytes_padded=page_bytes)


def scales_to(spec: LayerSpec, page_bytes: int) -> bool:
    """Can the page be reached by taking more tokens per block?"""
    grows = not isinstance(spec, StateSpec) and spec.page_bytes == spec.data_bytes
    return grows and page_bytes % spec.page_bytes == 0


def unifiable(layers: Layers) -> bool:
    page_bytes = max(spec.page_bytes for spec in layers.values())
    return all(
        spec.page_bytes == page_bytes or not isinstance(spec, MLASpec)
        for spec in set(layers.values())
        if not scales_to(spec, page_bytes)
    )


def hybrid_block_size(spec: FullAttentionSpec | MLASpec, state_page_bytes: int) -> int:
    """Smallest multiple of the attention block whose page holds a whole state page.

    State pages are far larger than 16 tokens of keys and values; to let both overlay
    one pool the attention block grows: ``a * ceil(state_page / (a * token_bytes))``
    with ``a`` the block size asked for (for MLA, its least common multiple with 128).
    """
    check_positive(state_page_bytes=state_page_bytes)
    is_mla = isinstance(spec, MLASpec)
    step = math.lcm(spec.block_size, 128) if is_mla else spec.block_size
    step_bytes = dataclasses.replace(spec, block_size=step, page_bytes_padded=None).data_bytes
    return step * -(-state_page_bytes // step_bytes)
