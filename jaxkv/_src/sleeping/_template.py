"""`CacheTemplate`, which allocates a cache again whose arrays are lost."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import KVCache
from jaxkv._src.internal.allocation import copy_to
from jaxkv._src.sleeping._host import ArrayTemplate


@dataclasses.dataclass(frozen=True, eq=False)
class CacheTemplate:
    """The shapes and shardings of a cache, and a copy of its scales.

    arrays, structure: of the cache without scales.
    scales: f32[layers, 2] and their template; None: the cache has none.
    """

    arrays: tuple[ArrayTemplate, ...]
    structure: Any
    scales: tuple[np.ndarray, ArrayTemplate] | None

    @classmethod
    def from_cache(cls, cache: KVCache) -> "CacheTemplate":
        """Returns the template of a cache whose arrays exist."""
        arrays, structure = jax.tree.flatten(dataclasses.replace(cache, scales=None))
        scales = None
        if cache.scales is not None:
            scales = np.array(cache.scales), ArrayTemplate.from_array(cache.scales)
        return cls(tuple(map(ArrayTemplate.from_array, arrays)), structure, scales)

    def make(self) -> KVCache:
        """Returns an empty cache; jax compiles no step again for it."""
        cache = jax.tree.unflatten(self.structure, [array.zeros() for array in self.arrays])
        if self.scales is None:
            return cache
        scales, template = self.scales
        with template.as_default():
            device = template.sharding if template.committed else None
            return dataclasses.replace(cache, scales=copy_to(scales, device))
