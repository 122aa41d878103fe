"""Awake, asleep, and the two functions between them."""

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn, overload

import jax
import jax.numpy as jnp

from jaxkv.block_tables import BlockTables
from jaxkv.checks import check_positive
from jaxkv.pool import KVPool
from jaxkv.sleep._host import HOST_MEMORY, HostCopy, Place, to_device, to_host

_FIELDS = {"kv_cache": ("pool", KVPool), "block_tables": ("tables", BlockTables)}
PARTS = tuple(_FIELDS)


class SleepError(RuntimeError):
    """The cache is not in the state that was asked for; the message says which it is in."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KVCache:
    """A cache that is awake: what sleeps and wakes together."""

    pool: KVPool
    tables: BlockTables
    scales: Any = None  # arrays of the caller in any tree, such as f32[layers] of fp8 layers

    def __repr__(self) -> str:
        return f"KVCache({self.pool!r}, {self.tables!r})"


class _Asleep(NamedTuple):
    """One part: how its arrays were one tree, and what is kept of each."""

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
    """A cache of which a part sleeps at least: nothing can be done with it but `wake_up`.

    A handle of the host, spent by the call that takes it. It has no pool and no tables
    to be reached, and jax refuses it as an argument of a step, both with SleepError.
    """

    def __init__(self, awake: dict[str, Any], asleep: dict[str, _Asleep], scales: Any):
        self._awake, self._asleep, self._scales = awake, asleep, scales
        self._spent = False

    @property
    def levels(self) -> dict[str, int]:
        """The parts that sleep, and at which level."""
        return {part: asleep.level for part, asleep in self._asleep.items()}

    @property
    def released_bytes(self) -> int:
        """Device memory that its sleep gave back, over all devices together."""
        return sum(asleep.num_bytes for asleep in self._asleep.values())

    @property
    def host_bytes(self) -> int:
        """Page-locked host memory that its content takes."""
        return sum(asleep.host_bytes for asleep in self._asleep.values())

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("pool", "tables", "scales"):
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
    parts: Collection[str] = PARTS,
    chunk_bytes: int = 256 * 2**20,
) -> SleepingCache:
    """Gives the device memory of a cache back to jax's allocator.

    Waits for the steps that compute the cache and deletes its arrays: what else refers to
    them raises jax's "Array has been deleted" from then on. A step that only reads them
    ends undisturbed and gives their memory back when it does. If the copying fails, for
    host memory most likely, nothing has happened.

    Args:
      cache: all of it awake, or a sleeping one of which another part shall sleep too.
      level: 1 keeps all content on the host; 2 drops that of the pool.
      parts: of `PARTS`; "kv_cache" is the pool, "block_tables" the tables, whose content
        is kept at both levels.
      chunk_bytes: buffers that are larger go out in parts of about so many bytes, two of
        which are on the device besides the buffer; one that no axis crosses whole on each
        device goes out in one.

    Raises:
      SleepError: a part that sleeps already, or whose arrays were deleted or donated.
      ValueError: an unknown level or part, or arrays in host memory.
      TypeError: no cache, or one that is being traced.
    """
    check_positive(chunk_bytes=chunk_bytes)
    if type(level) is not int or level not in (1, 2):
        raise ValueError(f"level={level!r}; use 1 to keep content on the host, 2 to drop it")
    _check_parts(parts)
    awake, asleep, scales = _taken_apart(cache)
    for part in parts:
        if part in asleep:
            raise SleepError(f"{part} sleeps already: {cache!r}")
    trees = {part: awake.pop(part) for part in dict.fromkeys(parts)}
    fallen = _copy_out(trees, level, chunk_bytes)
    for array in jax.tree.leaves(trees):
        array.delete()
    _spend(cache)
    return SleepingCache(awake, {**asleep, **fallen}, scales)


@overload
def wake_up(cache: SleepingCache, *, reset_scales: bool = False) -> KVCache: ...


@overload
def wake_up(
    cache: SleepingCache, *, parts: Collection[str] | None, reset_scales: bool = False
) -> KVCache | SleepingCache: ...


def wake_up(
    cache: SleepingCache, *, parts: Collection[str] | None = None, reset_scales: bool = False
) -> KVCache | SleepingCache:
    """Allocates a sleeping cache again, in the same places, with the content it had.

    Tables have their rows and the pool its bytes; after level 2 the pool is zero.

    Args:
      cache: asleep, in part or all of it.
      parts: of `PARTS`; None: all that sleep.
      reset_scales: fills the scales with 1 instead of keeping them, for when the content
        that they were measured on is gone.

    Returns:
      A `KVCache`; while another part still sleeps, a `SleepingCache`.

    Raises:
      SleepError: a cache, or a part, that is awake.
      ValueError: an unknown part.
      RuntimeError: of jax, for want of device memory; the cache sleeps as before.
    """
    if isinstance(cache, KVCache):
        raise SleepError(f"the cache is awake, all of it: {cache!r}")
    awake, asleep, scales = _taken_apart(cache)
    parts = tuple(asleep) if parts is None else parts
    _check_parts(parts)
    for part in parts:
        if part not in asleep:
            raise SleepError(f"{part} is awake already: {cache!r}")
    scales = jax.tree.map(_ones, scales) if reset_scales else scales
    taken = {part: asleep.pop(part) for part in dict.fromkeys(parts)}
    awake |= _copy_in(taken)
    _spend(cache)  # and with it the last reference to the copies
    if asleep:
        return SleepingCache(awake, asleep, scales)
    return KVCache(pool=awake["kv_cache"], tables=awake["block_tables"], scales=scales)


def _copy_out(trees: dict[str, Any], level: int, chunk_bytes: int) -> dict[str, _Asleep]:
    """All parts in one go, so that either all of them have what they need or none."""
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


def _copy_in(parts: dict[str, _Asleep]) -> dict[str, Any]:
    arrays = iter(to_device([copy for part in parts.values() for copy in part.arrays]))
    return {
        name: jax.tree.unflatten(part.structure, list(itertools.islice(arrays, len(part.arrays))))
        for name, part in parts.items()
    }


def _ones(scale: Any) -> Any:
    if not isinstance(scale, jax.Array):
        return jnp.ones_like(scale)
    with Place.of(scale).as_default():
        ones = jnp.ones_like(scale)
    return jax.device_put(ones, scale.sharding) if scale.committed else ones


def _taken_apart(
    cache: KVCache | SleepingCache,
) -> tuple[dict[str, Any], dict[str, _Asleep], Any]:
    """What is awake, what sleeps, and the scales; in dicts of the caller's own."""
    awake: dict[str, Any] = {}
    asleep: dict[str, _Asleep] = {}
    if isinstance(cache, KVCache):
        scales = cache.scales
        for part, (name, kind) in _FIELDS.items():
            awake[part] = getattr(cache, name)
            if not isinstance(awake[part], kind):
                raise TypeError(
                    f"{name} of the cache must be {kind.__name__}, got {type(awake[part]).__name__}"
                )
    elif isinstance(cache, SleepingCache):
        if cache._spent:
            raise SleepError(f"{cache!r}")
        awake, asleep, scales = dict(cache._awake), dict(cache._asleep), cache._scales
    else:
        raise TypeError(f"cache must be a KVCache or a SleepingCache, got {type(cache).__name__}")
    for part, tree in awake.items():
        _check_alive(part, tree)
    return awake, asleep, scales


def _spend(cache: KVCache | SleepingCache) -> None:
    if isinstance(cache, SleepingCache):
        cache.__init__({}, {}, None)
        cache._spent = True


def _check_parts(parts: Collection[str]) -> None:
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
                f"{part}: an array of it was deleted, for it sleeps already or was donated to a "
                "step; use what wake_up or the last step returned"
            )
        if array.sharding.memory_kind == HOST_MEMORY:
            raise ValueError(f"{part} has an array in {HOST_MEMORY} memory; leave it out of parts")
