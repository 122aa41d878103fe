"""Random servings of every kind of plan: no wrong byte, no refused step, no standstill, no leak."""

import os
import random
from collections import Counter

import pytest

from tests.servings import run_serving
from tests.servings.plans import KINDS

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"


@pytest.mark.parametrize("kind", KINDS)
def test_requests_read_what_they_wrote_and_all_of_them_end(kind: str) -> None:
    first = random.SystemRandom().randrange(2**40) if IS_LONG else 0
    seen: Counter[str] = Counter()
    for seed in range(first, first + (2000 if IS_LONG else 16)):
        seen += run_serving(seed, kind)
    wanted = {"steps", "forks", "rewinds", "lost schedules"}
    wanted |= set() if kind == "cross" else {"hits"}
    assert not wanted - set(seen), seen
