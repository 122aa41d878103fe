"""Functions of a sharded cache, run on every device of its mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Specs = Any  # a tree of PartitionSpecs, or a prefix of one


def runs_manually(axis: str | None) -> bool:
    """Returns whether a function can work on local arrays as they are.

    True inside a ``shard_map`` over the axis; for a cache without an axis also wherever no mesh
    axis is typed explicitly, which makes XLA's sharding rules refuse scatters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis is not None:
        return axis in mesh.manual_axes
    return AxisType.Explicit not in mesh.axis_types


def check_not_explicit(*trees: Any) -> None:
    """Raises ValueError where an array is sharded over explicit axes that no context tells.

    XLA's sharding rules would refuse the scatters of its reader, in words of their own.
    """
    for leaf in jax.tree.leaves(trees):
        sharding = jax.typeof(leaf).sharding
        types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        for axis in sharding.spec:
            names = axis if isinstance(axis, tuple) else (axis,)
            if AxisType.Explicit in [types.get(name) for name in names]:
                raise ValueError(
                    f"an array {jax.typeof(leaf)} is sharded over the explicit mesh axis "
                    f"{axis!r}: run the step under jax.set_mesh(mesh), which needs a cache made "
                    "with mesh=, or call this inside jax.shard_map"
                )


def with_auto_axes(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, and returns its arrays with all elements on every device.

    Where arguments are sharded over explicit axes, XLA chooses how to divide the work.
    """
    for leaf in jax.tree.leaves(args):
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            same = NamedSharding(sharding.mesh, PartitionSpec())
            with jax.sharding.use_abstract_mesh(sharding.mesh):
                return jax.sharding.auto_axes(function, out_sharding=same)(*args)
    return function(*args)


def on_every_device(
    function: Callable[..., Any], mesh: Mesh | None, in_specs: Specs, out_specs: Specs, *args: Any
) -> Any:
    """Runs a function under ``shard_map`` over the mesh of the context, or the one given."""
    context = jax.sharding.get_abstract_mesh()
    given = mesh if context.empty else None
    mapped = jax.shard_map(
        function,
        mesh=given,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # kernels write through references, which it cannot follow
    )
    args = tuple(
        _as_mapped(arg, spec, context if given is None else given)
        for spec, arg in zip(in_specs, args, strict=True)
    )
    # Outside of jit, shard_map would compile every primitive for all devices on its own.
    return jax.jit(mapped)(*args)


def _as_mapped(tree: Any, specs: Specs, mesh: Any) -> Any:
    """Returns arrays sharded as specs say over explicit axes, which shard_map insists on."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, axis_type in types if axis_type == AxisType.Explicit}

    def reshard(spec: PartitionSpec, array: Any) -> Any:
        spec = PartitionSpec(*(axis if axis in explicit else None for axis in spec))
        return jax.sharding.reshard(
            array, NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec
        )

    return jax.tree.map(reshard, _broadcast(specs, tree), tree) if explicit else tree


def _broadcast(specs: Specs, tree: Any) -> Any:
    """Returns a tree of specs, one per leaf, from a prefix of it."""
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec
    )
