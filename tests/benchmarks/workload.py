"""Groups of layers and requests of the timed steps, in jaxkv's books and in vLLM's. No jax."""

import gc
import math
import types
from collections.abc import Hashable, Mapping
from typing import Any

from jaxkv.blocks import BlockManager, StepShape
from jaxkv.planning import Plan, plan_cache
from jaxkv.specs import FullAttentionSpec, LayerSpec, Limits, SlidingWindowSpec, StateSpec
from tests.benchmarks.vllm_peer import VllmPeer

BLOCK_SIZE, MAX_MODEL_LEN, LONGEST_CHUNK = 16, 8192, 8192
# Pages of 64 bytes: the books never look inside one, and the pools of all cases fit anywhere.
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


class VllmBooks:
    """vLLM's `KVCacheManager` over the groups of a plan, without its prefix cache.

    Driven as its scheduler drives it: ``allocate_slots`` for one request after the other, and
    the new block ids of each as lists.
    """

    def __init__(self, peer: VllmPeer, plan: Plan):
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
            enable_caching=False,
        )
        self.requests: dict[Hashable, Any] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def start(self, name: Hashable, num_tokens: int) -> None:
        sampling = types.SimpleNamespace(
            max_tokens=MAX_MODEL_LEN, extra_args=None, skip_reading_prefix_cache=True
        )
        request = self._vllm.Request(str(name), [0] * num_tokens, sampling, None)
        request.status = self._vllm.RequestStatus.RUNNING
        self.requests[name] = request

    def step(self, work: Mapping[Hashable, int]) -> list[tuple[list[int], ...] | None]:
        """Returns the new block ids of each request; None where it gets none."""
        manager, requests = self.manager, self.requests
        manager.new_step_starts()
        new: list[tuple[list[int], ...] | None] = []
        for name, count in work.items():
            blocks = manager.allocate_slots(requests[name], count)
            new.append(blocks.get_block_ids(allow_none=True))
        manager.take_new_block_ids()
        for name, count in work.items():
            requests[name].num_computed_tokens += count
        return new

    def finish(self, name: Hashable) -> None:
        self.manager.free(self.requests.pop(name))


def _vllm_spec(vllm: types.SimpleNamespace, spec: LayerSpec, plan: Plan) -> Any:
    if isinstance(spec, StateSpec):  # one block for all tokens, as vLLM sets it without its cache
        return vllm.MambaSpec(plan.max_model_len, spec.shapes, spec.dtypes)
    attention = {**COMMON, "dtype": "bf16"}
    if isinstance(spec, SlidingWindowSpec):
        return vllm.SlidingWindowSpec(sliding_window=spec.sliding_window, **attention)
    return vllm.FullAttentionSpec(**attention)
