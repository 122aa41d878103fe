"""Runs notebooks and writes an ``.ipynb`` next to each source: ``python notebooks/execute.py``.

The sources are the py:percent files; the ``.ipynb`` are made from them and never edited. Name
sources to run only those. ``--output FOLDER`` writes elsewhere, and leaves what is here alone.
"""

import argparse
import base64
import io
import pathlib

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 300  # of one cell
COLOURS = 96  # of a picture


def read(source: pathlib.Path) -> nbformat.NotebookNode:
    """Returns a source as a notebook without outputs. Cells have the same ids each time."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def shrink(png: str) -> str:
    """Returns a picture with a palette, a third of the size: notebooks are kept in git."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    small = io.BytesIO()
    picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def execute(source: pathlib.Path) -> nbformat.NotebookNode:
    """Runs a source and returns it with its outputs."""
    notebook = read(source)
    where = {"metadata": {"path": str(source.parent)}}
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources=where,
    )
    client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                output.data["image/png"] = shrink(png)
    notebook.metadata.pop("language_info", None)  # names a patch release of Python
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    for source in options.sources or sorted(HERE.glob("[0-9]*_*.py")):
        target = (options.output or source.parent) / f"{source.stem}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(execute(source), target)
        print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
