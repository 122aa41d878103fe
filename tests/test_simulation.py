"""Simulations of every kind of plan: no wrong byte, no refused step, no standstill, no leak."""

import itertools
import os
import random
from collections import Counter

import pytest

from jaxkv._src.scheduler._admission import Admission
from tests.simulation import run_simulation
from tests.simulation.of_offload import STORED
from tests.simulation.of_prefixes import SHARED
from tests.simulation.plans import KINDS

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"


@pytest.mark.parametrize("kind", KINDS)
def test_requests_read_what_they_wrote_and_all_of_them_end(kind: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    seen: Counter[str] = Counter()
    some = (0, *range(5, 12), *{"ring and state": [23], "rings": [35, 65]}.get(kind, ()))
    for seed in range(first, first + 2000) if IS_LONG else some:
        seen += run_simulation(seed, kind)
    wanted = {"steps", "forks", "rewinds", "lost schedules", "hits"}
    rare = {"cross": "hits", "two states": "rewinds", "three states": "rewinds"}
    assert not wanted - {rare.get(kind)} - set(seen), seen


@pytest.mark.parametrize("kind", SHARED)
def test_prompts_share_the_longest_prefix_that_the_definition_allows(kind: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    seen: Counter[str] = Counter()
    for seed in range(first, first + 1000) if IS_LONG else (0, 1, 6):
        seen += run_simulation(seed, kind, prefixes=True)
    assert seen["hits"], seen


@pytest.mark.parametrize(
    ("seed", "which", "what"),
    [
        (130000200380, "prefixes", "the state a step begins with is kept, where a rewind ends it"),
        (130003200279, "prefixes", "states are dropped, as blocks that they share count for each"),
        (63200010953, "", "a copy in host memory is not worth a load, and these blocks are parked"),
        (63100020206, "offload copies", "a request is parked between a rewind and its next step"),
    ],
)
def test_simulations_in_which_the_definition_was_wrong(seed: int, which: str, what: str) -> None:
    run_simulation(seed, **dict.fromkeys(which.split(), True))


def test_blocks_that_wait_to_be_copied_are_shared_given_back_and_taken_again() -> None:
    """Also by requests that come from other caches, and from host memory."""
    first = random.SystemRandom().randrange(2**40) if IS_LONG else 0
    seen: Counter[str] = Counter()
    for seed, kind in itertools.product(range(first, first + (400 if IS_LONG else 6)), KINDS):
        seen += run_simulation(seed, kind, copies=True)
    for seed, kind in itertools.product(range(first, first + (100 if IS_LONG else 2)), STORED):
        seen += run_simulation(seed, kind, copies=True, offload=True)
    # A block came from host memory after it was taken again, for a copy that had been given back.
    seen += run_simulation(5706703036, copies=True, offload=True)
    assert min(seen[what] for what in ("copies", "imports", "rewinds", "loaded")) > 0, seen


@pytest.mark.parametrize("kind", ["full", "windows", "chunks", "none", "two states"])
def test_requests_wait_where_an_estimate_of_their_blocks_was_too_low(kind, monkeypatch) -> None:
    """Several are started then, and some of them get no blocks."""
    has_room, grows, refused = Admission._fits_budget, Admission.grows, Counter[str]()

    def any_has_room(admission, *options) -> bool:
        return admission._options.preemption or has_room(admission, *options)

    def counted(admission, *work) -> bool:
        grown = grows(admission, *work)
        refused["grown" if grown else "refused"] += 1
        return grown

    monkeypatch.setattr(Admission, "_fits_budget", any_has_room)
    monkeypatch.setattr(Admission, "grows", counted)
    for seed in range(1, 2001 if IS_LONG else 9, 2):  # those of a scheduler
        run_simulation(seed, kind, offload=seed % 4 == 3)
    assert refused["refused"]
