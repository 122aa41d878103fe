"""A step's table work: one upload and one dispatch, against vLLM's `BlockTables`.

Both start from Python lists (new ids by request and group) and NumPy arrays (rows, first
positions, lengths) and end with gathered tables and slots on the device. vLLM's part is
its own calls: append_block_ids, apply_staged_writes, gather_block_tables,
compute_slot_mappings; with "inputs", also what it needs on the device for the last two
(two uploads and its positions kernel), which our upload holds. "tables only" gives it
those for nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.block_tables import BlockTables, TableGroup, check_overflow
from jaxkv.blocks import TableUpdate
from jaxkv.step import StepShape, UploadRing, apply_step, apply_step_donating, pack_step
from tests.benchmarks.timing import ON_GPU, Report, Times, added, make_matrix, measure, work
from tests.benchmarks.vllm_peer import VllmPeer

BLOCK_SIZE = 16


class Case(NamedTuple):
    """``appends`` requests get ``ids`` blocks in each group; ``batch`` requests compute
    ``new`` tokens each, after ``computed`` ones."""

    name: str
    groups: int
    batch: int
    appends: int
    ids: int
    computed: int
    new: int
    row_blocks: int  # of a table row
    width: int  # gathered: a bucket that holds the longest row
    max_requests: int = 256
    kernel_blocks: int = 1  # per block

    @property
    def held(self) -> int:
        """Blocks of a row before the first step."""
        return self.computed // BLOCK_SIZE + 1 if self.computed else 0


CASES = (
    Case("decode, 16 appends", 1, 256, 16, 1, 2000, 1, 512, 512),
    Case("decode, 256 appends", 1, 256, 256, 1, 2000, 1, 512, 512),
    Case("decode, 256 appends, 4 groups", 4, 256, 256, 1, 2000, 1, 512, 512),
    Case("prefill, 8 x 64 blocks", 1, 8, 8, 64, 0, 1024, 256, 256),
    Case("decode, rows for 128k, 4 groups", 4, 256, 16, 1, 8000, 1, 8192, 1024),
)
SPLIT = Case("decode, 16 appends, split blocks", 1, 256, 16, 1, 2000, 1, 512, 512, kernel_blocks=4)
LARGE = tuple(
    Case(
        f"{rows} rows x {blocks} blocks x {groups}", groups, 256, 16, 1, 2000, 1, blocks, 512, rows
    )
    for rows, blocks, groups in (
        (256, 1024, 1),
        (1024, 8192, 4),
        (4096, 8192, 8),
        (4096, 65536, 8),
    )
)


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title("Table work of a step, host packing included")
    for case in (*CASES, SPLIT):
        ours = report.add(case.name, "jaxkv", time_ours(case))
        report.add(case.name, "NumPy upload", time_ours(case, ring=False), base=ours)
        report.add(case.name, "no work at all", time_nothing(case), base=ours)
        if peer is not None and case.kernel_blocks == 1:
            for inputs in (True, False):
                name = "vLLM, inputs" if inputs else "vLLM, tables only"
                report.add(case.name, name, time_vllm(case, peer, inputs), base=ours)
    report.title("The same work inside a caller's jitted step, which has an upload anyway")
    for case in CASES:
        time_added(report, case)
    report.title("Tables of any size: a decode step of 256 requests")
    for case in LARGE if ON_GPU else LARGE[:2]:
        report.add(case.name, "jaxkv", time_ours(case))


def make_tables(case: Case) -> BlockTables:
    shape = (case.max_requests, case.row_blocks)
    group = TableGroup(BLOCK_SIZE, case.kernel_blocks, "tokens", None, None)
    return BlockTables(
        tables=tuple(jnp.ones(shape, jnp.int32) for _ in range(case.groups)),
        num_blocks=jnp.full((case.groups, case.max_requests), case.held, jnp.int32),
        overflow=jnp.int32(0),
        groups=(group,) * case.groups,
        pool_blocks=2**20,
    )


def make_shape(case: Case) -> StepShape:
    return StepShape(
        entries=case.appends,
        block_ids=case.appends * case.groups * case.ids,
        zero_ids=0,
        batch=case.batch,
        tokens=case.batch * case.new,
        widths=(case.width,) * case.groups,
    )


def new_ids(case: Case) -> list[tuple[int, tuple[list[int], ...]]]:
    """Rows and their new ids per group, as a scheduler hands them out."""
    ids = list(range(7, 7 + case.ids))
    return [(row, tuple(list(ids) for _ in range(case.groups))) for row in range(case.appends)]


def make_pack(case: Case, pack):
    """Packs a step from lists: appended ids in decode, fresh rows in prefill."""
    changes, overwrite = new_ids(case), case.new > 1
    no_zeros = ((),) * case.groups
    batch = np.arange(case.batch, dtype=np.int32)
    first = np.full(case.batch, case.computed, np.int32)
    lengths = np.full(case.batch, case.new, np.int32)

    def call():
        entries = [(row, ids, overwrite) for row, ids in changes]  # as TableEntry, cheaper
        update = TableUpdate(entries, no_zeros)
        return pack(update=update, rows=batch, first_positions=first, lengths=lengths)

    return call


def time_ours(case: Case, ring: bool = True) -> Times:
    """By a ring of page-locked buffers, or by a NumPy array."""
    tables, shape = make_tables(case), make_shape(case)
    uploads = UploadRing(shape)
    pack = make_pack(case, uploads.pack if ring else functools.partial(pack_step, shape))

    def call():
        nonlocal tables
        tables, _, batch = apply_step_donating(tables, None, pack(), shape=shape)
        if ring:
            uploads.sent(batch)
        return batch

    times = measure(call)
    check_overflow(tables)
    return times


def time_nothing(case: Case) -> Times:
    """A jitted call that takes the same arguments and does nothing: what jax itself costs."""
    tables, shape = make_tables(case), make_shape(case)
    ring = UploadRing(shape)
    pack = make_pack(case, ring.pack)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(tables, upload):
        return tables, jax.device_put(upload, jax.memory.Space.Device)[:8]

    upload = pack()

    def call():
        nonlocal tables
        tables, out = step(tables, upload)
        return out

    return measure(call)


def time_vllm(case: Case, peer: VllmPeer, inputs: bool) -> Times:
    import torch

    device, tokens = torch.device("cuda"), case.batch * case.new
    tables = peer.BlockTables(
        [BLOCK_SIZE] * case.groups,
        case.max_requests,
        max(tokens, case.max_requests),
        [case.row_blocks] * case.groups,
        device,
    )
    tables.num_blocks.np[:] = case.held
    changes, overwrite = new_ids(case), case.new > 1
    rows = np.arange(case.batch, dtype=np.int64)
    ends = np.arange(case.batch + 1, dtype=np.int32) * case.new
    computed = torch.full((case.max_requests,), case.computed, dtype=torch.int32, device=device)
    idx, starts = torch.tensor(rows, device=device), torch.tensor(ends, device=device)
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    lengths = torch.zeros(case.max_requests, dtype=torch.int32, device=device)
    peer.prepare_pos_seq_lens(idx, starts, computed, positions, lengths)

    def call() -> None:
        nonlocal idx
        for row, ids in changes:
            tables.append_block_ids(row, ids, overwrite=overwrite)
        tables.apply_staged_writes()
        if inputs:
            idx = peer.upload(rows, device=device, dtype=torch.int64)
            peer.upload(ends, out=starts)
            peer.prepare_pos_seq_lens(idx, starts, computed, positions, lengths)
        tables.gather_block_tables(idx, case.batch)
        tables.compute_slot_mappings(idx, starts, positions, tokens)

    return measure(call, lambda _: torch.cuda.synchronize())


def time_added(report: Report, case: Case) -> None:
    """A jitted step of a caller's own with and without the table work in it.

    The caller's upload has the same size either way.
    """
    shape = make_shape(case)
    upload = make_pack(case, functools.partial(pack_step, shape))()

    def step(tables, matrix, upload, with_tables):
        batch = upload.sum()  # the caller's own use of its upload
        if with_tables:
            tables, _, batch = apply_step(tables, None, upload, shape=shape)
        return tables, work(matrix), batch

    found = {}
    for with_tables in (False, True):
        jitted = jax.jit(
            functools.partial(step, with_tables=with_tables), donate_argnames=("tables", "matrix")
        )
        state = make_tables(case), make_matrix()

        def call(jitted=jitted):
            nonlocal state
            *state, batch = jitted(*state, upload.copy())
            return batch

        name = "with table work" if with_tables else "without"
        found[with_tables] = report.add(case.name, name, measure(call))
    report.note(f"added: {added(found[True], found[False])}")
