"""A plan, or a refusal, as plain data for ``--json``. No jax."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._src.cli.costs import bytes_charged, bytes_per_request, state_bytes, token_bytes
from jaxkv._src.cli.page import what_binds
from jaxkv._src.cli.question import Question
from jaxkv._src.cli.tries import Try
from jaxkv._src.hf_config import Weights
from jaxkv._src.planning import KVCacheCapacityError, Plan


def plan_data(question: Question, plan: Plan, tried: Sequence[Try]) -> dict[str, Any]:
    """Returns the plan, and changes to try, as plain data."""
    length, usual = plan.max_model_len, question.request_len
    return {
        "groups": [
            {"layers": list(g.layers), "kind": g.specs[0].kind, "block_size": g.block_size}
            for g in plan.groups
        ],
        "bytes_per_block": list(plan.bytes_per_block),
        "unused_bytes_per_block": list(plan.unused_bytes_per_block),
        "memory_bytes": list(plan.memory_bytes),
        "gpu": _gpu_data(question),
        "num_blocks": plan.num_blocks,
        "usable_blocks": plan.usable_blocks,
        "reserved_blocks": plan.reserved_blocks,
        "max_model_len": length,
        "admission_blocks": plan.admission_blocks(length),
        "steady_blocks": plan.steady_blocks(length),
        "requests_that_fit": plan.requests_that_fit(length),
        "tokens_that_fit": plan.tokens_that_fit(length),
        "request_len": usual,
        "usual_requests_that_fit": plan.requests_that_fit(usual) if usual else None,
        "bytes_per_token": [of._asdict() for of in token_bytes(question.layers())],
        "bytes_of_states": state_bytes(question.layers())[1],
        "bytes_per_request": bytes_per_request(plan, length),
        "bytes_per_usual_request": bytes_per_request(plan, usual) if usual else None,
        "bytes_charged": bytes_charged(plan, length),
        "groups_to_zero": list(plan.groups_to_zero),
        "groupings": [figures._asdict() for figures in plan.compared],
        "warning": plan.warning or None,
        "binds": what_binds(question, plan),
        "try": list(map(dataclasses.asdict, tried)),
    }


def _gpu_data(question: Question) -> dict[str, Any] | None:
    budget = question.budget
    if budget.memory_bytes is not None:
        return None
    weights = budget.weights if isinstance(budget.weights, Weights) else None
    per_gpu = budget.weights_per_gpu(question.tensor_parallel, question.pipeline_parallel)
    return {
        "name": budget.gpu,
        "utilization": float(budget.utilization),
        "usable_bytes": budget.usable_bytes,
        "num_gpus": question.num_gpus,
        "weights_bytes": budget.weights_bytes,
        "weights_bytes_per_gpu": list(per_gpu),
        "parameters": None if weights is None else weights.parameters,
        "weights_stored": None if weights is None else weights.stored,
    }


def refusal_data(error: Exception, tried: Sequence[Try]) -> dict[str, Any]:
    """Returns a refusal, and changes that work, as plain data; figures if blocks are too few."""
    data: dict[str, Any] = {"error": str(error)}
    if isinstance(error, KVCacheCapacityError):
        for name in ("needed_blocks", "usable_blocks", "longest_len"):
            data[name] = getattr(error, name)
    return data | ({"try": list(map(dataclasses.asdict, tried))} if tried else {})
