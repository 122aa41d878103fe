"""Groups of layers and requests of the timed steps, for both block managers. No jax."""

import gc
import hashlib
import math
import pickle
import types
from collections.abc import Hashable, Mapping
from typing import Any

from jaxkv._src.blocks import BlockManager
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, Limits, SlidingWindowSpec, StateSpec
from jaxkv._src.uploads import StepShape
from tests.benchmarks.vllm_peer import VllmPeer

BLOCK_SIZE, MAX_MODEL_LEN, LONGEST_CHUNK = 16, 8192, 8192
# Pages of 64 bytes: block managers never look inside one, and the pools of all cases fit anywhere.
COMMON = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1}
FULL = FullAttentionSpec(**COMMON)
WINDOW = SlidingWindowSpec(sliding_window=1024, **COMMON)
LONG_WINDOW = SlidingWindowSpec(sliding_window=4096, **COMMON)
STATE = StateSpec(block_size=BLOCK_SIZE, shapes=((16,),), dtypes=("f32",), cache_mode="none")


def prompt_len(index: int) -> int:
    """Returns about 2k tokens: a sixteenth of the requests begins a block in each step."""
    return 2048 + index * 7 % 256


def make_plan(
    specs: tuple[LayerSpec, ...], max_requests: int, max_model_len: int = MAX_MODEL_LEN
) -> Plan:
    """Returns a plan of one layer a group, with blocks for requests of up to 3,000 tokens."""
    per_request = 200 * len(specs)
    longest = len(specs) * (max_model_len // BLOCK_SIZE + 1)
    plan = plan_cache(
        {f"layers.{i}": spec for i, spec in enumerate(specs)},
        2**50,
        max_model_len=max_model_len,
        num_blocks_override=max_requests * per_request + 2 * longest,
        limits=Limits(max_in_flight_tokens=LONGEST_CHUNK),
    )
    if len(plan.groups) != len(specs):
        raise RuntimeError(f"{len(specs)} layers made {len(plan.groups)} groups, not one each")
    return plan


def prefill(manager: BlockManager, lengths: Mapping[Hashable, int]) -> None:
    """Starts requests and computes their prompts, one after the other."""
    shape = StepShape.for_plan(
        manager.plan, max_requests=manager.max_requests, batch_size=1, max_tokens=LONGEST_CHUNK
    )
    for name, length in lengths.items():
        manager.start(name)
        manager.step(shape, {name: length})


def settle() -> None:
    """Collects garbage, and freezes what is left, as servers do before they serve."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class VllmManager:
    """vLLM's `KVCacheManager` over the groups of a plan.

    Driven as its scheduler drives it: ``allocate_slots`` for one request after the other, and
    the new block ids of each as lists.
    """

    def __init__(self, peer: VllmPeer, plan: Plan, *, caches: bool = False):
        """Starts without requests; ``caches``: with vLLM's prefix cache."""
        vllm = self._vllm = peer.manager
        groups = [
            vllm.KVCacheGroupSpec(list(group.layers), _vllm_spec(vllm, group.specs[0], plan))
            for group in plan.groups
        ]
        self.manager = vllm.KVCacheManager(
            vllm.KVCacheConfig(plan.num_blocks, [], groups),
            max_model_len=plan.max_model_len,
            scheduler_block_size=math.lcm(*(g.kv_cache_spec.block_size for g in groups)),
            hash_block_size=BLOCK_SIZE,
            max_in_flight_tokens=LONGEST_CHUNK,
            enable_caching=caches,
        )
        self.requests: dict[Hashable, Any] = {}
        self._found: dict[Hashable, Any] = {}  # blocks of the prefix, until the first step
        self._caches, self._hasher = caches, None
        if caches:
            vllm.init_none_hash(_sha256)
            self._hasher = vllm.get_request_block_hasher(BLOCK_SIZE, _sha256)

    @property
    def num_free_blocks(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def start(self, name: Hashable, num_tokens: int, tokens: list[int] | None = None) -> int:
        """Starts a request. Returns the tokens of its prompt that the prefix cache holds."""
        sampling = types.SimpleNamespace(
            max_tokens=MAX_MODEL_LEN, extra_args=None, skip_reading_prefix_cache=not self._caches
        )
        tokens = [0] * num_tokens if tokens is None else tokens
        request = self._vllm.Request(str(name), tokens, sampling, None, block_hasher=self._hasher)
        request.status = self._vllm.RequestStatus.RUNNING
        self.requests[name] = request
        if not self._caches:
            return 0
        self._found[name], cached, _ = self.manager.get_computed_blocks(request)
        return cached

    def step(self, work: Mapping[Hashable, int]) -> list[tuple[list[int], ...] | None]:
        """Returns the new block ids of each request; None where it gets none."""
        manager, requests = self.manager, self.requests
        manager.new_step_starts()
        new: list[tuple[list[int], ...] | None] = []
        for name, count in work.items():
            if name in self._found:
                blocks = self._allocate_rest(name, count)
            else:
                blocks = manager.allocate_slots(requests[name], count)
            new.append(blocks.get_block_ids(allow_none=True))
        manager.take_new_block_ids()
        for name, count in work.items():
            requests[name].num_computed_tokens += count
        return new

    def _allocate_rest(self, name: Hashable, count: int) -> Any:
        """Allocates what follows the prefix that was found."""
        request, found = self.requests[name], self._found.pop(name)
        cached = request.num_tokens - count
        blocks = self.manager.allocate_slots(request, count, cached, found)
        request.num_computed_tokens = cached
        return blocks

    def finish(self, name: Hashable) -> None:
        self.manager.free(self.requests.pop(name))


def _sha256(content: Any) -> bytes:
    """As vLLM's ``sha256``, whose module imports what need not be installed."""
    return hashlib.sha256(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _vllm_spec(vllm: types.SimpleNamespace, spec: LayerSpec, plan: Plan) -> Any:
    if isinstance(spec, StateSpec):  # one block for all tokens, as vLLM sets it without its cache
        return vllm.MambaSpec(plan.max_model_len, spec.shapes, spec.dtypes)
    attention = {**COMMON, "dtype": "bf16"}
    if isinstance(spec, SlidingWindowSpec):
        return vllm.SlidingWindowSpec(sliding_window=spec.sliding_window, **attention)
    return vllm.FullAttentionSpec(**attention)
