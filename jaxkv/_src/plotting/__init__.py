"""Pictures of plans, layouts, block tables and pools. No jax."""

from jaxkv._src.plotting._layout import plot_layout
from jaxkv._src.plotting._length import plot_length_against_requests
from jaxkv._src.plotting._memory import plot_memory
from jaxkv._src.plotting._occupancy import plot_block_use, plot_occupancy
from jaxkv._src.plotting._order import plot_order, plot_orders
from jaxkv._src.plotting._page import plot_page
from jaxkv._src.plotting._pool import Holder, plot_pool_over_time, snapshot_blocks
from jaxkv._src.plotting._tables import plot_block_tables

__all__ = [
    "Holder",
    "plot_block_tables",
    "plot_block_use",
    "plot_layout",
    "plot_length_against_requests",
    "plot_memory",
    "plot_occupancy",
    "plot_order",
    "plot_orders",
    "plot_page",
    "plot_pool_over_time",
    "snapshot_blocks",
]
