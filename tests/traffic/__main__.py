"""Serves random sessions of random engines, and counts the faults that they find."""

import argparse
import functools
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections import Counter

# Most of the time is compiling.
if not shutil.which("nvidia-smi"):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"

from tests.traffic.sessions import POINTS, SESSIONS, try_traffic


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.traffic", description=__doc__)
    parser.add_argument("sessions", type=int)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**6 % 10**9)
    parser.add_argument("--session", type=int, help="only this session of each engine")
    parser.add_argument("--minutes", type=float, default=10**6, help="begin no engine later")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--interrupts", nargs="*", choices=POINTS, default=POINTS)
    asked = parser.parse_args()
    sessions = range(min(SESSIONS, asked.sessions))
    if asked.session is not None:
        sessions = range(asked.session, asked.session + 1)
    until = time.time() + 60 * asked.minutes
    seeds = range(asked.seed, asked.seed + math.ceil(asked.sessions / SESSIONS))
    seen, faults, began = Counter[str](), dict[str, list[int]](), time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(asked.jobs) as pool:
        results = pool.imap(
            functools.partial(try_traffic, sessions, asked.interrupts, until), seeds
        )
        for seed, (counts, text) in zip(seeds, results, strict=True):
            seen += counts
            if text:
                fault = text.rpartition("\n")[2].partition(": ")[2]
                fault = re.sub(r"\d+", "N", re.sub(r"\[.*?\]", "[...]", fault))[:110]
                if fault not in faults:
                    print(text, flush=True)
                faults.setdefault(fault, []).append(seed)
    print(f"from seed {asked.seed} in {time.perf_counter() - began:.0f} s: {dict(seen)}")
    for fault, found in faults.items():
        print(f"{len(found):6} x {fault} (--seed {found[0]})")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
