"""GPU kernels over plain arrays and block ids, independent of jaxkv.

Each kernel has two implementations: Mosaic GPU, for NVIDIA GPUs with the instructions of the kernel
(`default_implementation`), and XLA, which is the reference and runs everywhere.
``implementation=`` chooses: ``"mosaic_gpu"``, ``"xla"``, or with None Mosaic GPU for arguments that
it supports, if the program is compiled for a GPU that supports it, else XLA. ``"mosaic_gpu"``
raises NotImplementedError for other arguments, for a jax that is too old, and for a GPU that does
not run it; on other devices jax refuses to compile the kernel.

Kernels work inside ``jit``, ``lax.scan`` and ``shard_map`` (with ``check_vma=False``), and write in
place if their buffers are donated there. They ignore block ids that are out of range, and treat all
other blocks alike, including block 0.

- `zero_blocks` and `copy_blocks`: whole blocks of one array, or of every array in a tree.
- `write_rows`: rows of elements into pages, as when tokens are added to a cache.
- `write_token_heads`: keys and values in rows of `TokenHeadRow`, with a scale for each head.
- `paged_attention`: attention over keys and values in pages (`StridedPages`, `RequestPages`,
  `AttentionRule`, `Interleaving`, `PackedRow`, `SharedPrefixes`, `TokenHeadRow`).
- `gated_delta_rule`, `selective_scan` and `causal_conv1d`: recurrent layers over states in pages
  (`StatePages`, `RequestStates`, `Convolution`, `Replay`).
- `default_implementation`: the implementation that ``None`` stands for.
- `explain_default`: the same for each kernel, with its instructions, or with the reason for XLA.
- `import_mosaic`: imports what an implementation needs, before jax traces.
- `read_extents`, `read_cells`: read rows of an array that the same program writes in place, or
  parts of them.
"""

from pallas_kernels._capability import Implementation as Implementation
from pallas_kernels._capability import default_implementation as default_implementation
from pallas_kernels._capability import explain_default as explain_default
from pallas_kernels._capability import import_mosaic as import_mosaic
from pallas_kernels._copy_blocks import copy_blocks as copy_blocks
from pallas_kernels._in_place import read_cells as read_cells
from pallas_kernels._in_place import read_extents as read_extents
from pallas_kernels._paged_attention import AttentionRule as AttentionRule
from pallas_kernels._paged_attention import Interleaving as Interleaving
from pallas_kernels._paged_attention import LatentPacking as LatentPacking
from pallas_kernels._paged_attention import PackedRow as PackedRow
from pallas_kernels._paged_attention import RequestPages as RequestPages
from pallas_kernels._paged_attention import SharedPrefixes as SharedPrefixes
from pallas_kernels._paged_attention import StridedPages as StridedPages
from pallas_kernels._paged_attention import TokenHeadRow as TokenHeadRow
from pallas_kernels._paged_attention import paged_attention as paged_attention
from pallas_kernels._recurrence import Convolution as Convolution
from pallas_kernels._recurrence import Replay as Replay
from pallas_kernels._recurrence import RequestStates as RequestStates
from pallas_kernels._recurrence import StatePages as StatePages
from pallas_kernels._recurrence import causal_conv1d as causal_conv1d
from pallas_kernels._recurrence import gated_delta_rule as gated_delta_rule
from pallas_kernels._recurrence import selective_scan as selective_scan
from pallas_kernels._write_rows import write_rows as write_rows
from pallas_kernels._write_token_heads import write_token_heads as write_token_heads
from pallas_kernels._zero_blocks import zero_blocks as zero_blocks

__all__ = [
    "AttentionRule",
    "Convolution",
    "Implementation",
    "Interleaving",
    "LatentPacking",
    "PackedRow",
    "Replay",
    "RequestPages",
    "RequestStates",
    "SharedPrefixes",
    "StatePages",
    "StridedPages",
    "TokenHeadRow",
    "causal_conv1d",
    "copy_blocks",
    "default_implementation",
    "explain_default",
    "gated_delta_rule",
    "import_mosaic",
    "paged_attention",
    "read_cells",
    "read_extents",
    "selective_scan",
    "write_rows",
    "write_token_heads",
    "zero_blocks",
]
