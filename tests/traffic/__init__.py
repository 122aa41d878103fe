"""Random traffic through `jaxkv.Engine`, on models whose tokens no rounding can change."""
