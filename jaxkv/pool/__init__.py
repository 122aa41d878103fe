"""The bytes of a cache: typed reads and writes of one layer, views, zeroing, copies.

The pool is ``uint8``, so that layers of different groups can use the same bytes: fp8 keys and
values of one group, fp32 recurrent states of another. Writes scatter the bytes of new rows, and
reads bitcast what they gathered, so neither makes a typed copy of the pool on any backend.

Functions take the cache, a layer's name and the step's batch, and look up the layer's group, block
size and scales. They work inside ``jit`` and return a new cache; where the old one is donated, they
work in place. Padding and places outside the pool are never written, and read as zeros.
"""

from jaxkv.pool._blocks import copy_blocks, zero_blocks
from jaxkv.pool._bytes import SAME, flag_period, locate, on_devices
from jaxkv.pool._recurrent import read_state, write_state
from jaxkv.pool._tokens import (
    attention_spec,
    check_batch,
    layer_scales,
    quantize,
    ranks_of_heads,
    read_rows,
    read_tokens,
    token_spec,
    write_rows,
    write_tokens,
)
from jaxkv.pool._views import describe_bytes, describe_layer, layer_view, with_layer_view

__all__ = [
    "SAME",
    "attention_spec",
    "check_batch",
    "copy_blocks",
    "describe_bytes",
    "describe_layer",
    "flag_period",
    "layer_scales",
    "layer_view",
    "locate",
    "on_devices",
    "quantize",
    "ranks_of_heads",
    "read_rows",
    "read_state",
    "read_tokens",
    "token_spec",
    "with_layer_view",
    "write_rows",
    "write_state",
    "write_tokens",
    "zero_blocks",
]
