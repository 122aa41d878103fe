"""The README's example runs as it stands, and prints what the README says."""

import pathlib
import re

import numpy as np
import pytest

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_examples_run_and_read_back_what_they_wrote(capsys: pytest.CaptureFixture) -> None:
    first, second = blocks("python")
    scope: dict = {}
    exec(compile(first, "README.md", "exec"), scope)
    keys = np.asarray(scope["keys"])[0]
    assert (keys[:40] == 1).all() and (keys[40:48] == 0).all()
    print(scope["plan"])
    assert capsys.readouterr().out == blocks("text")[0]

    exec(compile(second, "README.md", "exec"), scope)
    held = scope["manager"].block_ids("request 1")[0]
    assert int(scope["batch"].slots[0, 0]) == held[40 // 16] * 16 + 40 % 16
    scope["check_overflow"](scope["tables"])


def test_the_example_is_about_25_lines() -> None:
    example = blocks("python")[0]
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 27
