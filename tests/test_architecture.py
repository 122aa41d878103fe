"""Imports run downwards only, planning never loads jax, and CONTRIBUTING.md draws this.

`ROWS` is the rule. The checker reads the imports of every module, also inside functions.
"""

import ast
import graphlib
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

import jaxkv
import pallas_kernels

HERE = pathlib.Path(__file__).parents[1]
PACKAGES = [pathlib.Path(str(package.__file__)).parent for package in (jaxkv, pallas_kernels)]

# From the top: a module imports only what stands in a lower row. Those on the left never
# import jax; what stands on the right only inside a function that was given one of its own.
ROWS: list[tuple[list[str], list[str]]] = [
    (["__main__"], ["public"]),
    (["cli"], ["demo", "env"]),
    (["plotting"], ["testing"]),
    ([], ["engine"]),
    ([], ["step"]),
    ([], ["attention", "recurrent", "offload (jax)", "sleeping", "logits_processors"]),
    ([], ["pool"]),
    ([], ["block_tables"]),
    (["scheduler", "interop"], ["cache"]),
    (["blocks", "layout"], []),
    (["gpu_memory", "offload", "uploads"], []),
    (["planning", "hf_config", "prefixes"], []),
    (["specs"], ["internal (jax)"]),
    (["internal"], ["pallas_kernels"]),
]
ROW_OF = {name: row for row, sides in enumerate(ROWS) for name in itertools.chain(*sides)}
WITHOUT_JAX = {name for left, _ in ROWS for name in left}

# Packages that are not dependencies of jaxkv, and what may import them.
OPTIONAL = {
    "matplotlib": {"plotting"},
    "tqdm": {"engine"},
    "hypothesis": {"testing"},
    "chex": {"testing"},
    "msgpack": {"prefixes"},
}
MAX_IMPORT_MS = 100
INTERNAL_WITH_JAX = {"allocation", "indexing", "jit_int32", "mesh", "persistent_jit"}
OFFLOAD_WITH_JAX = {"host_blocks", "_chunk_copies"}
REQUIRED = {"jax", "jaxlib", "jaxtyping", "numpy", "ml_dtypes"}  # jax brings the last


SRC = "jaxkv._src."


def part_of(module: str) -> str:
    """``jaxkv._src.pool._tokens`` -> ``pool``; another package's name for its modules.

    The modules that list public names are ``public``.
    """
    package, *rest = module.split(".")
    if package != "jaxkv":
        return package
    if rest[:1] != ["_src"]:
        return "__main__" if rest == ["__main__"] else "public"
    if rest[1:2] == ["internal"] and set(rest[2:3]) & INTERNAL_WITH_JAX:
        return "internal (jax)"
    if rest[1:2] == ["offload"] and set(rest[2:3]) & OFFLOAD_WITH_JAX:
        return "offload (jax)"
    return (rest[1:] or [""])[0]


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Modules that a module's text imports, and when: now, later (in a function), for types."""
    for node, when in statements(ast.parse(source), "now"):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module in ("jaxkv._src", f"{SRC}internal"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        yield from ((name, when) for name in names)


def statements(block: ast.AST, when: str) -> Iterator[tuple[ast.AST, str]]:
    """Each statement below a block, with the time at which it runs."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(block, part, ()):
            yield node, when
            within = when
            if isinstance(node, ast.FunctionDef):
                within = "later"
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                within = "for types"
            yield from statements(node, within)


def complaints(module: str, source: str) -> list[str]:
    """Returns what is wrong with the imports of one module, given by its dotted name and text."""
    part = part_of(module)
    if part not in ROW_OF:
        return [f"{module}: {part} has no place in ROWS"] if part else []
    found = []
    for name, when in imports(source):
        other = part_of(name)
        if other == part or other in sys.stdlib_module_names:
            continue
        if (name, part) == ("jaxkv", "demo"):  # shows the front door
            continue
        if other in ROW_OF:
            if ROW_OF[other] <= ROW_OF[part]:
                found.append(f"{module} imports {other}, which is not below {part}")
            pieces = name.removeprefix(SRC).removeprefix("internal").split(".")
            if any(piece.startswith("_") for piece in pieces):
                found.append(f"{module} imports {name}, which is private to {other}")
        elif other in OPTIONAL:
            if part not in OPTIONAL[other]:
                found.append(f"{module} imports {other}, which users need not have")
        elif other not in REQUIRED:
            found.append(f"{module} imports {other or 'jaxkv'}, which no rule allows")
        is_jax, on_right = other in {"jax", "jaxlib"}, other in set(ROW_OF) - WITHOUT_JAX
        loads_jax = (is_jax and when != "for types") or (on_right and when == "now")
        if part in WITHOUT_JAX and loads_jax:
            found.append(f"{module} imports {other} and has to do without jax")
    return found


def modules() -> Iterator[tuple[str, pathlib.Path]]:
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def draw() -> str:
    """`ROWS` as CONTRIBUTING.md shows it."""
    lines = [("without jax", "with jax")]
    lines += [("  ".join(left), "  ".join(right)) for left, right in ROWS]
    width = max(len(left) for left, _ in lines) + 4
    return "\n".join(f"{left:{width}}{right}".rstrip() for left, right in lines) + "\n"


def run(code: str, *options: str, arguments: Sequence[str] = ()) -> str:
    """Returns what code prints in a fresh interpreter, which finds the same packages."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(path.parent) for path in PACKAGES)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_run_downwards() -> None:
    assert [text for name, path in modules() for text in complaints(name, path.read_text())] == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Also within a package, and for types."""
    graph = {
        name: {other for other, _ in imports(path.read_text())}
        for name, path in modules()
        if path.name != "__init__.py"
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_every_part_of_the_table_exists() -> None:
    assert {part_of(name) for name, _ in modules()} - {""} == set(ROW_OF)


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        (
            "jaxkv._src.specs._base",
            "import jaxkv._src.planning",
            "planning, which is not below specs",
        ),
        ("jaxkv._src.layout", "from jaxkv._src.blocks import BlockManager", "imports blocks"),
        ("jaxkv._src.layout", "from jaxkv._src import blocks", "imports blocks"),
        ("jaxkv._src.pool", "def f():\n    from jaxkv._src.step import apply_step", "imports step"),
        ("jaxkv._src.pool", "if TYPE_CHECKING:\n    import jaxkv._src.step", "imports step"),
        (
            "pallas_kernels._tiling",
            "import jaxkv._src.internal.checks",
            "is not below pallas_kernels",
        ),
        ("jaxkv._src.specs", "import jaxkv", "imports public, which is not below specs"),
        ("jaxkv._src.step", "from jaxkv._src.pool._tokens import write", "private to pool"),
        ("jaxkv._src.pool", "from pallas_kernels._mosaic import call", "private to pallas_kernels"),
        ("jaxkv._src.blocks", "import jax.numpy as jnp", "imports jax and has to do without jax"),
        (
            "jaxkv._src.blocks",
            "from jaxkv._src.internal import mesh",
            "(jax) and has to do without jax",
        ),
        (
            "jaxkv._src.plotting",
            "def f():\n    import jax",
            "imports jax and has to do without jax",
        ),
        ("jaxkv._src.plotting", "from jaxkv._src.cache import KVCache", "has to do without jax"),
        ("jaxkv._src.blocks", "import pallas_kernels", "has to do without jax"),
        ("jaxkv._src.step", "import matplotlib.pyplot", "which users need not have"),
        ("jaxkv._src.step", "import torch", "imports torch, which no rule allows"),
        ("jaxkv._src.step", "from . import _pack", "no rule allows"),
        ("jaxkv._src.extra", "", "extra has no place in ROWS"),
    ],
)
def test_the_checker_finds_a_planted_violation(module: str, source: str, text: str) -> None:
    assert any(text in found for found in complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "jaxkv._src.planning",
            "import dataclasses, numpy, jaxkv._src.specs, jaxkv._src.internal.checks",
        ),
        ("jaxkv._src.planning", "from jaxkv._src.planning._plan import Plan"),
        ("jaxkv._src.planning", "if TYPE_CHECKING:\n    from jax import Array"),
        ("jaxkv._src.plotting", "def f():\n    from jaxkv._src.cache import KVCache"),
        ("jaxkv._src.demo.run", "import jaxkv"),
        ("jaxkv._src.plotting", "import matplotlib.figure"),
    ],
)
def test_the_checker_lets_pass_what_is_right(module: str, source: str) -> None:
    assert complaints(module, source) == []


def test_contributors_are_shown_the_table() -> None:
    text = (HERE / "CONTRIBUTING.md").read_text()
    shown = re.search(r"<!-- architecture -->\n```\n(.*?)```\n<!-- /architecture -->", text, re.S)
    assert shown and shown[1] == draw(), f"CONTRIBUTING.md has to show, between marks:\n{draw()}"


def test_what_does_without_jax_loads_none() -> None:
    parts = WITHOUT_JAX - {"plotting"}
    names = [name for name, _ in modules() if part_of(name) in parts]
    names += [f"jaxkv.{part}" for part in parts if (PACKAGES[0] / f"{part}.py").exists()]
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    loaded = set(run(code).split())
    assert set(names) <= loaded
    assert not {"jax", "jaxlib", *OPTIONAL} & {name.partition(".")[0] for name in loaded}


NAMES = set(ROW_OF) - {"__main__", "public", "demo", "internal (jax)", "offload (jax)"}
# Each package is imported in a fork of one process, which has jax and nothing of ours.
IMPORT = """
import os, sys, time
start = time.process_time()
import jax.numpy, numpy
jax_took, before = time.process_time() - start, set(sys.modules)
for name in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        start = time.process_time()
        __import__(name)
        took = time.process_time() - start
        print(name, 1e3 * took, 1e3 * jax_took, *set(sys.modules) - before)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_an_import_is_quick_and_silent_and_loads_nothing_optional() -> None:
    """At most 100 ms beyond jax, in the quickest of a few runs: others compile or compete.

    On a slower or a busy machine, a third of what jax itself takes.
    """
    slow = {part if part == "pallas_kernels" else f"jaxkv._src.{part}" for part in NAMES}
    for _ in range(5):
        runs = run(IMPORT, "-W", "error", arguments=sorted(slow)).splitlines()
        for line in runs:
            name, took, jax_took, *loaded = line.split()
            assert not set(OPTIONAL) & {module.partition(".")[0] for module in loaded}, name
            if float(took) <= max(MAX_IMPORT_MS, float(jax_took) / 3):
                slow.remove(name)
        if not slow:
            return
    pytest.fail(f"slow to import: {slow}; the last run, in ms, of them and of jax: {runs}")
