"""The README's examples run as they stand and print what it says; what it names exists."""

import importlib.util
import json
import os
import pathlib
import pickle
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

import jaxkv
from jaxkv.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = README, (ROOT / "CONTRIBUTING.md").read_text()
MAX_LINES, MAX_LINES_OF_CODE = 150, 27


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def without_a_cache(params, ids: list[int]) -> np.ndarray:
    """Returns the logits of every token of a request, computed by the README's model at once."""
    x = np.asarray(params["embed"])[ids]
    for _ in ("layers.0", "layers.1"):
        scores = np.einsum("qhd,khd->hqk", x, x) / np.sqrt(x.shape[-1])
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        x = x + np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), x)
    return np.einsum("thd,vhd->tv", x, np.asarray(params["head"]))


SERVE_MORE = """
import pickle, sys, numpy
prompts = [[3, 1, 4, 1, 5], [2, 7, 1]]
outputs = engine.generate(prompts, jaxkv.Sampling(max_tokens=20))
served = [(prompts[output.request], output.tokens) for output in outputs]
pickle.dump((jax.tree.map(numpy.asarray, params), served), open(sys.argv[1], "wb"))
"""


def test_the_example_prints_what_is_shown_and_serves_the_model_without_a_cache(tmp_path) -> None:
    """In a process with one device; the suite has eight virtual ones."""
    (example,) = blocks("python")
    command = [sys.executable, "-c", example + SERVE_MORE, str(tmp_path / "served")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output(command, env=environment, text=True)
    assert printed == blocks("text")[0]
    params, served = pickle.loads((tmp_path / "served").read_bytes())
    for prompt, tokens in served:
        logits = without_a_cache(params, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(axis=1).tolist()


def test_the_command_prints_what_is_shown(capsys: pytest.CaptureFixture) -> None:
    (_, command), (_, shown) = blocks("sh"), blocks("text")
    python, module, package, *arguments = shlex.split(command)
    assert (python, module, package) == ("python", "-m", "jaxkv")
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown


def test_the_page_and_its_example_are_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= MAX_LINES_OF_CODE


def test_the_guide_of_the_example_has_all_of_it() -> None:
    cells = json.loads((ROOT / "notebooks" / "first_example.ipynb").read_text())["cells"]
    code = [line.strip() for cell in cells for line in cell["source"]]
    (example,) = blocks("python")
    lines = [line for line in example.splitlines() if line.strip() and line[0] != "#"]
    assert not [line for line in lines if line.strip() not in code]


def test_figures_are_those_of_the_benchmarks() -> None:
    """The times next to vLLM's stand in the tables, and pictures are drawn from these."""
    tables = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
    (bullet,) = re.findall(r"^- \*\*Fast\*\*.*", README, re.M)
    told = re.findall(r"[\d.]+(?= s\b)", bullet)
    assert len(told) == 4 and all(re.search(rf"\b{re.escape(n)}\b", tables) for n in told)
    path = ROOT / "notebooks" / "draw_benchmarks.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    for name, text in module.pictures().items():
        drawn = (ROOT / "notebooks" / name).read_text()
        assert drawn == text, "run python notebooks/draw_benchmarks.py"


def test_the_files_that_are_named_exist() -> None:
    roots = ROOT, pathlib.Path(jaxkv.__file__).parents[1]  # not one where the wheel is tested
    for text in TEXTS:
        names = {name for name in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in name}
        names |= set(re.findall(r"`((?:tests|notebooks|jaxkv|pallas_kernels)/[\w./]+)`", text))
        assert len(names) > 5
        lost = [name for name in names if not any((root / name).exists() for root in roots)]
        assert not lost
