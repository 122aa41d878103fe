"""Implementation of jaxkv. Private: import names from `jaxkv` and its public modules."""
