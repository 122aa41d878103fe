"""`CacheTemplate`, which allocates a cache again whose arrays are lost."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import KVCache
from jaxkv._src.internal.allocation import copied
from jaxkv._src.sleeping._host import ArrayPlace


@dataclasses.dataclass(frozen=True, eq=False)
class CacheTemplate:
    """The shapes and shardings of a cache, and a copy of its scales.

    places, structure: of the cache without scales.
    scales: f32[layers, 2] and their place; None: the cache has none.
    """

    places: tuple[ArrayPlace, ...]
    structure: Any
    scales: tuple[np.ndarray, ArrayPlace] | None

    @classmethod
    def of(cls, cache: KVCache) -> "CacheTemplate":
        """Returns the template of a cache whose arrays exist."""
        arrays, structure = jax.tree.flatten(dataclasses.replace(cache, scales=None))
        scales = None
        if cache.scales is not None:
            scales = np.array(cache.scales), ArrayPlace.of(cache.scales)
        return cls(tuple(map(ArrayPlace.of, arrays)), structure, scales)

    def make(self) -> KVCache:
        """Returns an empty cache, for which jax compiles no step again."""
        cache = jax.tree.unflatten(self.structure, [place.zeros() for place in self.places])
        if self.scales is None:
            return cache
        scales, place = self.scales
        with place.as_default():
            made = copied(scales, place.sharding if place.committed else None)
        return dataclasses.replace(cache, scales=made)
