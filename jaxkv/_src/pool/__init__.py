"""The bytes of a cache: typed reads and writes of one layer, views, zeroing, copies."""

from jaxkv._src.pool._blocks import copy_blocks, zero_blocks
from jaxkv._src.pool._bytes import on_devices, read_cells
from jaxkv._src.pool._layer import SAME, BoundLayer, bind, check_batch, put_back
from jaxkv._src.pool._recurrent import read_state, write_state
from jaxkv._src.pool._tokens import (
    check_latents,
    check_tokens,
    quantize,
    read_rows,
    read_tokens,
    store_rows,
    store_tokens,
    token_head_row,
    token_spec,
    write_rows,
    write_tokens,
)
from jaxkv._src.pool._views import describe_bytes, describe_layer, layer_view, with_layer_view

__all__ = [
    "SAME",
    "BoundLayer",
    "bind",
    "check_batch",
    "check_latents",
    "check_tokens",
    "copy_blocks",
    "describe_bytes",
    "describe_layer",
    "layer_view",
    "on_devices",
    "put_back",
    "quantize",
    "read_cells",
    "read_rows",
    "read_state",
    "read_tokens",
    "store_rows",
    "store_tokens",
    "token_head_row",
    "token_spec",
    "with_layer_view",
    "write_rows",
    "write_state",
    "write_tokens",
    "zero_blocks",
]
