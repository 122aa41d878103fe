"""Weights that arrive on other devices, or sharded otherwise, than those before them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding


def check_devices(params: Any, devices: set[jax.Device]) -> None:
    """Raises ValueError for weights that were put on other devices than the cache's."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, Array) and leaf.committed and leaf.sharding.device_set != devices:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is on {_shown(leaf.sharding.device_set)}, and "
                f"the cache on {_shown(devices)}: for weights over a mesh pass cache=make_cache("
                "plan, max_requests=, mesh=, axis=), or put both on the same devices"
            )


def _shown(devices: set[jax.Device]) -> str:
    return ", ".join(sorted(map(str, devices)))


def without_mesh(params: Any, device: jax.Device | None) -> Any:
    """Returns the weights of one device without the mesh that they may have, nothing copied.

    A mesh of explicit axes, as `jax.make_mesh` makes them, is in the types of arrays, and those of
    a cache on one device have none.
    """

    def plain(leaf: Any) -> Any:
        if not (isinstance(leaf, Array) and isinstance(leaf.sharding, NamedSharding)):
            return leaf
        return jax.device_put(leaf, place) if leaf.sharding.device_set == {device} else leaf

    place = None if device is None else SingleDeviceSharding(device)
    return params if place is None else jax.tree.map(plain, params)


def placed_like(params: Any, before: Any) -> Any:
    """Returns weights sharded as those before: other shardings would compile steps anew."""
    leaves, tree = jax.tree.flatten(params)
    pairs = enumerate(zip(leaves, jax.tree.leaves(before), strict=True))
    places = {at: old.sharding for at, (new, old) in pairs if _is_elsewhere(new, old)}
    for at, leaf in zip(
        places, _moved([leaves[at] for at in places], [*places.values()]), strict=True
    ):
        leaves[at] = leaf
    return tree.unflatten(leaves)


def _is_elsewhere(new: Any, old: Any) -> bool:
    """Returns whether an array is not where another one was committed to."""
    if not (isinstance(new, Array) and isinstance(old, Array) and old.committed):
        return False
    was, now = old.sharding, new.sharding
    if isinstance(was, NamedSharding) and isinstance(now, NamedSharding) and was.mesh != now.mesh:
        return True  # axes that are explicit belong to the arrays' types
    return not was.is_equivalent_to(now, new.ndim)


def _moved(arrays: list[Array], shardings: list[Sharding]) -> Sequence[Array]:
    """Returns arrays with other shardings, copied between devices where these are the same."""
    if all(map(_have_same_devices, arrays, shardings)):  # `device_put` may copy to the host
        return jax.jit(lambda arrays: arrays, out_shardings=shardings)(arrays)
    return jax.device_put(arrays, shardings)


def _have_same_devices(array: Array, sharding: Sharding) -> bool:
    meshes = [of.mesh for of in (array.sharding, sharding) if isinstance(of, NamedSharding)]
    return len(meshes) == 2 and [*meshes[0].devices.flat] == [*meshes[1].devices.flat]
