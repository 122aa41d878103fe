"""The bytes: raw buffers, typed reads and writes of one layer, zeroing of fresh blocks.

Knows the layout that a plan made and turns (layer, block id) into bytes. Knows nothing
of requests or tables: it is given slots and block ids.

A pool is ``uint8``, so that layers of different groups can lie on the same bytes: fp8
keys and values of one group, fp32 recurrent state of another. A token's row is K then V
of every head; the rows of a block follow each other, or the order that the pool was made
in says otherwise (`jaxkv.kernel_blocks`). Writes scatter the bytes of the new rows and
reads bitcast what they gathered, so that neither ever makes a typed copy of the pool, on
any backend.

All functions are jit-safe and return a new pool; donate the old one in your ``jit`` and
every one of them works in place. Slots and ids that are out of range, and the null
block, are never written and read as zeros.
"""

from jaxkv.pool._blocks import copy_blocks, zero_new_blocks
from jaxkv.pool._recurrent import read_state, write_state
from jaxkv.pool._state import KVPool, make_pool, make_sharded_pool, pool_shapes
from jaxkv.pool._tokens import quantize, read_rows, read_tokens, write_rows, write_tokens
from jaxkv.pool._views import describe_bytes, describe_layer, layer_view, with_layer_view

__all__ = [
    "KVPool",
    "copy_blocks",
    "describe_bytes",
    "describe_layer",
    "layer_view",
    "make_pool",
    "make_sharded_pool",
    "pool_shapes",
    "quantize",
    "read_rows",
    "read_state",
    "read_tokens",
    "with_layer_view",
    "write_rows",
    "write_state",
    "write_tokens",
    "zero_new_blocks",
]
