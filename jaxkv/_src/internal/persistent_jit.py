"""Functions that are lowered once, and cached in a folder for later processes.

People may share the folder, so that nothing in it is trusted to be Python: a file holds a hash, a
line of JSON and what `jax.export` has serialized.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from jax import export

DIGEST = 32  # bytes of a hash of a file's content, before it
Outputs = Any  # the form of a result: a tuple of such forms, None, or 0 for an array


class Target(NamedTuple):
    """A folder for lowered code, and the platform that it is lowered for."""

    folder: str
    platform: str = "cuda"


_FOLDER: contextvars.ContextVar[Target | None] = contextvars.ContextVar("_FOLDER", default=None)


@contextlib.contextmanager
def persist_in(target: Target | None) -> Iterator[None]:
    """Stores lowered code while a program for one device is traced; None: stores nothing."""
    token = _FOLDER.set(target)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def folder_for(device: jax.Device) -> Target | None:
    """Returns a folder in jax's compilation cache, if there is one and the device is a GPU.

    jax needs the package ``flatbuffers`` to write what it has lowered.
    """
    folder = jax.config.jax_compilation_cache_dir
    is_local = folder and "://" not in folder and jax.config.jax_enable_compilation_cache
    if device.platform != "gpu" or not is_local or not find_spec("flatbuffers"):
        return None
    return Target(os.path.join(folder, "jaxkv"))


def persistent_jit[F: Callable[..., Any]](function: F) -> F:
    """Decorates a function: `jax.jit` with static keywords, whose lowered code is persistent.

    It returns arrays, None, and tuples of these.
    """

    def run(target: Target | None, static: tuple[tuple[str, Any], ...], *args: Any) -> Any:
        with persist_in(target):
            return run_persistent(function, *args, **dict(static))

    run.__name__ = function.__name__  # in the program
    jitted = jax.jit(run, static_argnums=(0, 1))

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        return jitted(_FOLDER.get(), tuple(sorted(static.items())), *args)

    return call  # pyrefly: ignore[bad-return]


def run_persistent(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Calls a function of this library without tracing it again if `persist_in` stored it.

    The name of its file is a hash of all that it depends on: its arguments, this library's code,
    jax, jax's settings and the device.
    """
    target = _FOLDER.get()
    if target is None or not jax.sharding.get_abstract_mesh().empty:
        return function(*args, **static)
    leaves, tree = jax.tree.flatten(args)
    types = [jax.typeof(leaf) for leaf in leaves]
    about = function.__module__, target.platform, static, tree.unflatten(map(repr, types))
    try:
        key = hashlib.sha256(_surroundings() + _all_of(about).encode()).hexdigest()
    except TypeError:
        return function(*args, **static)
    path = pathlib.Path(target.folder, f"{function.__name__.strip('_')}-{key}")
    shapes = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in types]
    lowered = _read(path, target.platform, shapes)
    if lowered is None:
        found: list[Outputs] = []
        flat = functools.partial(_flat, function, tree, static, found)
        exported = export.export(jax.jit(flat), platforms=[target.platform])(*shapes)
        lowered = Lowered(found[-1], exported)
        _write(path, b"\n".join([json.dumps(found[-1]).encode(), exported.serialize()]))
    arrays = lowered.exported.call(*leaves)
    return jax.tree.unflatten(jax.tree.structure(lowered.outputs), arrays)


class Lowered(NamedTuple):
    """A function that was lowered, and the form of its result."""

    outputs: Outputs
    exported: export.Exported

    @classmethod
    def parsed(cls, content: bytes, platform: str, shapes: list[jax.ShapeDtypeStruct]) -> "Lowered":
        """Returns what a file holds; raises an error of any kind if it is something else."""
        line, serialized = content.split(b"\n", 1)
        exported = export.deserialize(bytearray(serialized))
        outputs = _form_of(json.loads(line))
        wanted = (platform,), 1, [(of.shape, of.dtype) for of in shapes]
        inputs = [(of.shape, of.dtype) for of in exported.in_avals]
        if (exported.platforms, exported.nr_devices, inputs) != wanted:
            raise ValueError("it is lowered for other arguments")
        if len(exported.out_avals) != len(jax.tree.leaves(outputs)):
            raise ValueError("it has other results")
        return cls(outputs, exported)


def _form_of(value: Any) -> Outputs:
    """Returns the form of a result, of JSON, which has lists instead of tuples."""
    if isinstance(value, list):
        return tuple(map(_form_of, value))
    if value is None or (type(value) is int and value == 0):
        return value
    raise ValueError(f"{value!r} is no form of a result")


def _flat(
    function: Callable[..., Any],
    tree: Any,
    static: dict[str, Any],
    found: list[Outputs],
    *leaves: Any,
) -> list[Any]:
    """Calls a function; returns the arrays of its result, and appends their form."""
    result = function(*tree.unflatten(leaves), **static)
    found.append(jax.tree.map(lambda _: 0, result))
    return jax.tree.leaves(result)


def _all_of(value: Any) -> str:
    """Returns all that a value holds, as text; the texts of layouts and shapes leave things out.

    Raises:
      TypeError: it holds something of a type that is not known here.
    """
    parts: Iterable[Any]
    if dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        parts = itertools.chain(*value.items())
    elif isinstance(value, tuple):
        parts = value
    elif value is None or isinstance(value, str | int | float | np.generic):
        return repr(value)
    else:
        raise TypeError(f"{type(value).__name__} has no such text")
    return f"{type(value).__name__}({', '.join(map(_all_of, parts))})"


def _surroundings() -> bytes:
    """Returns what a lowered function depends on beside its arguments."""
    device = jax.devices()[0]
    settings = {
        name: getattr(jax.config, name, None)
        for name in jax.config.values
        if not name.startswith(("jax_compilation_cache", "jax_persistent_cache"))
    }
    variables = {name: value for name, value in os.environ.items() if "MOSAIC" in name}
    parts = (
        *(sys.version, jax.__version__, jaxlib.__version__),
        *(device.device_kind, getattr(device, "core_count", None)),
        *(sorted(settings.items()), sorted(variables.items())),
    )
    return _hash_of_code() + repr(parts).encode()


@functools.cache
def _hash_of_code() -> bytes:
    """Returns a hash of all modules of this library."""
    digest = hashlib.sha256()
    for name in ("jaxkv", "pallas_kernels"):
        package = importlib.import_module(name)
        for path in sorted(pathlib.Path(*package.__path__).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


def _read(path: pathlib.Path, platform: str, shapes: list[jax.ShapeDtypeStruct]) -> Lowered | None:
    """Returns what a file holds; None if there is none, or if it is broken."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
            raise ValueError("its hash is another")
        return Lowered.parsed(content[DIGEST:], platform, shapes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = str(error)
    except Exception as error:  # of whatever reads something else than what was written
        reason = f"{path} is broken: {error}"
    warnings.warn(f"a layer is lowered anew, because {reason}", stacklevel=2)
    return None


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file at once, so that no other process reads a part of it."""
    content = hashlib.sha256(content).digest() + content
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        warnings.warn(f"lowered code is not stored for later processes: {error}", stacklevel=2)
