"""Attention over keys and values in pages: the call, its kernels, and their task maps."""

from pallas_kernels._paged_attention.call import paged_attention as paged_attention
from pallas_kernels._paged_attention.packed import LatentPacking as LatentPacking
from pallas_kernels._paged_attention.packed import PackedRow as PackedRow
from pallas_kernels._paged_attention.pages import StridedPages as StridedPages
from pallas_kernels._paged_attention.requests import Interleaving as Interleaving
from pallas_kernels._paged_attention.requests import RequestPages as RequestPages
from pallas_kernels._paged_attention.requests import SharedPrefixes as SharedPrefixes
from pallas_kernels._paged_attention.rule import AttentionRule as AttentionRule
from pallas_kernels._paged_attention.token_heads import TokenHeadRow as TokenHeadRow
