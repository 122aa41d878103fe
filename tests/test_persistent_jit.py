"""Lowered code that is kept computes the same, and is taken only for what it was lowered for."""

import contextlib
import dataclasses
import fractions
import hashlib
import pathlib
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxkv
import jaxkv._src.internal.persistent_jit as persistence
from jaxkv._src.engine import _device
from jaxkv._src.internal.persistent_jit import Target, persist_in, run_persistent
from tests.engine_models import forward, make_params, make_plan
from tests.helpers import ON_GPU, needs_mosaic

pytest.importorskip("flatbuffers")
ROOT = pathlib.Path(__file__).parents[1]
SPEC = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)


def place_in(folder: pathlib.Path) -> Target:
    return Target(str(folder / "new"), "cuda" if ON_GPU else "cpu")


def files(place: Target) -> dict[str, int]:
    """Returns how many files there are of each function."""
    names = [path.name.rsplit("-", 1)[0] for path in pathlib.Path(place.folder).glob("*")]
    return {name: names.count(name) for name in names}


def never(*args: Any) -> None:
    raise AssertionError("lowered again")


# --- what it computes -----------------------------------------------------------------


def make_engine() -> jaxkv.Engine:
    jax.clear_caches()
    plan = make_plan(("latent", "state"))
    return jaxkv.Engine(forward, make_params(), plan, max_requests=2, max_tokens=4)


def test_an_engine_computes_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, found = place_in(tmp_path), []
    for chosen in (None, place):
        monkeypatch.setattr(_device, "folder_for", lambda device, chosen=chosen: chosen)
        outputs = make_engine().generate([[7], [5]], jaxkv.Sampling(max_tokens=4))
        found.append(sorted((output.request, output.tokens) for output in outputs))
    assert found[0] == found[1]
    # Of the shape that is traced first, and of that which serves.
    assert files(place) == {"apply": 2, "attend": 2, "recur": 2}
    monkeypatch.setattr(persistence, "_flat", never)
    make_engine()  # traces a step


def lower_for_gpu(folder: str) -> int:
    """Lowers two layers for a GPU. Returns how many kernels they have."""
    plan = jaxkv.plan_cache({"a": SPEC, "b": SPEC}, 2**24, max_model_len=96)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=2, max_query_len=1)

    def run(cache: Any, upload: Any, x: Any) -> Any:
        with persist_in(Target(folder)):
            step = jaxkv.StepContext(cache, upload, token_ids=jnp.zeros(2, jnp.int32))
            for layer in ("a", "b"):
                x = x + step.attend(layer, x, x, x, implementation="mosaic_gpu")
            return step.done(), x

    cache = jax.eval_shape(lambda: jaxkv.make_cache(plan, max_requests=2))
    traced = jax.jit(run).trace(cache, shape.idle(), jnp.ones((2, 2, 64), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu")


@needs_mosaic
def test_another_process_finds_kernels(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys, tests.conftest, tests.test_persistent_jit as t; "
        "print(t.lower_for_gpu(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    monkeypatch.setattr(persistence, "_flat", never)
    assert lower_for_gpu(str(tmp_path)) == int(done.stdout) == 3  # one writes, two attend


# --- when it is taken -----------------------------------------------------------------


def scaled(pair: tuple[Any, Any], *, by: Any) -> Any:
    return pair[0] + pair[1], (None, pair[0] * by[0])


X, DEVICE = jnp.arange(4.0), jax.devices()[0]
OPTIONS = types.MappingProxyType({"a": 1})


class Call(NamedTuple):
    pair: tuple[Any, Any] = (X, X)
    by: Any = (2, SPEC, OPTIONS)
    context: Any = contextlib.nullcontext()


def another_device(**changes: Any) -> list[types.SimpleNamespace]:
    known = {name: getattr(DEVICE, name, None) for name in ("device_kind", "core_count")}
    return [types.SimpleNamespace(**known | changes)]


# What a call depends on: functions that return another call, or change what is around it.
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Call | None]] = {
    "shape": lambda patch: Call((X[:3], X[:3])),
    "dtype": lambda patch: Call((X.astype(int), X.astype(int))),
    "weak type": lambda patch: Call((X, jnp.asarray(1.0) * 1)),
    "static": lambda patch: Call(by=(3, SPEC, OPTIONS)),
    "field of a spec": lambda patch: Call(
        by=(2, dataclasses.replace(SPEC, head_size=128), OPTIONS)
    ),
    "value of a mapping": lambda patch: Call(by=(2, SPEC, types.MappingProxyType({"a": 2}))),
    "setting": lambda patch: Call(context=jax.default_matmul_precision("highest")),
    "variable": lambda patch: patch.setenv("MOSAIC_GPU_DUMP_PTX", "1"),
    "jax": lambda patch: patch.setattr(jax, "__version__", "0.99"),
    "device": lambda patch: patch.setattr(
        jax, "devices", lambda: another_device(device_kind="new")
    ),
    "code": lambda patch: patch.setattr(persistence, "_hash_of_code", lambda: b"other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_lowered_anew(
    change: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, call = place_in(tmp_path), Call()
    with persist_in(place):
        for _ in range(2):
            run_persistent(scaled, call.pair, by=call.by)
        assert files(place) == {"scaled": 1}
        call = CHANGES[change](monkeypatch) or call
        with call.context:
            out = run_persistent(scaled, call.pair, by=call.by)
    assert files(place) == {"scaled": 2}
    (total, (_, product)), expected = out, scaled(call.pair, by=call.by)
    assert jnp.array_equal(total, expected[0]) and jnp.array_equal(product, expected[1][1])


def test_what_may_depend_on_more_is_not_kept(tmp_path: pathlib.Path) -> None:
    with persist_in(place_in(tmp_path)):
        out = run_persistent(
            lambda pair, *, by: scaled(pair, by=(2,)), (X, X), by=(fractions.Fraction(2),)
        )
        assert jnp.array_equal(out[1][1], 2 * X)
        assert not files(place_in(tmp_path))
        run_persistent(scaled, (X, X), by=(np.float32(2),))
        assert files(place_in(tmp_path)) == {"scaled": 1}


def test_a_folder_that_cannot_be_written_warns(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with persist_in(place_in(tmp_path / "file")), pytest.warns(UserWarning, match="not stored"):
        out = run_persistent(scaled, (X, X), by=(2,))
    assert jnp.array_equal(out[1][1], 2 * X)


def hashed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


class Payload:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


def of_other_arguments() -> bytes:
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    function = jax.jit(lambda x, y: scaled((x, y), by=(2,)))
    return export.export(function, platforms=[jax.default_backend()])(shape, shape).serialize()


# Contents of a file, of what was written. Those with a hash of their own were written by others.
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda whole: b"",
    "other bytes": lambda whole: whole[:-9] + bytes(9),
    "a pickle": lambda whole: hashed(pickle.dumps(Payload())),
    "other code": lambda whole: hashed(b"[0, [null, 0]]\n" + bytes(range(256))),
    "code of other arguments": lambda whole: hashed(b"[0, [null, 0]]\n" + of_other_arguments()),
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_warns_and_is_written_anew(
    break_it: Callable[[bytes], bytes], tmp_path: pathlib.Path
) -> None:
    with persist_in(place_in(tmp_path)):
        run_persistent(scaled, (X, X), by=(2,))
        (path,) = (tmp_path / "new").iterdir()
        whole = path.read_bytes()
        path.write_bytes(break_it(whole))
        with pytest.warns(UserWarning, match=r"lowered anew, because .* is broken"):
            out = run_persistent(scaled, (X, X), by=(2,))
        assert jnp.array_equal(out[1][1], 2 * X)
        assert len(path.read_bytes()) == len(whole)
        run_persistent(scaled, (X, X), by=(2,))  # without a warning


@pytest.mark.parametrize("folder", ["local", "gs://bucket", None])
@pytest.mark.parametrize("is_enabled", [True, False])
def test_code_is_kept_next_to_what_jax_keeps(
    folder: str | None, is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"jax_compilation_cache_dir": folder, "jax_enable_compilation_cache": is_enabled}
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(**config))
    devices: list[Any] = [types.SimpleNamespace(platform=name) for name in ("gpu", "cpu")]
    wanted = (
        Target(str(pathlib.Path("local", "jaxkv"))) if folder == "local" and is_enabled else None
    )
    assert [persistence.folder_for(device) for device in devices] == [wanted, None]
    monkeypatch.setattr(persistence, "find_spec", lambda name: None)  # flatbuffers
    assert persistence.folder_for(devices[0]) is None
