"""Functions that are lowered once, and kept in a folder for later processes."""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import itertools
import os
import pathlib
import pickle
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


class Place(NamedTuple):
    """A folder for lowered code, and the platform that it is lowered for."""

    folder: str
    platform: str = "cuda"


_PLACE: contextvars.ContextVar[Place | None] = contextvars.ContextVar("_PLACE", default=None)


@contextlib.contextmanager
def keep_in(place: Place | None) -> Iterator[None]:
    """Keeps what is lowered, while a program for one device is traced; None: keeps nothing."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def place_for(device: jax.Device) -> Place | None:
    """Returns a place in jax's compilation cache, if there is one and the device is a GPU.

    jax needs the package ``flatbuffers`` to write what it has lowered.
    """
    folder = jax.config.jax_compilation_cache_dir
    is_local = folder and "://" not in folder and jax.config.jax_enable_compilation_cache
    if device.platform != "gpu" or not is_local or not find_spec("flatbuffers"):
        return None
    return Place(os.path.join(folder, "jaxkv"))


def kept_jit[F: Callable[..., Any]](function: F) -> F:
    """Decorates a function: `jax.jit` whose keywords are static, and which `keep_in` keeps."""

    def run(place: Place | None, static: tuple[tuple[str, Any], ...], *args: Any) -> Any:
        with keep_in(place):
            return run_kept(function, *args, **dict(static))

    run.__name__ = function.__name__  # in the program
    jitted = jax.jit(run, static_argnums=(0, 1))

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        return jitted(_PLACE.get(), tuple(sorted(static.items())), *args)

    return call  # pyrefly: ignore[bad-return]


def run_kept(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Calls a function of this library; one that `keep_in` keeps is not traced and lowered again.

    The name of its file is a hash of all that it depends on: its arguments, this library's code,
    jax, jax's settings and the device.
    """
    place = _PLACE.get()
    if place is None or not jax.sharding.get_abstract_mesh().empty:
        return function(*args, **static)
    leaves, tree = jax.tree.flatten(args)
    types = [jax.typeof(leaf) for leaf in leaves]
    about = function.__module__, place.platform, static, tree.unflatten(map(repr, types))
    try:
        key = hashlib.sha256(_surroundings() + _all_of(about).encode()).hexdigest()
    except TypeError:
        return function(*args, **static)
    path = pathlib.Path(place.folder, f"{function.__name__.strip('_')}-{key}")
    found = _read(path)
    if not found:
        flat = functools.partial(_flat, function, tree, static, found)
        shapes = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in types]
        exported = export.export(jax.jit(flat), platforms=[place.platform])(*shapes)
        found.append(bytes(exported.serialize()))
        _write(path, pickle.dumps(found))
    outputs, lowered = found
    arrays = export.deserialize(bytearray(lowered)).call(*leaves)
    return jax.tree.unflatten(jax.tree.structure(outputs), arrays)


def _flat(
    function: Callable[..., Any], tree: Any, static: dict[str, Any], found: list[Any], *leaves: Any
) -> list[Any]:
    """Calls a function; returns the arrays of its result, and appends their tree, with zeros."""
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


def _read(path: pathlib.Path) -> list[Any]:
    """Returns what a file holds; nothing if there is none, or if it is broken."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = str(error)
    else:
        if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
            return pickle.loads(content[DIGEST:])
        reason = f"{path} is broken"
    warnings.warn(f"a layer is lowered anew, because {reason}", stacklevel=2)
    return []


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file at once, so that no other process reads a part of it."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(content).digest() + content)
        partial.replace(path)
    except OSError as error:
        warnings.warn(f"lowered code is not kept for later processes: {error}", stacklevel=2)
