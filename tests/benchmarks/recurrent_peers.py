"""vLLM's Triton kernels of recurrent layers, on states of a benchmark's shapes."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.benchmarks.attention_peers import wait
from tests.benchmarks.timing import Times, measure
from tests.benchmarks.vllm_peer import VllmPeer

if TYPE_CHECKING:
    from tests.benchmarks.recurrent import RecurrentSpec


def time_peer(spec: "RecurrentSpec", peer: VllmPeer) -> Times:
    """Times vLLM's convolution and rule; of prompts also how it gathers and keeps the states."""
    if spec.rule == "scan":
        if max(spec.counts) > 1:
            raise NotImplementedError("prompts of Mamba-2 are not timed")
        return measure(_mamba_step(spec, peer), wait)
    if spec.drafts:
        return measure(_drafts(spec, peer), wait)
    return measure(_step(spec, peer) if max(spec.counts) == 1 else _prompts(spec, peer), wait)


class _Tensors:
    """Random inputs and states; each request has a page of its own in every turn."""

    def __init__(self, spec: "RecurrentSpec") -> None:
        import torch

        from tests.benchmarks.recurrent import POOL, page_sets

        like: dict[str, Any] = {"device": "cuda"}
        count, heads, channels = sum(spec.counts), spec.value_heads, spec.channels
        self.states = torch.zeros(POOL, *spec.state_shape, dtype=getattr(torch, spec.state), **like)
        kept = spec.width - 1 + spec.drafts
        windows = torch.zeros(POOL, kept, channels, dtype=torch.bfloat16, **like)
        self.windows = windows.transpose(1, 2)
        self.inputs = torch.randn(count, channels, dtype=torch.bfloat16, **like)
        self.gates = torch.randn(count, heads, dtype=torch.bfloat16, **like)
        self.decay = -torch.rand(count, heads, **like)
        self.beta = torch.rand(count, heads, **like)
        self.per_head = torch.randn(heads, **like)
        self.weights = torch.randn(channels, spec.width, dtype=torch.bfloat16, **like)
        sets = [torch.from_numpy(ids).cuda() for ids in page_sets(spec)]
        self.turns = itertools.cycle(sets)
        starts = [0, *itertools.accumulate(spec.counts)]
        self.starts = torch.tensor(starts, dtype=torch.int32, **like)

    def split(self, spec: "RecurrentSpec", inputs: Any) -> tuple[Any, Any, Any]:
        keys = spec.key_heads * spec.key
        queries, keys, values = inputs.split([keys, keys, spec.value_heads * spec.value], dim=-1)
        shape = 1, len(inputs), -1
        return (
            queries.contiguous().view(*shape, spec.key),
            keys.contiguous().view(*shape, spec.key),
            values.contiguous().view(*shape, spec.value),
        )


def _step(spec: "RecurrentSpec", peer: VllmPeer) -> Callable[[], Any]:
    import torch

    given, vllm = _Tensors(spec), peer.recurrent
    shape = len(spec.counts), 1, spec.value_heads, spec.value
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def call() -> Any:
        ids = next(given.turns)[:, 0]
        vllm.causal_conv1d_update(
            given.inputs, given.windows, given.weights, None, "silu", conv_state_indices=ids
        )
        return vllm.fused_recurrent_gated_delta_rule_packed_decode(
            *(given.inputs, given.gates, given.gates, given.per_head, given.per_head),
            *(spec.key**-0.5, given.states, out, ids),
            use_qk_l2norm_in_kernel=True,
        )

    return call


def _drafts(spec: "RecurrentSpec", peer: VllmPeer) -> Callable[[], Any]:
    import torch

    given, vllm = _Tensors(spec), peer.recurrent
    accepted = torch.ones(len(spec.counts), dtype=torch.int32, device="cuda")

    def call() -> Any:
        ids = next(given.turns)
        mixed = vllm.causal_conv1d_update(
            *(given.inputs, given.windows, given.weights, None, "silu"),
            conv_state_indices=ids[:, 0].contiguous(),
            num_accepted_tokens=accepted,
            query_start_loc=given.starts,
            max_query_len=max(spec.counts),
        )
        return vllm.fused_recurrent_gated_delta_rule(
            *given.split(spec, mixed),
            g=given.decay[None],
            beta=given.beta[None],
            initial_state=given.states,
            inplace_final_state=True,
            cu_seqlens=given.starts,
            ssm_state_indices=ids,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )

    return call


def _prompts(spec: "RecurrentSpec", peer: VllmPeer) -> Callable[[], Any]:
    import torch

    given, vllm = _Tensors(spec), peer.recurrent
    resumed = torch.ones(len(spec.counts), dtype=torch.bool, device="cuda")

    def call() -> Any:
        ids = next(given.turns)[:, 0].contiguous()
        mixed = vllm.causal_conv1d_fn(
            *(given.inputs.T, given.weights, None, given.windows, given.starts),
            cache_indices=ids,
            has_initial_state=resumed,
            activation="silu",
        ).T
        out, last = vllm.chunk_gated_delta_rule(
            *given.split(spec, mixed),
            g=given.decay[None],
            beta=given.beta[None],
            initial_state=given.states[ids.long()].contiguous(),
            output_final_state=True,
            cu_seqlens=given.starts,
            use_qk_l2norm_in_kernel=True,
        )
        given.states[ids.long()] = last.to(given.states.dtype)
        return out

    return call


def _mamba_step(spec: "RecurrentSpec", peer: VllmPeer) -> Callable[[], Any]:
    import torch

    given, vllm = _Tensors(spec), peer.recurrent
    batch, heads, value, key = len(spec.counts), *spec.state_shape
    out = torch.empty(batch, heads, value, dtype=torch.bfloat16, device="cuda")
    per_head = -given.per_head.abs()[:, None, None].expand(heads, value, key)
    skip = given.per_head[:, None].expand(heads, value)

    def call() -> Any:
        ids = next(given.turns)[:, 0]
        mixed = vllm.causal_conv1d_update(
            given.inputs, given.windows, given.weights, None, "silu", conv_state_indices=ids
        )
        x, b, c = mixed.split([heads * value, spec.key_heads * key, spec.key_heads * key], dim=-1)
        vllm.selective_state_update(
            *(given.states, x.view(batch, heads, value)),
            given.gates[:, :, None].expand(batch, heads, value),
            *(per_head, b.view(batch, -1, key), c.view(batch, -1, key), skip),
            dt_bias=skip,
            dt_softplus=True,
            state_batch_indices=ids,
            out=out,
        )
        return out

    return call
