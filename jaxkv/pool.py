"""The bytes of a cache: typed reads and writes of one layer, views, zeroing, copies.

The pool is ``uint8``, so that layers of different groups can use the same bytes: fp8 keys and
values of one group, fp32 recurrent states of another. Writes scatter the bytes of new rows, and
reads bitcast what they gathered, so neither makes a typed copy of the pool on any backend.

Functions take the cache, a layer's name and the step's batch, and look up the layer's group, block
size and scales. They work inside ``jit`` and return a new cache; where the old one is donated, they
work in place. Padding and slots outside the pool are never written, and read as zeros.

`zero_blocks` and `copy_blocks` do what `jaxkv.apply_step` does, for schedulers without uploads, and
`quantize` converts values as `jaxkv.write_tokens` does. `jaxkv.HostBlocks` copies whole blocks to
host memory and back, and raises `TransferError` if a copy fails. `describe_blocks` returns the
`BlockDescriptors` of blocks, for transfers between caches (`BlockManager.export_blocks`).
"""

from jaxkv._src.cache import describe_blocks
from jaxkv._src.layout import BlockDescriptors
from jaxkv._src.offload.host_blocks import TransferError
from jaxkv._src.pool import (
    copy_blocks,
    describe_layer,
    quantize,
    zero_blocks,
)

__all__ = [
    "BlockDescriptors",
    "TransferError",
    "copy_blocks",
    "describe_blocks",
    "describe_layer",
    "quantize",
    "zero_blocks",
]
