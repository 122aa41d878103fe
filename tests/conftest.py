"""Strict modes, virtual devices, and one Hypothesis profile for the whole suite."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from pallas_kernels import _capability

# Processes of tests would compile each module of jaxkv anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Most of the suite's time is compiling.
if not shutil.which("nvidia-smi"):
    # LLVM leaves XLA's program as it is, and what runs is tiny.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    # Tests compile programs of others, outside of interpret mode or in processes of their own. Each
    # worker has a folder, because jax writes what others may read at the same time.
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if kept is None:
        folder = tempfile.TemporaryDirectory(prefix="programs-", ignore_cleanup_errors=True)
        kept = folder.name
    kept = os.path.join(kept, os.environ.get("PYTEST_XDIST_WORKER", ""))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = kept
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    jax.config.update("jax_compilation_cache_dir", kept)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# On a GPU, several processes share its memory; jax reads this when it first uses the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Tracing makes many objects that live long, and collecting them was 5 % of the time.
gc.set_threshold(200_000)

# On a CPU the sharding tests need several devices; on a GPU they take what is there.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The default run tries the same examples each time; the long one draws its own, and keeps failures.
settings.register_profile(
    "default",
    derandomize=True,
    database=None,
    deadline=None,  # the first example compiles
    max_examples=40,
    stateful_step_count=30,
    # To vary a failure for its reasons takes minutes, more than a test may take.
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "long",
    parent=settings.get_profile("default"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    max_examples=1000,
)
settings.load_profile(os.environ.get("JAXKV_HYPOTHESIS_PROFILE", "default"))


# Their tests take longest. They come first, so that no worker is left with one of them at the end.
LONGEST = {"test_notebooks", "test_benchmarks", "test_demo", "test_hosts", "test_two_processes"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chooses and lowers kernels for 9.0, whatever GPU there is, or is asked for."""
    others = _capability.compute_capability() not in (None, _capability.WITHOUT_GPU)
    if others:
        monkeypatch.setattr(_capability, "compute_capability", lambda: _capability.WITHOUT_GPU)
        jax.clear_caches()  # jax keeps what it has traced for the other GPU
    yield
    if others:
        jax.clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skips what the GPU, or the one that it takes the kernels of, does not run."""
    try:
        return (yield)
    except NotImplementedError as error:
        if "needs compute capability" not in str(error):
            raise
        pytest.skip(str(error))
