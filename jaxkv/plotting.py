"""Pictures of plans, layouts, block tables and pools. No jax.

Needs matplotlib (``pip install "jaxkv[plot]"``), which is imported when something is drawn.

Every function returns a new matplotlib ``Figure``, which Jupyter shows when it is the last value of
a cell. pyplot is never imported and no global setting is changed. Colours are from Okabe and
Ito, in one fixed order: group 0 is blue in every picture. Hatched bytes hold no data.
`snapshot_blocks` records which `Holder` has each block, for a picture over time.
"""

from jaxkv._src.plotting import (
    Holder,
    plot_block_tables,
    plot_block_use,
    plot_layout,
    plot_length_against_requests,
    plot_memory,
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
    "plot_orders",
    "plot_page",
    "plot_pool_over_time",
    "snapshot_blocks",
]
