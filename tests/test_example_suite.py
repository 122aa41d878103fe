"""A suite for a paged cache of your own: 40 lines, and it finds the bugs planted in it.

The cache is `tests/toy_cache.py`. The machine starts, grows, preempts and finishes requests
at random and checks leaks, aliasing, the null block and what every request reads.
"""

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jaxkv.planning import plan_cache
from jaxkv.specs import FullAttentionSpec, Limits
from jaxkv.testing import CacheStateMachine
from tests.toy_cache import ForgetsToZero, FreesTwice, ToyCache, WritesPadding

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="bf16")
LIMITS = Limits(max_in_flight_tokens=8)


class ToyMachine(CacheStateMachine):
    plan = plan_cache({"kv": SPEC}, 2**20, max_model_len=24, num_blocks_override=9, limits=LIMITS)
    unwritten_reads_zero, out_of_blocks = True, MemoryError
    kind = ToyCache

    def make_cache(self):
        self.cache = self.kind(self.plan.num_blocks)

    def start(self, request):
        self.cache.start(request)

    def grow(self, request, num_computed_tokens, num_tokens):
        self.cache.grow(request, num_tokens)

    def write(self, writes):
        for write in writes:
            rows = write.rows.view(self.cache.pages.dtype)
            self.cache.write(write.request, write.positions, rows)

    def finish(self, request):
        self.cache.finish(request)

    def num_free_blocks(self):
        return len(self.cache.free)

    def block_ids(self, request):
        return [self.cache.tables[request]]

    def read_pages(self, request, layer):
        return self.cache.read(request).reshape(-1, 16).view(np.uint8)

    def read_null_block(self):
        return [np.asarray(self.cache.pages[0])]


TestToyCache = ToyMachine.TestCase


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForgetsToZero, "which nobody wrote"),
        (FreesTwice, "was refused blocks, and something changed"),
        (WritesPadding, "the null block was written"),
    ],
)
def test_planted_bugs_are_found(kind, message):
    machine = type("Machine", (ToyMachine,), {"kind": kind})
    options = settings(max_examples=300, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(machine, settings=options)
