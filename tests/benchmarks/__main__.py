"""Runs the benchmarks: ``python -m tests.benchmarks --help``, or ``make bench``."""

import argparse
import gc
import pathlib
from typing import get_args

from tests.benchmarks import (
    admission,
    attention,
    compile,
    copies,
    host,
    offload,
    planner,
    prefixes,
    recurrent,
    sharded,
    sharing,
    sleep,
    step,
    timing,
    zero,
)
from tests.benchmarks.served import comparison, decodes, drafted
from tests.benchmarks.timing import Report
from tests.benchmarks.vllm_peer import VllmPeer

PARTS = {
    "host": host.run,
    "admission": admission.run,
    "prefixes": prefixes.run,
    "step": step.run,
    "zero": zero.run,
    "copies": copies.run,
    "attention": attention.run,
    "sharing": sharing.run,
    "recurrent": recurrent.run,
    "sharded": sharded.run,
    "served": comparison.run,
    "rollouts": comparison.run_rollouts,
    "decodes": decodes.run,
    "drafts": drafted.run,
    "sleep": sleep.run,
    "offload": offload.run,
    "planner": planner.run,
    "compile": compile.run,
}
# The others read the host's clock alone.
READS_GPU_CLOCK = ("step", "zero", "copies", "attention", "sharing", "recurrent", "sharded")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--vllm", type=pathlib.Path, help="folder of vLLM's Python files")
    engine = "folder of the whole of vLLM, for the parts served and rollouts"
    parser.add_argument("--vllm-engine", type=pathlib.Path, help=engine)
    names = {case.name: None for case in (*comparison.CASES, *comparison.DIVIDED)}
    parser.add_argument("--case", choices=list(names), help="of the part served; two, or --all")
    parser.add_argument(
        "--devices", type=int, default=1, help="of the part served: divides models among these"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file to keep the run in")
    parser.add_argument(
        "--size",
        choices=get_args(timing.Size),
        default=timing.size,
        help="how large the arrays are; full on a GPU and small elsewhere",
    )
    parser.add_argument("--all", action="store_true", help="every case; some take minutes")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; choose from {', '.join(PARTS)}")
    timing.size, timing.every_case = options.size, options.all
    timing.vllm_engine, timing.served_case = options.vllm_engine, options.case
    timing.served_devices = options.devices
    report = Report()
    peer = load_peer(options.vllm, report)
    gc.freeze()  # as servers do, so that no old object is looked at while we time
    try:
        run_parts(options.parts or list(PARTS), report, peer)
    finally:  # so that a part that fails costs no figures of those before it
        if options.json:
            report.save(options.json)


def run_parts(parts: list[str], report: Report, peer: VllmPeer | None) -> None:
    """Runs parts once by the host's clock and, on a GPU, once more by the GPU's."""
    timing.clock = "host"
    for name in parts:
        report.prints = not timing.ON_GPU or name not in READS_GPU_CLOCK
        PARTS[name](report, peer)
    report.prints = True
    if timing.ON_GPU:
        timing.clock = "GPU"
        for name in parts:
            if name in READS_GPU_CLOCK:
                PARTS[name](report, peer)


def load_peer(folder: pathlib.Path | None, report: Report) -> VllmPeer | None:
    """Returns vLLM's code, or None after a line that says why it is not timed."""
    if folder is None:
        report.note("vLLM is not timed: give --vllm a folder of its Python files")
        return None
    try:
        peer = VllmPeer(folder)
    except FileNotFoundError as error:
        report.note(f"vLLM is not timed: {error}")
        return None
    if not peer.has_tables:
        report.note("vLLM's tables and its zeroing are not timed: they need torch, Triton and CUDA")
    return peer


if __name__ == "__main__":
    main()
