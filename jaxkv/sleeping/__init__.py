"""Sleep: a cache gives its device memory back for a while, and takes it again.

`sleep` takes a `KVCache` and returns a `SleepingCache`, `wake_up` the other way round, so that
a sleeping cache cannot be stepped by mistake. Level 1 keeps all content in page-locked host
memory. Level 2 drops keys, values and states, which are zero when the cache wakes; the tables
are kept, and what requests had computed must be computed again. Scales stay on the device at
both levels.

A cache that woke has the shapes, dtypes and places it had, so compiled steps go on without
compiling, on one condition: the cache was an argument of the step. An array that a function
closes over becomes a constant of the compiled program: it is never released, and the step reads
it as it was when it was compiled. `check_not_closed_over` looks for such arrays::

    step = jax.jit(lambda upload: model(cache, upload))  # wrong: sees one old cache
    step = jax.jit(model, donate_argnums=0)              # right: step(cache, upload)
    jaxkv.check_not_closed_over(cache, step, cache, upload)

On a mesh of several processes all of them make the same calls. Each copies its own shards, and the
copies end with it.

Memory returns to jax's allocator. For other processes to get it as well, that allocator must
not keep it: set ``XLA_PYTHON_CLIENT_ALLOCATOR=platform`` or ``cuda_async``. Host memory stays
page-locked for the next sleep, and XLA gives a process 64 GB of it unless
``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` says more.
"""

from jaxkv.sleeping._cache import PARTS, Part, SleepError, SleepingCache, sleep, wake_up
from jaxkv.sleeping._closed_over import ClosedOverError, check_not_closed_over

__all__ = [
    "PARTS",
    "ClosedOverError",
    "Part",
    "SleepError",
    "SleepingCache",
    "check_not_closed_over",
    "sleep",
    "wake_up",
]
