"""The state machine over jaxkv itself: manager, cache and step, as an engine uses them."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis.stateful import invariant
from jax import Array, lax

from jaxkv._src.blocks import BlockManager
from jaxkv._src.cache import KVCache, StepBatch, check_errors, make_cache
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.layout import rows_per_block
from jaxkv._src.planning import Plan
from jaxkv._src.pool import describe_bytes, read_rows, write_rows, write_state
from jaxkv._src.recurrent import linear_attention
from jaxkv._src.specs import LayerSpec, StateSpec
from jaxkv._src.step import apply_step
from jaxkv._src.uploads import StepShape, TableEntry, Upload, pack_step
from jaxkv.testing import CacheStateMachine, Write
from pallas_kernels import Implementation


class JaxkvStateMachine(CacheStateMachine):
    """Drives jaxkv; also compares the rows on the device with the manager's. Set `plan`.

    Every tensor that is always zeroed first starts as NaN in all dtypes.

    stacked, implementation: as `make_cache` and `apply_step` take them; rows are written by the
      device's default implementation.
    checkpoint_share: as `BlockManager` takes it.
    """

    stacked: ClassVar[bool | None] = None
    implementation: ClassVar[str | None] = None
    copies_on_write: ClassVar[bool] = True
    checkpoint_share: ClassVar[float] = 0.5

    @override
    def make_cache(self) -> None:
        self.manager = BlockManager(
            self.plan, max_requests=self.max_requests, checkpoint_share=self.checkpoint_share
        )
        empty = _make_empty(self.plan, self.max_requests, self.stacked)
        self.cache = jax.tree.map(jnp.copy, empty)  # steps consume theirs
        self.shape = _widest_shape(self.plan, self.max_requests)
        self._batch: dict[Hashable, int] = {}  # tokens that each grown request computes
        self._chunk_ends: dict[int, tuple[int, ...]] = {}  # of prompts
        self._is_told = False  # the device knows of the step whose writes come next
        self._sent: set[int] = set()  # requests whose rows the device has, since they computed
        self._read: dict[str, np.ndarray] | None = None  # by layer, until something changes

    @override
    def start(self, request: int) -> None:
        self.manager.start(request)
        self._read = None

    @override
    def start_prompt(self, request: int, tokens: Sequence[int], salt: str | None) -> int:
        middle = (len(tokens) + 1) // 2
        hit = self.manager.start(request, tokens, salt=salt, boundaries=[middle])
        self._chunk_ends[request] = hit.chunk_ends
        self._read = None
        return hit.num_cached_tokens

    @override
    def chunk_end(self, request: int, num_computed_tokens: int, num_tokens: int) -> int:
        ends = [end for end in self._chunk_ends.get(request, ()) if end > num_computed_tokens]
        return min([num_tokens, *ends])

    @override
    def new_epoch(self) -> None:
        self.manager.new_epoch()

    @override
    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        self.manager.grow({request: num_tokens - num_computed_tokens})
        self._batch[request] = num_tokens - num_computed_tokens

    @override
    def finish(self, request: int) -> None:
        self.manager.finish(request)
        self._sent.discard(request)
        self._read = None

    @override
    def finish_prompt(self, request: int, tokens: Sequence[int]) -> None:
        self._chunk_ends.pop(request, None)
        self.manager.finish(request, tokens)
        self._sent.discard(request)
        self._read = None

    @override
    def fork(self, request: int, donor: int, num_tokens: int) -> bool:
        try:
            self.manager.fork(donor, [request], num_tokens=num_tokens)
        except ValueError:
            return False
        self._read = None
        return True

    @override
    def rewind(self, request: int, num_tokens: int) -> bool:
        try:
            self.manager.rewind({request: num_tokens})
        except ValueError:
            return False
        self._read = None
        return True

    @override
    def num_free_blocks(self) -> int:
        return self.manager.num_free_blocks

    @override
    def block_ids(self, request: int) -> Sequence[Sequence[int]]:
        return self.manager.block_ids(request)

    @override
    def read_null_block(self) -> list[np.ndarray]:
        axis = self.cache.layout.buffers.block_axis
        return [np.asarray(buffer).take(0, axis=axis) for buffer in self.cache.buffers]

    @override
    def write(self, writes: Sequence[Write]) -> None:
        self._dispatch(writes)

    @override
    def read_pages(self, request: int, layer: str) -> np.ndarray:
        if self._batch and not self._is_told:  # between the growth and the writes of a step
            self._run(self.manager.step(self.shape, self._batch), self._no_rows())
            self._is_told = True
        if self._read is None:
            self._read = self._read_all()
        return self._read[layer][list(self.computed).index(request)]

    @invariant()
    def every_request_has_a_row_of_its_own(self) -> None:
        rows = list(self.manager.requests.values())
        if len(set(rows)) < len(rows):
            raise AssertionError(f"requests share a row: {self.manager.requests}")

    @invariant()
    def device_rows_equal_the_manager_s(self) -> None:
        check_errors(self.cache)
        tables, starts = np.asarray(self.cache.block_tables), self.cache.layout.table_offsets
        for request in self._sent:
            row = self.manager.requests[request]
            for group, ids in enumerate(self.block_ids(request)):
                got = tables[row, starts[group] : starts[group] + len(ids)].tolist()
                if any(
                    mine not in (NULL_BLOCK, theirs) for mine, theirs in zip(ids, got, strict=True)
                ):
                    raise AssertionError(f"group {group}: device row {got}, manager {ids}")

    def _dispatch(self, writes: Sequence[Write]) -> None:
        """Runs one step, as an engine does."""
        batch = self._batch
        if self._is_told:
            computed = self.manager.num_computed_tokens
            firsts = [computed(name) - count for name, count in batch.items()]
            upload = self._pack(list(batch), firsts)
        else:
            upload = self.manager.step(self.shape, batch)
        self._run(upload, self._lay_out(batch, writes))
        self._batch = {}
        self._is_told = False

    def _run(self, upload: Upload, rows: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        self.cache = _step(self.cache, upload, rows, implementation=self.implementation)
        self._sent |= {request for request in self.computed if request in self._batch}
        self._read = None

    def _pack(self, requests: Sequence[Hashable], firsts: Sequence[int]) -> Upload:
        """Packs a step after ``firsts`` tokens, with the rows that the device does not have."""
        rows = self.manager.requests
        unsynced = [request for request in requests if request not in self._sent]
        return pack_step(
            self.shape,
            entries=[TableEntry(rows[name], self.manager.block_ids(name)) for name in unsynced],
            rows=[rows[request] for request in requests],
            num_computed_tokens=firsts,
            num_new_tokens=[self._batch.get(request, 1) for request in requests],
            accepted_tokens=[0] * len(requests),
        )

    def _no_rows(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns the ``rows`` of `_step` that write nothing."""
        laid_out: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for layer, placement in self.reference.layers.items():
            spec, count = placement.spec, (self.shape.max_tokens,)
            if isinstance(spec, StateSpec) and not _is_driven(spec):
                blocks = self.shape.widths[placement.group] - 1 - spec.speculative_blocks
                count = self.shape.batch_size, blocks
            width = spec.data_bytes // rows_per_block(spec)
            laid_out[layer] = np.zeros(count, bool), np.zeros((*count, width), np.uint8)
        return laid_out

    def _lay_out(
        self, batch: Mapping[Hashable, int], writes: Sequence[Write]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns the ``rows`` of `_step`: all requests end to end, in the batch's order."""
        laid_out = self._no_rows()
        starts = dict(zip(batch, np.cumsum([0, *batch.values()])[:-1], strict=True))
        for request, layer, positions, rows in writes:
            mask, data = laid_out[layer]
            spec = self.reference.layers[layer].spec
            if isinstance(spec, StateSpec) and not _is_driven(spec):
                at = list(batch).index(request), np.arange(len(rows))
            else:
                first = self.manager.num_computed_tokens(request) - batch[request]
                at = starts[request] + positions - first
            mask[at], data[at] = True, rows
        return laid_out

    def _read_all(self) -> dict[str, np.ndarray]:
        """Reads the pages of all running requests, by layer and logical block."""
        firsts = [max(0, min(n, self.plan.max_model_len - 1)) for n in self.computed.values()]
        upload = self._pack(list(self.computed), firsts)
        tables, pages = jax.tree.map(np.asarray, _read_tokens(self.cache, upload))
        read = {}
        for layer, placement in self.reference.layers.items():
            if isinstance(placement.spec, StateSpec):
                read[layer] = self._read_states(layer)
                continue
            width = self.plan.row_blocks[placement.group]
            read[layer] = np.zeros((len(firsts), width, placement.spec.data_bytes), np.uint8)
            for i, start in enumerate(tables[placement.group][: len(firsts)].tolist()):
                found = pages[layer][i][: width - start]
                read[layer][i, start : start + len(found)] = found
        return read

    def _read_states(self, layer: str) -> np.ndarray:
        """Reads the states of all running requests from the pool's bytes, by logical block."""
        placement, view = self.cache.layout.placement_of(layer), describe_bytes(self.cache, layer)
        buffer = np.asarray(self.cache.buffers[self.cache.layout.buffers.buffer_of(layer)])
        stride = view.strides_bytes[view.block_axis]
        width = self.plan.row_blocks[placement.group]
        states = np.zeros((len(self.computed), width, placement.spec.data_bytes), np.uint8)
        for i, request in enumerate(self.computed):
            for logical, block_id in enumerate(self.block_ids(request)[placement.group]):
                start = view.offset_bytes + block_id * stride
                states[i, logical] = buffer.reshape(-1)[start : start + placement.spec.data_bytes]
        return states


def _widest_shape(plan: Plan, max_requests: int) -> StepShape:
    """Returns a shape that fits every step, also after growth that no step followed."""
    tokens = max_requests * min(plan.limits.max_in_flight_tokens, plan.max_model_len)
    shape = StepShape.for_plan(
        plan, max_requests=max_requests, batch_size=max_requests, max_tokens=tokens
    )
    most = sum(plan.row_blocks) * max_requests
    return dataclasses.replace(shape, block_ids=most, zero_ids=most, block_copies=most)


@functools.lru_cache(maxsize=4)
def _make_empty(plan: Plan, max_requests: int, stacked: bool | None) -> KVCache:
    """Returns an empty cache, shared because every example wants one and making it compiles."""
    cache = make_cache(plan, max_requests=max_requests, stacked=stacked)
    return _poison(cache, plan.groups_to_zero)


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=0)
def _step(
    cache: KVCache,
    upload: Upload,
    rows: Mapping[str, tuple[Array, Array]],
    *,
    implementation: Implementation | None,
) -> KVCache:
    """Applies a step and writes the rows of every layer.

    rows: bool[...] and uint8[..., row_bytes] by layer: which of the [T] tokens are written, or of
      the [B, K] blocks of a state: K of each request, counted from the first that it writes. For a
      state that a recurrent layer writes, the tokens after which there is one.
    """
    cache, batch = apply_step(cache, upload, implementation=implementation)
    for layer, (mask, data) in rows.items():
        spec = cache.layout.placement_of(layer).spec
        if _is_driven(spec):
            recur = functools.partial(_recur, layer=layer, batch=batch, data=data)
            cache = lax.cond(jnp.any(mask), recur, lambda cache: cache, cache)
        elif isinstance(spec, StateSpec):
            for block in range(mask.shape[1]):
                at = jnp.where(mask[:, block], jnp.int32(block), jnp.int32(-1))
                cache = write_state(cache, layer, batch, _split(spec, data[:, block]), at=at)
        else:
            cache = write_rows(cache, layer, batch, data, mask=mask)
    return cache


@jax.jit
def _read_tokens(cache: KVCache, upload: Upload) -> tuple[list[Array], dict[str, Array]]:
    """Reads through the tables of a step: per group the first columns, int32[B], and by layer
    uint8[B, W, data_bytes]."""
    _, batch = apply_step(cache, upload)
    pages = {}
    for group, members in enumerate(cache.layout.buffers.layout.groups):
        for layer in members.layers:
            spec = cache.layout.placement_of(layer).spec
            if not isinstance(spec, StateSpec):
                rows = lax.bitcast_convert_type(read_rows(cache, layer, batch), jnp.uint8)
                shape = batch.tables[group].shape
                pages[layer] = rows.reshape(*shape, spec.data_bytes)
    firsts = [batch.in_group(group).first_blocks for group in range(len(cache.layout.growths))]
    return firsts, pages


def _is_driven(spec: LayerSpec) -> bool:
    """Returns whether a recurrent layer writes a state: one of float32, with keys of one number."""
    is_one = isinstance(spec, StateSpec) and jnp.dtype(spec.dtypes[0]) == jnp.float32
    return is_one and len(spec.shapes[0]) == 3 and spec.shapes[0][2] == 1


def _recur(cache: KVCache, layer: str, batch: StepBatch, data: Array) -> KVCache:
    """Runs a recurrent layer that forgets all but the newest token, uint8[T, row_bytes]."""
    heads, _, _ = cache.layout.placement_of(layer).spec.shapes[0]
    values = lax.bitcast_convert_type(data.reshape(len(data), -1, 4), jnp.float32)
    queries, keys = jnp.zeros((len(data), heads)), jnp.ones((len(data), heads))
    qkv = jnp.concatenate([queries, keys, values], axis=1)
    return linear_attention(cache, layer, batch, qkv, jnp.full(heads, -jnp.inf))[0]


def _split(spec: StateSpec, data: Array) -> list[Array]:
    """Returns the arrays of states, [N, *shape], from their bytes, uint8[N, data_bytes]."""
    ends = np.cumsum(spec.array_bytes)[:-1]
    arrays = []
    for part, shape, dtype in zip(
        jnp.split(data, ends, axis=1), spec.shapes, spec.dtypes, strict=True
    ):
        itemsize = jnp.dtype(dtype).itemsize
        split = part.reshape(len(part), *shape, *([itemsize] if itemsize > 1 else []))
        arrays.append(lax.bitcast_convert_type(split, jnp.dtype(dtype)))
    return arrays


def _poison(cache: KVCache, zeroed: Sequence[bool]) -> KVCache:
    """Fills every tensor whose groups are all zeroed first with 0xFF, except the null block."""
    buffers, layout = cache.layout.buffers, cache.layout.buffers.layout
    poisoned = []
    for stack, buffer in zip(buffers.stacks, cache.buffers, strict=True):
        fills = [
            0xFF
            if all(zeroed[g] for g in range(len(zeroed)) if tensor in layout.tensors_of(g))
            else 0
            for tensor in stack
        ]
        values = np.array(fills, np.uint8)
        if buffers.stacked:
            axis = buffers.axes.index("L")
            values = values.reshape([-1 if i == axis else 1 for i in range(buffer.ndim)])
        full = np.broadcast_to(values, buffer.shape).copy()
        full[(slice(None),) * buffers.block_axis + (0,)] = 0
        # On the buffer's own devices: a step that finds it elsewhere compiles once more.
        poisoned.append(jax.device_put(full, buffer.sharding))
    return dataclasses.replace(cache, buffers=tuple(poisoned))
