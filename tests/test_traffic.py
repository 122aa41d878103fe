"""Random traffic through the engine on the device: tokens are the model's, and nothing is left."""

import os
import random

import jax
import pytest

from tests.traffic.sessions import run_traffic

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"
# Of every kind of layer, each dtype and each option, and short to compile.
SEEDS = (12, 14, 17, 18, 19, 31, 42, 419, 543)


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_those_of_the_model_whatever_comes_between(seed: int) -> None:
    """`python -m tests.traffic` serves as many sessions as one likes."""
    if not IS_LONG:
        run_traffic(seed, range(3))
        return
    for _ in range(50):
        run_traffic(random.SystemRandom().randrange(2**40))
        jax.clear_caches()
