"""``python -m jaxkv plan``: the plan of a model in a given memory, and changes to try. No jax."""

import argparse
import json
import textwrap
from collections.abc import Mapping
from typing import Any, get_args

from jaxkv._src.cli.amounts import parse_bytes, parse_count, parse_length, parse_share
from jaxkv._src.cli.data import plan_data, refusal_data
from jaxkv._src.cli.page import page
from jaxkv._src.cli.question import Question
from jaxkv._src.cli.specs_file import SpecsFile, load_specs
from jaxkv._src.cli.tries import tries
from jaxkv._src.gpu_memory import GPUS, Budget, NoMemoryLeftError, gpu_bytes
from jaxkv._src.hf_config import (
    count_weights,
    layers_from_config,
    load_config,
    preset_names,
)
from jaxkv._src.internal.checks import check_choice
from jaxkv._src.planning import Grouping, KVCacheCapacityError
from jaxkv._src.specs import CacheMode

COUNTS = {
    "block_size": "tokens per block (default: the family's usual)",
    "num_blocks_override": "blocks of the pool, instead of as many as fit",
    "tensor_parallel": "GPUs among which heads and weights are divided",
    "pipeline_parallel": "stages among which layers are divided",
    "context_parallel": "ranks among which the tokens of a request are divided",
    "max_in_flight_tokens": "most tokens of one request in a step (default: 8192)",
    "max_encoder_tokens": "longest encoder input (default: the model's own)",
    "speculative_tokens": "draft tokens of a request in a step",
}
SHORT = {
    "tensor_parallel": ("--tp",),
    "pipeline_parallel": ("--pp",),
    "context_parallel": ("--cp",),
}
EPILOG = """\
Presets: {presets}
Units: KB, MB, GB, TB; KiB, MiB, GiB, TiB. Lengths: 8k is 8,192 tokens, 1m 1,048,576.
Errors name flags as the library does: max_model_len is --max-model-len.
--specs reads, for example:
  {"max_model_len": 131072,
   "layers": [{"count": 6, "layers": [
     {"count": 5, "kind": "sliding", "sliding_window": 1024, "num_kv_heads": 8, "head_size": 128},
     {"kind": "full", "num_kv_heads": 8, "head_size": 128, "dtype": "bf16"}]}]}
"""
LEAST_MEMORY = 2**10  # less than a block of any model; a unit is missing
REMEDY = "; give the bytes of the weights, such as --weights 14.2GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command; `run` reads their values."""
    presets = textwrap.fill(", ".join(preset_names()), 90, subsequent_indent="  ")
    parser.epilog = EPILOG.replace("{presets}", presets)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG", help="a config.json, its directory, or a preset")
    add("--specs", metavar="FILE", help="layers as JSON, instead of CONFIG; see below")
    add("--memory", metavar="BYTES", help="memory for the cache on each GPU: 71.3GiB, 80GB")
    add("--gpu", metavar="NAME", help=f"instead of --memory: {', '.join(sorted(GPUS))}")
    add("--utilization", metavar="SHARE", help="GPU's share for weights and cache (default: 0.9)")
    add(
        "--weights",
        metavar="BYTES",
        help="bytes of all weights, in even parts; default: counted",
    )
    add(
        "--max-model-len",
        metavar="LEN",
        default="auto",
        help="longest request: 8k, 1m, auto (default)",
    )
    add("--request-len", metavar="LEN", help="length of a usual request, to count those at once")
    add("--kv-dtype", metavar="DTYPE", help="dtype of keys and values (default: the model's own)")
    for name, text in COUNTS.items():
        add(f"--{name.replace('_', '-')}", *SHORT.get(name, ()), metavar="N", help=text)
    override = "accept --num-blocks-override beyond the memory"
    add("--override-beyond-memory", action="store_true", help=override)
    states = "recurrent states to keep: none (default), align or all"
    add("--state-cache-mode", metavar="MODE", default="none", help=states)
    rings = "tokens of a ring beside recurrent states, for fewer bytes of a step; or auto: 8 or 0"
    add("--replay", metavar="N", default="0", help=rings)
    groups = "groups of layers: auto (default), rule, least_waste or packed"
    add("--grouping", metavar="NAME", default="auto", help=groups)
    add("--json", action="store_true", help="print the plan or the refusal as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints a plan and changes to try.

    Returns:
      The exit status: 0 for a plan, 2 for a refusal that ``--json`` prints as data.

    Raises:
      ValueError: a refusal, without ``--json``.
    """
    question: Question | None = None
    try:
        question = _read(options)
        plan, tried = question.plan(), tries(question)
    except (ValueError, TypeError, NotImplementedError) as error:
        has_remedy = isinstance(error, KVCacheCapacityError | NoMemoryLeftError)
        tried = tries(question) if question is not None and has_remedy else []
        if not options.json:
            raise ValueError("\n".join([str(error), *map(str, tried)])) from error
        print(json.dumps(refusal_data(error, tried), indent=2))
        return 2
    data = plan_data(question, plan, tried) if options.json else None
    print(json.dumps(data, indent=2) if data else page(question, plan, tried))
    return 0


def _read(options: argparse.Namespace) -> Question:
    counts = {
        name: parse_count(given, f"--{name.replace('_', '-')}")
        for name in COUNTS
        if (given := getattr(options, name)) is not None
    }
    check_choice(get_args(Grouping), grouping=options.grouping)
    check_choice(get_args(CacheMode), state_cache_mode=options.state_cache_mode)
    model = _read_model(options, counts)
    budget = _read_budget(options, model, drafts=counts.get("speculative_tokens", 0) > 0)
    longest, usual = options.max_model_len, options.request_len
    return Question(
        model=model,
        budget=budget,
        max_model_len=None if longest == "auto" else parse_length(longest, "--max-model-len"),
        request_len=None if usual is None else parse_length(usual, "--request-len"),
        kv_dtype=options.kv_dtype,
        override_beyond_memory=options.override_beyond_memory,
        state_cache_mode=options.state_cache_mode,
        replay="auto" if options.replay == "auto" else parse_count(options.replay, "--replay"),
        grouping=options.grouping,
        **counts,
    )


def _read_model(
    options: argparse.Namespace, counts: Mapping[str, int]
) -> Mapping[str, Any] | SpecsFile:
    if (options.config is None) == (options.specs is None):
        raise ValueError(
            "give CONFIG (a preset, a config.json or its directory) or --specs FILE"
            f"{'' if options.config is None else ', not both'}; see python -m jaxkv plan --help"
        )
    if options.specs is None:
        return load_config(options.config)
    if counts.get("tensor_parallel", 1) != 1:
        raise ValueError(
            f"--tensor-parallel={counts['tensor_parallel']} divides what a configuration says; "
            "write the layers of one rank into the file and leave it out; beside --gpu, --weights "
            "are the bytes of one rank then"
        )
    return load_specs(options.specs)


def _read_budget(
    options: argparse.Namespace, model: Mapping[str, Any] | SpecsFile, *, drafts: bool
) -> Budget:
    """Returns the memory for the cache."""
    if (options.memory is None) == (options.gpu is None):
        raise ValueError(
            "give --gpu NAME, such as --gpu h200, or the memory that is left for the cache, such "
            f"as --memory 71.3GiB{'' if options.gpu is None else ', not both'}"
        )
    if options.gpu is None:
        for name in ("utilization", "weights"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} needs --gpu, because --memory is for the cache alone")
        memory_bytes = parse_bytes(options.memory)
        if memory_bytes < LEAST_MEMORY:
            raise ValueError(
                f"--memory={options.memory!r} is {memory_bytes:,} bytes, which holds no cache; "
                f"give a unit, such as --memory {memory_bytes or 10}GiB"
            )
        return Budget(memory_bytes=memory_bytes)
    gpu_bytes(options.gpu)  # raises if it is not in the table
    share = parse_share(options.utilization or "0.9", "--utilization")
    if options.weights not in (None, "auto"):
        given = parse_bytes(options.weights, "--weights")
        return Budget(gpu=options.gpu, utilization=share, weights=given)
    if isinstance(model, SpecsFile):
        raise ValueError(f"--weights=auto reads a configuration, not --specs{REMEDY}")
    try:
        weights = count_weights(model, drafts=drafts)
    except ValueError as error:
        layers_from_config(
            model, kv_dtype=options.kv_dtype
        )  # a model that is not understood at all is refused first
        raise ValueError(f"{error}{REMEDY}") from error
    return Budget(gpu=options.gpu, utilization=share, weights=weights)
