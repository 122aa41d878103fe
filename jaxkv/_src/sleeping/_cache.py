"""`SleepingCache`, and the functions `sleep` and `wake_up`."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, get_args, overload

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxkv._src.cache import CacheLayout, KVCache
from jaxkv._src.internal.allocation import HOST_MEMORY
from jaxkv._src.internal.checks import check_flag, check_positive
from jaxkv._src.internal.text import shown
from jaxkv._src.internal.unique import Unique
from jaxkv._src.sleeping._host import ArrayTemplate, HostCopy, to_device, to_host

Part = Literal["kv_cache", "block_tables"]
PARTS: tuple[Part, ...] = get_args(Part)
_FIELDS: Mapping[Part, tuple[str, ...]] = {
    "kv_cache": ("buffers",),
    "block_tables": ("rows", "status"),
}
_ARRAYS = ("buffers", "rows", "block_tables", "row_lengths", "status", "error_flags", "scales")


class SleepError(RuntimeError):
    """A cache, or a part of it, is in the wrong state for a call; the message says in which."""


class _Asleep(NamedTuple):
    """A part that sleeps: the tree structure of its arrays, and a host copy of each."""

    level: int
    structure: Any
    arrays: list[HostCopy]

    @property
    def num_bytes(self) -> int:
        return sum(copy.template.num_bytes for copy in self.arrays)

    @property
    def host_bytes(self) -> int:
        return sum(chunk.nbytes for copy in self.arrays for chunk in copy.chunks)


class SleepingCache(Unique):
    """A cache with at least one sleeping part; only `wake_up` and `sleep` accept it.

    The call that takes it uses it up. Reading its buffers or tables raises SleepError, and so does
    passing it to a jitted step.
    """

    why = "the call that takes it uses it up; call wake_up, and copy the cache that it returns"

    def __init__(
        self,
        awake: Mapping[Part, PyTree],
        asleep: Mapping[Part, _Asleep],
        scales: jax.Array | None,
        layout: CacheLayout,
    ):
        self._awake, self._asleep = dict(awake), dict(asleep)
        self._scales, self._layout = scales, layout
        self._spent = False

    @property
    def levels(self) -> dict[str, int]:
        """The level at which each sleeping part sleeps."""
        return {part: asleep.level for part, asleep in self._asleep.items()}

    @property
    def released_bytes(self) -> int:
        """Bytes of device memory that were given back, over all devices together."""
        return sum(asleep.num_bytes for asleep in self._asleep.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked host memory that hold the content."""
        return sum(asleep.host_bytes for asleep in self._asleep.values())

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ARRAYS:
            raise SleepError(f"{name} of a sleeping cache ({self._state()}): call wake_up first")
        raise AttributeError(f"SleepingCache has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"SleepingCache({self._state()}; {self.released_bytes:,} bytes released)"

    def _state(self) -> str:
        if self._spent:
            return "spent: a later sleep or wake_up took it; use what that returned"
        states = {part: f"asleep at level {level}" for part, level in self.levels.items()}
        return ", ".join(f"{part} {states.get(part, 'awake')}" for part in PARTS)


def _refuse_leaves(cache: SleepingCache) -> NoReturn:
    raise SleepError(f"{cache!r} was passed to jax; call wake_up first, and pass what it returns")


def _refuse_rebuilding(structure: Any, leaves: Any) -> NoReturn:
    raise SleepError("jax cannot rebuild a sleeping cache; call wake_up, and use what it returns")


jax.tree_util.register_pytree_node(SleepingCache, _refuse_leaves, _refuse_rebuilding)


def sleep(
    cache: KVCache | SleepingCache,
    *,
    level: int = 1,
    parts: Collection[Part] = PARTS,
    chunk_bytes: int = 256 * 2**20,
) -> SleepingCache:
    """Gives the device memory of a cache back to jax's allocator.

    Example::

        cache = jaxkv.make_cache(plan, max_requests=256)
        asleep = jaxkv.sleep(cache)            # the pool's device memory is free
        ...                                    # train, or swap weights
        cache = jaxkv.wake_up(asleep)          # the same content on the same devices

    Waits for the steps that compute the cache, and deletes its arrays: other references to them
    raise jax's "Array has been deleted" from then on. A step that only reads them finishes
    undisturbed, and their memory is free when it has. If the copy fails (usually because host
    memory runs out), the cache is unchanged.

    Args:
      cache: awake, or partly asleep.
      level: 1 copies all content to the host; 2 drops the content of the pool.
      parts: the parts to put to sleep: "kv_cache", the pool; "block_tables", whose content is
        copied at both levels.
      chunk_bytes: buffers with more bytes than this on a device are copied in chunks of about
        that many, two of which take device memory next to the buffer. A buffer whose axes are all
        sharded is copied whole.

    Returns:
      A handle for `wake_up`.

    Raises:
      SleepError: a part that sleeps already, or whose arrays were deleted or donated; a handle
        that was used before.
      ValueError: an unknown level or part, or arrays in host memory.
      TypeError: not a cache, or one that is being traced.
    """
    check_positive(chunk_bytes=chunk_bytes)
    if type(level) is not int or level not in (1, 2):
        raise ValueError(f"level={shown(level)}; use 1 to keep content on the host, 2 to drop it")
    _check_parts(parts)
    awake, asleep, scales, layout = _taken_apart(cache)
    for part in parts:
        if part in asleep:
            raise SleepError(f"{part} sleeps already; leave it out of parts: {cache!r}")
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
    """Allocates a sleeping cache again, on the same devices and with the content that it had.

    Example::

        asleep = jaxkv.sleep(jaxkv.make_cache(plan, max_requests=256), level=2)
        cache = jaxkv.wake_up(asleep)          # the pool is zero, so nothing is cached any more
        manager.reset_prefixes()

    After level 2 the pool is zero: finish all requests, and call
    `jaxkv.BlockManager.reset_prefixes`. Compiled steps are not compiled again.

    Args:
      cache: with at least one sleeping part.
      parts: the parts to wake up; None: all that sleep.
      reset_scales: True: sets all scales to 1, for when the content is gone on which they were
        measured. False: keeps them.

    Returns:
      A `KVCache`; a `SleepingCache` while another part still sleeps.

    Raises:
      SleepError: a cache, or a part, that is awake; a handle that was used before.
      ValueError: an unknown part.
      RuntimeError: jax's own, if device memory runs out; the cache sleeps as before.
    """
    if isinstance(cache, KVCache):
        raise SleepError(f"the cache is awake, all of it; it needs no wake_up: {cache!r}")
    awake, asleep, scales, layout = _taken_apart(cache)
    check_flag(reset_scales=reset_scales)
    parts = tuple(asleep) if parts is None else parts
    _check_parts(parts)
    for part in parts:
        if part not in asleep:
            raise SleepError(f"{part} is awake already; leave it out of parts: {cache!r}")
    scales = _ones(scales) if reset_scales and scales is not None else scales
    taken = {part: asleep.pop(part) for part in dict.fromkeys(parts)}
    awake |= _copy_in(taken)
    _spend(cache)  # drops the last reference to the copies
    if asleep:
        return SleepingCache(awake, asleep, scales, layout)
    fields = {name: array for part in awake.values() for name, array in part.items()}
    return KVCache(**fields, scales=scales, layout=layout)


def _copy_out(trees: Mapping[Part, Any], level: int, chunk_bytes: int) -> dict[Part, _Asleep]:
    """Copies all parts together, so that either all of them sleep or none."""
    dropped = [part for part in trees if part == "kv_cache" and level == 2]
    leaves = {part: jax.tree.leaves(tree) for part, tree in trees.items()}
    copied = [array for part in trees if part not in dropped for array in leaves[part]]
    copies = iter(to_host(copied, chunk_bytes))
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
    """Returns ones with the shape, dtype and sharding of the scales."""
    with ArrayTemplate.from_array(scales).as_default():
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
            raise SleepError(f"cache cannot be used again: {cache!r}")
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
        raise ValueError(f"parts={shown(parts)}; give at least one of {PARTS}, as a tuple")


def _check_alive(part: str, tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.core.Tracer):
            raise TypeError(
                "sleep deletes arrays, so a jitted function cannot call it; call it outside"
            )
        if not isinstance(array, jax.Array):
            raise TypeError(
                f"{part} has a {type(array).__name__} instead of a jax.Array; use jax.device_put"
            )
        if array.is_deleted():
            raise SleepError(
                f"{part} has an array that was deleted: it sleeps already, or was donated to a "
                "step; use what wake_up or the last step returned"
            )
        if array.sharding.memory_kind == HOST_MEMORY:
            raise ValueError(f"{part} has an array in {HOST_MEMORY} memory; leave it out of parts")
