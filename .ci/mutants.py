"""Mutation testing: cosmic-ray changes one operator at a time, and lists what no test catches.

    python .ci/mutants.py TEST...                                        # lines changed since main
    python .ci/mutants.py --packages blocks engine --sample 400 TEST...  # random ones of packages

It works on a copy of the checkout, in build/mutants. TEST is what pytest runs for each mutant.
"""

import argparse
import pathlib
import random
import shutil
import subprocess
import sys

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

ROOT = pathlib.Path(__file__).parents[1]
COPY = ROOT / "build" / "mutants"
BIN = pathlib.Path(sys.executable).parent
SESSION = "mutants.sqlite"
CONFIG = """
[cosmic-ray]
module-path = {modules!r}
timeout = {timeout}
excluded-modules = []
test-command = {command!r}
distributor.name = "local"
filters.git-filter.branch = "{base}"
filters.operators-filter.exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"] # int | None
"""


def call(*command: object, folder: pathlib.Path = COPY) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: failed\n{done.stdout}")
    return done.stdout.strip()


def copy_checkout() -> None:
    """Makes a worktree of the checkout, with the changes that are not committed."""
    commit = call("git", "stash", "create", folder=ROOT) or "HEAD"
    remove_copy()
    call("git", "worktree", "add", "--quiet", "--detach", COPY, commit, folder=ROOT)


def remove_copy() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    call("git", "worktree", "prune", folder=ROOT)


def skip_all_but(count: int, seed: int) -> None:
    """Skips all mutants but some random ones. A seed and a commit choose the same each time."""
    with use_db(COPY / SESSION, WorkDB.Mode.open) as db:
        mutants = {
            (m.module_path.as_posix(), m.start_pos, m.operator_name, m.occurrence): item.job_id
            for item in db.pending_work_items
            for m in item.mutations
        }
        jobs = [mutants[key] for key in sorted(mutants)]
        chosen = set(random.Random(seed).sample(jobs, min(count, len(jobs))))
        skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="not in the sample")
        db.set_multiple_results([job for job in jobs if job not in chosen], skipped)


def report() -> int:
    """Prints the mutants that no test caught. Returns their number."""
    with use_db(COPY / SESSION, WorkDB.Mode.open) as db:
        run = [r for _, r in db.results if r.worker_outcome is not WorkerOutcome.SKIPPED]
    survived = [result.diff for result in run if not result.is_killed]
    print(*survived, sep="\n\n")
    print(f"{len(run) - len(survived)} of {len(run)} mutants were caught")
    return len(survived)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="+", help="files of tests, the likeliest to fail first")
    parser.add_argument("--packages", nargs="+", help="packages of jaxkv/_src, all their lines")
    parser.add_argument("--sample", type=int, help="how many mutants; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each mutant")
    options = parser.parse_args()
    base = call("git", "merge-base", "main", "HEAD", folder=ROOT)
    changed = call("git", "diff", "--name-only", base, "--", "jaxkv/_src", folder=ROOT).split()
    modules = [name for name in changed if name.endswith(".py") and (ROOT / name).exists()]
    if options.packages:
        modules = [f"jaxkv/_src/{name}" for name in options.packages]
    if not modules:
        sys.exit("nothing in jaxkv/_src differs from main; name --packages")
    copy_checkout()
    pytest = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {' '.join(options.tests)}"
    config = CONFIG.format(modules=modules, timeout=options.timeout, command=pytest, base=base)
    (COPY / "mutants.toml").write_text(config)
    try:
        call(*pytest.split())  # without a mutant
        call(BIN / "cosmic-ray", "init", "mutants.toml", SESSION)
        call(BIN / "cr-filter-operators", SESSION, "mutants.toml")
        if not options.packages:
            call(BIN / "cr-filter-git", SESSION, "--config", "mutants.toml")
        if options.sample:
            skip_all_but(options.sample, options.seed)
        call(BIN / "cosmic-ray", "exec", "mutants.toml", SESSION)
        return 1 if report() else 0
    finally:
        remove_copy()


if __name__ == "__main__":
    sys.exit(main())
