"""Plants each slip into a copy of the code, and says which of them no test finds."""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.mutants import ROOT, Slip, read_slips

COPIED = ("jaxkv", "pallas_kernels", "tests", "notebooks", "README.md", "CONTRIBUTING.md")
COPIED += ("pyproject.toml", "Makefile", "CHANGELOG.md")
FAILED, PASSED = 1, 0  # exit statuses of pytest; others say that it could not run its tests


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("part", nargs="*", help="only slips whose file or text has one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=600, help="of one slip; then it is found")
    asked = parser.parse_args()
    chosen = [
        slip
        for slip in read_slips()
        if not asked.part or any(part in f"{slip.file} {slip.old}" for part in asked.part)
    ]
    began, survivors = time.perf_counter(), []
    copies: queue.Queue[pathlib.Path] = queue.Queue()
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(asked.jobs) as threads,
    ):
        for job in range(asked.jobs):
            copies.put(copied(pathlib.Path(folder) / str(job)))
        found = threads.map(lambda slip: fate(slip, copies, asked.seconds), chosen)
        for slip, (is_found, text) in zip(chosen, found, strict=True):
            survivors += [] if is_found else [slip]
            where = f"{slip.file}: {slip.old} -> {slip.new}"
            print(f"{'found' if is_found else 'SURVIVES'}: {where} ({text})", flush=True)
    seconds = time.perf_counter() - began
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} slips are found, in {seconds:.0f} s")
    return 1 if survivors else 0


def fate(slip: Slip, copies: queue.Queue[pathlib.Path], seconds: int) -> tuple[bool, str]:
    """Returns whether the tests of a slip find it, and which of them or why."""
    copy = copies.get()
    try:
        (copy / slip.file).write_text(slip.planted())
        return _run(copy, slip.tests, seconds)
    finally:
        shutil.copy(ROOT / slip.file, copy / slip.file)
        copies.put(copy)


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Returns a folder with all that the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def _run(copy: pathlib.Path, tests: Sequence[str], seconds: int) -> tuple[bool, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return True, f"takes over {seconds} s"
    if done.returncode == PASSED:
        return False, f"by {' '.join(tests)}"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == FAILED or lines:
        return True, lines[0] if lines else " ".join(tests)
    raise RuntimeError(f"pytest {tests} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
