"""Sleep: a cache gives its device memory back for a while, and takes it again.

`sleep` turns a `KVCache` into a `SleepingCache`, and `wake_up` turns it back, so that no step runs
on a sleeping cache by mistake. Level 1 keeps all content in page-locked host memory. Level 2 drops
keys, values and states: they are zero when the cache wakes up, and requests must compute them
again. The block tables are kept at both levels, and scales stay on the device.

A cache that wakes up has the same shapes, dtypes and shardings as before, so compiled steps are not
compiled again, provided that they take the cache as an argument. An array that a function closes
over becomes a constant of the compiled program: its memory is never released, and the step reads
the content that it had when it was compiled. `check_not_closed_over` finds such arrays::

    step = jax.jit(lambda upload: model(cache, upload))  # wrong: sees one old cache
    step = jax.jit(model, donate_argnums=0)              # right: step(cache, upload)
    jaxkv.sleeping.check_not_closed_over(cache, step, cache, upload)

On a mesh of several processes all of them make the same calls. Each process copies its own shards,
and its copies are lost when it ends.

Memory returns to jax's allocator. For other processes to use it, that allocator must not keep it:
set ``XLA_PYTHON_CLIENT_ALLOCATOR=platform`` or ``cuda_async``. Host memory stays page-locked for
the next sleep; a process gets at most 64 GB of it, or ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB``.
"""

from jaxkv._src.sleeping import (
    ClosedOverError,
    SleepError,
    SleepingCache,
    check_not_closed_over,
)

__all__ = [
    "ClosedOverError",
    "SleepError",
    "SleepingCache",
    "check_not_closed_over",
]
