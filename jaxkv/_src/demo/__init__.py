"""A small hybrid decoder served end to end from one paged pool.

An example to read and a proof to run; nothing else in the package depends on it.
"""
