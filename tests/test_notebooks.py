"""Every notebook runs as a reader would run it, and is what its source says.

Each runs in a process of its own, in a Jupyter kernel, on whatever device is there.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parents[1]
SOURCES = sorted((HERE / "notebooks").glob("[0-9]_*.py"))
NEEDED = "jupytext", "nbclient", "ipykernel", "matplotlib"
MAX_BYTES = 150_000  # kept in git, and read on the web

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f'no {", ".join(missing)}: pip install "jaxkv[notebooks]"'
)


def cells(path: pathlib.Path) -> list[dict]:
    return json.loads(path.read_text())["cells"]


def outputs(path: pathlib.Path) -> list[dict]:
    return [output for cell in cells(path) for output in cell.get("outputs", ())]


def contents(path: pathlib.Path) -> list[tuple[str, str, str]]:
    return [(cell["id"], cell["cell_type"], "".join(cell["source"])) for cell in cells(path)]


def test_there_are_these_and_each_has_its_pair() -> None:
    names = ["1_layouts", "2_block_tables", "3_planning", "4_zeroing_and_nan", "5_your_own_engine"]
    names += ["6_meshes", "7_coming_from_vllm_or_numpy", "8_prefixes_and_rollouts"]
    names += ["9_sleep_and_page_lists"]
    assert [source.stem for source in SOURCES] == names
    assert sorted(path.stem for path in (HERE / "notebooks").glob("*.ipynb")) == names


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_and_is_what_its_source_says(source, tmp_path) -> None:
    command = [sys.executable, str(HERE / "notebooks" / "execute.py"), str(source)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        env=os.environ
        | {
            "PYTHONPATH": str(HERE),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be in use already
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    committed, fresh = source.with_suffix(".ipynb"), tmp_path / f"{source.stem}.ipynb"
    rebuild = "the pair is out of step: run `python notebooks/execute.py` and commit both"
    assert contents(committed) == contents(fresh), rebuild
    for path in (committed, fresh):
        assert path.stat().st_size < MAX_BYTES
        assert all("name" not in output or output["name"] != "stderr" for output in outputs(path))
        pictures = ["image/png" in output.get("data", {}) for output in outputs(path)]
        drawn = sum("plotting.plot_" in text for _, _, text in contents(path))
        assert sum(pictures) == drawn >= 3
