"""Runs simulations, and counts the faults that they find."""

import argparse
import re
import sys
import time
from collections import Counter

from tests.simulation import run_simulation
from tests.simulation.plans import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("simulations", type=int)
    parser.add_argument("--first", type=int, default=time.time_ns() // 10**6 % 10**10)
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--offload", action="store_true", help="use host memory most of the time")
    parser.add_argument("--prefixes", action="store_true", help="find kept prefixes more often")
    parser.add_argument("--copies", action="store_true", help="share and copy blocks all the time")
    asked = parser.parse_args()
    seen, faults, seeds = Counter[str](), Counter[str](), dict[str, int]()
    began = time.perf_counter()
    for seed in range(asked.first, asked.first + asked.simulations):
        try:
            which = {name: getattr(asked, name) for name in ("offload", "prefixes", "copies")}
            seen += run_simulation(seed, asked.kind, **which)
        except AssertionError as error:
            if asked.simulations == 1:
                print(error)
            fault = re.sub(r"\d+", "N", str(error).rpartition("\n")[2].partition(": ")[2])[:110]
            faults[fault] += 1
            seeds.setdefault(fault, seed)
    seconds = time.perf_counter() - began
    print(f"{asked.simulations} from seed {asked.first} in {seconds:.0f} s: {dict(seen)}")
    for fault, count in faults.most_common():
        print(f"{count:6} x {fault} (seed {seeds[fault]})")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
