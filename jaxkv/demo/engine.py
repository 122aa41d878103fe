"""Continuous batching with chunked prefill over the paged pool.

Every step is one upload and one call of one jitted function, which updates the tables,
zeroes fresh blocks, runs the model and picks the next tokens. Tables and pool are
arguments, donated and returned; nothing is closed over but static sizes. That is also why
the cache can sleep between two steps without either being compiled again.

With context parallelism every device of a mesh runs that step under ``shard_map`` and
keeps the positions that it was dealt.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.block_tables import check_overflow, make_block_tables, map_slots
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.checks import check_positive
from jaxkv.demo.caches import CONTEXT_AXIS, PagedCache
from jaxkv.demo.model import Model, Params, forward
from jaxkv.demo.trace import Request
from jaxkv.kernel_blocks import AcceptedSizes, select_kernel_block_sizes
from jaxkv.planning import Plan
from jaxkv.pool import KVPool, make_pool, make_sharded_pool
from jaxkv.sleep import KVCache, sleep, wake_up
from jaxkv.step import StepShape, apply_step, pack_step

MAX_REQUESTS = 16
PREFILL_BATCH, PREFILL_CHUNK = 4, 64
REQUESTS_BETWEEN_NAPS = 8
INTERLEAVE_TOKENS = 4  # positions that a context-parallel rank is dealt at a time


@dataclasses.dataclass(slots=True)
class Running:
    """A request in the engine: its tokens so far, and how many are in the cache."""

    request: Request
    tokens: list[int]
    num_computed_tokens: int = 0

    @property
    def num_waiting_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclasses.dataclass
class Report:
    """What happened. occupancy: per step, blocks held by each group."""

    outputs: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    preemptions: list[int] = dataclasses.field(default_factory=list)  # steps
    blocks_allocated: int = 0
    blocks_zeroed: int = 0
    bytes_zeroed: int = 0
    nan_rows: int = 0
    first_nan_request: int | None = None
    occupancy: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    naps: int = 0
    bytes_released: int = 0

    @property
    def new_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.outputs.values())


def serve_step(model, implementation, chunk, shape, params, tables, pool, upload):
    """One step on the device: B requests, up to ``chunk`` tokens of each.

    Returns tables, pool, and int32[2, B]: next tokens, and whether a logit was NaN.
    """
    rank = lax.axis_index(CONTEXT_AXIS) if tables.groups[0].context_parallel > 1 else 0
    tables, pool, batch = apply_step(
        tables, pool, upload, shape=shape, implementation=implementation
    )
    offset = jnp.arange(chunk, dtype=jnp.int32)[None]
    positions = jnp.where(
        offset < batch.lengths[:, None], batch.first_positions[:, None] + offset, -1
    )
    tables, slots = map_slots(tables, batch.rows[:, None], positions, rank=rank)
    cache = PagedCache(
        pool=pool,
        block_tables=batch.block_tables,
        slots=slots.reshape(slots.shape[0], -1),
        groups=tables.groups,
    )
    tokens = batch.extra.reshape(shape.batch, chunk)
    with jax.default_matmul_precision("highest"):
        cache, logits = forward(model, params, tokens, positions, cache)
    picked = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    bad = jnp.isnan(logits).any(axis=-1).astype(jnp.int32)
    return tables, cache.pool, jnp.stack([picked, bad])


def _context_mesh(plan: Plan) -> Mesh | None:
    if plan.context_parallel == 1:
        return None
    return Mesh(np.array(jax.devices()[: plan.context_parallel]), (CONTEXT_AXIS,))


def _make_pool(plan: Plan, mesh: Mesh | None) -> KVPool:
    return make_pool(plan) if mesh is None else make_sharded_pool(plan, mesh, CONTEXT_AXIS)


def _on_mesh(step: Callable, mesh: Mesh | None) -> Callable:
    """A step of every device on its own part of the pool; all else is the same on all."""
    if mesh is None:
        return step
    same, pages = PartitionSpec(), PartitionSpec(None, CONTEXT_AXIS)
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(same, same, pages, same),
        out_specs=(same, pages, same),
        check_vma=False,
    )


def _kernel_block_sizes(plan: Plan, kernel_block_size: int | None) -> list[int] | None:
    if kernel_block_size is None:
        return None
    check_positive(kernel_block_size=kernel_block_size)
    backends = {"--kernel-block-size": AcceptedSizes(exact=(kernel_block_size,))}
    sizes = select_kernel_block_sizes(plan.groups, [backends] * len(plan.groups))
    return [size for size in sizes if size is not None]  # all groups of a plan keep a cache


class Engine:
    """Serves one trace. Host state lives here; device state passes through the step."""

    def __init__(
        self,
        model: Model,
        params: Params,
        plan: Plan,
        *,
        zeroing: bool = True,
        implementation: str | None = None,
        kernel_block_size: int | None = None,
        sleep_between_batches: bool = False,
    ):
        self.plan, self.naps = plan, sleep_between_batches
        self.manager = BlockManager(
            plan,
            max_requests=MAX_REQUESTS,
            zero_policy="when_needed" if zeroing else "never",
        )
        self.mesh = _context_mesh(plan)
        everywhere = NamedSharding(self.mesh, PartitionSpec()) if self.mesh else None
        self.params = jax.device_put(params, everywhere)
        self.tables = make_block_tables(
            plan,
            max_requests=MAX_REQUESTS,
            kernel_block_sizes=_kernel_block_sizes(plan, kernel_block_size),
            interleave_tokens=INTERLEAVE_TOKENS if self.mesh else 1,
            device=everywhere,
        )
        self.pool = _make_pool(plan, self.mesh)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []  # oldest first
        self.report = Report()
        self._prefilled_last = False
        self._steps = {}
        for batch, chunk in ((PREFILL_BATCH, PREFILL_CHUNK), (MAX_REQUESTS, 1)):
            shape = StepShape(
                entries=MAX_REQUESTS,
                block_ids=64,
                zero_ids=32,
                batch=batch,
                widths=self.tables.widths,
                extra=batch * chunk,
            )
            step = functools.partial(serve_step, model, implementation, chunk, shape)
            self._steps[chunk] = shape, jax.jit(_on_mesh(step, self.mesh), donate_argnums=(1, 2))

    def serve(self, trace: Sequence[Request], on_finish: Callable[[], object]) -> Report:
        """Runs every request of the trace to its end."""
        for request in trace:
            total = len(request.prompt) + request.max_new_tokens
            if total > self.plan.max_model_len:
                raise ValueError(
                    f"request {request.name} may reach {total} tokens; the plan admits "
                    f"{self.plan.max_model_len}"
                )
        arrivals = deque(trace)
        started = time.perf_counter()
        while arrivals or self.waiting or self.running:
            while arrivals and arrivals[0].arrival_step <= self.report.steps:
                request = arrivals.popleft()
                self.waiting.append(Running(request, list(request.prompt)))
            self._admit()
            self._step()
            for _ in range(self._retire()):
                on_finish()
            if self.naps and len(self.report.outputs) // REQUESTS_BETWEEN_NAPS > self.report.naps:
                self._nap()
        self.report.seconds = time.perf_counter() - started
        check_overflow(self.tables)
        return self.report

    def warm_up(self) -> None:
        """Compiles both steps on an empty batch, so that serving never does."""
        for chunk in self._steps:
            self._dispatch([], [], chunk)

    def _nap(self) -> None:
        """The whole cache to the host and back, while requests run."""
        sleeping = sleep(KVCache(pool=self.pool, tables=self.tables))
        self.report.naps += 1
        self.report.bytes_released += sleeping.released_bytes
        cache = wake_up(sleeping)
        self.pool, self.tables = cache.pool, cache.tables

    def _admit(self) -> None:
        """Starts waiting requests while rows and blocks last: blocks for all of the
        request's tokens, and one to grow into for every request that runs already."""
        while self.waiting and len(self.running) < MAX_REQUESTS:
            candidate = self.waiting[0]
            needed = self.plan.admission_blocks(len(candidate.tokens))
            if needed + len(self.running) > self.manager.pool.num_free_blocks:
                return
            self.manager.start(candidate.request.name)
            self.running.append(self.waiting.popleft())

    def _step(self) -> None:
        """Prefill and decode take turns while both have work."""
        prefilling = [r for r in self.running if r.num_waiting_tokens > 1]
        decoding = [r for r in self.running if r.num_waiting_tokens == 1]
        prefill = bool(prefilling) and not (decoding and self._prefilled_last)
        self._prefilled_last = prefill
        chunk = PREFILL_CHUNK if prefill else 1
        batch = prefilling[:PREFILL_BATCH] if prefill else decoding
        batch = [running for running in batch if self._grow(running, chunk)]
        batch = [running for running in batch if running in self.running]
        lengths = [min(chunk, running.num_waiting_tokens) for running in batch]
        picked, bad = self._dispatch(batch, lengths, chunk)
        for i, (running, length) in enumerate(zip(batch, lengths, strict=True)):
            running.num_computed_tokens += length
            if running.num_waiting_tokens == 0:
                running.tokens.append(int(picked[i]))
                self._note_nan(running, bool(bad[i]))
        self.report.steps += 1
        self.report.occupancy.append(self.manager.held_blocks())

    def _grow(self, running: Running, chunk: int) -> bool:
        """Finds blocks for the next tokens, preempting the youngest where there are none."""
        computed = running.num_computed_tokens
        target = computed + min(chunk, running.num_waiting_tokens)
        while running in self.running:
            free_before = self.manager.pool.num_free_blocks
            try:
                self.manager.grow(running.request.name, computed, target)
            except OutOfBlocksError:
                self._preempt(self.running[-1])
            else:
                self.report.blocks_allocated += free_before - self.manager.pool.num_free_blocks
                return True
        return False

    def _preempt(self, running: Running) -> None:
        """Gives its blocks back; it will compute all its tokens again."""
        self.manager.finish(running.request.name)
        self.running.remove(running)
        running.num_computed_tokens = 0
        self.waiting.appendleft(running)
        self.report.preemptions.append(self.report.steps)

    def _retire(self) -> int:
        done = [r for r in self.running if r.num_new_tokens == r.request.max_new_tokens]
        for running in done:
            self.manager.finish(running.request.name)
            self.running.remove(running)
            self.report.outputs[running.request.name] = running.tokens[
                len(running.request.prompt) :
            ]
        return len(done)

    def _dispatch(self, batch: Sequence[Running], lengths: Sequence[int], chunk: int) -> np.ndarray:
        shape, step = self._steps[chunk]
        tokens = np.zeros((shape.batch, chunk), np.int32)
        for i, (running, length) in enumerate(zip(batch, lengths, strict=True)):
            start = running.num_computed_tokens
            tokens[i, :length] = running.tokens[start : start + length]
        update = self.manager.take_update()
        self._count_zeroed(update.zero_ids)
        table_rows = self.manager.requests
        upload = pack_step(
            shape,
            update=update,
            rows=[table_rows[running.request.name] for running in batch],
            first_positions=[running.num_computed_tokens for running in batch],
            lengths=lengths,
            extra=tokens.reshape(-1),
        )
        self.tables, self.pool, out = step(self.params, self.tables, self.pool, upload)
        return np.asarray(out)

    def _count_zeroed(self, zero_ids: Sequence[Sequence[int]]) -> None:
        layout = self.plan.layout
        for group, ids in enumerate(zero_ids):
            page_bytes = sum(layout.slots[slot].page_bytes for slot in layout.slots_of(group))
            self.report.blocks_zeroed += len(ids)
            self.report.bytes_zeroed += len(ids) * page_bytes

    def _note_nan(self, running: Running, bad: bool) -> None:
        if bad:
            self.report.nan_rows += 1
            if self.report.first_nan_request is None:
                self.report.first_nan_request = running.request.name
