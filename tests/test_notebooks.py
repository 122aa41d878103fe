"""Every notebook runs, and is what its source says.

They run as scripts, many after another in one process, on whatever device is there; one runs in a
Jupyter kernel instead, as `execute.py` makes them all.
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
SOURCES = sorted(
    (HERE / "notebooks").glob("[0-9]*_*.py"), key=lambda path: int(path.stem.split("_")[0])
)
WITHOUT_PICTURES = "10_a_hugging_face_model", "11_rollouts_with_flax", "12_serving_fast"
NEEDED = "jupytext", "nbclient", "ipykernel", "matplotlib"
IN_KERNEL = HERE / "notebooks" / "3_planning.py"
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
    names += ["9_sleep_and_page_lists", *WITHOUT_PICTURES]
    assert [source.stem for source in SOURCES] == names
    assert sorted(path.stem for path in (HERE / "notebooks").glob("*.ipynb")) == sorted(names)


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
import gc, runpy, sys, jax
from matplotlib import pyplot
gc.set_threshold(200_000)  # as in conftest.py
for name in sys.argv[1:]:
    print("running", name, flush=True)
    precision = jax.config.jax_default_matmul_precision
    runpy.run_path(name)
    jax.config.update("jax_default_matmul_precision", precision)
    pyplot.close("all")
"""
FIRST, LAST = "6_meshes", "12_serving_fast"


@pytest.mark.parametrize("first", [0, 1])
def test_every_second_notebook_runs(first: int) -> None:
    has_flax = importlib.util.find_spec("flax") is not None
    sources = [
        source
        for source in sorted(SOURCES, key=lambda s: (s.stem != FIRST, s.stem == LAST))
        if source != IN_KERNEL and (has_flax or "from flax" not in source.read_text())
    ]
    sources = sources[first::2]
    printed = run("-c", RUN, *(source.name for source in sources))
    each = re.split(r"^running .*\n", printed, flags=re.M)[1:]
    assert len(each) == len(sources) and all(each)


READ = """
import json, pathlib, sys, execute
for name in sys.argv[1:]:
    cells = execute.read(pathlib.Path(name)).cells
    print(json.dumps([(cell.id, cell.cell_type, cell.source) for cell in cells]))
"""


def test_each_notebook_is_what_its_source_says() -> None:
    rebuild = "the pair is out of step: run `python notebooks/execute.py` and commit both"
    lines = run("-c", READ, *(source.name for source in SOURCES)).splitlines()
    for source, line in zip(SOURCES, lines, strict=True):
        committed = source.with_suffix(".ipynb")
        assert contents(committed) == [tuple(cell) for cell in json.loads(line)], rebuild
        assert_fit_to_read(committed)


def test_a_notebook_is_made_in_a_jupyter_kernel(tmp_path) -> None:
    run("execute.py", IN_KERNEL, "--output", tmp_path)
    fresh = tmp_path / f"{IN_KERNEL.stem}.ipynb"
    assert contents(fresh) == contents(IN_KERNEL.with_suffix(".ipynb"))
    assert_fit_to_read(fresh)


def assert_fit_to_read(path: pathlib.Path) -> None:
    """Small, without warnings, and with a picture for each cell that draws one."""
    assert path.stat().st_size < MAX_BYTES
    assert all("name" not in output or output["name"] != "stderr" for output in outputs(path))
    pictures = ["image/png" in output.get("data", {}) for output in outputs(path)]
    sampled = sum("plotting.plot_" in text for _, _, text in contents(path))
    assert sum(pictures) == sampled
    assert sampled or path.stem in WITHOUT_PICTURES
