"""Page-locked host buffers for uploads, used in turn."""

import ctypes
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.checks import check_positive
from jaxkv.step._pack import write_step
from jaxkv.step._shape import StepShape

MEMORY_KIND = "pinned_host"


class UploadRing:
    """Packs steps into host memory that the device reads by itself.

    A NumPy upload is handed to a thread of the runtime, which copies it and has to be
    woken up first; on the machines that we measured this took 100 to 250 us of every step
    whose host code runs longer than some 20 us. A step that reads page-locked memory
    costs none of that. What it asks for in return is care with buffers that are used
    again, and that care is taken here: a buffer is not written again before the step that
    reads it is known to be done.

    ```
    upload = ring.pack(update=..., rows=..., first_positions=..., lengths=...)
    tables, pool, batch = apply_step_donating(tables, pool, upload, shape=shape)
    ring.sent(batch)
    ```

    For steps on one device. Not thread-safe; one scheduler owns it.
    """

    def __init__(self, shape: StepShape, *, depth: int = 8, device: jax.Device | None = None):
        """Allocates ``depth`` buffers of ``shape.size`` int32s.

        Args:
          shape: of the steps.
          depth: steps that may be under way before `pack` waits for the oldest. The host
            learns of a step's end late, so more than the device ever has in hand.
          device: that will run the steps; None: the default device.

        Raises:
          NotImplementedError: the device has no page-locked host memory.
        """
        check_positive(depth=depth)
        device = next(iter(jnp.zeros(0).devices())) if device is None else device
        if MEMORY_KIND not in [memory.kind for memory in device.addressable_memories()]:
            raise NotImplementedError(
                f"device={device} has no {MEMORY_KIND} memory; give steps what pack_step returns"
            )
        self.shape = shape
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=MEMORY_KIND)
        # Not from a NumPy array: some backends would share its memory instead of copying.
        self._uploads = [
            jax.device_put(jnp.zeros(shape.size, jnp.int32), sharding) for _ in range(depth)
        ]
        self._views = [_view(upload) for upload in self._uploads]
        if any(np.shares_memory(a, b) for a, b in itertools.combinations(self._views, 2)):
            raise NotImplementedError(f"device={device} gave two buffers the same memory")
        self._fences: list[list[Array]] = [[] for _ in range(depth)]
        self._turn, self._is_out = 0, False

    def __repr__(self) -> str:
        return f"UploadRing({len(self._uploads)} uploads of {self.shape.size:,} int32s)"

    def pack(self, **step: Any) -> Array:
        """Packs a step, with the arguments of `pack_step`, into the next buffer.

        Waits until the step that read that buffer before is done.

        Returns:
          int32[shape.size] in host memory, for `apply_step`. It is a view of the buffer:
          do not donate it, and keep no reference to it beyond the step.

        Raises:
          RuntimeError: `sent` was not called for the last upload, or it cannot be known
            whether the step that read the buffer is done.
        """
        if self._is_out:
            raise RuntimeError(
                "the last upload was packed and not sent: call sent(...) with what its step "
                "returned, or sent(None) when no step will read it"
            )
        upload = self._uploads[self._turn]
        if upload.is_deleted():
            raise RuntimeError("a step donated its upload: give steps rings' uploads undonated")
        self._wait()
        write_step(self.shape, self._views[self._turn], **step)
        self._is_out = True
        return upload

    def _wait(self) -> None:
        """Until the step that read the next buffer is done."""
        fence = self._fences[self._turn]
        alive = [output for output in fence if not output.is_deleted()]
        if fence and not alive:
            raise RuntimeError(
                "all outputs that sent(...) was given are deleted or donated; give it one that "
                "lives on, such as the StepBatch, and start again with a new ring"
            )
        for output in alive[:1]:  # one computation made them: they are ready together
            output.block_until_ready()

    def sent(self, outputs: Any) -> None:
        """Says which step reads the last upload: any output of it that lives on, such as
        its `StepBatch`, or None when no step will.

        Raises:
          RuntimeError: no upload was packed.
          TypeError: outputs without an array of jax among them.
        """
        if not self._is_out:
            raise RuntimeError("no upload is waiting to be sent: call pack(...) first")
        arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
        if outputs is not None and not arrays:
            raise TypeError(f"outputs must hold arrays of jax, got {type(outputs).__name__}")
        self._fences[self._turn] = arrays
        self._turn = (self._turn + 1) % len(self._uploads)
        self._is_out = False


def _view(upload: Array) -> np.ndarray:
    """The buffer of a host array, to write into."""
    upload.block_until_ready()
    memory = (ctypes.c_int32 * upload.size).from_address(upload.unsafe_buffer_pointer())
    return np.frombuffer(memory, np.int32)
