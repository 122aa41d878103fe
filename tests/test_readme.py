"""The README's examples run as they stand and print what it says; what it names exists."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = README, (ROOT / "CONTRIBUTING.md").read_text()
MAX_LINES, MAX_LINES_OF_CODE = 170, 27


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def without_a_cache(params, ids: list[int]) -> np.ndarray:
    """Returns the logits of every token of a request, computed by the README's model at once."""
    params = np.asarray(params)
    x = params[0, ids]
    for _ in ("layers.0", "layers.1"):
        stored = x.astype(jnp.bfloat16).astype(np.float32)
        scores = np.einsum("qhd,khd->hqk", x, stored) / np.sqrt(x.shape[-1])
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        x = x + np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), stored)
    return np.einsum("thd,vhd->tv", x, params[1])


def test_the_example_serves_what_the_model_says_without_a_cache() -> None:
    scope: dict = {}
    for example in blocks("python"):
        exec(compile(example, "README.md", "exec"), scope)
    prompts = {"a": 5, "b": 3}
    assert scope["step"]._cache_size() == 1
    for name, ids in scope["tokens"].items():
        first = prompts[name] - 1
        logits = without_a_cache(scope["params"], ids)[first:-1]
        picked = np.take_along_axis(logits, np.array(ids)[first + 1 :, None], axis=1)[:, 0]
        assert len(picked) == 20 and len(set(ids)) > 5
        assert (picked >= logits.max(axis=1) - 1e-2 * np.abs(logits).max()).all()


def test_the_examples_run_on_one_device_too() -> None:
    """The suite has eight virtual ones."""
    examples = "\n".join(blocks("python"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", examples], check=True, env=environment)


def test_the_command_prints_what_is_shown(capsys: pytest.CaptureFixture) -> None:
    (command,), (shown,) = blocks("sh"), blocks("text")
    python, module, package, *arguments = shlex.split(command)
    assert (python, module, package) == ("python", "-m", "jaxkv")
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown


def test_the_page_and_its_example_are_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= MAX_LINES_OF_CODE


def test_the_files_that_are_named_exist() -> None:
    roots = ROOT, pathlib.Path(jaxkv.__file__).parents[1]  # not one where the wheel is tested
    for text in TEXTS:
        names = {name for name in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in name}
        names |= set(re.findall(r"`((?:tests|notebooks|jaxkv|pallas_kernels)/[\w./]+)`", text))
        assert len(names) > 5
        lost = [name for name in names if not any((root / name).exists() for root in roots)]
        assert not lost
