"""A suite for a paged cache of your own: a short subclass, and it finds the bugs planted in it.

The cache is `tests/toy_cache.py`. The machine starts, grows, forks, preempts and finishes requests
at random and checks leaks, aliasing, the null block and what every request reads.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import FullAttentionSpec, Limits
from jaxkv.testing import CacheStateMachine
from tests import toy_cache
from tests.toy_cache import ToyCache

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="bf16")
LIMITS = Limits(max_in_flight_tokens=8)


class ToyMachine(CacheStateMachine):
    plan = plan_cache({"kv": SPEC}, 2**20, max_model_len=24, num_blocks_override=11, limits=LIMITS)
    unwritten_reads_zero, copies_on_write, out_of_blocks = True, True, MemoryError
    kind = ToyCache

    def make_cache(self):
        self.cache = self.kind(self.plan.num_blocks)

    def start(self, request):
        self.cache.start(request)

    def grow(self, request, num_computed_tokens, num_tokens):
        self.cache.grow(request, num_computed_tokens, num_tokens)

    def write(self, writes):
        for write in writes:
            self.cache.write(write.request, write.positions, write.rows)

    def finish(self, request):
        self.cache.finish(request)

    def fork(self, request, donor, num_tokens):
        return self.cache.fork(request, donor, num_tokens)

    def rewind(self, request, num_tokens):
        return self.cache.rewind(request, num_tokens)

    def num_free_blocks(self):
        return len(self.cache.free)

    def block_ids(self, request):
        return [self.cache.tables[request]]

    def read_pages(self, request, layer):
        return self.cache.read(request).reshape(-1, SPEC.data_bytes)

    def read_null_block(self):
        return [self.cache.pages[0]]


TestToyCache = ToyMachine.TestCase


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("ForgetsToZero", "which nobody wrote"),
        ("FreesTwice", "was refused blocks, and something changed"),
        ("WritesPadding", "the null block was written"),
        ("WritesIntoSharedBlocks", "two may share what a fork shares until one of them writes"),
    ],
)
def test_planted_bugs_are_found(bug, message):
    machine = type("Machine", (ToyMachine,), {"kind": getattr(toy_cache, bug)})
    options = settings(
        max_examples=100,
        phases=[Phase.generate],  # to shrink what is found may take minutes
        report_multiple_bugs=False,
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(machine, settings=options)
