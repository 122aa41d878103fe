"""Executes notebooks where they are: ``python notebooks/execute.py``, or name some of them.

They are written with one line of the file for each line of a cell, and one for all its outputs, so
that git shows what changed. ``--layout`` only does that, without executing.
"""

import argparse
import base64
import io
import json
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
TIMEOUT_S = 300  # of one cell
COLOURS = 96  # of a picture
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def code(path: pathlib.Path) -> str:
    """Returns the code cells of a notebook as one script."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code") + "\n"


def layout(notebook: dict[str, Any]) -> str:
    """Returns a notebook as the text of its file."""
    cells = ",\n".join(_cell(number, cell) for number, cell in enumerate(notebook["cells"]))
    rest = {"metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return f'{{"cells": [\n{cells}\n],\n{json.dumps(rest)[1:]}\n'


def _cell(number: int, cell: dict[str, Any]) -> str:
    head = {"cell_type": cell["cell_type"], "id": f"cell-{number}", "metadata": {}}
    if cell["cell_type"] == "code":
        head |= {"execution_count": cell["execution_count"], "outputs": cell["outputs"]}
    lines = "".join(cell["source"]).splitlines(keepends=True)
    source = ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "source": [\n{source}]}}'


def execute(path: pathlib.Path) -> dict[str, Any]:
    """Runs a notebook and returns it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                output.data["image/png"] = shrink(png)
    return notebook


def shrink(png: str) -> str:
    """Returns a picture with a palette, a third of the size: notebooks are kept in git."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    small = io.BytesIO()
    picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path)
    parser.add_argument("--layout", action="store_true", help="execute nothing")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="another folder")
    options = parser.parse_args()
    for path in options.notebooks or NOTEBOOKS:
        notebook = json.loads(path.read_text()) if options.layout else execute(path)
        options.output.mkdir(parents=True, exist_ok=True)
        target = options.output / path.name
        target.write_text(layout(notebook))
        print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
