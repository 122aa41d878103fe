"""Small shared pieces of the suite: a hybrid plan, devices, compilation counts."""

import contextlib
import functools
import types
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)
from pallas_kernels import _capability
from pallas_kernels._capability import Kernel, why_unsupported

ON_GPU = jax.default_backend() == "gpu"
HAS_MOSAIC = jax.__version_info__ >= (0, 11)
# Whether interpret mode takes barriers of two thread blocks, and arrivals nobody waits for.
HAS_LATE_BARRIERS = jax.__version_info__ >= (0, 12)
needs_mosaic = pytest.mark.skipif(
    not HAS_MOSAIC, reason=f"Mosaic kernels need jax >= 0.11, this is {jax.__version__}"
)
IMPLEMENTATIONS = ["xla", pytest.param("mosaic_gpu", marks=needs_mosaic)]
# With a number of ids that count, or None; `test_suite` interprets kernels without one.
TREES = [("xla", None), ("xla", 3), pytest.param("mosaic_gpu", 3, marks=needs_mosaic)]


def skip_without(*kernels: Kernel) -> None:
    """Skips a test on a GPU that does not run all of these kernels."""
    if reason := why_unsupported(kernels, any_platform=True):
        pytest.skip(reason)


def needs_devices(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(len(jax.devices()) < count, reason=f"needs {count} devices")


def runs_of(shapes: Sequence[Any], interpreted: Sequence[Any]) -> list[Any]:
    """Returns pairs of implementation and shape; without a GPU Mosaic has the interpreted ones."""
    mosaic = shapes if ON_GPU else interpreted
    runs: list[Any] = [("xla", shape) for shape in shapes]
    return runs + [pytest.param("mosaic_gpu", shape, marks=needs_mosaic) for shape in mosaic]


@contextlib.contextmanager
def kernels_run() -> Iterator[None]:
    """Lets Mosaic kernels run: on a GPU as they are, elsewhere in GPU interpret mode."""
    if ON_GPU or not HAS_MOSAIC:
        yield
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    teach_mma()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()), callbacks_of_numpy():
        yield


@contextlib.contextmanager
def callbacks_of_numpy() -> Generator[None]:
    """Gives callbacks arrays of NumPy: to make jax's of them is most of interpret mode's time."""
    from jax._src import callback
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    def copy(arrays: Sequence[np.ndarray], device: jax.Device) -> list[np.ndarray]:
        return [np.array(array) for array in arrays]

    def to_int(number: Any) -> Any:
        return int(number) if isinstance(number, np.ndarray) else known(number)

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(callback, "api") and (known := getattr(shared_memory, "_to_int", None)):
            patch.setattr(callback, "api", types.SimpleNamespace(device_put=copy))
            patch.setattr(shared_memory, "_to_int", to_int)
        yield


@functools.cache
def teach_mma() -> None:
    """Lets interpret mode, which does not know mma, multiply by XLA."""
    from jax._src.pallas.mosaic_gpu.primitives import mma_p
    from jax.interpreters import mlir

    def multiply(sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        return sums + jnp.matmul(left, right, preferred_element_type=sums.dtype)

    mlir.register_lowering(mma_p, mlir.lower_fun(multiply, multiple_results=False), "cpu")


def interpret_as(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interprets the kernels of a GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def copy(source: Any, target: Any, oob_mode: Any) -> None:
        target[...] = source[...]

    if capability != (9, 0):
        monkeypatch.setattr(_capability, "compute_capability", lambda: capability)
    if capability < (9, 0):  # interpret mode does not know cp.async
        monkeypatch.setattr(plgpu, "copy_gmem_to_smem", copy)
        monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda n: None)


def hybrid_layers(kv_dtype: str = "fp8_e4m3") -> dict[str, LayerSpec]:
    """Five groups of every growth, all on one page size: 4 tokens of 2 x 4 x 2 heads."""
    common = {"num_kv_heads": 2, "head_size": 4, "dtype": kv_dtype}
    item = 1 if kv_dtype.startswith("fp8") else 2
    full = FullAttentionSpec(block_size=4, **common)
    sliding = SlidingWindowSpec(block_size=4, sliding_window=6, **common)
    chunked = ChunkedAttentionSpec(block_size=4, chunk_size=6, **common)
    state = StateSpec(block_size=4, shapes=((3,), (2, 2 * item)), dtypes=("f32", "f32"))
    return {
        "full.0": full,
        "full.1": full,
        "sliding.0": sliding,
        "sliding.1": sliding,
        "chunked.0": chunked,
        "chunked.1": chunked,
        "state.0": state,
        "state.1": state,
        "state.2": state,
    }


def hybrid_plan(
    num_blocks: int = 40, max_model_len: int = 24, kv_dtype: str = "fp8_e4m3", **options: Any
) -> Plan:
    return plan_cache(
        hybrid_layers(kv_dtype),
        2**30,
        max_model_len=max_model_len,
        num_blocks_override=num_blocks,
        limits=Limits(max_in_flight_tokens=8),
        **options,
    )


def ids_of_group(num_groups: int, group: int, ids: Sequence[int]) -> list[list[int]]:
    """Ids for one group, none for the others: the block ids of a `TableEntry`."""
    return [list(ids) if index == group else [] for index in range(num_groups)]


def pointers(tree: object) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(tree)]


def snapshot[T](tree: T) -> T:
    """The same tree with copies in NumPy, for `jaxkv.testing.assert_same_bytes`."""
    return jax.tree.map(np.array, tree)


def garbage(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bytes: every number, and NaN of every payload."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = (*shape, dtype.itemsize)
    return np.random.default_rng(0).integers(0, 256, size, np.uint8).view(dtype)[..., 0]


def as_ids(ids) -> np.ndarray:
    return np.array(ids, np.int32)
