"""Attention over keys and values in pages: the call, its kernels, and their task maps."""

from pallas_kernels._paged_attention.call import paged_attention as paged_attention
from pallas_kernels._paged_attention.packed import PackedRow as PackedRow
from pallas_kernels._paged_attention.packed import RowPacking as RowPacking
from pallas_kernels._paged_attention.pages import StridedPages as StridedPages
from pallas_kernels._paged_attention.tiles import Interleaving as Interleaving
from pallas_kernels._paged_attention.tiles import SharedPrefixes as SharedPrefixes

__all__ = [
    "Interleaving",
    "PackedRow",
    "RowPacking",
    "SharedPrefixes",
    "StridedPages",
    "paged_attention",
]
