"""Strict modes, virtual devices, and one Hypothesis profile for the whole suite."""

import gc
import os
import shutil

import jax
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

# Most of the suite's time is compiling. LLVM leaves XLA's program as it is, and what runs is tiny.
if not shutil.which("nvidia-smi"):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"

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
