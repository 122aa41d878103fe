"""Pictures of plans, layouts, block tables and pools. No jax."""

from jaxkv._src.plotting._blocks import plot_layout, plot_page
from jaxkv._src.plotting._orders import plot_orders
from jaxkv._src.plotting._plans import plot_length_against_requests, plot_memory
from jaxkv._src.plotting._steps import (
    Holder,
    plot_block_use,
    plot_pool_over_time,
    snapshot_blocks,
)
from jaxkv._src.plotting._tables import plot_block_tables

__all__ = [
    "Holder",
    "plot_block_tables",
    "plot_block_use",
    "plot_layout",
    "plot_length_against_requests",
    "plot_memory",
    "plot_orders",
    "plot_page",
    "plot_pool_over_time",
    "snapshot_blocks",
]
