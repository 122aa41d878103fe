"""``python -m jaxkv plan``: figures, planned changes to try, and refusals that name flags."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import jaxkv
from jaxkv.__main__ import main
from jaxkv._src.cli.amounts import parse_bytes, parse_length, parse_share
from jaxkv._src.cli.question import split_stages
from jaxkv._src.cli.specs_file import change_specs, load_specs
from jaxkv._src.cli.tries import MAX_TRIES, is_worth_it
from jaxkv._src.gpu_memory import gpu_bytes
from jaxkv._src.hf_config import (
    count_weights,
    encoder_len,
    layers_from_config,
    layers_per_stage,
    load_config,
    model_len,
    num_layers,
)
from jaxkv._src.internal.text import gib
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.specs import Limits


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(["plan", *arguments])
    except SystemExit as stop:  # argparse's own refusals
        status = int(stop.code or 0)
    return status, *capsys.readouterr()


def figures(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    status, out, err = run(capsys, *arguments, "--json")
    assert status in (0, 2) and not err
    return json.loads(out)


def changed(arguments: tuple[str, ...], option: str, value: str) -> list[str]:
    """The arguments with an option set to another value."""
    words = list(arguments)
    if option not in words:
        return [*words, option, value]
    words[words.index(option) + 1] = value
    return words


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "jaxkv", "plan", "qwen3-8b", "--memory", "40GiB"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert (
        "1 x (36 full @ 16)" in done.stdout
        and "18,203 usable blocks of 2,359,296 bytes" in done.stdout
    )


def said(data: dict) -> str:
    """Returns what a `try` line says of a plan."""

    def of(count: int, tokens: int) -> str:
        return f"{count:,} request{'' if count == 1 else 's'} of {tokens:,} tokens at once"

    longest, count = data["max_model_len"], data["requests_that_fit"]
    if data["request_len"] not in (None, longest):
        usual = of(data["usual_requests_that_fit"], data["request_len"])
        return f"{usual}, or {count:,} of {longest:,}"
    return f"{of(count, longest)}, {data['tokens_that_fit']:,} in all"


ON_GPUS = ("--gpu", "h200", "--tensor-parallel")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            ("qwen3-next-80b-a3b", "--memory", "141GB"),
            [
                "48 with a cache: 3 x (12 state @ 544) + 1 x (12 full @ 544)",
                "131.32 GiB: 10,545 usable blocks of 13,369,344 bytes",
                "24,576 bytes in 12 full",
                "39,518,208 bytes (37.69 MiB) in 36 layers",
                "262,144 tokens (the model's own length): 6.04 GiB, 21 at once; 5,",
            ],
        ),
        (
            ("qwen3-next-80b-a3b", *ON_GPUS, "2", "--request-len", "8k"),
            [
                "79.67 billion in bfloat16; 74.25 GiB on each of 2 GPUs",
                "8,192 tokens: 0.12 GiB, 435 at once",
            ],
        ),
        (("deepseek-v4-flash", *ON_GPUS, "2", "--request-len", "8k"), ["mxfp4, fp8, bfloat16"]),
        (("gpt-oss-20b", "--gpu", "l4", "--request-len", "4k"), ["last 128 tokens"]),
        (("gemma-4-e2b", "--gpu", "rtx4090", "--max-model-len", "32k"), ["5.08 billion"]),
        (
            ("whisper-large-v3", "--memory", "9GiB"),
            ["64 caches", "32 cross layers (of the encoder)"],
        ),
        (("falcon-h1-24-layers", "--memory", "9GiB"), ["24 with 48 caches: "]),
    ],
)
def test_a_plan_is_one_screen(capsys, arguments, texts) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 0 and not err
    assert all(text in out for text in texts), out
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 100
    assert 1 <= out.count("\ntry ") <= MAX_TRIES
    assert "\nlongest request  " in out


OF_LAYERS = {
    *("kv_dtype", "block_size", "tensor_parallel"),
    *("state_cache_mode", "speculative_tokens", "replay"),
}
OF_STEPS = {"max_in_flight_tokens", "max_encoder_tokens"}


def planned(preset: str, options: dict[str, Any]) -> Plan:
    """The plan that the library makes of a preset in 40 GiB, with options of the command."""
    config, options = load_config(preset), dict(options)
    layers = layers_from_config(config, **{n: options.pop(n) for n in OF_LAYERS & set(options)})
    limits = {"max_encoder_tokens": encoder_len(config)}
    limits |= {name: options.pop(name) for name in OF_STEPS & set(options)}
    stages = split_stages(layers, options.pop("pipeline_parallel", 1))
    longest = {
        "max_model_len": model_len(config),
        "fit_max_model_len": "max_model_len" not in options,
    }
    memory = [40 * 2**30] * len(stages)
    return plan_cache(stages, memory, limits=Limits(**limits), **longest | options)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        (
            "gpt-oss-20b",
            {
                **{"kv_dtype": "fp8_e4m3", "block_size": 32, "tensor_parallel": 2},
                **{"max_in_flight_tokens": 500, "request_len": 1000, "grouping": "least_waste"},
            },
        ),
        (
            "qwen3-next-80b-a3b",
            {
                **{"state_cache_mode": "align", "speculative_tokens": 2, "pipeline_parallel": 3},
                **{"max_model_len": 100_000, "request_len": 8000},
            },
        ),
        (
            "llama-3.1-8b",
            {
                **{"context_parallel": 2, "override_beyond_memory": True},
                **{"num_blocks_override": 30_000},
            },
        ),
        ("whisper-large-v3", {"max_encoder_tokens": 300}),
        ("nemotron-h-8b", {"replay": "auto"}),
        ("gemma-4-26b-a4b", {"grouping": "packed"}),
        ("zamba2-2.7b", {"block_size": 1024, "request_len": 32}),  # which has a warning
    ],
)
def test_the_plan_of_the_command_is_the_one_of_the_library(capsys, preset, options) -> None:
    """With every flag, and in every figure."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    words = [w for flag, v in given.items() for w in ([flag] if v is True else [flag, str(v)])]
    data, plan = figures(capsys, preset, "--memory", "40GiB", *words), planned(preset, options)
    fields = """bytes_per_block unused_bytes_per_block memory_bytes num_blocks usable_blocks
        reserved_blocks max_model_len groups_to_zero request_len""".split()
    wanted = {name: getattr(plan, name) for name in fields}
    length, usual, size = plan.max_model_len, plan.request_len, sum(plan.bytes_per_block)
    for name in ("admission_blocks", "steady_blocks", "requests_that_fit", "tokens_that_fit"):
        wanted[name] = getattr(plan, name)(length)
    wanted |= {
        "groups": [
            {"layers": group.layers, "kind": group.specs[0].kind, "block_size": group.block_size}
            for group in plan.groups
        ],
        "gpu": None,
        "usual_requests_that_fit": plan.requests_that_fit(usual) if usual else None,
        "bytes_per_request": plan.steady_blocks(length) * size,
        "bytes_per_usual_request": plan.steady_blocks(usual) * size if usual else None,
        "bytes_charged": plan.admission_blocks(length) * size,
        "groupings": [of._asdict() for of in plan.compared],
        "warning": plan.warning or None,
    }
    assert {name: data[name] for name in wanted} == json.loads(json.dumps(wanted))
    assert set(data) - set(wanted) == {"bytes_per_token", "bytes_of_states", "binds", "try"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("gemma-3-4b", "--memory", "3GiB"),  # less than the model's own length fits
        ("gemma-3-4b", "--memory", "60GiB", "--max-model-len", "8k", "--request-len", "999"),
        ("gpt-oss-20b", "--memory", "9GiB", "--request-len", "4k", "--grouping", "rule"),
        ("gemma-3-4b", "--memory", "4GiB", "--grouping", "least_waste", "--request-len", "8k"),
        ("zamba2-2.7b", "--memory", "8GiB", "--block-size", "1024"),  # which has a warning
    ],
)
def test_rows_of_requests_say_the_figures_of_the_json(capsys, arguments) -> None:
    data, (_, out, _) = figures(capsys, *arguments), run(capsys, *arguments)
    rows = re.sub(r"\n +", " ", out).splitlines()
    longest, usual = data["max_model_len"], data["request_len"]
    page = sum(data["bytes_per_block"])
    held = gib(data["steady_blocks"] * page)
    if data["admission_blocks"] != data["steady_blocks"]:
        held += f" ({gib(data['admission_blocks'] * page)} in prefill)"
    text = f"{longest:,} tokens ({data['binds']}): {held}, {data['requests_that_fit']:,} at once"
    assert f"longest request  {text}; {data['tokens_that_fit']:,} in all" in rows
    (row,) = [row for row in rows if row.startswith("usual requests")] or [""]
    assert bool(row) == bool(usual)
    if usual:
        assert row.startswith(f"usual requests   {usual:,} tokens: ")
        assert row.endswith(f", {data['usual_requests_that_fit']:,} at once")
    compared = {of["requests"] for of in data["groupings"]}
    is_said = len(compared) > ("--grouping" not in arguments)
    each = [
        f"{of['requests']:,} at once by {of['grouping']} ({of['num_groups']} groups)"
        for of in data["groupings"]
    ]
    text = f"grouping         {', '.join(each)}; {usual or longest:,} tokens each"
    assert [row for row in rows if row.startswith("grouping ")] == [text] * is_said
    texts = [f"warning          {data['warning']}"] * bool(data["warning"])
    assert [row for row in rows if row.startswith("warning ")] == texts


@pytest.mark.parametrize(
    ("arguments", "least", "less"),
    [
        (("--memory", "9GiB", "--num-blocks-override", "100"), "8197", "8196"),
        # 2.002 GiB next to half of the weights, of 22.03 GiB
        (("--gpu", "l4", "--weights", "8GiB", "--utilization", "0.25"), "0.28", "0.27"),
    ],
)
def test_changes_advised_are_the_least_that_would_do(
    capsys, tmp_path, arguments, least, less
) -> None:
    """The second stage has the wider layers; sinks take four blocks next to the null block."""
    layers = [{**FULL, "num_kv_heads": heads, "sink_tokens": 64, "count": 4} for heads in (1, 8)]
    words = ["--specs", specs_file(tmp_path, layers), "--pipeline-parallel", "2", *arguments]
    words += ["--max-model-len", "131072"]
    option = arguments[-2]
    advised = {of["option"]: of["value"] for of in figures(capsys, *words)["try"]}
    assert advised[option] == least
    assert figures(capsys, *changed(tuple(words), option, least))["reserved_blocks"] == 5
    assert "error" in figures(capsys, *changed(tuple(words), option, less))


def test_a_refusal_as_data_has_the_figures(capsys) -> None:
    data = figures(capsys, "llama-3.1-8b", "--memory", "1GiB", "--max-model-len", "131072")
    assert data["error"].startswith("max_model_len=131,072 needs 8,192 blocks")
    assert data["needed_blocks"] == 8192 and data["usable_blocks"] == 511
    assert data["longest_len"] == 511 * 16 and data["try"]


@pytest.mark.parametrize(
    ("then", "worth"),
    [
        ((1000, 500, 100, 10000), False),
        ((1010, 10, 50, 5000), True),  # a longer request comes first, then more usual ones
        ((1009, 505, 10, 5000), True),
        ((1009, 500, 101, 5000), True),
        ((1009, 499, 200, 20000), False),
        ((1000, 500, 100, 10100), True),
    ],
)
def test_a_gain_counts_unless_a_figure_before_it_falls(then, worth) -> None:
    assert is_worth_it((1000, 500, 100, 10000), then) == worth
    assert is_worth_it((0, 0, 0, 0), then) and not is_worth_it(then, (0, 0, 0, 0))


def test_layers_without_a_cache_and_of_two_caches_count_as_layers_of_a_stage() -> None:
    cached = {f"layers.{i}.attn": "attn" for i in (0, 3, 4)}  # of 8 layers
    assert [len(part) for part in split_stages(cached, 4, 8)] == [1, 1, 1, 0]
    doubled = {f"layers.{i}.mla": "mla" for i in range(2 * 5)}  # of 5 layers: 1 + 2 + 2
    assert [len(part) for part in split_stages(doubled, 3, 5)] == [4, 4, 2]
    assert num_layers(load_config("nemotron-h-8b")) == 52


@pytest.mark.parametrize(
    ("layers", "stages"),  # of vLLM's `get_pp_indices`
    [(61, [31, 30]), (61, [15, 15, 16, 15]), (22, [5, 6, 6, 5]), (5, [2, 2, 1]), (4, [1, 2, 1])],
)
def test_the_stages_before_the_last_have_what_does_not_divide(layers, stages) -> None:
    assert layers_per_stage(layers, len(stages)) == stages


def test_the_fullest_stage_of_a_pipeline_bounds_the_plan(capsys) -> None:
    """Gemma 3 has a tied head; sizes by hand, in bf16. The tower lies on the first stage."""
    arguments = ("gemma-3-27b", "--gpu", "rtx3090", "--pipeline-parallel", "3")
    data, whole = figures(capsys, *arguments), figures(capsys, *arguments[:1], "--gpu", "h200")
    table, gpu = 262208 * 5376 * 2, data["gpu"]
    heads = 5376 * (32 + 16 + 16 + 32) * 128
    layer = 2 * (heads + 3 * 5376 * 21504)
    total = gpu["weights_bytes"]
    assert total == whole["gpu"]["weights_bytes"] and whole["gpu"]["weights_bytes_per_gpu"] == [
        total
    ]
    tower = total - 62 * layer - table
    assert gpu["weights_bytes_per_gpu"] == [
        21 * layer + table + tower,
        21 * layer,
        20 * layer + table,
    ]
    memory = [gpu["usable_bytes"] - size for size in gpu["weights_bytes_per_gpu"]]
    assert data["memory_bytes"] == memory
    pairs = zip(memory, data["bytes_per_block"], strict=True)
    assert data["num_blocks"] == min(size // block for size, block in pairs)
    _, page, _ = run(capsys, *arguments)
    assert "; 19.55 GiB on stage 0, the fullest of 3\n" in page


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("71.3GiB", 713 * 2**30 // 10),  # a fraction of a byte is left out
        ("141GB", 141 * 10**9),
        ("64.1GB", 641 * 10**8),  # as a float, a byte less
        ("1.5GiB", 3 * 2**29),
        *((f"3{unit}B", 3 * 1000**i) for i, unit in enumerate("KMGT", 1)),
        *((f"3{unit.lower()}ib", 3 * 1024**i) for i, unit in enumerate("KMGT", 1)),
    ],
)
def test_memory_is_read_exactly(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


def test_lengths_and_shares_are_read_exactly() -> None:
    lengths = {"8192": 8192, "8k": 8192, "1.5K": 1536, "1m": 2**20}
    assert {text: parse_length(text, "--request-len") for text in lengths} == lengths
    assert parse_share("0.9", "") == parse_share("90%", "") == parse_share(".90", "")
    for text in ("0", "1.01", "101%", "much", "-1"):
        with pytest.raises(ValueError, match="--utilization="):
            parse_share(text, "--utilization")
    for text in ("0", "0.1", "8.3k", "8kb", "", "-8", "k"):
        with pytest.raises(ValueError, match="--request-len="):
            parse_length(text, "--request-len")


LLAMA = ("llama-3.1-8b", "--memory", "1GiB")
ON_L4 = ("llama-3.1-8b", "--gpu", "l4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json", "--memory", "1GiB"), "config='nowhere.json'"),
        (("Qwen/Qwen3-9B", "--memory", "9GiB"), "did you mean qwen3-8b or "),
        (("/dev/zero", "--memory", "9GiB"), "(not a regular file)"),
        (("llama-3.1-8b",), "give --gpu NAME, such as --gpu h200, or the memory that is"),
        ((*LLAMA, "--specs", "layers.json"), "give CONFIG (a preset, a config.json or its"),
        (("llama-3.1-8b", "--gpu", "l4", "--memory", "9GiB"), "as --memory 71.3GiB, not both"),
        ((*LLAMA, "--weights", "16GB"), "--weights needs --gpu, because --memory is for the cache"),
        (("llama-3.1-8b", "--gpu", "tpu"), "gpu='tpu' is not in the table: a10, "),
        ((*ON_L4, "--weights", "all"), "--weights='all'"),
        (("llama-3.1-8b", "--memory", "71.3"), "is a fraction without a unit; give 71.3GiB"),
        (("llama-3.1-8b", "--memory", "1023"), "1,023 bytes, which holds no cache; give a unit"),
        (("llama-3.1-8b", "--memory", "1KiB"), "the pool has 0 usable ones"),
        (
            (*LLAMA, "--max-model-len", "131073"),
            "--max-model-len=131,073 is beyond the model's 131",
        ),
        ((*LLAMA, "--request-len", "1m"), "--request-len=1,048,576 is beyond the model's 131,072"),
        ((*LLAMA, "--request-len", "9k"), "set request_len to at most 8,176"),
        ((*ON_L4, "--utilization", "1", "--weights", str(gpu_bytes("l4"))), "weights of 22.03 GiB"),
        ((*ON_L4, "--weights", "60GiB", "--pipeline-parallel", "2"), "on each of 2 GPUs; divide"),
        (
            ("llama-3.1-70b", "--gpu", "a10", "--pipeline-parallel", "4"),
            "and weights of 33.83 GiB on stage 0, the fullest of 4; divide",
        ),
    ],
)
def test_bad_arguments_get_one_clear_message_and_status_2(capsys, arguments, message) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out
    assert message in err and len(err) < 2000
    assert "\x1b" not in err
    assert message.strip() in figures(capsys, *arguments)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("qwen3-next-80b-a3b", *ON_GPUS, "2", "--request-len", "8k"),
        ("deepseek-v3", *ON_GPUS, "8", "--utilization", "0.8"),
        ("llama-3.1-8b", "--gpu", "rtx4090", "--max-model-len", "128k"),
        ("gemma-2-9b", "--memory", "9.99GiB", "--request-len", "1k"),
        ("llama-3.1-8b", "--memory", "40GiB", "--num-blocks-override", "100"),
        ("gemma-3-27b", "--memory", "8GiB", "--grouping", "least_waste", "--tp", "2"),
        ("gemma-2-9b", "--gpu", "l4", "--pipeline-parallel", "4", "--utilization", "0.5"),
        ("llama-3.1-8b", "--memory", "1GiB", "--block-size", "1024"),
    ],
)
def test_every_change_offered_gives_what_it_says(capsys, arguments) -> None:
    data = figures(capsys, *arguments)
    options = {change["option"] for change in data["try"]}
    assert options and ("--block-size" in options or "--block-size" not in arguments)
    assert "--memory" not in options or "--memory" in arguments
    for change in data["try"]:
        then = figures(capsys, *changed(arguments, change["option"], change["value"]))
        more = ""
        if change["option"] == "--memory":
            given = parse_bytes(arguments[arguments.index("--memory") + 1])
            more = f"{gib(parse_bytes(change['value']) - given)} more, "
        assert change["gives"] == more + said(then)
        if change["option"] == "--tensor-parallel" and int(change["value"]) > 2:  # by doubling
            fewer = changed(arguments, "--tensor-parallel", str(int(change["value"]) // 2))
            assert "error" in figures(capsys, *fewer) or fewer == list(arguments)


SMALL = ("llama-3.1-8b", "--gpu", "l4", "--utilization", "0.91", "--max-model-len")


@pytest.mark.parametrize(
    ("words", "weights", "advised"),
    [
        # next to 513 blocks of 2 MiB in the 22.03 GiB of an L4
        ((*SMALL, "8k"), "19.9GiB", ("--utilization", "0.95")),
        ((*SMALL, "8k"), "19.95GiB", ("--tensor-parallel", "2")),
        # two have room for a cache, and not for one of 8 GiB each
        ((*SMALL, "128k"), "30GiB", ("--tensor-parallel", "4")),
        # each of 64 has room for the first, and not for the second
        (("deepseek-v3", "--gpu", "h200"), "6000GiB", ("--tensor-parallel", "64")),
        (("deepseek-v3", "--gpu", "h200"), "9000GiB", None),
    ],
)
def test_shares_are_advised_up_to_95_percent_and_ranks_up_to_64(
    capsys, words, weights, advised
) -> None:
    data = figures(capsys, *words, "--weights", weights)
    offered = {change["option"]: change["value"] for change in data.get("try", ())}
    more = {"--utilization", "--tensor-parallel"} & set(offered)
    assert [(option, offered[option]) for option in more] == [advised] * (advised is not None)


def test_a_pipe_that_nobody_writes_is_refused_at_once(capsys, tmp_path) -> None:
    os.mkfifo(pipe := tmp_path / "config.json")
    reasons = {(str(pipe),): "(not a", (str(tmp_path),): "(config.json: not a"}
    for arguments, begins in {**reasons, ("--specs", str(pipe)): "(not a"}.items():
        status, _, err = run(capsys, *arguments, "--memory", "9GiB")
        assert status == 2 and f"{begins} regular file)" in err


def test_the_command_ends_in_silence_when_its_output_is_closed() -> None:
    """Such as ``| head -1``."""
    command = [sys.executable, "-m", "jaxkv", "plan", "qwen3-8b", "--memory", "40GiB"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout and running.stderr
    running.stdout.close()
    assert running.wait() == 1 and not running.stderr.read()
    running.stderr.close()


def test_the_cache_gets_the_memory_that_weights_leave(capsys) -> None:
    weights = count_weights(load_config("qwen3-8b"))
    data = figures(capsys, "qwen3-8b", "--gpu", "H200", "--utilization", "85%")
    assert gpu_bytes("h200") == 13980 * 2**30 // 100
    usable = 13980 * 85 * 2**30 // 100**2
    assert data["memory_bytes"] == [usable - weights.num_bytes]
    assert data["gpu"]["weights_bytes"] == weights.num_bytes
    assert data["gpu"]["parameters"] == weights.parameters
    counted = (*("qwen3-8b", "--gpu", "H200", "--utilization", "85%"), "--weights", "auto")
    assert figures(capsys, *counted) == data
    for given, stages in ((16_400_000_001, 1), (16_400_000_001, 2)):  # no byte is forgotten
        told = ("--weights", str(given), "--pipeline-parallel", str(stages))
        data = figures(capsys, "qwen3-8b", "--gpu", "h200", "--utilization", "85%", *told)
        assert data["memory_bytes"] == [usable - -(-given // stages)] * stages
        assert data["gpu"]["parameters"] is None
    _, page, _ = run(capsys, "qwen3-8b", "--gpu", "h200", *told)
    assert re.search(r"\nweights +15\.27 GiB; 7\.64 GiB on each of 2 GPUs\n", page)


def test_a_model_without_known_weights_asks_for_their_bytes(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    config = {**load_config("llama-3.1-8b"), "model_type": "xverse"}
    path.write_text(json.dumps({n: v for n, v in config.items() if n != "torch_dtype"}))
    data = figures(capsys, str(path), "--gpu", "h100")
    assert "give --weights" not in data["error"] and "pass kv_dtype" in data["error"]
    data = figures(capsys, str(path), "--gpu", "h100", "--kv-dtype", "bf16")
    assert data["error"].endswith("such as --weights 14.2GiB")
    path.write_text(json.dumps(config))
    data = figures(capsys, str(path), "--gpu", "h100")
    assert "the sizes of the weights of model_type='xverse' are not known" in data["error"]
    assert data["error"].endswith("such as --weights 14.2GiB")
    assert "error" not in figures(capsys, str(path), "--gpu", "h100", "--weights", "14.2GiB")


FULL = {"kind": "full", "num_kv_heads": 8, "head_size": 128}
WINDOW = {**FULL, "kind": "sliding", "sliding_window": 1024}


def specs_file(tmp_path, layers: object, **fields: object) -> str:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps({"max_model_len": 131072, "layers": layers, **fields}))
    return str(path)


def test_specs_from_a_file_are_planned_like_a_configuration(capsys, tmp_path) -> None:
    path = specs_file(tmp_path, [{**FULL, "count": 32}])
    by_file = figures(capsys, "--specs", path, "--memory", "40GiB", "--request-len", "8k")
    by_config = figures(capsys, "llama-3.1-8b", "--memory", "40GiB", "--request-len", "8k")
    groups = [by_file.pop("groups"), by_config.pop("groups")]
    assert by_file == by_config and [len(group[0]["layers"]) for group in groups] == [32, 32]
    for change in by_file["try"]:
        arguments = ("--specs", path, "--memory", "40GiB", "--request-len", "8k")
        then = figures(capsys, *changed(arguments, change["option"], change["value"]))
        assert change["gives"].endswith(said(then))
    status, out, _ = run(capsys, "--specs", path, "--gpu", "h100", "--weights", "16GB")
    assert status == 0 and "of 71.19 GiB (h100 at 0.9): " in out


def test_a_pattern_of_specs_is_repeated_and_kinds_have_fields_of_their_own(
    capsys, tmp_path
) -> None:
    state = {"kind": "state", "shapes": [[3, 64], [8, 16, 16]], "dtypes": ["bf16", "f32"]}
    pattern = {"count": 4, "layers": [{**WINDOW, "count": 5}, FULL]}
    shared = {"kind": "shared", "layer": "layers.5"}
    path = specs_file(tmp_path, [pattern, state, shared])
    data = figures(capsys, "--specs", path, "--memory", "9GiB")
    kinds = {name: g["kind"] for g in data["groups"] for name in g["layers"]}
    assert [kinds[f"layers.{i}"] for i in (4, 5, 11, 24)] == ["sliding", "full", "full", "state"]
    assert data["bytes_per_token"] == [
        {"layers": 20, "kind": "sliding", "span": 1024, "num_bytes": 20 * 4096},
        {"layers": 4, "kind": "full", "span": None, "num_bytes": 4 * 4096},
    ]
    assert data["bytes_of_states"] == 2 * 3 * 64 + 4 * 8 * 16 * 16
    path = specs_file(tmp_path, [{**state, "speculative_blocks": 2, "count": 5}, FULL])
    drafted = figures(capsys, "--specs", path, "--memory", "9GiB")
    assert drafted["bytes_of_states"] == 5 * (1 + 2) * data["bytes_of_states"]
    ring = {**state, "shapes": [[8, 16, 16]], "dtypes": ["f32"], "replay": 4}
    arguments = "--specs", specs_file(tmp_path, [ring]), "--memory", "9GiB"
    num_bytes = 4 * (2 * 8 * 4 * 16 + 8 * 16)  # keys, what each adds, and logarithms of decays
    assert f"; {num_bytes:,} of them inputs since" in run(capsys, *arguments)[1]


def test_flags_change_all_layers_of_a_file_that_have_what_they_change(capsys, tmp_path) -> None:
    latent = {"kind": "mla", "head_size": 576}
    state = {"kind": "state", "shapes": [[64]], "dtypes": ["f32"]}
    entries = [FULL, latent, {**latent, "bytes_per_token": 656}, state]
    entries += [{"kind": "shared", "layer": "layers.0"}, {"kind": "encoder_only"}]
    layers = load_specs(specs_file(tmp_path, entries)).layers
    before = dict(layers)
    changed = change_specs(layers, kv_dtype="fp8", block_size=64)
    *kept, shared, encoder = changed.values()
    assert [spec.block_size for spec in kept] == [64] * 4
    assert [spec.data_bytes // 64 for spec in kept] == [2 * 8 * 128, 576, 656, 4]
    assert [shared, encoder] == list(before.values())[-2:]
    assert layers == before and change_specs(layers, kv_dtype=None, block_size=None) == before
    assert [spec.data_bytes // 16 for spec in list(before.values())[:2]] == [4 * 8 * 128, 2 * 576]


@pytest.mark.parametrize(
    ("memory", "flags", "binds"),
    [
        ("40GiB", (), "the model's own length"),
        ("40GiB", ("--max-model-len", "128k"), "the model's own length"),
        ("40GiB", ("--max-model-len", "8k"), "the length asked for"),
        ("40GiB", ("--num-blocks-override", "9"), "the override"),
        (
            "40GiB",
            ("--max-model-len", "8k", "--num-blocks-override", "2000"),
            "the length asked for",
        ),
        ("4GiB", (), "memory"),
    ],
)
def test_a_plan_says_what_bounds_its_longest_request(capsys, memory, flags, binds) -> None:
    assert figures(capsys, "llama-3.1-8b", "--memory", memory, *flags)["binds"] == binds


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("full", "layers of --specs must be a list of objects, got 'full'"),
        ([{**FULL, "kind": "half"}], "layers[0].kind='half' of --specs; use one of full, sliding"),
        ([{**FULL, "block_size": 0}], "layers[0] of --specs: block_size must be at least 1"),
        (
            [{"kind": "full"}],
            "layers[0] of --specs: kind='full' also needs num_kv_heads, head_size",
        ),
        (
            [{**FULL, "head_dim": 1}],
            "kind='full' has no field head_dim; its fields are block_size, ",
        ),
        ([{"layers": [FULL, {**FULL, "dtype": "fp3"}]}], "layers[0].layers[1] of --specs: dtype="),
        ([], "layers is empty"),
        ([{**FULL, "count": 10**9}], "layers[0].count of --specs makes more than 10,000 layers"),
        (
            [{"layers": [FULL] * 73, "count": 137}],  # 10,001
            "layers[0].count of --specs makes more than 10,000 layers",
        ),
        (
            [FULL, {"layers": [FULL], "count": 2, "block_size": 32}],
            "layers[1] of --specs repeats layers and has no field block_size",
        ),
    ],
)
def test_a_bad_file_of_specs_is_refused_by_its_entry(capsys, tmp_path, layers, message) -> None:
    path = specs_file(tmp_path, layers)
    assert message in figures(capsys, "--specs", path, "--memory", "9GiB")["error"]


def test_a_file_of_specs_holds_the_layers_of_one_rank(capsys, tmp_path) -> None:
    path = specs_file(tmp_path, [FULL])
    data = figures(capsys, "--specs", path, "--memory", "9GiB", "--tensor-parallel", "2")
    assert "write the layers of one rank into the file and leave it out" in data["error"]
    data = figures(capsys, "--specs", path, "--gpu", "h100")
    assert "--weights=auto reads a configuration, not --specs" in data["error"]
    path = specs_file(tmp_path, [FULL], block_size=16)
    data = figures(capsys, "--specs", path, "--memory", "9GiB")
    assert "must hold an object with max_model_len, layers" in data["error"]


def test_the_help_shows_a_file_of_specs_that_works(capsys, tmp_path) -> None:
    status, out, _ = run(capsys, "--help")
    example = out[out.index("--specs reads, for example:") :].partition("\n")[2]
    (tmp_path / "specs.json").write_text(example)
    data = figures(capsys, "--specs", str(tmp_path / "specs.json"), "--memory", "40GiB")
    assert status == 0 and sum(of["layers"] for of in data["bytes_per_token"]) == 36


def test_it_starts_fast_without_numpy_and_jax() -> None:
    code = """
import os, sys
from jaxkv.__main__ import main
assert not main(["plan", "qwen3-next-80b-a3b", "--gpu", "h200", "--tensor-parallel", "2"])
assert not {"numpy", "jax"} & set(sys.modules)
print(sum(os.times()[:2]))
"""
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(done.stdout.splitlines()[-1]) for done in runs) < 0.35  # CPU seconds


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_python_has_the_memory_of_the_command(
    tensor: int, pipeline: int, capsys: pytest.CaptureFixture
) -> None:
    parallel = ("--tp", str(tensor), "--pp", str(pipeline))
    told = figures(capsys, "qwen3-8b", "--gpu", "h100", *parallel, "--request-len", "4k")
    config = load_config("qwen3-8b")
    memory = jaxkv.planning.memory_for(
        "h100", config, tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    layers = split_stages(layers_from_config(config, tensor_parallel=tensor), pipeline)
    plan = plan_cache(layers, memory, max_model_len=model_len(config), request_len=4096)
    assert list(memory) == told["memory_bytes"]
    assert plan.num_blocks == told["num_blocks"]
    assert plan.requests_that_fit(4096) == told["usual_requests_that_fit"]
    with pytest.raises(ValueError, match=r"utilization=1\.5 must be more than 0\.0 and up to 1"):
        jaxkv.planning.memory_for("h100", config, utilization=1.5)


def test_python_has_the_memory_of_a_model_whose_weights_cannot_be_counted(
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="model_type='my_own' are not known; pass their bytes as"):
        jaxkv.planning.memory_for("h100", {"model_type": "my_own"})
    parallel = {"tensor_parallel": 2, "pipeline_parallel": 2}
    words = [f"--{name.replace('_', '-')}={number}" for name, number in parallel.items()]
    told = figures(capsys, "qwen3-8b", "--gpu", "h100", "--weights", "30GiB", *words)
    memory = jaxkv.planning.memory_for("h100", weights=30 * 2**30, **parallel)
    assert list(memory) == told["memory_bytes"]


def test_a_model_that_is_unknown_is_told_what_is_near_and_how_to_get_its_file() -> None:
    with pytest.raises(ValueError, match=r"`hf download zai/GLM-9 config\.json` prints the path"):
        load_config("zai/GLM-9")
    for named in ({"model_type": "my_own"}, {}):
        with pytest.raises(ValueError, match=r"nearest of \d+ that are: qwen3_moe, "):
            layers_from_config(named | {"architectures": ["Qwen3MoeForCausalLM"]})
