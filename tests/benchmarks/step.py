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
from collections.abc import Callable
from typing import Any

import jax

import jaxkv
from tests.benchmarks import timing
from tests.benchmarks.servers import PARTS, Case, Server, VllmServer
from tests.benchmarks.timing import (
    ON_GPU,
    Report,
    Subject,
    Times,
    by_size,
    measure,
    measure_in_turns,
    medians,
)
from tests.benchmarks.vllm_peer import VllmPeer
from tests.benchmarks.workload import BLOCK_SIZE


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
