"""Simulations, checked against what every block must hold; `tests.test_simulation` runs some.

``python -m tests.simulation 20000`` runs as many, from a new seed, and counts the faults that they
find; ``python -m tests.simulation 1 --first 345`` runs the one of a seed, and prints its calls.
"""

import random
from collections import Counter

from tests.simulation.of_copies import CopySimulation, OffloadCopySimulation
from tests.simulation.of_manager import ManagerSimulation
from tests.simulation.of_offload import OffloadSchedulerSimulation, OffloadSimulation
from tests.simulation.of_prefixes import PrefixSimulation
from tests.simulation.of_scheduler import SchedulerSimulation

NUM_CALLS = 60  # of a manager
PREFIX_CALLS = 150


def run_simulation(
    seed: int,
    kind: str | None = None,
    *,
    offload: bool = False,
    prefixes: bool = False,
    copies: bool = False,
) -> Counter[str]:
    """Runs a simulation; those of even seeds, of prefixes and of copies are of a manager alone.

    Args:
      seed: of all that it draws.
      kind: of the plan, one of `KINDS`; None: any.
      offload: whether most blocks go to host memory and come back.
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
            return PrefixSimulation(seed, kind, history).run(PREFIX_CALLS)
        if copies:
            return (OffloadCopySimulation if offload else CopySimulation)(seed, kind, history).run(
                NUM_CALLS
            )
        if seed % 2:
            simulation = (OffloadSchedulerSimulation if offload else SchedulerSimulation)(
                seed, kind, history
            )
            return simulation.run(random.Random(seed).randint(3, 12))
        return (OffloadSimulation if offload else ManagerSimulation)(seed, kind, history).run(
            NUM_CALLS
        )
    except Exception as error:
        calls, fault = "\n".join(history), f"{type(error).__name__}: {error}"
        raise AssertionError(f"{calls}\n\nsimulation {seed} of {kind}: {fault}") from error
