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

from jaxkv.pool._blocks import copy_blocks as copy_blocks
from jaxkv.pool._blocks import zero_new_blocks as zero_new_blocks
from jaxkv.pool._recurrent import read_state as read_state
from jaxkv.pool._recurrent import write_state as write_state
from jaxkv.pool._state import KVPool as KVPool
from jaxkv.pool._state import make_pool as make_pool
from jaxkv.pool._state import make_sharded_pool as make_sharded_pool
from jaxkv.pool._state import pool_shapes as pool_shapes
from jaxkv.pool._tokens import quantize as quantize
from jaxkv.pool._tokens import read_rows as read_rows
from jaxkv.pool._tokens import read_tokens as read_tokens
from jaxkv.pool._tokens import write_rows as write_rows
from jaxkv.pool._tokens import write_tokens as write_tokens
from jaxkv.pool._views import describe_bytes as describe_bytes
from jaxkv.pool._views import describe_layer as describe_layer
from jaxkv.pool._views import layer_view as layer_view
from jaxkv.pool._views import with_layer_view as with_layer_view
