"""One upload for all processes of a mesh: compared by all, or packed by one of them."""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv._src.internal.checks import check_each, check_kind
from jaxkv._src.uploads import StepShape, Upload

END = -1  # in place of a shape's index: no upload will follow


def check_same_upload(upload: Upload, mesh: Mesh) -> None:
    """Raises in every process of a mesh unless all of them hold the same upload.

    For schedulers that run in every process. Call it in all processes before the step that takes
    the upload. Otherwise uploads that differ are applied silently, each on its own devices, and
    steps of different shapes wait for each other forever. Exchanges 16 bytes per process, and
    waits for them::

        upload = manager.step(shape, work)
        jaxkv.step.check_same_upload(upload, mesh)
        cache, out = step(params, cache, upload)

    Args:
      upload: the upload of this process.
      mesh: the mesh of the cache. The exchange runs on one device of each process, after the work
        that is queued there; to keep it off the GPUs, pass a mesh of CPU devices
        (``Mesh(jax.devices("cpu"), ("hosts",))``). With one process there is nothing to compare.

    Raises:
      RuntimeError: the uploads differ in content or in shape: every process raises, and lists all
        of them. Or a process has ended.
      ValueError: a mesh without a device of this process.
    """
    check_kind(Upload, "what BlockManager.step returned", upload=upload)
    check_kind(Mesh, "a jax.sharding.Mesh", mesh=mesh)
    exchange = _exchange_of(mesh)
    if len(exchange.processes) == 1:
        return
    rows = exchange.gather(_summary(upload)).tolist()
    if all(row == rows[0] for row in rows):
        return
    told = [
        f"process {process} has {_describe(row, rows[0])}"
        for process, row in zip(exchange.processes, rows, strict=True)
    ]
    raise RuntimeError(
        f"the uploads of this step differ: {'; '.join(told)}. The schedulers have drifted apart: "
        "restart all processes, and make the same calls in the same order in each of them, or "
        "let one process pack for all (broadcast_upload)"
    )


def broadcast_upload(
    upload: Upload | None, shapes: Sequence[StepShape], mesh: Mesh
) -> Upload | None:
    """Sends the upload of a mesh's first process to all of its processes.

    For a scheduler that runs in one process: the process of the mesh's first device packs, and the
    others receive. All processes call it, once per step::

        upload = manager.step(shape, work) if jax.process_index() == 0 else None
        upload = jaxkv.step.broadcast_upload(upload, shapes, mesh)
        cache, out = step(params, cache, upload)

    Args:
      upload: in the first process the upload, or None to tell the others that no more will
        follow; in all other processes None.
      shapes: every shape that an upload may have, the same in all processes. Each call sends as
        many bytes as the largest of them takes.
      mesh: as for `check_same_upload`.

    Returns:
      In all processes the upload of the first one, in host memory, or None.

    Raises:
      RuntimeError: a process has ended.
      ValueError: no shapes, an upload of another shape, an upload in another process than the
        first, or a mesh without a device of this process. Only this process raises it: end the
        process, and the others end with it.
    """
    check_each(StepShape, "a StepShape", shapes=shapes)
    check_kind(Mesh, "a jax.sharding.Mesh", mesh=mesh)
    exchange, shapes = _exchange_of(mesh), tuple(shapes)
    if not shapes:
        raise ValueError("shapes is empty; pass every shape that an upload may have")
    message = np.zeros(1 + max(shape.format.size for shape in shapes), np.int32)
    if upload is not None:
        if not exchange.is_first:
            raise ValueError(
                f"process {jax.process_index()} passed an upload, but process "
                f"{exchange.processes[0]} packs for this mesh; pass None here"
            )
        check_kind(Upload, "what BlockManager.step returned", upload=upload)
        if upload.shape not in shapes:
            raise ValueError(
                f"upload has the shape {upload.shape}, which is not one of shapes={list(shapes)}"
            )
        message[0] = shapes.index(upload.shape)
        message[1 : 1 + upload.shape.format.size] = upload.data
    elif exchange.is_first:
        message[0] = END
    if len(exchange.processes) > 1:
        message = exchange.sum(message)
    if message[0] == END:
        return None
    shape = shapes[message[0]]
    return Upload(data=message[1 : 1 + shape.format.size], shape=shape)


class _Exchange:
    """One device of each process of a mesh, and the programs that run on them.

    processes: their indices, in the order of the mesh.
    """

    def __init__(self, mesh: Mesh):
        devices: dict[int, jax.Device] = {}
        for device in mesh.devices.flat:
            devices.setdefault(device.process_index, device)
        self.processes = tuple(devices)
        index = jax.process_index()
        if index not in devices:
            raise ValueError(
                f"no device of the mesh belongs to process {index}; call this only in processes "
                "that have one"
            )
        self.is_first = self.processes[0] == index
        self._device = devices[index]
        self._mesh = Mesh(np.array(list(devices.values())), ("process",))
        self._split = NamedSharding(self._mesh, PartitionSpec("process"))
        same = NamedSharding(self._mesh, PartitionSpec())
        self._gather = jax.jit(lambda rows: rows, out_shardings=same)
        self._sum = jax.jit(lambda rows: rows.sum(axis=0, dtype=rows.dtype), out_shardings=same)

    def gather(self, row: np.ndarray) -> np.ndarray:
        """Returns the rows of all processes, int32[processes, N]."""
        return self._run(self._gather, row)

    def sum(self, row: np.ndarray) -> np.ndarray:
        """Returns the sum of the rows of all processes, int32[N]."""
        return self._run(self._sum, row)

    def _run(self, program: Callable[[Array], Array], row: np.ndarray) -> np.ndarray:
        own = jax.device_put(row[None], self._device)
        shape = (len(self.processes), row.size)
        rows = jax.make_array_from_single_device_arrays(shape, self._split, [own])
        try:
            with jax.set_mesh(self._mesh):  # the caller's may have other devices
                return np.asarray(program(rows))
        except (RuntimeError, ValueError) as error:  # jax raises one or the other
            raise RuntimeError(
                f"processes {list(self.processes)} could not exchange an upload; if one of them "
                "has ended, restart all of them"
            ) from error


@functools.lru_cache
def _exchange_of(mesh: Mesh) -> _Exchange:
    return _Exchange(mesh)


def _summary(upload: Upload) -> np.ndarray:
    """Returns an upload's number and size, and checksums of its shape and content: int32[4].

    A CRC finds every difference of a single int32, and misses other differences once in 2**32.
    """
    data = np.ascontiguousarray(upload.data)
    checksums = np.array([_shape_checksum(upload.shape), zlib.crc32(data)], np.uint32)
    return np.array([data[0], data.size, *checksums.view(np.int32)], np.int32)


@functools.lru_cache
def _shape_checksum(shape: StepShape) -> int:
    """Returns a checksum that is equal in all processes, which Python's hash is not."""
    fields = [(field.name, getattr(shape, field.name)) for field in dataclasses.fields(shape)]
    return zlib.crc32(repr(fields).encode())


def _describe(row: list[int], first: list[int]) -> str:
    number, size, shape, content = map(operator.ne, row, first)
    told = f"number {row[0]}" if row[0] else "one without a number"
    if size or shape:
        return f"{told}, of another shape"
    return f"{told}, of other content" if number or content else told
