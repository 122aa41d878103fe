"""Random servings, checked against what every block must hold; `tests.test_simulation` runs some.

``python -m tests.simulation 20000`` runs as many, from a new seed, and counts the faults that they
find; ``python -m tests.simulation 1 --first 345`` runs the one of a seed, and prints its calls.
"""

import random
from collections import Counter

from tests.simulation.of_copies import CopyServing, TierCopyServing
from tests.simulation.of_manager import ManagerServing
from tests.simulation.of_offload import TierSchedulerServing, TierServing
from tests.simulation.of_prefixes import PrefixServing
from tests.simulation.of_scheduler import SchedulerServing

NUM_CALLS = 60  # of a manager
PREFIX_CALLS = 150


def run_serving(
    seed: int,
    kind: str | None = None,
    *,
    offload: bool = False,
    prefixes: bool = False,
    copies: bool = False,
) -> Counter[str]:
    """Runs a serving; those of even seeds, of prefixes and of copies are of a manager alone.

    Args:
      seed: of all that it draws.
      kind: of the plan, one of `KINDS`; None: any.
      tier: whether most blocks go to host memory and come back.
      prefixes: whether it is of a manager in which prompts find what was kept.
      copies: whether requests share, copy and give back blocks between steps most of the time.

    Returns:
      Counts of what it did.

    Raises:
      AssertionError: a fault, with the calls that led to it.
    """
    history: list[str] = []
    try:
        if prefixes:
            return PrefixServing(seed, kind, history).run(PREFIX_CALLS)
        if copies:
            return (TierCopyServing if offload else CopyServing)(seed, kind, history).run(NUM_CALLS)
        if seed % 2:
            serving = (TierSchedulerServing if offload else SchedulerServing)(seed, kind, history)
            return serving.run(random.Random(seed).randint(3, 12))
        return (TierServing if offload else ManagerServing)(seed, kind, history).run(NUM_CALLS)
    except Exception as error:
        calls, fault = "\n".join(history), f"{type(error).__name__}: {error}"
        raise AssertionError(f"{calls}\n\nserving {seed} of {kind}: {fault}") from error
