"""Tests for caches: see `jaxkv.testing`, which lists what is public."""
