"""Steps of jaxkv and vLLM over the same requests, from block manager to what the model reads."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.planning import Plan
from jaxkv._src.uploads import StepShape, Upload
from tests.benchmarks.timing import poll
from tests.benchmarks.vllm_peer import VllmPeer
from tests.benchmarks.workload import (
    BLOCK_SIZE,
    FULL,
    LONGEST_CHUNK,
    MAX_MODEL_LEN,
    WINDOW,
    VllmManager,
    make_plan,
    prompt_len,
    settle,
)

PARTS = ("schedule and grow", "blocks and packing", "dispatch", "append", "wait")
PROMPT = 7680  # tokens of the prompts that are computed in chunks


class Inputs(NamedTuple):
    """Arrays that a model reads in a step of B requests and T tokens, of G groups of layers.

    There are few, because a jitted call takes about 3 us for each array that it returns.

    block_tables: of neighboring groups with tables of one width.
    of_tokens: positions, and then the slots in each group.
    of_requests: seq_lens, and then the position at which the table of each group begins; vLLM's
      begin at 0.
    """

    block_tables: tuple[jax.Array, ...]  # int32[groups of this width, B, W]
    of_tokens: jax.Array  # int32[1 + G, T]
    of_requests: jax.Array  # int32[1 + G, B]
    query_start_loc: jax.Array  # int32[B + 1]


@functools.partial(jax.jit, donate_argnums=0)
def apply_step(cache: jaxkv.KVCache, upload: Upload) -> tuple[jaxkv.KVCache, Inputs]:
    """Applies a step, and computes what the first layer of each group reads."""
    cache, batch = jaxkv.apply_step(cache, upload)
    layers = [f"layers.{group}" for group in range(len(batch.tables))]
    tables = [batch.kernel_block_tables(layer) for layer in layers]
    same_width = [list(group) for _, group in itertools.groupby(tables, key=lambda t: t.shape)]
    inputs = Inputs(
        block_tables=tuple(jnp.stack(group) for group in same_width),
        of_tokens=jnp.stack([batch.positions, *map(batch.slot_mapping, layers)]),
        of_requests=jnp.stack([batch.seq_lens, *map(batch.first_positions, layers)]),
        query_start_loc=batch.query_start_loc,
    )
    return cache, inputs


class Case(NamedTuple):
    """``requests`` that decode, and one more that computes ``chunk`` tokens of its prompt.

    in_phase: all of them begin a block in the same step, and only that one is timed; else a
      sixteenth of them does in each.
    """

    requests: int
    groups: int
    chunk: int = 0
    in_phase: bool = False

    @property
    def name(self) -> str:
        text = f"{self.requests} decodes"
        text += f" + {self.chunk} of a prompt" if self.chunk else ""
        text += ", all append" if self.in_phase else ""
        return f"{text}, {self.groups} group{'s' * (self.groups > 1)}"

    @property
    def rows(self) -> int:
        return self.requests + bool(self.chunk)

    @property
    def max_tokens(self) -> int:
        return self.requests + self.chunk

    @property
    def prompts(self) -> dict[int, int]:
        """Prompt tokens of the requests that decode, by request."""
        return {i: 2048 if self.in_phase else prompt_len(i) for i in range(self.requests)}

    def plan(self) -> Plan:
        return make_plan((FULL, *[WINDOW] * (self.groups - 1)), self.rows)

    def work(self) -> dict[int, int]:
        """Returns the new tokens of each request in a step; request ``requests`` is the prompt."""
        work = dict.fromkeys(range(self.requests), 1)
        return {**work, self.requests: self.chunk} if self.chunk else work


class Server:
    """A scheduler, its manager and a cache, with the prompts of a case computed."""

    def __init__(self, case: Case):
        self.case, plan = case, case.plan()
        self.manager = jaxkv.BlockManager(plan, max_requests=case.rows)
        self.cache = jaxkv.make_cache(plan, max_requests=case.rows)
        self.ring: jaxkv.UploadRing | None = None
        self.has_prompt = False
        self.work = case.work()
        max_tokens = case.max_tokens if case.chunk else LONGEST_CHUNK
        self.scheduler = jaxkv.Scheduler(self.manager, max_tokens=max_tokens)
        sizes = {"max_requests": case.rows, "batch_size": case.rows}
        prefill = StepShape.for_plan(plan, **sizes, max_tokens=max_tokens)
        decode = StepShape.for_plan(plan, **sizes, max_tokens=case.requests, max_query_len=1)
        self.shape = prefill if case.chunk else decode
        for name, tokens in case.prompts.items():
            self.scheduler.add(name, tokens)
        while work := self.scheduler.schedule().work:
            self.apply(self.manager.step(prefill, work))
        settle()

    def apply(self, upload: Upload) -> Inputs:
        self.cache, inputs = apply_step(self.cache, upload)
        return inputs

    def decode(self) -> None:
        """Gives every request a first token to decode: the scheduler has work from now on."""
        self.scheduler.append(dict.fromkeys(self.case.prompts, 1))

    def scheduled_step(self, clocks: list[float] | None = None) -> Inputs:
        """Runs a step from the scheduler to the model's inputs; notes the time after each part."""
        scheduler, prompt = self.scheduler, self.case.requests
        clocks = [] if clocks is None else clocks
        if self.case.chunk and not self.has_prompt:
            scheduler.add(prompt, PROMPT)
            self.has_prompt = True
        clocks.append(time.perf_counter())
        schedule = scheduler.schedule()
        clocks.append(time.perf_counter())
        upload = self.manager.step(self.shape, schedule.work, ring=self.ring)
        clocks.append(time.perf_counter())
        inputs = self.apply(upload)
        clocks.append(time.perf_counter())
        scheduler.append(dict.fromkeys(schedule.samples, 1))
        clocks.append(time.perf_counter())
        if prompt in schedule.samples:
            scheduler.finish(prompt)
            self.has_prompt = False
        return inputs

    def parts_of_step(self) -> dict[str, float]:
        """Runs a step of the scheduler. Returns the seconds of its parts."""
        clocks: list[float] = []
        poll(self.scheduled_step(clocks))
        clocks.append(time.perf_counter())
        seconds = (later - sooner for sooner, later in itertools.pairwise(clocks))
        return dict(zip(PARTS, seconds, strict=True))

    def step(self) -> Inputs:
        """Runs a step without the scheduler, whose work vLLM's side does not do either."""
        prompt, manager = self.case.requests, self.manager
        if self.case.chunk and manager.num_computed_tokens(prompt) == PROMPT:
            manager.finish(prompt)
            manager.start(prompt)
        return self.apply(manager.step(self.shape, self.work, ring=self.ring))

    def until_blocks_begin(self, step: Callable[[], Any]) -> Any:
        """Runs steps until all requests begin a block in the next one."""
        inputs = step()
        while self.manager.num_computed_tokens(0) % BLOCK_SIZE:
            inputs = step()
        return inputs


class VllmServer:
    """vLLM's manager and tables, with the prompts of a case computed."""

    def __init__(self, case: Case, peer: VllmPeer):
        import torch

        device = torch.device("cuda")
        self.case, self.vllm, self.work = case, peer.tables, case.work()
        self.manager = VllmManager(peer, case.plan())
        self.tables = peer.tables.BlockTables(
            [BLOCK_SIZE] * case.groups,
            case.rows,
            max(case.max_tokens, case.rows),
            [MAX_MODEL_LEN // BLOCK_SIZE] * case.groups,
            device,
        )
        for name, tokens in case.prompts.items():
            self.manager.start(name, tokens)
            (ids,) = self.manager.step({name: tokens})
            self.tables.append_block_ids(name, ids, overwrite=True)
        self.tables.apply_staged_writes()
        if case.chunk:
            self.manager.start(case.requests, PROMPT)
        counts = [1] * case.requests + [case.chunk] * bool(case.chunk)
        self.rows = np.arange(case.rows, dtype=np.int64)
        self.ends = np.cumsum([0, *counts]).astype(np.int32)
        self.idx = torch.tensor(self.rows, device=device)
        self.starts = torch.tensor(self.ends, device=device)
        lengths = [*case.prompts.values(), *([0] * bool(case.chunk))]
        self.computed = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.positions = torch.zeros(case.max_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(case.rows, dtype=torch.int32, device=device)
        settle()

    def step(self) -> None:
        case, manager, tables, vllm = self.case, self.manager, self.tables, self.vllm
        prompt = case.requests
        if case.chunk and manager.requests[prompt].num_computed_tokens == PROMPT:
            manager.finish(prompt)
            manager.start(prompt, PROMPT)
        is_new = bool(case.chunk) and not manager.requests[prompt].num_computed_tokens
        for row, ids in enumerate(manager.step(self.work)):
            if ids is not None:
                tables.append_block_ids(row, ids, overwrite=is_new and row == prompt)
        tables.apply_staged_writes()
        idx = vllm.upload(self.rows, device=tables.device, dtype=self.idx.dtype)
        vllm.upload(self.ends, out=self.starts)
        vllm.prepare_pos_seq_lens(idx, self.starts, self.computed, self.positions, self.seq_lens)
        tables.gather_block_tables(idx, case.rows)
        tables.compute_slot_mappings(idx, self.starts, self.positions, case.max_tokens)

    def quiet_steps(self) -> None:
        """Runs steps until all requests begin a block in the next one."""
        self.step()
        while self.manager.requests[0].num_computed_tokens % BLOCK_SIZE:
            self.step()
