"""Random servings of an engine: samples get the tokens of the model, and leave nothing behind."""

import os
import random
from collections import Counter

import pytest

from tests.simulation.of_engine import run_engine

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"


@pytest.mark.parametrize("first", range(0, 64, 16))
def test_samples_get_the_tokens_of_the_model_whatever_is_called_in_between(first: int) -> None:
    if IS_LONG:
        first = random.SystemRandom().randrange(2**40)
    seen: Counter[str] = Counter()
    for seed in range(first, first + (2000 if IS_LONG else 16)):
        seen += run_engine(seed)
    assert seen["idle waits"] < seen["calls"] / 4, "the host is not ahead of the device"
    assert seen["steps that preempt two"]
