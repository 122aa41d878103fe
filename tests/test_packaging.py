"""The contents of wheel and sdist, and what they ask for.

`make wheel-check` goes on from here: it installs the wheel and runs this suite on it.
"""

import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser

import pytest

import jaxkv

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = "jaxkv", "pallas_kernels"


def files_under(*folders: str, suffixes: tuple[str, ...]) -> set[str]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in suffixes and ".ipynb_checkpoints" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the sdist and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: pathlib.Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = f"jaxkv-{jaxkv.__version__}.dist-info/METADATA"
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == files_under(*PACKAGES, suffixes=(".py", ".pyi", ".json", ".typed"))
    assert {"jaxkv/py.typed", "pallas_kernels/py.typed"} <= held
    assert {
        f"jaxkv/_src/hf_config/presets/{name}.json" for name in ("llama-3.1-8b", "gpt-oss-20b")
    } <= held


def test_the_sdist_holds_what_tests_and_readers_need_and_nothing_private(
    built: pathlib.Path,
) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {*PACKAGES, "tests", "notebooks"}
    assert {name for name in names if "/" not in name} == {
        *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"),
        *("PKG-INFO", ".gitignore"),  # hatchling's own choice
    }
    held = {name for name in names if "/" in name}
    suffixes = (".py", ".pyi", ".json", ".typed", ".ipynb", ".md", ".svg", ".txt")
    assert held == files_under(*folders, suffixes=suffixes)


def test_users_get_what_every_module_needs_and_choose_the_rest(metadata: Message) -> None:
    asked = metadata.get_all("Requires-Dist") or []
    plain = {line for line in asked if "extra ==" not in line}
    assert plain == {"jax>=0.10.2", "jaxtyping>=0.3", "numpy>=2.0"}
    for cuda in ("cuda12", "cuda13"):
        lines = [line.partition(";")[0] for line in asked if f"extra == '{cuda}'" in line]
        assert lines == ["flatbuffers", f"jax[{cuda}]>=0.10.2"]
    extras = {"chat", "cuda12", "cuda13", "demo", "docs", "events", "mutants", "notebooks", "plot"}
    extras |= {"browser", "test", "testing"}
    assert set(metadata.get_all("Provides-Extra") or []) == extras


def test_the_page_that_an_index_would_show(metadata: Message) -> None:
    assert metadata["Version"] == jaxkv.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert not re.findall(r"\]\((?!https://)[^)]*\)", page), "links that only a repository has"
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / "README.md").read_text())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    assert set(plain.splitlines()) <= set(text.splitlines())
    assert len(page.splitlines()) > 100


def test_the_site_has_a_page_for_each_public_module() -> None:
    listed = set(re.findall(r"^   (\w[\w.]+)$", (ROOT / ".docs/reference.rst").read_text(), re.M))
    paths = [*(ROOT / "jaxkv").glob("[a-z]*.py"), *(ROOT / "jaxkv/interop").glob("[a-z]*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    assert listed == {*PACKAGES, *modules}


def test_the_targets_of_the_makefile_name_tests_that_exist() -> None:
    done = subprocess.run(
        ["make", "-n", "quick"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    named = set(re.findall(r"tests/\S+\.py", done.stdout))
    assert named and all((ROOT / path).exists() for path in named), named
