"""The commands of ``python -m jaxkv``. No jax."""
