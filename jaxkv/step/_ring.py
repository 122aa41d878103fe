"""A ring of page-locked host buffers for uploads."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._internal.checks import check_positive
from jaxkv.blocks import StepShape

MEMORY_KIND = "pinned_host"


class UploadRing:
    """A ring of page-locked host buffers, into which `BlockManager.step` packs uploads.

    Example::

        ring = jaxkv.UploadRing()
        upload = manager.step(shape, work, ring=ring)

    A NumPy upload is copied by a thread of the runtime, which has to be woken up first; the device
    copies page-locked memory by itself. A buffer is reused only after its copy has finished.

    For steps on one device. Not thread-safe; one scheduler owns it.
    """

    def __init__(self, *, depth: int = 8, device: jax.Device | None = None):
        """Creates an empty ring; each step shape gets its buffers when it is first used.

        Args:
          depth: uploads of one shape that may be in flight before `buffer` waits for the oldest.
            The host learns late that a copy has finished, so use more than the steps that the
            device has queued.
          device: the device that runs the steps; None: the default device.

        Raises:
          NotImplementedError: the device has no page-locked host memory.
        """
        check_positive(depth=depth)
        device = next(iter(jnp.zeros(0).devices())) if device is None else device
        if MEMORY_KIND not in [memory.kind for memory in device.addressable_memories()]:
            raise NotImplementedError(
                f"device={device} has no {MEMORY_KIND} memory; call step without a ring"
            )
        self._depth, self._device = depth, device
        self._buffers: dict[StepShape, _Buffers] = {}
        self._last: _Buffers | None = None

    def __repr__(self) -> str:
        return f"UploadRing({len(self._buffers)} shapes, {self._depth} uploads each)"

    def buffer(self, shape: StepShape) -> np.ndarray:
        """Returns the next buffer of a shape, int32[shape.format.size], once it is free."""
        if shape not in self._buffers:
            self._buffers[shape] = _Buffers(shape.format.size, self._depth, self._device)
        self._last = self._buffers[shape]
        return self._last.next()

    def seal(self) -> Array:
        """Starts copying the last buffer to the device, and returns the array there."""
        if self._last is None:
            raise RuntimeError("seal was called before buffer; call buffer(shape) first")
        return self._last.send()


class _Buffers:
    """Buffers of one size; each is free again once its copy on the device is ready."""

    def __init__(self, size: int, depth: int, device: jax.Device):
        host = jax.sharding.SingleDeviceSharding(device, memory_kind=MEMORY_KIND)
        # Not from NumPy arrays: some backends share their memory instead of copying it.
        self._uploads = [jax.device_put(jnp.zeros(size, jnp.int32), host) for _ in range(depth)]
        self._views = [_view(upload) for upload in self._uploads]
        if len({view.ctypes.data for view in self._views}) < depth:
            raise NotImplementedError(
                f"device={device} gives two buffers the same memory; call step without a ring"
            )
        self._copies: list[Array | None] = [None] * depth
        self._turn = -1

    def next(self) -> np.ndarray:
        self._turn = (self._turn + 1) % len(self._views)
        copy = self._copies[self._turn]
        if copy is not None:
            if copy.is_deleted():
                raise RuntimeError(
                    "a step donated its upload, so the ring cannot tell when its buffer is free: "
                    "donate only the cache"
                )
            copy.block_until_ready()
        return self._views[self._turn]

    def send(self) -> Array:
        copy = self._copies[self._turn] = _copy(self._uploads[self._turn])
        return copy


@jax.jit
def _copy(upload: Array) -> Array:
    """Copies an upload to the device; jitted, because that costs less than `jax.device_put`."""
    return jax.device_put(upload, jax.memory.Space.Device)


def _view(upload: Array) -> np.ndarray:
    """Returns the memory of a host array, to write into."""
    upload.block_until_ready()
    memory = (ctypes.c_int32 * upload.size).from_address(upload.unsafe_buffer_pointer())
    return np.frombuffer(memory, np.int32)
