"""The bytes of a cache: typed reads and writes of one layer, views, zeroing, copies."""

from jaxkv._src.pool._blocks import copy_blocks, zero_blocks
from jaxkv._src.pool._bytes import SAME, flag_period, locate, on_devices
from jaxkv._src.pool._recurrent import read_state, write_state
from jaxkv._src.pool._tokens import (
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
from jaxkv._src.pool._views import describe_bytes, describe_layer, layer_view, with_layer_view

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
