"""A cache that sleeps, and the two functions between the states."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, get_args, overload

import jax
import jax.numpy as jnp

from jaxkv._internal.checks import check_positive
from jaxkv.cache import CacheLayout, KVCache
from jaxkv.sleeping._host import HOST_MEMORY, ArrayPlace, HostCopy, to_device, to_host

Part = Literal["kv_cache", "block_tables"]
PARTS: tuple[Part, ...] = get_args(Part)
_FIELDS: Mapping[Part, tuple[str, ...]] = {
    "kv_cache": ("buffers",),
    "block_tables": ("block_tables", "row_lengths", "status"),
}


class SleepError(RuntimeError):
    """The cache is not in the state that was asked for; the message says which it is in."""


class _Asleep(NamedTuple):
    """One part that sleeps: the tree of its arrays, and the copy of each."""

    level: int
    structure: Any
    arrays: list[HostCopy]

    @property
    def num_bytes(self) -> int:
        return sum(copy.place.num_bytes for copy in self.arrays)

    @property
    def host_bytes(self) -> int:
        return sum(chunk.nbytes for copy in self.arrays for chunk in copy.chunks)


class SleepingCache:
    """A cache with at least one sleeping part; only `wake_up` accepts it, and `sleep`.

    A handle on the host, spent by the call that takes it. Its buffers and tables cannot be
    reached, and jax refuses it as an argument of a step, both with SleepError.
    """

    def __init__(
        self,
        awake: Mapping[Part, Any],
        asleep: Mapping[Part, _Asleep],
        scales: Any,
        layout: CacheLayout,
    ):
        self._awake, self._asleep = dict(awake), dict(asleep)
        self._scales, self._layout = scales, layout
        self._spent = False

    @property
    def levels(self) -> dict[str, int]:
        """The level of each part that sleeps."""
        return {part: asleep.level for part, asleep in self._asleep.items()}

    @property
    def released_bytes(self) -> int:
        """Device memory that sleeping gave back, over all devices together."""
        return sum(asleep.num_bytes for asleep in self._asleep.values())

    @property
    def host_bytes(self) -> int:
        """Page-locked host memory that the content takes."""
        return sum(asleep.host_bytes for asleep in self._asleep.values())

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("buffers", "block_tables", "row_lengths", "status", "error_flags", "scales"):
            raise SleepError(f"{name} of a sleeping cache ({self._state()}): call wake_up first")
        raise AttributeError(f"SleepingCache has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"SleepingCache({self._state()}; {self.released_bytes:,} bytes released)"

    def _state(self) -> str:
        if self._spent:
            return "spent: a later call to sleep or wake_up took it"
        states = {part: f"asleep at level {level}" for part, level in self.levels.items()}
        return ", ".join(f"{part} {states.get(part, 'awake')}" for part in PARTS)


def _refuse_leaves(cache: SleepingCache) -> NoReturn:
    raise SleepError(f"{cache!r} was passed to jax; call wake_up first, and pass what it returns")


def _refuse_rebuilding(structure: Any, leaves: Any) -> NoReturn:
    raise SleepError("a sleeping cache is not made of leaves")


jax.tree_util.register_pytree_node(SleepingCache, _refuse_leaves, _refuse_rebuilding)


def sleep(
    cache: KVCache | SleepingCache,
    *,
    level: int = 1,
    parts: Collection[Part] = PARTS,
    chunk_bytes: int = 256 * 2**20,
) -> SleepingCache:
    """Gives the device memory of a cache back to jax's allocator.

    Waits for the steps that compute the cache and deletes its arrays: other references to
    them raise jax's "Array has been deleted" from then on. A step that only reads them ends
    undisturbed and gives their memory back when it does. If the copy fails (usually out of
    host memory), the cache is unchanged.

    Args:
      cache: awake, or partly asleep, to put another part to sleep.
      level: 1 keeps all content on the host; 2 drops that of the pool.
      parts: of "kv_cache", the pool, and "block_tables", whose content is kept at both levels.
      chunk_bytes: larger buffers are copied in chunks of about that many bytes, two of which
        are on the device next to the buffer. A buffer that no axis crosses whole on each
        device is copied in one.

    Returns:
      A handle for `wake_up`.

    Raises:
      SleepError: a part that sleeps already, or whose arrays were deleted or donated.
      ValueError: an unknown level or part, or arrays in host memory.
      TypeError: not a cache, or one that is being traced.
    """
    check_positive(chunk_bytes=chunk_bytes)
    if type(level) is not int or level not in (1, 2):
        raise ValueError(f"level={level!r}; use 1 to keep content on the host, 2 to drop it")
    _check_parts(parts)
    awake, asleep, scales, layout = _taken_apart(cache)
    for part in parts:
        if part in asleep:
            raise SleepError(f"{part} sleeps already: {cache!r}")
    trees = {part: awake.pop(part) for part in dict.fromkeys(parts)}
    fallen = _copy_out(trees, level, chunk_bytes)
    for array in jax.tree.leaves(trees):
        array.delete()
    _spend(cache)
    return SleepingCache(awake, {**asleep, **fallen}, scales, layout)


@overload
def wake_up(cache: SleepingCache, *, reset_scales: bool = False) -> KVCache: ...


@overload
def wake_up(
    cache: SleepingCache, *, parts: Collection[Part] | None, reset_scales: bool = False
) -> KVCache | SleepingCache: ...


def wake_up(
    cache: SleepingCache, *, parts: Collection[Part] | None = None, reset_scales: bool = False
) -> KVCache | SleepingCache:
    """Allocates a sleeping cache again, in the same places, with the content it had.

    After level 2 the pool is zero, so finish all requests and call
    `jaxkv.BlockManager.reset_prefixes`. Compiled steps go on without compiling.

    Args:
      cache: asleep, all of it or a part.
      parts: to wake; None: all that sleep.
      reset_scales: fills the scales with 1 instead of keeping them, for when the content
        that they were measured on is gone.

    Returns:
      A `KVCache`; while another part still sleeps, a `SleepingCache`.

    Raises:
      SleepError: a cache, or a part, that is awake.
      ValueError: an unknown part.
      RuntimeError: jax's own, when device memory is short; the cache sleeps as before.
    """
    if isinstance(cache, KVCache):
        raise SleepError(f"the cache is awake, all of it: {cache!r}")
    awake, asleep, scales, layout = _taken_apart(cache)
    parts = tuple(asleep) if parts is None else parts
    _check_parts(parts)
    for part in parts:
        if part not in asleep:
            raise SleepError(f"{part} is awake already: {cache!r}")
    scales = _ones(scales) if reset_scales and scales is not None else scales
    taken = {part: asleep.pop(part) for part in dict.fromkeys(parts)}
    awake |= _copy_in(taken)
    _spend(cache)  # and with it the last reference to the copies
    if asleep:
        return SleepingCache(awake, asleep, scales, layout)
    fields = {name: array for part in awake.values() for name, array in part.items()}
    return KVCache(**fields, scales=scales, layout=layout)


def _copy_out(trees: Mapping[Part, Any], level: int, chunk_bytes: int) -> dict[Part, _Asleep]:
    """Copies all parts in one go, so that either all of them sleep or none."""
    dropped = [part for part in trees if part == "kv_cache" and level == 2]
    leaves = {part: jax.tree.leaves(tree) for part, tree in trees.items()}
    kept = [array for part in trees if part not in dropped for array in leaves[part]]
    copies = iter(to_host(kept, chunk_bytes))
    return {
        part: _Asleep(
            level,
            jax.tree.structure(tree),
            [
                HostCopy.without_content(array) if part in dropped else next(copies)
                for array in leaves[part]
            ],
        )
        for part, tree in trees.items()
    }


def _copy_in(parts: Mapping[Part, _Asleep]) -> dict[Part, Any]:
    arrays = iter(to_device([copy for part in parts.values() for copy in part.arrays]))
    return {
        name: jax.tree.unflatten(part.structure, list(itertools.islice(arrays, len(part.arrays))))
        for name, part in parts.items()
    }


def _ones(scales: jax.Array) -> jax.Array:
    """Returns ones in the place of the scales."""
    with ArrayPlace.of(scales).as_default():
        ones = jnp.ones_like(scales)
    return jax.device_put(ones, scales.sharding) if scales.committed else ones


def _taken_apart(
    cache: KVCache | SleepingCache,
) -> tuple[dict[Part, Any], dict[Part, _Asleep], Any, CacheLayout]:
    """Returns the parts that are awake, those that sleep, the scales and the layout."""
    awake: dict[Part, Any] = {}
    asleep: dict[Part, _Asleep] = {}
    if isinstance(cache, KVCache):
        for part, names in _FIELDS.items():
            awake[part] = {name: getattr(cache, name) for name in names}
        scales, layout = cache.scales, cache.layout
    elif isinstance(cache, SleepingCache):
        if cache._spent:
            raise SleepError(f"{cache!r}")
        awake |= cache._awake
        asleep |= cache._asleep
        scales, layout = cache._scales, cache._layout
    else:
        raise TypeError(f"cache must be a KVCache or a SleepingCache, got {type(cache).__name__}")
    for part, tree in awake.items():
        _check_alive(part, tree)
    return awake, asleep, scales, layout


def _spend(cache: KVCache | SleepingCache) -> None:
    if isinstance(cache, SleepingCache):
        cache._awake.clear()
        cache._asleep.clear()
        cache._scales = None
        cache._spent = True


def _check_parts(parts: Collection[Part]) -> None:
    listed = isinstance(parts, (tuple, list, set, frozenset))
    if not listed or not parts or not all(part in PARTS for part in parts):
        raise ValueError(f"parts={parts!r}; give at least one of {PARTS}, as a tuple")


def _check_alive(part: str, tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.core.Tracer):
            raise TypeError("sleep deletes arrays, so it cannot be part of a jitted function")
        if not isinstance(array, jax.Array):
            raise TypeError(f"{part} has a {type(array).__name__} for an array; device_put it")
        if array.is_deleted():
            raise SleepError(
                f"{part}: an array of it was deleted: it sleeps already, or was donated to a "
                "step; use what wake_up or the last step returned"
            )
        if array.sharding.memory_kind == HOST_MEMORY:
            raise ValueError(f"{part} has an array in {HOST_MEMORY} memory; leave it out of parts")
