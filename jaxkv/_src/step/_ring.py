"""A ring of page-locked host buffers for uploads."""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Int32

from jaxkv._src.internal.allocation import HOST_MEMORY, zeros
from jaxkv._src.internal.checks import check_kind, check_positive
from jaxkv._src.internal.unique import Unique
from jaxkv._src.uploads import StepShape


class UploadRing(Unique):
    """A ring of page-locked host buffers, into which `BlockManager.step` packs uploads.

    Example::

        ring = jaxkv.UploadRing()
        upload = manager.step(shape, work, ring=ring)
        cache, out = step(params, cache, upload)

    A NumPy upload is copied by a thread of the runtime, which has to be woken up first; the device
    copies page-locked memory by itself, as part of the step. A buffer is packed again only after
    the steps that took it have finished.

    jax compiles a step anew for uploads of a ring; ``shape.idle(ring)`` returns one without
    requests, to compile with before serving. Donate the cache and not the upload.

    Each device of a mesh has buffers of its own. Not thread-safe; one scheduler owns it.
    """

    why = "it owns page-locked memory; make another for each scheduler"

    def __init__(self, *, depth: int = 16, device: jax.Device | Sharding | None = None):
        """Creates an empty ring; each step shape gets its buffers when it is first used.

        Args:
          depth: uploads of one shape that may be packed between an upload and the call of a step
            that takes it. After twice as many at the latest, jax refuses the upload as deleted.
            Packing waits for a device that is more than ``depth`` steps behind. A shape has three
            times as many buffers.
          device: the device that runs the steps, or the devices, as a sharding that replicates an
            array (``cache.status.sharding``); None: the default device.

        Raises:
          NotImplementedError: a device has no page-locked host memory.
          ValueError: a sharding that divides an array.
        """
        check_positive(depth=depth)
        device = next(iter(jnp.zeros(0).devices())) if device is None else device
        check_kind((jax.Device, Sharding), "a jax.Device or a jax.sharding.Sharding", device=device)
        sharding = device if isinstance(device, Sharding) else SingleDeviceSharding(device)
        if not sharding.is_fully_replicated:
            raise ValueError(
                f"device={device} divides an array; every device reads the whole upload: pass "
                "NamedSharding(mesh, PartitionSpec())"
            )
        for one in sharding.addressable_devices:
            if HOST_MEMORY not in [memory.kind for memory in one.addressable_memories()]:
                raise NotImplementedError(
                    f"device={one} has no {HOST_MEMORY} memory; call step without a ring"
                )
        self._depth, self._sharding = depth, sharding
        self._buffers: dict[StepShape, _Buffers] = {}
        self._open: _Buffers | None = None  # whose buffer was returned and not flushed yet

    def __repr__(self) -> str:
        return f"UploadRing({len(self._buffers)} shapes, depth {self._depth})"

    def buffer(self, shape: StepShape) -> Int32[np.ndarray, "ints"]:
        """Returns the next buffer of a shape, int32[shape.format.size], once it is free.

        A buffer that was not flushed is the next one again.
        """
        check_kind(StepShape, shape=shape)
        buffers = self._buffers.get(shape)
        if buffers is None:
            buffers = _Buffers(shape.format.size, self._depth, self._sharding)
            self._buffers[shape] = buffers
        view = buffers.next()
        self._open = buffers
        return view

    def flush(self) -> Int32[Array, "ints"]:
        """Returns the last buffer as an array in host memory, which `apply_step` copies."""
        if self._open is None:
            raise RuntimeError("flush was called before buffer; call buffer(shape) first")
        buffers, self._open = self._open, None
        return buffers.send()


class _Buffers:
    """Buffers of one size, in three parts: one is packed, one is read, one is taken back.

    A part is taken back by a program to which its arrays are donated. jax deletes them, so that
    no later step can read them. The arrays that the program returns have the same memory, and are
    ready once all steps that were dispatched before have read it.
    """

    PARTS = 3

    def __init__(self, size: int, depth: int, sharding: Sharding):
        host = sharding.with_memory_kind(HOST_MEMORY)
        # Not from NumPy arrays: some backends share their memory instead of copying it.
        empty = zeros(((size,),), np.int32, sharding)
        self._parts = [
            _take_back([jax.device_put(array, host) for array in empty * depth])
            for _ in range(self.PARTS)
        ]
        self._views = _views(self._parts[0])
        self._part, self._turn = 0, 0
        addresses = [at for part in self._parts for array in part for at in _addresses(array)]
        if len(set(addresses)) < len(addresses):
            raise NotImplementedError(
                f"{sharding} gives two buffers the same memory; call step without a ring"
            )

    def next(self) -> np.ndarray:
        if self._turn == len(self._views):
            before, after = (self._part - 1) % self.PARTS, (self._part + 1) % self.PARTS
            self._parts[before] = _take_back(self._parts[before])
            self._views = _views(self._parts[after])
            self._part, self._turn = after, 0
        return self._views[self._turn][0]

    def send(self) -> Array:
        upload = self._parts[self._part][self._turn]
        first, *others = self._views[self._turn]
        for view in others:
            view[:] = first
        self._turn += 1
        return upload


def _take_back(uploads: list[Array]) -> list[Array]:
    """Deletes arrays and returns others, which are ready once no dispatched step reads them."""
    if any(upload.is_deleted() for upload in uploads):
        raise RuntimeError(
            "a step donated its upload, so the ring cannot tell when its buffer is free: "
            "donate only the cache"
        )
    with jax.disable_jit(False):  # without jit nothing would be donated
        return _same(uploads)


@functools.partial(jax.jit, donate_argnums=0)
def _same(uploads: list[Array]) -> list[Array]:
    return uploads


def _views(uploads: list[Array]) -> list[list[np.ndarray]]:
    """Returns the memory of host arrays, of each device, to write into, once no program reads."""
    jax.block_until_ready(uploads)
    return [[_memory(at, upload.size) for at in _addresses(upload)] for upload in uploads]


def _addresses(upload: Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in upload.addressable_shards]


@functools.lru_cache(maxsize=4096)  # a part that was taken back has the memory that it had before
def _memory(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_int32 * size).from_address(address), np.int32)
