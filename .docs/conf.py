"""Builds the site: a page for each public module, and the guides. ``make docs`` runs it."""

import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import shutil
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import jaxkv  # noqa: E402

project, author, release = "jaxkv", "the jaxkv authors", jaxkv.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "sphinx_copybutton"]
exclude_patterns = ["guides/readme.txt"]
html_theme, html_title = "furo", "jaxkv"
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
nb_execution_mode = "off"  # the guides are executed where they are tested
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]

FIELD = re.compile(r"^([a-z]\w*(?:, \w+)*): (.*)$")
STAR = re.compile(r"(?<=, )\*(?=\w)")  # [B, *shape]


def as_fields(app, what, name, obj, options, lines: list[str]) -> None:
    """Makes fields of the lines ``name: text`` with which classes describe their attributes."""
    if what == "data" and getattr(obj, "__doc__", None) == type(obj).__doc__:
        lines.clear()  # that of dict, say
    for i, line in enumerate(lines):
        lines[i] = line = STAR.sub(r"\\*", line) if "::" not in line and "=" not in line else line
        if what == "class" and (found := FIELD.match(line)):
            lines[i] = f":{found[1]}: {found[2]}"


def members(module: object) -> list[str]:
    """Returns the public names of a module, functions and classes first."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n in dir(module) if n[0] != "_" and not inspect.ismodule(getattr(module, n))]
    return sorted(names, key=lambda name: not callable(getattr(module, name)))


def entry(module: str, name: str) -> str:
    """Returns the directive that documents one name."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return f".. autofunction:: {module}.{name}\n"
    return f".. autodata:: {module}.{name}\n"


def page(module: str) -> str:
    """Returns the page of a public module."""
    found = importlib.import_module(module)
    head = f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n   :no-members:\n\n"
    body = f".. currentmodule:: {module}\n\n"
    return head + body + "\n".join(entry(module, name) for name in members(found))


LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)?)(?!\w+:)([^)#]+)\)")


def on_site(link: re.Match[str]) -> str:
    """Returns a link to a file of the repository as it is on the site: a guide, or text alone."""
    is_picture, text, _, path = link.groups()
    guide = re.fullmatch(r"(?:notebooks/)?(\d\w+\.ipynb)", path)
    if is_picture and (ROOT / path).is_file():
        shutil.copy(ROOT / path, HERE / "guides")
        return f"![{text}](guides/{pathlib.Path(path).name})"
    return f"[{text}](/guides/{guide[1]})" if guide else text


def take_guide(notebook: pathlib.Path) -> None:
    """Copies a notebook, with its links as they are on the site."""
    content = json.loads(notebook.read_text())
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = LINK.sub(on_site, "".join(cell["source"]))
    (HERE / "guides" / notebook.name).write_text(json.dumps(content))


def write_pages(app) -> None:
    """Writes a page for each public module, and takes the guides and the README along."""
    api, guides = HERE / "api", HERE / "guides"
    for folder in (api, guides):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    names = [name for _, name, _ in pkgutil.iter_modules(jaxkv.__path__) if name[0] != "_"]
    modules = ["jaxkv", *(f"jaxkv.{name}" for name in names if name != "interop")]
    for module in [*modules, "jaxkv.interop.vllm", "pallas_kernels"]:
        (api / f"{module}.rst").write_text(page(module))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        take_guide(notebook)
    (guides / "readme.txt").write_text(LINK.sub(on_site, (ROOT / "README.md").read_text()))


def setup(app) -> None:
    """Registers what this file adds to Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", as_fields, priority=400)
