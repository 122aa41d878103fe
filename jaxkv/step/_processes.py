"""One upload for all processes of a mesh: compared, or packed by one of them for all."""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.blocks import StepShape, Upload

END = -1  # in place of a shape's index: no upload will follow


def check_same_upload(upload: Upload, mesh: Mesh) -> None:
    """Raises in every process of a mesh unless all of them hold the same upload.

    For schedulers that run in every process. Call it in all processes before the step that takes
    the upload: uploads that differ would be applied in silence, each on its own devices, and
    steps of different shapes would wait for each other for good. Exchanges 16 bytes per process,
    and waits for them::

        upload = manager.step(shape, work)
        jaxkv.check_same_upload(upload, mesh)
        cache, out = step(params, cache, upload)

    Args:
      upload: of this process.
      mesh: of the cache. One device of each process exchanges, after what it was given to do
        before; pass a mesh of CPU devices (``Mesh(jax.devices("cpu"), ("hosts",))``) to leave
        GPUs out of it. A mesh of one process has nothing to compare.

    Raises:
      RuntimeError: the uploads differ, in content or in shape, and every process says which do;
        or a process has ended.
      ValueError: a mesh without a device of this process.
    """
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
        "start all processes anew, and give each scheduler the same calls in the same order, or "
        "let one pack for all (broadcast_upload)"
    )


def broadcast_upload(
    upload: Upload | None, shapes: Sequence[StepShape], mesh: Mesh
) -> Upload | None:
    """Returns the upload of the mesh's first process, in all its processes.

    For one scheduler: the process of the mesh's first device packs, and the others receive. All
    processes call it, once per step::

        upload = manager.step(shape, work) if jax.process_index() == 0 else None
        upload = jaxkv.broadcast_upload(upload, shapes, mesh)
        cache, out = step(params, cache, upload)

    Args:
      upload: in the first process, the upload, or None to tell the others that none will follow;
        in all others None.
      shapes: that uploads may have; the same in all processes. The largest of them is sent.
      mesh: as for `check_same_upload`.

    Returns:
      The upload, in memory of the host; or None, in all processes.

    Raises:
      RuntimeError: a process has ended.
      ValueError: no shapes, an upload of another shape, an upload in another process than the
        first, or a mesh without a device of this process. It is raised here alone: end the
        process, and the others end with it.
    """
    exchange, shapes = _exchange_of(mesh), tuple(shapes)
    if not shapes:
        raise ValueError("shapes is empty; give every shape that an upload may have")
    message = np.zeros(1 + max(shape.format.size for shape in shapes), np.int32)
    if upload is not None:
        if not exchange.is_first:
            raise ValueError(
                f"process {jax.process_index()} passed an upload, but process "
                f"{exchange.processes[0]} packs for this mesh; pass None here"
            )
        if upload.shape not in shapes:
            raise ValueError(f"{upload.shape} is not one of the shapes given: {list(shapes)}")
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
                f"no device of the mesh belongs to process {index}; only processes that have one "
                "exchange uploads"
            )
        self.is_first = self.processes[0] == index
        self._device = devices[index]
        self._mesh = Mesh(np.array(list(devices.values())), ("process",))
        self._split = NamedSharding(self._mesh, PartitionSpec("process"))
        same = NamedSharding(self._mesh, PartitionSpec())
        self._gather = jax.jit(lambda rows: rows, out_shardings=same)
        self._sum = jax.jit(lambda rows: rows.sum(axis=0, dtype=rows.dtype), out_shardings=same)

    def gather(self, row: np.ndarray) -> np.ndarray:
        """Returns int32[processes, N] of each process's int32[N]."""
        return self._run(self._gather, row)

    def sum(self, row: np.ndarray) -> np.ndarray:
        """Returns the sum of each process's int32[N]."""
        return self._run(self._sum, row)

    def _run(self, program: Callable[[Array], Array], row: np.ndarray) -> np.ndarray:
        own = jax.device_put(row[None], self._device)
        shape = (len(self.processes), row.size)
        rows = jax.make_array_from_single_device_arrays(shape, self._split, [own])
        try:
            with jax.set_mesh(self._mesh):  # the caller's may have other devices
                return np.asarray(program(rows))
        except (RuntimeError, ValueError) as error:  # jax raises either, depending on the moment
            raise RuntimeError(
                f"processes {list(self.processes)} could not exchange an upload; if one of them "
                "has ended, start all anew"
            ) from error


@functools.lru_cache
def _exchange_of(mesh: Mesh) -> _Exchange:
    return _Exchange(mesh)


def _summary(upload: Upload) -> np.ndarray:
    """Returns an upload's number and size, and checksums of its shape and content: int32[4].

    A CRC tells apart for certain what differs in one int32 only, and all else but for one case
    in 2**32.
    """
    data = np.ascontiguousarray(upload.data)
    checksums = np.array([_shape_checksum(upload.shape), zlib.crc32(data)], np.uint32)
    return np.array([data[0], data.size, *checksums.view(np.int32)], np.int32)


@functools.lru_cache
def _shape_checksum(shape: StepShape) -> int:
    """Returns a checksum that is the same in every process: Python's own hash is not."""
    fields = [(field.name, getattr(shape, field.name)) for field in dataclasses.fields(shape)]
    return zlib.crc32(repr(fields).encode())


def _describe(row: list[int], first: list[int]) -> str:
    number, size, shape, content = map(operator.ne, row, first)
    told = f"number {row[0]}" if row[0] else "one without a number"
    if size or shape:
        return f"{told}, of another shape"
    return f"{told}, of other content" if number or content else told
