"""Table work of a step, from the scheduler to what the model reads on the device.

Ours is `Scheduler.schedule` and ``append``, `BlockManager.step` and one jitted call (`apply_step`
in `tests.benchmarks.servers`); then the same without the scheduler. vLLM's is its `KVCacheManager`
and the calls of its model runner on `BlockTables`: append_block_ids, apply_staged_writes, two
uploads, the kernel of positions and seq_lens, gather_block_tables, compute_slot_mappings.

Both serve the same requests and leave the same on the device: a block table and a slot mapping of
each group, positions, seq_lens and query_start_loc. Ours is more in three ways: it computes where
the tables of windows begin, nulls blocks that no token reads, and checks the upload; theirs keeps
slots and positions as int64. "async" is the host's share, "synced" waits for the device.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxkv
from jaxkv._src.planning import plan_cache
from jaxkv._src.uploads import StepShape, Upload
from tests.benchmarks import timing
from tests.benchmarks.servers import PARTS, Case, Server, VllmServer, apply_step
from tests.benchmarks.timing import (
    ON_GPU,
    Report,
    Subject,
    Times,
    added,
    by_size,
    make_matrix,
    measure,
    measure_in_turns,
    medians,
    work,
)
from tests.benchmarks.vllm_peer import VllmPeer
from tests.benchmarks.workload import BLOCK_SIZE, FULL, MAX_MODEL_LEN, WINDOW, make_plan


def cases() -> tuple[Case, ...]:
    """Returns the cases of this run's size: the usual size first, and some of all by default."""
    if timing.size == "smallest":
        return (Case(4, 2, chunk=32, in_phase=True),)
    usual = Case(256, 1), Case(256, 4), Case(256, 4, chunk=512)
    if not timing.every_case:
        return (*usual, *by_size(full=(Case(64, 1), Case(1024, 4)), small=(), smallest=()))
    decodes = [Case(256, 2), Case(256, 8)]
    decodes += [Case(count, groups) for count in (64, 1024, 4096) for groups in (1, 4)]
    in_phase = [Case(256, groups, in_phase=True) for groups in (1, 4)]
    return (*usual, *decodes, Case(256, 1, chunk=512), *in_phase)


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title("Table work of a step, to the model's inputs; above each the parts, median us")
    for case in cases():
        server = _server(case)
        _note_parts(report, server)
        (scheduled,) = time_steps(server, server.scheduled_step)
        report.add(case.name, "jaxkv with its scheduler", scheduled)
        has_tables = peer is not None and peer.has_tables
        others = [_vllm_subject(case, peer)] if has_tables else []
        ours, *theirs = time_steps(server, server.step, *others)
        report.add(case.name, "jaxkv", ours)
        for times in theirs:
            report.add(case.name, "vLLM", times, base=ours)
    requests = by_size(full=256, small=64, smallest=4)
    _time_jax(report, requests)
    if not timing.every_case:
        report.note("left out: other cases, buffers and large tables; --all times them, too")
        return
    report.title("The same work inside a caller's jitted step, which has an upload anyway")
    for groups in by_size(full=(1, 4), small=(1,), smallest=(1,)):
        _time_added(report, Server(Case(requests, groups)))
    _time_buffers(report, by_size(full=80, small=80, smallest=3), requests)
    small = ((256, 1024, 1), (1024, 8192, 4))
    large = (*small, (4096, 8192, 8), (4096, 65536, 8))
    _time_large(report, by_size(full=large, small=small, smallest=((8, 64, 2),)), requests)


# --- timing -----------------------------------------------------------------------------


_parts: dict[Case, dict[str, float]] = {}  # by the host's clock, which is read before we print


def _server(case: Case) -> Server:
    """Returns a server whose requests begin to decode, with page-locked uploads on a GPU."""
    server = Server(case)
    server.ring = jaxkv.UploadRing() if ON_GPU else None
    server.decode()
    return server


def _note_parts(report: Report, server: Server) -> None:
    """Prints the median microseconds of the parts of a step, from the scheduler on."""
    case = server.case
    if timing.clock == "host":
        samples: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(by_size(full=80, small=48, smallest=34)):
            begins_blocks = server.manager.num_computed_tokens(0) % BLOCK_SIZE == 0
            for part, seconds in server.parts_of_step().items():
                if begins_blocks or not case.in_phase:
                    samples[part].append(seconds)
        # the first step compiles
        _parts[case] = medians({part: seconds[1:] for part, seconds in samples.items()})
    texts = [f"{part} {us:.1f}" for part, us in _parts[case].items()]
    report.note(f"{case.name:<40} {', '.join(texts)}", **_parts[case])


def time_steps(server: Server, step: Callable[[], Any], *others: Subject) -> list[Times]:
    """Times steps with or without the scheduler, and others in turns with them.

    The scheduler has no work any more after steps without it.
    """
    times = measure_in_turns(_subject(server, step), *others)
    jaxkv.check_errors(server.cache)
    return times


def _subject(server: Server, step: Callable[[], Any]) -> Subject:
    case, manager = server.case, server.manager
    if case.chunk and step == server.step:
        if case.requests in manager.requests:
            manager.finish(case.requests)
        manager.start(case.requests)
    until = functools.partial(server.until_blocks_begin, step)
    return Subject(step, prepare=until if case.in_phase else None)


def _vllm_subject(case: Case, peer: VllmPeer) -> Subject:
    import torch

    server = VllmServer(case, peer)
    prepare = server.quiet_steps if case.in_phase else None
    return Subject(server.step, lambda _: torch.cuda.synchronize(), prepare)


def _time_jax(report: Report, requests: int) -> None:
    """Times what jax itself costs."""
    server = Server(Case(requests, 1))
    report.title("The same without the scheduler, and what jax itself costs")
    (times,) = time_steps(server, server.step)
    ours = report.add(server.case.name, "NumPy upload", times)
    if ON_GPU:
        server.ring = jaxkv.UploadRing()
        (times,) = time_steps(server, server.step)
        report.add(server.case.name, "page-locked ring", times, base=ours)
    report.add(server.case.name, "no work at all", time_nothing(server), base=ours)


def time_nothing(server: Server) -> Times:
    """Times a jitted call that takes the same arguments and does nothing: jax's own cost.

    The upload is on the device already, so no step takes less.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, upload):
        return cache, upload.data[:8]

    cache, upload = server.cache, jax.device_put(server.shape.idle())

    def call():
        nonlocal cache
        cache, out = step(cache, upload)
        return out

    return measure(call)


# --- what else a step costs -----------------------------------------------------------------


def _decodes(manager: jaxkv.BlockManager, shape: StepShape) -> Iterator[Upload]:
    """Starts as many requests as a step of the shape has; yields uploads that decode them."""
    for name in range(shape.batch_size):
        manager.start(name)
    while True:
        yield manager.step(shape, dict.fromkeys(range(shape.batch_size), 1))


def _time_uploads(cache: jaxkv.KVCache, uploads: Iterator[Upload]) -> Times:
    def call():
        nonlocal cache
        cache, inputs = apply_step(cache, next(uploads))
        return inputs

    times = measure(call)
    jaxkv.check_errors(cache)
    return times


def _time_buffers(report: Report, layers: int, requests: int) -> None:
    """Times a pool of one stacked buffer, and one of a buffer a layer."""
    report.title(f"{requests} decodes by the buffers of a pool of {layers} layers, uploads at hand")
    plan = plan_cache(
        {f"layers.{i}": FULL for i in range(layers)},
        2**50,
        max_model_len=MAX_MODEL_LEN,
        num_blocks_override=40 * requests + MAX_MODEL_LEN // BLOCK_SIZE,
    )
    shape = StepShape.for_plan(plan, max_requests=requests, max_tokens=requests)
    for stacked in (True, False):
        cache = jaxkv.make_cache(plan, max_requests=requests, stacked=stacked)
        manager = jaxkv.BlockManager(plan, max_requests=requests)
        uploads = iter(list(itertools.islice(_decodes(manager, shape), 400)))
        name = f"{len(cache.buffers)} buffers"
        report.add(name, "jaxkv", _time_uploads(cache, uploads))


def _time_large(report: Report, sizes: tuple[tuple[int, int, int], ...], requests: int) -> None:
    """Times tables of many rows and blocks; a step sees few of them."""
    report.title(f"Tables of any size: a decode step of {requests} requests")
    for rows, blocks, groups in sizes:
        specs = (FULL, *[WINDOW] * (groups - 1))
        plan = make_plan(specs, requests, max_model_len=blocks * BLOCK_SIZE)
        cache = jaxkv.make_cache(plan, max_requests=rows, tables_only=True)
        manager = jaxkv.BlockManager(plan, max_requests=rows)
        shape = StepShape.for_plan(
            plan, max_requests=rows, max_tokens=requests, max_seq_len=MAX_MODEL_LEN
        )
        times = _time_uploads(cache, _decodes(manager, shape))
        report.add(f"{rows} rows x {blocks} blocks x {groups}", "jaxkv", times)


def _time_added(report: Report, server: Server) -> None:
    """Times a jitted step of a caller's own with and without the table work in it.

    The caller's upload has the same size either way.
    """
    idle = server.shape.idle()

    def step(cache, matrix, upload, with_tables):
        seen = upload.data.sum()  # the caller's own use of its upload
        if with_tables:
            cache, seen = jaxkv.apply_step(cache, upload)
        return cache, work(matrix), seen

    found: dict[bool, Times] = {}
    for with_tables in (False, True):
        jitted = jax.jit(functools.partial(step, with_tables=with_tables), donate_argnums=(0, 1))
        state = server.cache, make_matrix()

        def call(jitted=jitted):
            nonlocal state
            *state, seen = jitted(*state, Upload(data=idle.data.copy(), shape=idle.shape))
            return seen

        name = "with table work" if with_tables else "without"
        found[with_tables] = report.add(server.case.name, name, measure(call))
        server.cache = state[0]
    report.note(f"added: {added(found[True], found[False])}")
