"""A cache that gives its device memory back for a while, and takes it again.

Knows pool, tables and scales as arrays with a place on devices. Knows nothing of
requests: stop stepping before `sleep`, and go on after `wake_up`.

``sleep`` takes a `KVCache` and gives a `SleepingCache`, ``wake_up`` the other way round,
so that a cache which sleeps cannot be stepped by mistake. Level 1 keeps all content in
page-locked host memory. Level 2 drops keys, values and states, which are zero when the
cache wakes; what requests hold in the tables is kept, and what they had computed must be
computed again. Scales stay on the device at both levels.

What is awake again has the shapes, dtypes and places it had, so compiled steps go on
without compiling, on one condition: tables and buffers were arguments of the step. An
array that a function closes over becomes a constant of the compiled program: it is never
released, and the step reads it as it was when it was compiled, not what woke. Pass the
cache instead, and let `check_not_closed_over` look for what was missed::

    step = jax.jit(lambda batch: attend(cache.pool, batch))  # wrong: sees one old pool
    step = jax.jit(attend, donate_argnums=0)                 # right: step(cache.pool, batch)
    check_not_closed_over(cache, step, cache.pool, batch)

Memory returns to jax's allocator. For other processes to get it as well, that allocator
must not keep it: set ``XLA_PYTHON_CLIENT_ALLOCATOR=platform`` or ``cuda_async``. Host
memory stays page-locked for the next sleep, and XLA gives a process 64 GB of it unless
``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` says more.
"""

from jaxkv.sleep._cache import PARTS, KVCache, SleepError, SleepingCache, sleep, wake_up
from jaxkv.sleep._closed_over import ClosedOverError, check_not_closed_over

__all__ = [
    "PARTS",
    "ClosedOverError",
    "KVCache",
    "SleepError",
    "SleepingCache",
    "check_not_closed_over",
    "sleep",
    "wake_up",
]
