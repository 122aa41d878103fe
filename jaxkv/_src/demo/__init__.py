"""A small hybrid decoder served from one paged pool, and compared with itself without a cache.

An example to read and a proof to run; nothing else in the package depends on it.
"""
