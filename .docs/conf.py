"""Configures the site: a page for each public name, and the guides. ``make docs`` builds it."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import shutil
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import jaxkv  # noqa: E402
from jaxkv.__main__ import main  # noqa: E402

# Pages from elsewhere lie here as they do in the repository, so that links between them hold.
for name in ("notebooks", "api", "tests"):  # without pages of names that are gone
    shutil.rmtree(HERE / name, ignore_errors=True)
for pattern in ("C*.md", "notebooks/*.*", "tests/benchmarks/README.md"):
    for path in ROOT.glob(pattern):
        copy = HERE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def split_benchmarks(path: pathlib.Path) -> dict[str, str]:
    """Makes a page of each section of the benchmarks; returns the page of each of their anchors."""
    intro, *sections = re.split(r"^## ", path.read_text(), flags=re.M)
    page_of, names = {}, [section.partition("\n")[0] for section in sections]
    for name, section in zip(names, sections, strict=True):
        text = re.sub(r"^#(#+ )", r"\1", section.partition("\n")[2], flags=re.M)
        path.with_name(f"{name}.md").write_text(f"# {name.capitalize()}\n{text}")
        for heading in [name, *re.findall(r"^##+ (.*)", text, re.M)]:
            page_of[heading.lower().replace(" ", "-")] = f"{name}.md"
    pictures = "\n\n".join(re.findall(r"^!\[.*", "\n".join(sections), re.M))
    lists = " · ".join(f"[{name.capitalize()}]({name}.md)" for name in names)
    title, _, rest = intro.partition("\n")
    pages = "```{toctree}\n:hidden:\n" + "\n".join(names) + "\n```\n"
    path.write_text(f"{title}\n\n{lists}\n\n{pictures}\n\n## Running them\n{rest}\n{pages}")
    return page_of


def write_commands(path: pathlib.Path) -> None:
    """Makes a page of what the commands say about themselves."""
    os.environ["COLUMNS"], texts = "88", ["# Command line\n"]
    for command in ("plan", "env", "demo"):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            main([command, "--help"])
        texts.append(f"## {command}\n\n```text\n{said.getvalue()}```\n")
    path.write_text("\n".join(texts))


write_commands(HERE / "commands.md")
PAGE_OF = split_benchmarks(HERE / "tests" / "benchmarks" / "README.md")
jaxkv.__all__ = list(jaxkv._MODULE_OF)  # without it, autodoc documents no imported name

project, author, release = "jaxkv", "the jaxkv authors", jaxkv.__version__
extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"),
    *("myst_nb", "sphinx_copybutton"),
]
html_theme, html_title = "furo", "jaxkv"
html_static_path, html_css_files = ["static"], ["site.css"]
templates_path = ["templates"]
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80  # else an argument a line
autodoc_inherit_docstrings = True
autoclass_content = "both"  # constructors document their arguments
autosummary_ignore_module_all = False
napoleon_use_rtype = False
nb_execution_mode = "off"  # the guides are executed where they are tested
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

FIELD = re.compile(r"^([a-z]\w*(?:, \w+)*): (.*)$")
STAR = re.compile(r"(?<=, )\*(?=\w)")  # [B, *shape]
LINK = re.compile(r"!?\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(?:#([^)]*))?\)")
SPLIT = "benchmarks/README.md"


def adapt_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Makes a list of the lines ``name: text`` with which classes describe their attributes."""
    if what == "data" and getattr(obj, "__doc__", None) == type(obj).__doc__:
        lines.clear()  # that of dict, say
    if what in ("property", "attribute") and lines:
        lines[:1] = lines[0].replace(": ", ":\n", 1).split("\n")  # before a colon is no type
    lines[:] = [line for line in lines if not line.startswith("Create new instance of ")]
    for i, line in enumerate(lines):
        lines[i] = line = STAR.sub(r"\\*", line) if "::" not in line and "=" not in line else line
        if what in ("class", "exception") and (found := FIELD.match(line)):
            lines[i] = f"- **{found[1]}**: {found[2]}"


def skip_member(app, what, name, obj, skip, options) -> bool | None:
    """Skips the fields of named tuples, which the docstring of the class describes."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


LISTED = re.findall(r"^   (\w[\w.]+)$", (HERE / "reference.rst").read_text(), re.M)
autosummary_context = {
    "public": {module: sorted(importlib.import_module(module).__all__) for module in LISTED},
    "foreign": "tuple, dict, int, object, BaseException, Exception, Mapping, Flag",
}


NAMES = {name for module in ("jaxkv", *LISTED) for name in importlib.import_module(module).__all__}
NAMES |= {f"jaxkv.{name}" for name in jaxkv.__all__} | {name for name in LISTED if "." in name}
CODE = re.compile(r"(?<![\w`}])`([\w.]+)`(?![\w`])")


def adapt_links(app, page: str, source: list[str]) -> None:
    """Puts the README on the first page, links public names, unlinks files not here."""
    folder = (HERE / page).parent

    def on_site(link: re.Match[str]) -> str:
        if link[3] and link[2].endswith(SPLIT):
            name = PAGE_OF[link[3]]
            return f"[{link[1]}]({link[2].removesuffix('README.md')}{name}#{link[3]})"
        return link[0] if os.path.exists(os.path.normpath(folder / link[2])) else link[1]

    def role(code: re.Match[str]) -> str:
        return f"{{py:obj}}{code[0]}" if code[1] in NAMES else code[0]

    def adapted(text: str) -> str:
        text = LINK.sub(on_site, text)
        return CODE.sub(role, text) if page.startswith("notebooks/") or page == "index" else text

    if source[0].startswith("{"):  # a notebook
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = adapted("".join(cell["source"]))
        source[0] = json.dumps(notebook)
    else:
        text = (ROOT / "README.md").read_text() if page == "index" else ""
        source[0] = adapted(text + source[0])


def find_public(app, env, node, text):
    """Resolves a name without its module, or with a private one, to the shortest public name."""
    found = re.fullmatch(
        r"(?:(?:jaxkv|pallas_kernels)\._[\w.]+\.)?([\w.]+)", node.get("reftarget", "")
    )
    domain = env.domains.python_domain
    names = [name for name in domain.objects if found and name.endswith(f".{found[1]}")]
    if node.get("refdomain") != "py" or not names:
        return None
    name = min(names, key=len)
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, text)


def setup(app) -> None:
    """Registers what this file adds to Sphinx."""
    app.connect("missing-reference", find_public)
    app.connect("source-read", adapt_links)
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)
    app.connect("autodoc-skip-member", skip_member)
