"""Conversion of plans and steps of other engines. No jax."""
