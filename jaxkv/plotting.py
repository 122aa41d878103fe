"""Pictures of plans, layouts, block tables and pools. No jax.

Needs matplotlib (``pip install "jaxkv[plot]"``), which is imported when something is drawn.

Every function returns the matplotlib ``Figure`` that it drew on: a new one, which Jupyter shows
when it is the last value of a cell, or the one of the ``ax`` that it was given. pyplot is never
imported and no global setting is changed. Colours are those of Okabe and Ito, in one fixed
order: group 0 is blue in every picture. Hatching marks bytes that hold no data, and tells
groups apart in print.
"""

from jaxkv._src.plotting import (
    Holder,
    plot_block_tables,
    plot_block_use,
    plot_layout,
    plot_length_against_requests,
    plot_memory,
    plot_occupancy,
    plot_order,
    plot_orders,
    plot_page,
    plot_pool_over_time,
    snapshot_blocks,
)

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
