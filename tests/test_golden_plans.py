"""The planner against recorded answers: every case of a golden file, field by field.

JAXKV_GOLDEN_CASES names another file of the same format.
"""

import json
import os
import pathlib
from typing import Any

import pytest

from jaxkv._src.planning import KVCacheCapacityError, plan_cache
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)

Case = dict[str, Any]

SHIPPED = pathlib.Path(__file__).parent / "golden" / "plan_cases.json"
GOLDEN = pathlib.Path(os.environ.get("JAXKV_GOLDEN_CASES", SHIPPED))
CASES: list[Case] = json.loads(GOLDEN.read_text())["cases"]

SPECS: dict[str, type[LayerSpec]] = {
    "full": FullAttentionSpec,
    "sliding": SlidingWindowSpec,
    "chunked": ChunkedAttentionSpec,
    "cross": CrossAttentionSpec,
    "mla": MLASpec,
    "mamba": StateSpec,
}
RENAMED = {
    "page_size_padded": "page_bytes_padded",
    "attention_chunk_size": "chunk_size",
}
NOT_STORAGE = {"kind", "role"}


def make_spec(fields: Case, cache_mode: str) -> LayerSpec:
    """Builds a spec; a field that the spec does not know is a TypeError."""
    known = {RENAMED.get(k, k): v for k, v in fields.items() if k not in NOT_STORAGE}
    if fields["kind"] == "mamba":
        known["cache_mode"] = cache_mode
    return SPECS[fields["kind"]](**known)


def make_workers(case: Case) -> list[dict[str, LayerSpec]]:
    """One mapping per worker; layers are numbered through all of them."""
    workers: list[dict[str, LayerSpec]] = []
    for worker in case["workers"]:
        first = sum(map(len, workers))
        fields = [worker["specs"][name] for name in worker["layers"]]
        workers.append(
            {
                str(first + i): make_spec(spec, case["mamba_cache_mode"])
                for i, spec in enumerate(fields)
            }
        )
    return workers


def answer(case: Case) -> Case:
    """The planner's answer, in the words of the golden file."""
    workers = make_workers(case)
    limits = Limits(
        max_in_flight_tokens=case["max_in_flight_tokens"],
        max_encoder_tokens=case["max_encoder_len"],
    )
    try:
        plan = plan_cache(
            workers,
            [worker["available_memory"] for worker in case["workers"]],
            max_model_len=case["max_model_len"],
            fit_max_model_len=case["fit_max_model_len"],
            num_blocks_override=case["num_blocks_override"],
            override_beyond_memory=True,  # the source never checks it against memory
            limits=limits,
        )
    except KVCacheCapacityError as refusal:
        return {"error": True, "estimated_max_model_len": refusal.longest_len}
    return {
        "error": False,
        "max_model_len": plan.max_model_len,
        "num_blocks": plan.num_blocks,
        "groups": [[int(layer) for layer in group.layers] for group in plan.groups],
        "block_sizes": [group.block_size for group in plan.groups],
        "blocks_per_request": list(plan.blocks_per_group(plan.max_model_len)),
        "pool_bytes_per_block": list(plan.bytes_per_block),
    }


def test_the_golden_file_holds_cases() -> None:
    assert CASES  # no case would be no test, silently


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_planner_gives_the_recorded_answer(case: Case) -> None:
    expected, got = dict(case["expect"]), answer(case)
    if expected.get("estimated_max_model_len", 0) is None:  # no estimate was recorded
        for fields in expected, got:
            fields.pop("estimated_max_model_len", None)
    assert got == expected
