"""Recurrent layers over the states of a cache."""

from jaxkv._src.recurrent._layers import gated_delta, linear_attention, mamba2, short_conv

__all__ = ["gated_delta", "linear_attention", "mamba2", "short_conv"]
