"""The README's examples run as they stand, one after the other, and print what it says."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(example: str, scope: dict) -> None:
    exec(compile(example, "README.md", "exec"), scope)


def test_the_examples_run_and_read_back_what_they_wrote(capsys: pytest.CaptureFixture) -> None:
    step, ring, engine, sleep, suite = blocks("python")
    scope: dict = {}
    run(step, scope)
    keys = np.asarray(scope["keys"])[0]
    assert (keys[:40] == 1).all() and (keys[40:48] == 0).all()
    print(scope["plan"])
    assert capsys.readouterr().out == blocks("text")[0]

    run(ring, scope)
    held = scope["manager"].block_ids("request 1")[0]
    assert int(scope["batch"].slots[0, 0]) == held[40 // 16] * 16 + 40 % 16
    scope["check_overflow"](scope["tables"])

    run(engine, scope)
    np.testing.assert_allclose(np.asarray(scope["out"])[:2], 1, rtol=1e-5)
    assert scope["step"]._cache_size() == 1
    scope["check_overflow"](scope["tables"])

    run(sleep, scope)
    assert "kv_cache asleep at level 1" in capsys.readouterr().out
    np.testing.assert_allclose(np.asarray(scope["out"])[:2], 1, rtol=1e-5)
    assert scope["step"]._cache_size() == 1

    run(suite, scope)


def test_the_examples_run_on_one_device_too() -> None:
    """The suite has eight virtual ones."""
    examples = "\n".join(blocks("python"))
    subprocess.run(
        [sys.executable, "-c", examples], check=True, env={**os.environ, "XLA_FLAGS": ""}
    )


def test_the_examples_are_short() -> None:
    lengths = [
        len([line for line in example.splitlines() if line.strip()]) for example in blocks("python")
    ]
    assert lengths[0] <= 27 and max(lengths) <= 50


def test_the_files_that_it_names_exist() -> None:
    root = pathlib.Path(__file__).parents[1]
    names = re.findall(r"`((?:tests|notebooks)/[\w./]+)`|\]\((notebooks/[\w.]+)\)", README)
    assert len(names) > 15
    for name in {name for pair in names for name in pair if name}:
        assert (root / name).exists(), name
