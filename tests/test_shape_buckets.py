"""The shapes of an engine's steps, and how full its steps are."""

import itertools
import operator

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager, RowWork
from jaxkv._src.engine import _shape_buckets
from jaxkv._src.engine._samples import RECORD, ModelFacts, Samples
from jaxkv._src.engine._sampling import Sampling
from jaxkv._src.engine._shape_buckets import PADDING, PADDING_OF_BACKLOG, READING, ShapeBuckets
from jaxkv._src.planning import plan_cache
from jaxkv._src.scheduler import Schedule, Scheduler, Wanted
from jaxkv._src.scheduler._schedule import SampledRequests
from jaxkv._src.specs import FullAttentionSpec
from jaxkv._src.uploads import Batch

LAYERS = {"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)}


def make(
    max_requests: int, max_tokens: int, num_bytes: int = 2**28
) -> tuple[BlockManager, Scheduler, ShapeBuckets]:
    plan = plan_cache(LAYERS, num_bytes, max_model_len=2048)
    manager = BlockManager(plan, max_requests=max_requests)
    scheduler = Scheduler(manager, max_tokens=max_tokens)
    return manager, scheduler, ShapeBuckets(plan, scheduler, max_requests, max_tokens)


# By max_requests and max_tokens, the requests of decodes and the tokens of other steps.
SIZES = {
    (1, 1): ([1], [1]),
    (1, 15): ([1], [15]),
    (1, 31): ([1], [31]),
    (7, 32): ([7], [16, 32]),
    (9, 100): ([8, 9], [16, 100]),
    (100, 100): ([8, 32, 64, 100], [100]),
    (64, 1023): ([8, 32, 64], [64, 256, 512, 1023]),
    (64, 1024): ([8, 32, 64], [64, 256, 512, 768, 1024]),
    (65, 3072): ([8, 32, 64, 65], [65, 256, 512, 768, 3072]),
    (128, 3076): ([8, 32, 64, 128], [128, 256, 512, 769, 3076]),
    (129, 4096): ([8, 32, 64, 128, 129], [256, 512, 768, 1024, 4096]),
    (256, 8192): ([8, 32, 64, 128, 192, 256], [256, 512, 768, 2048, 8192]),
    (300, 1024): ([8, 32, 64, 128, 192, 256, 300], [512, 768, 1024]),
    (1000, 3000): ([8, 32, 64, 128, 192, 256, 384, 512, 768, 1000], [1000, 3000]),
}


@pytest.mark.parametrize("most", SIZES, ids=str)
def test_shapes_are_few_and_hold_what_the_engine_may_run(
    most: tuple[int, int], monkeypatch
) -> None:
    (requests, tokens), (decodes, mixed) = most, SIZES[most]
    manager, scheduler, buckets = make(*most)
    assert (list(buckets.decode), list(buckets.mixed)) == SIZES[most]
    assert buckets.shapes == [*buckets.decode.values(), *buckets.mixed.values()]
    assert buckets.to_trace.max_tokens == tokens + (tokens == requests)
    plan = manager.plan
    monkeypatch.setattr(_shape_buckets, "LEAST_SAVED_BYTES", 2048 * 64 * (8 + 8) * 2)
    shared = ShapeBuckets(plan, scheduler, *most, prefix_groups=40)
    assert list(shared.shared) == [size for size in decodes[::-2] if size > 64][::-1]
    for size, shape in (*shared.decode.items(), *shared.shared.items()):
        assert (shape.batch_size, shape.max_tokens, shape.max_query_len) == (size, size, 1)
        is_shared = shape is shared.shared.get(size)
        assert shape.shared_prefixes == is_shared * min(40, size // 2) and not shape.reproducible
    (one,) = ShapeBuckets(plan, scheduler, *most, reproducible=True).shapes
    assert one.reproducible and one.max_tokens == tokens
    for shape in (*shared.mixed.values(), *buckets.shapes, one, buckets.to_trace):
        assert not shape.shared_prefixes
        assert shape.max_tokens in (*decodes, *mixed, buckets.to_trace.max_tokens)
        assert shape.batch_size == (
            shape.max_tokens if shape.max_query_len == 1 < requests else requests
        )
        assert shape.extra == shape.max_tokens + shape.batch_size * RECORD.itemsize // 4


def test_steps_take_what_waits_in_nearly_the_shortest_time() -> None:
    """Next to all ways to compute it, by the same estimate of a step's time."""
    _, _, buckets = make(64, 4096)
    for decodes in (0, 10, 64):
        for has_backlog, padding in ((False, PADDING), (True, PADDING_OF_BACKLOG)):

            def time_of(size: int, wanted: int, padding: int = padding) -> int:
                return READING + size + padding * max(0, size - wanted)

            best, taken = dict[int, int](), dict[int, int]()
            for wanted in range(decodes + 1, 4096):
                sizes = [size for size in buckets.mixed if size > decodes]
                best[wanted] = min(
                    time_of(size, wanted) + best.get(wanted - size + decodes, 0) for size in sizes
                )
                size = buckets.fill(Wanted(wanted, has_backlog), decodes)
                taken[wanted] = time_of(size, wanted) + taken.get(wanted - size + decodes, 0)
                assert taken[wanted] <= 1.1 * best[wanted], (wanted, decodes)


@pytest.mark.parametrize("each", [1, 2, 16])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_schedule_runs_in_the_smallest_shape_that_holds_it(each: int, reproducible: bool) -> None:
    manager, scheduler, _ = make(64, 1024)
    buckets = ShapeBuckets(manager.plan, scheduler, 64, 1024, reproducible=reproducible)
    for requests, samples in itertools.product((1, 7, 8, 9, 33, 64), (0, 1, 8, 9, 40, 64)):
        rows, sampled = np.arange(requests), np.arange(samples)
        work = RowWork(rows, Batch.from_counts(rows, np.full(requests, each)), None)
        named = SampledRequests(sampled, sampled, sampled)
        schedule = Schedule(work, named, (), {}, rows, rows, operator.itemgetter(0))
        fit = [
            shape
            for shape in buckets.shapes
            if shape.max_tokens >= requests * each
            and shape.batch_size >= max(requests, samples)
            and shape.max_query_len >= each
        ]
        assert buckets.fitting(schedule) is fit[0]


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(2**28, 0.02), (2**18, 0.05)], ids=["plenty", "half of the requests"]
)
def test_steps_of_a_burst_are_padded_little(num_bytes: int, most: float) -> None:
    """Prompts that arrive at once, of which more wait than run, and that end at random times."""
    manager, scheduler, buckets = make(32, 2048, num_bytes)
    rng = np.random.default_rng(0)
    left = {}
    for name in range(100):
        left[name] = int(rng.integers(20, 60))
        scheduler.add(name, int(rng.integers(100, 800)), max_tokens=1024)
    computed = padded = 0
    sampled: list[int] = []
    while left:
        filled = buckets.fill(scheduler.wanted(), len(sampled))
        schedule = scheduler.schedule(max_tokens=filled)
        shape = buckets.fitting(schedule)
        manager.step(shape, schedule.work)
        if shape.max_tokens > READING:
            computed += sum(schedule.work.values())
            padded += shape.max_tokens - sum(schedule.work.values())
        for name in schedule.samples:
            left[name] -= 1
            if left[name]:
                scheduler.append({name: 1})
            else:
                scheduler.finish(name)
                del left[name]
    assert computed > 20_000
    assert padded < most * computed, padded / computed


@pytest.mark.parametrize("prompt", [40, 200, 1700])
def test_a_prompt_next_to_many_decodes_takes_few_steps(prompt: int) -> None:
    """Decodes fill all but one token of the smallest step, and the prompt no larger one."""
    manager, scheduler, buckets = make(256, 2048)
    for name in range(255):
        scheduler.add(name, 1)
    steps, sampled = 0, list[int | str]()
    while "prompt" not in sampled:
        most = buckets.fill(scheduler.wanted(), len(sampled))
        schedule = scheduler.schedule(max_tokens=most)
        manager.step(buckets.fitting(schedule), schedule.work)
        sampled = list(schedule.samples)
        scheduler.append(dict.fromkeys(sampled, 1))
        if not steps:
            scheduler.add("prompt", prompt)
        steps += 1
    assert steps < 20


# --- samples ---------------------------------------------------------------------------


def make_samples(seed: int) -> Samples:
    samples = Samples(48, seed, num_rows=4)
    samples.model = ModelFacts(9, has_head=False, has_side=False, is_reproducible=False)
    return samples


def test_every_sample_has_a_record_of_its_own_however_many_there_are() -> None:
    samples, lasts, free = make_samples(0), {}, list(range(400))
    for name in range(200):
        sampling = Sampling(temperature=1.0, max_tokens=1 + name % 7, n=2, seed=name)
        samples.of_request[name] = samples.create(name, "prompt", [1, 2], sampling)
        for sample in samples.of_request[name]:
            samples.add(sample, free.pop(0))
            lasts[sample.name] = name, sample.number, name % 7
        if name % 3 == 2:
            for sample in list(samples.of_request[name - 1]):
                samples.remove(sample)
                free.append(sample.index)
                del lasts[sample.name]
    records = {s.name: samples.records[s.index] for s in filter(None, samples.by_index)}
    assert {n: (r["seed"], r["sample"], r["last"]) for n, r in records.items()} == lasts


def test_every_seed_that_is_named_is_the_one_that_counts() -> None:
    def seeds(of_engine: int, seed: int | None) -> list[int]:
        samples = make_samples(of_engine)
        sampling = Sampling(temperature=1.0, seed=seed)
        made = [samples.create(name, "prompt", [1], sampling) for name in range(9)]
        return [sample.seed for (sample,) in made]

    for seed in (0, 1, 2**32 - 1):
        assert seeds(0, seed) == seeds(1, seed) == [seed] * 9
    assert len(set(seeds(0, None))) == 9 and seeds(0, None) == seeds(0, None) != seeds(1, None)
