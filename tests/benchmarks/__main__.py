"""Runs the benchmarks: ``python -m tests.benchmarks --help``, or ``make bench``."""

import argparse
import gc
import pathlib

from tests.benchmarks import copies, planner, sharded, sleep, step, timing, zero
from tests.benchmarks.timing import Report
from tests.benchmarks.vllm_peer import VllmPeer

PARTS = {
    "zero": zero.run,
    "step": step.run,
    "copies": copies.run,
    "sharded": sharded.run,
    "sleep": sleep.run,
    "planner": planner.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--vllm", type=pathlib.Path, help="folder of vLLM's Python files")
    parser.add_argument("--json", type=pathlib.Path, help="file to keep the run in")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; choose from {', '.join(PARTS)}")
    report = Report()
    peer = load_peer(options.vllm, report)
    gc.freeze()  # as servers do, so that no old object is looked at while we time
    for clock in ("host", "GPU") if timing.ON_GPU else ("host",):
        timing.clock = clock
        for name in options.parts or PARTS:
            PARTS[name](report, peer)
    if options.json:
        report.save(options.json)


def load_peer(folder: pathlib.Path | None, report: Report) -> VllmPeer | None:
    """vLLM's code, or None and a line that says why it is not timed."""
    if folder is None:
        report.note("vLLM is not timed: give --vllm a folder of its Python files")
        return None
    try:
        return VllmPeer(folder)
    except (ImportError, FileNotFoundError) as error:
        report.note(f"vLLM is not timed: {error}")
        return None


if __name__ == "__main__":
    main()
