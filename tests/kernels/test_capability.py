"""Capability of the device: the choice of an implementation, reasons against Mosaic, the grid."""

import contextlib
import dataclasses
import sys
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from jaxkv.__main__ import main
from pallas_kernels import (
    _capability,
    default_implementation,
    explain_default,
    import_mosaic,
)
from pallas_kernels._dispatch import choose
from tests.helpers import HAS_MOSAIC, ON_GPU, needs_mosaic


@dataclasses.dataclass
class Gpu:
    compute_capability: str
    core_count: int


def pretend(monkeypatch, gpu: Gpu) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])


def test_the_default_suits_the_device() -> None:
    assert default_implementation() == ("mosaic_gpu" if ON_GPU and HAS_MOSAIC else "xla")


# By hand, from NVIDIA's PTX manual: TMA is there from sm_90 on.
ALL = set(get_args(_capability.Kernel))
RUNS = {
    **dict.fromkeys("8.0 8.6 8.7 8.9".split(), ALL - {"recurrent_replay"}),
    **dict.fromkeys("9.0 10.0 10.3 11.0 12.0 12.1".split(), ALL),
    **{unknown: set() for unknown in ("7.5", "9.1", "13.0", "13.7", "")},
}


@needs_mosaic
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("capability", RUNS)
def test_a_gpu_runs_the_kernels_of_its_instructions_and_xla_for_others(
    capability: str, forced: bool, monkeypatch
) -> None:
    """Its own, or those of the GPU that the environment asks for."""
    pretend(monkeypatch, Gpu("9.0" if forced else capability, 84))
    if forced:
        monkeypatch.setenv(_capability.VARIABLE, capability)
        if capability and not RUNS[capability]:
            with pytest.raises(ValueError, match=f"{capability}: it must be one of 8.0, 8.6"):
                default_implementation()
            return
        capability = capability or "9.0"
    for kernel, told in explain_default().items():
        runs = kernel in RUNS[capability]
        assert default_implementation(kernel) == ("mosaic_gpu" if runs else "xla")
        assert told.startswith("mosaic_gpu: " if runs else "xla: the kernel ")
        reason = _capability.why_unsupported([kernel], any_platform=True)
        assert (reason is None) == runs
        if reason is not None:
            assert f"the kernel {kernel!r} needs compute capability" in reason
            assert reason.endswith(f"this GPU has {capability or '0.0'}")
    assert default_implementation() == ("mosaic_gpu" if RUNS[capability] == ALL else "xla")
    with pytest.raises(ValueError, match=r"kernels: 'attend' is none of 'zero_blocks'"):
        default_implementation("attend")  # pyrefly: ignore[bad-argument-type]


def test_the_environment_is_told_for_bug_reports(capsys) -> None:
    assert main(["env"]) == 0
    told = capsys.readouterr().out
    assert f"jax {jax.__version__}, " in told and jax.devices()[0].device_kind in told
    for kernel, path in explain_default().items():
        assert f" {kernel} " in told and path in told


@needs_mosaic
@pytest.mark.parametrize("unsupported", [None, "the call is odd"])
@pytest.mark.parametrize("implementation", [None, "xla", "mosaic_gpu"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_call_runs_by_mosaic_where_the_call_and_the_device_allow(
    on_gpu: bool, implementation: Any, unsupported: str | None, monkeypatch
) -> None:
    """Without a choice, XLA stands by for a program that is compiled for another device."""
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0) if on_gpu else None)
    traced: list[str] = []

    def run(name: str) -> tuple[jax.Array]:
        traced.append(name)
        return (jnp.zeros(()),)

    def call() -> Any:
        kernels = {name: lambda name=name: run(name) for name in ("mosaic_gpu", "xla")}
        return choose(implementation, unsupported, kernels=["decode"], **kernels)

    if implementation == "mosaic_gpu" and unsupported:
        with pytest.raises(NotImplementedError, match='"mosaic_gpu": the call is odd; use "xla"'):
            call()
        return
    jax.eval_shape(call)
    best = ["mosaic_gpu", "xla"] if on_gpu and not unsupported else ["xla"]
    assert sorted(traced) == ([implementation] if implementation else best)


@needs_mosaic
@pytest.mark.parametrize(
    ("implementation", "on_gpu", "is_imported"),
    [(None, False, False), (None, True, True), ("xla", True, False), ("mosaic_gpu", False, True)],
)
def test_mosaic_is_imported_where_a_call_may_use_it(
    implementation: Any, on_gpu: bool, is_imported: bool, monkeypatch
) -> None:
    pretend(monkeypatch, Gpu("9.0", 132))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if on_gpu else "cpu")
    monkeypatch.setitem(sys.modules, "pallas_kernels._mosaic", None)  # to import it is an error
    with pytest.raises(ImportError) if is_imported else contextlib.nullcontext():
        import_mosaic(implementation)
    with pytest.raises(ValueError, match="implementation='triton'; use one of"):
        import_mosaic("triton")  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("gpu", [Gpu("9.0", 132), Gpu("10.0", 148), None], ids=str)
def test_a_grid_has_its_thread_blocks_on_every_sm(gpu, monkeypatch) -> None:
    """Without a GPU, on every SM of a Hopper; a real one says how many it has."""
    if gpu is not None:
        pretend(monkeypatch, gpu)
    sms = gpu.core_count if gpu else 132
    if ON_GPU and gpu is None:
        sms = jax.devices()[0].core_count
    assert sms > 0 and _capability.max_thread_blocks(4) == 4 * sms


def test_elements_of_one_two_and_four_bytes_are_stored() -> None:
    words, halves = "float32 int32 uint32", "bfloat16 float16 int16 uint16"
    stored = f"{words} {halves} float8_e4m3fn float8_e5m2 int8 uint8".split()
    for name in [*stored, "float64", "int64", "complex64", "bool", "int4"]:
        assert _capability.can_store(jnp.dtype(name)) == (name in stored), name
