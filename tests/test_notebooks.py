"""Every notebook runs, and its outputs are in it.

Their code runs as scripts, many after another in one process, on whatever device is there; one runs
in a Jupyter kernel instead, as `notebooks/execute.py` runs them all.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((HERE / "notebooks").glob("*.ipynb"))
WITHOUT_PICTURES = "hugging_face_model", "rollouts_with_flax", "serving_fast", "sharp_bits"
WITHOUT_PICTURES += ("first_example", "logits_processors")
NEEDED = "nbclient", "ipykernel", "matplotlib"
IN_KERNEL = HERE / "notebooks" / "planning.ipynb"
MAX_BYTES = 330_000  # kept in git, and read on the web

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


def run(*arguments: object) -> str:
    """Runs Python where the notebooks are; returns what it printed."""
    cache = "JAX_COMPILATION_CACHE_DIR"  # which the last one sets
    outside = {name: value for name, value in os.environ.items() if name != cache}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=HERE / "notebooks",
        env=outside
        | {
            "PYTHONPATH": str(HERE),
            "MPLBACKEND": "agg",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be in use already
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning:" not in done.stderr
    return done.stdout


# A process compiles what its notebooks share once; each of two takes every second one. The first
# of all counts devices, and the last moves jax's cache of programs.
RUN = """
import gc, pathlib, sys, execute, jax
from matplotlib import pyplot
gc.set_threshold(200_000)  # as in conftest.py
for name in sys.argv[1:]:
    print("running", name, flush=True)
    precision = jax.config.jax_default_matmul_precision
    script = execute.code(pathlib.Path(name))
    exec(compile(script, name, "exec"), {"__name__": "__main__"})
    jax.config.update("jax_default_matmul_precision", precision)
    pyplot.close("all")
"""
FIRST, LAST = "meshes", "serving_fast"


@pytest.mark.parametrize("first", [0, 1])
def test_every_second_notebook_runs(first: int) -> None:
    has_flax = importlib.util.find_spec("flax") is not None
    paths = [
        path
        for path in sorted(NOTEBOOKS, key=lambda path: (path.stem != FIRST, path.stem == LAST))
        if path != IN_KERNEL and (has_flax or "from flax" not in path.read_text())
    ]
    paths = paths[first::2]
    printed = run("-c", RUN, *(path.name for path in paths))
    each = re.split(r"^running .*\n", printed, flags=re.M)[1:]
    assert len(each) == len(paths) and all(each)


LAID_OUT = """
import json, sys, execute
for path in map(execute.pathlib.Path, sys.argv[1:]):
    print(path.read_text() == execute.layout(json.loads(path.read_text())))
"""


def test_each_is_laid_out_for_git_and_has_the_outputs_of_all_its_cells() -> None:
    assert len(NOTEBOOKS) == 17
    lines = run("-c", LAID_OUT, *(path.name for path in NOTEBOOKS)).split()
    for path, is_laid_out in zip(NOTEBOOKS, lines, strict=True):
        assert is_laid_out == "True", "run `python notebooks/execute.py` and commit the notebook"
        codes = [cell for cell in cells(path) if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in codes] == [*range(1, len(codes) + 1)]
        assert_fit_to_read(path)
        assert "**Next:**" in contents(path)[-1][-1], "a guide ends with where next"


def test_a_notebook_is_executed_in_a_jupyter_kernel(tmp_path) -> None:
    run("execute.py", IN_KERNEL, "--output", tmp_path)
    fresh = tmp_path / IN_KERNEL.name
    assert contents(fresh) == contents(IN_KERNEL)
    assert_fit_to_read(fresh)


def assert_fit_to_read(path: pathlib.Path) -> None:
    """Small, without warnings, and with a picture for each cell that draws one."""
    assert path.stat().st_size < MAX_BYTES
    assert all("name" not in output or output["name"] != "stderr" for output in outputs(path))
    pictures = ["image/png" in output.get("data", {}) for output in outputs(path)]
    drawing = sum("plotting.plot_" in text for _, _, text in contents(path))
    assert sum(pictures) == drawing
    assert drawing or path.stem in WITHOUT_PICTURES
