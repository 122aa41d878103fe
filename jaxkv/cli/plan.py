"""``python -m jaxkv plan``: the plan of a model in a given memory, and changes to try. No jax."""

import argparse
import dataclasses
import json
import re
from typing import Any, get_args

from jaxkv.cli.question import Question, answer, parse_bytes, parse_length
from jaxkv.cli.tries import tries
from jaxkv.hf_config import load_config, model_len
from jaxkv.planning import Grouping, KVCacheCapacityError, Plan
from jaxkv.specs import CacheMode

# Arguments of the library -> how a user of the command writes them.
FLAGS = {
    field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Question)
} | {"config": "CONFIG", "memory_bytes": "--memory"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "config", metavar="CONFIG", help="path of a config.json or its directory, or a preset"
    )
    parser.add_argument(
        "--memory", required=True, help="for the cache, per GPU: 80GiB, 141GB, or bytes"
    )
    parser.add_argument("--max-model-len", default="auto", help="tokens, or auto (default)")
    parser.add_argument("--kv-dtype", help="of keys and values (default: the model's own)")
    parser.add_argument("--block-size", type=int, help="tokens (default: the family's usual)")
    parser.add_argument("--num-blocks-override", type=int, metavar="N")
    parser.add_argument("--override-beyond-memory", action="store_true")
    for name in ("tensor", "pipeline", "context"):
        parser.add_argument(f"--{name}-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--max-in-flight-tokens", type=int, default=8192, metavar="N")
    parser.add_argument(
        "--state-cache-mode", default="none", choices=get_args(CacheMode), help="of mamba layers"
    )
    parser.add_argument("--speculative-tokens", type=int, default=0, metavar="N")
    parser.add_argument("--grouping", default="auto", choices=get_args(Grouping))
    parser.add_argument("--json", action="store_true", help="print plan or refusal as data")


def run(options: argparse.Namespace) -> int:
    """Prints a plan and changes to try.

    Returns:
      0 for a plan; 2 for a refusal, which ``--json`` prints as data.

    Raises:
      ValueError: a refusal, without ``--json``.
    """
    try:
        text, status = _answer(_read(options), as_json=options.json)
    except (ValueError, TypeError, NotImplementedError) as error:
        message = in_flags(str(error))
        if not options.json:
            raise ValueError(message) from error
        text, status = json.dumps({"error": message}, indent=2), 2
    print(text)
    return status


def _read(options: argparse.Namespace) -> Question:
    given = vars(options) | {
        "config": load_config(options.config),
        "memory_bytes": parse_bytes(options.memory),
        "max_model_len": parse_length(options.max_model_len),
    }
    return Question(**{field.name: given[field.name] for field in dataclasses.fields(Question)})


def _answer(question: Question, *, as_json: bool) -> tuple[str, int]:
    """Returns the text to print and the exit status; raises refusals that are not data."""
    try:
        plan = question.plan()
    except KVCacheCapacityError as error:
        if as_json:
            return json.dumps(refusal_data(question, error), indent=2), 2
        raise ValueError("\n".join([str(error), *map(str, tries(question))])) from error
    return json.dumps(as_data(question, plan), indent=2) if as_json else page(question, plan), 0


def page(question: Question, plan: Plan) -> str:
    """Returns the plan as text, with what binds and changes to try."""
    lines = [str(plan), f"{'what binds':<16} {what_binds(question, plan)}"]
    if question.grouping != "auto":
        lines.append(f"{'per request':<16} {describe_gain(question, plan)}")
    return "\n".join([*lines, *map(str, tries(question))])


def as_data(question: Question, plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain data, for ``--json``."""
    length = plan.max_model_len
    return {
        "groups": [
            {"layers": list(g.layers), "kind": g.specs[0].kind, "block_size": g.block_size}
            for g in plan.groups
        ],
        "bytes_per_block": list(plan.bytes_per_block),
        "unused_bytes_per_block": list(plan.unused_bytes_per_block),
        "memory_bytes": list(plan.memory_bytes),
        "num_blocks": plan.num_blocks,
        "usable_blocks": plan.usable_blocks,
        "max_model_len": length,
        "admission_blocks": plan.admission_blocks(length),
        "steady_blocks": plan.steady_blocks(length),
        "requests_that_fit": plan.requests_that_fit(length),
        "tokens_that_fit": plan.tokens_that_fit(length),
        "groups_to_zero": list(plan.groups_to_zero),
        "binds": what_binds(question, plan),
        "reserved_blocks": plan.reserved_blocks,
        "bytes_per_request": bytes_per_request(plan, length),
        "bytes_saved_against_rule": bytes_saved(question, plan),
        "try": [dataclasses.asdict(change) for change in tries(question)],
    }


def refusal_data(question: Question, error: KVCacheCapacityError) -> dict[str, Any]:
    """Returns a refusal for want of blocks as plain data, for ``--json``."""
    return {
        "error": in_flags(str(error)),
        "needed_blocks": error.needed_blocks,
        "usable_blocks": error.usable_blocks,
        "longest_len": error.longest_len,
        "try": [dataclasses.asdict(change) for change in tries(question)],
    }


def in_flags(message: str) -> str:
    """Returns a message of the library with its arguments as a user of the command writes them.

    ``name=value`` becomes ``--flag=value``. A bare name changes too if it has an underscore,
    because others may be words. Calls that the message quotes stay as they are.
    """

    def flag(match: re.Match[str]) -> str:
        name, equals = match["name"], match["equals"]
        if not equals and "_" not in name:
            return name
        return FLAGS[name] + equals.removesuffix("=True")

    names = "|".join(FLAGS)
    return re.sub(rf"(?<![\w.])(?<!\w\()(?P<name>{names})(?P<equals>=True\b|=|\b)", flag, message)


def what_binds(question: Question, plan: Plan) -> str:
    """Returns what keeps the longest request from being longer."""
    if plan.max_model_len == model_len(question.config):
        return "the model's own length"
    if question.max_model_len is not None:
        return "the length asked for"
    if question.num_blocks_override is not None:
        return "the override"
    sizes = plan.bytes_per_block
    tightest = max(range(len(sizes)), key=lambda worker: sizes[worker])
    return "memory" if len(sizes) == 1 else f"memory of pipeline stage {tightest}"


def describe_gain(question: Question, plan: Plan) -> str:
    """Returns the bytes charged for a request, and what they are less than by the rule."""
    charged, saved = bytes_per_request(plan, plan.max_model_len), bytes_saved(question, plan)
    if saved is None:
        return f"{charged:,} bytes; the rule cannot group this model"
    share = 100 * saved / (charged + saved)
    return f"{charged:,} bytes, {saved:,} ({share:.1f} %) fewer than by the rule"


def bytes_saved(question: Question, plan: Plan) -> int | None:
    """Returns the bytes that a request is charged less than by the rule; None: no such plan."""
    rule = answer(dataclasses.replace(question, grouping="rule")).plan
    if rule is None:
        return None
    length = plan.max_model_len
    return bytes_per_request(rule, length) - bytes_per_request(plan, length)


def bytes_per_request(plan: Plan, num_tokens: int) -> int:
    """Returns the bytes that admission charges for a request, over all workers."""
    return plan.admission_blocks(num_tokens) * sum(plan.bytes_per_block)
