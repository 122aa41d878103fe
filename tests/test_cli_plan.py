"""``python -m jaxkv plan``: figures, advice that was planned, refusals in the words of flags."""

import json
import re
import subprocess
import sys

import pytest

from jaxkv.__main__ import main
from jaxkv.cli.plan import in_flags
from jaxkv.cli.question import parse_bytes, split_stages
from jaxkv.cli.tries import MAX_TRIES, is_worth_it
from jaxkv.hf_config import load_config


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
    assert "1 x (36 full @ 16)" in done.stdout and "18,204 of which 18,203 usable" in done.stdout


def test_a_plan_is_one_page(capsys) -> None:
    status, out, err = run(capsys, "qwen3-next-80b-a3b", "--memory", "141GB")
    assert status == 0 and not err
    assert "3 x (12 state @ 544) + 1 x (12 full @ 544)" in out
    assert "13,369,344 bytes" in out and "the model's own length" in out
    assert len(out.splitlines()) <= 20
    assert 1 <= out.count("\ntry ") <= MAX_TRIES


def test_json_says_the_same_as_the_page(capsys) -> None:
    _, page, _ = run(capsys, "llama-3.1-8b", "--memory", "40GiB")
    data = figures(capsys, "llama-3.1-8b", "--memory", "40GiB")
    assert data["num_blocks"] == 20480 and data["max_model_len"] == 131072
    assert data["groups"][0]["kind"] == "full" and len(data["groups"][0]["layers"]) == 32
    for name in ("num_blocks", "usable_blocks", "admission_blocks", "tokens_that_fit"):
        assert f"{data[name]:,}" in page
    assert {change["option"] for change in data["try"]} == {"--memory", "--kv-dtype"}
    for change in data["try"]:
        size = ""
        if change["option"] == "--memory":
            size = f" ({int(change['value']) / 2**30:.2f} GiB)"
        assert f"try {change['option']} {change['value']}{size}: {change['gives']}\n" in page


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3.1-8b", "--memory", "8GiB", "--max-model-len", "131072"),
        ("gemma-3-27b", "--memory", "2GiB", "--max-model-len", "131072"),
        ("llama-3.1-70b", "--memory", "4GiB", "--max-model-len", "100000"),
    ],
)
def test_a_refusal_offers_changes_that_work(capsys, arguments) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out
    assert err.startswith(f"jaxkv plan: --max-model-len={int(arguments[-1]):,} needs ")
    assert "or raise --memory to at least " in err
    offered = re.findall(r"^try (--\S+) (\S+)(?: \(.*?\))?: (.*)$", err, flags=re.MULTILINE)
    assert {"--max-model-len", "--memory"} <= {option for option, _, _ in offered}
    for option, value, text in offered:
        data = figures(capsys, *changed(arguments, option, value))
        if option in ("--max-model-len", "--memory"):
            assert "error" not in data, (option, value)
        else:  # what it promises it gives
            assert f"{data['max_model_len']:,} tokens" in text


def test_the_memory_advised_is_exact_and_said_in_gib(capsys) -> None:
    arguments = ["llama-3.1-8b", "--max-model-len", "131072"]
    _, _, err = run(capsys, *arguments, "--memory", "8GiB")
    ((memory, size, more),) = re.findall(
        r"try --memory (\d+) \((.*?)\): [\d,]+ bytes \((.*?)\) more,", err
    )
    assert (size, more) == ("16.00 GiB", "8.00 GiB")
    assert "error" not in figures(capsys, *arguments, "--memory", memory)
    assert "error" in figures(capsys, *arguments, "--memory", str(int(memory) - 1))


def test_a_refusal_as_data_has_the_figures(capsys) -> None:
    data = figures(capsys, "llama-3.1-8b", "--memory", "1GiB", "--max-model-len", "131072")
    assert data["error"].startswith("--max-model-len=131,072 needs 8,192 blocks")
    assert data["needed_blocks"] == 8192 and data["usable_blocks"] == 511
    assert data["longest_len"] == 511 * 16 and data["try"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json", "--memory", "1GiB"), "CONFIG='nowhere.json'"),
        (("llama-3.1-8b", "--memory", "lots"), "--memory='lots'"),
        (("llama-3.1-8b", "--memory", "1GiB", "--tensor-parallel", "3"), "--tensor-parallel=3"),
        (("llama-3.1-8b", "--memory", "1GiB", "--num-blocks-override", "1"), "--num-blocks-over"),
    ],
)
def test_any_other_refusal_is_data_too(capsys, arguments, message) -> None:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 2 and not err
    data = json.loads(out)
    assert set(data) == {"error"} and message in data["error"]


def test_a_change_is_offered_only_if_a_figure_grows_by_one_percent(capsys) -> None:
    arguments = ("deepseek-v3.2", "--memory", "80GiB")
    now, smaller = figures(capsys, *arguments), figures(capsys, *arguments, "--block-size", "16")
    assert smaller["tokens_that_fit"] - now["tokens_that_fit"] == 64  # of 1,786,944
    assert [change["option"] for change in now["try"]] == ["--memory"]
    many = figures(capsys, "qwen3-8b", "--memory", "4TiB", "--max-model-len", "1000")
    (requests,) = (n for c in many["try"] if c["option"] == "--memory" for n in at_once(c["gives"]))
    assert requests >= 1.01 * many["requests_that_fit"] > requests - 1


@pytest.mark.parametrize(
    ("then", "worth"),
    [
        ((1000, 100, 10000), False),
        ((1009, 100, 10000), False),
        ((1010, 50, 5000), True),  # a longer request comes first
        ((1009, 101, 5000), True),
        ((999, 200, 20000), False),
        ((1009, 99, 20000), False),
        ((1000, 100, 10100), True),
    ],
)
def test_a_gain_counts_unless_a_figure_before_it_falls(then, worth) -> None:
    assert is_worth_it((1000, 100, 10000), then) == worth
    assert is_worth_it((0, 0, 0), then) and not is_worth_it(then, (0, 0, 0))


def at_once(gives: str) -> list[int]:
    return [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) at once", gives)]


@pytest.mark.parametrize(
    ("message", "in_words_of_the_command"),
    [
        ("max_model_len=9 needs", "--max-model-len=9 needs"),
        (
            "lower it, or pass override_beyond_memory=True",
            "lower it, or pass --override-beyond-memory",
        ),
        ("on one (pipeline_parallel=1 does)", "on one (--pipeline-parallel=1 does)"),
        ("raise memory_bytes to at least", "raise --memory to at least"),
        ('a block_size, or grouping="packed"', 'a --block-size, or --grouping="packed"'),
        ("a grouping of the configuration", "a grouping of the configuration"),
        ("FullAttentionSpec(block_size=16)", "FullAttentionSpec(block_size=16)"),
        ("limits.max_encoder_tokens=0", "limits.max_encoder_tokens=0"),
    ],
)
def test_messages_name_flags_where_the_library_names_arguments(
    message: str, in_words_of_the_command: str
) -> None:
    assert in_flags(message) == in_words_of_the_command


def test_parallelism_divides_heads_layers_and_tokens(capsys) -> None:
    one = figures(capsys, "llama-3.1-8b", "--memory", "40GiB")
    tensor = figures(capsys, "llama-3.1-8b", "--memory", "40GiB", "--tensor-parallel", "8")
    stages = figures(capsys, "llama-3.1-8b", "--memory", "40GiB", "--pipeline-parallel", "2")
    context = figures(capsys, "llama-3.1-8b", "--memory", "40GiB", "--context-parallel", "2")
    (whole,) = one["bytes_per_block"]
    assert tensor["bytes_per_block"] == [whole // 8]
    assert stages["bytes_per_block"] == [whole // 2] * 2
    assert context["admission_blocks"] == one["admission_blocks"] // 2


def test_least_waste_prints_its_gain(capsys) -> None:
    status, out, _ = run(capsys, "gemma-3-27b", "--memory", "40GiB", "--grouping", "least_waste")
    assert status == 0
    assert re.search(r"per request .* \((\d+\.\d) %\) fewer than by the rule", out)


def test_stages_keep_the_caches_of_one_layer_together() -> None:
    layers = {f"layers.{i}.{kind}": kind for i in range(5) for kind in ("attn", "state")}
    parts = split_stages(layers, 2)
    assert [len(part) for part in parts] == [6, 4]
    assert {**parts[0], **parts[1]} == layers
    with pytest.raises(ValueError, match=r"pipeline_parallel=7 must lie in 1\.\.5"):
        split_stages(layers, 7)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("141GB", 141 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512", 512),
        (" 2 MiB ", 2**21),
        ("0.5KB", 500),
    ],
)
def test_memory_is_read_exactly(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


LLAMA = ("llama-3.1-8b", "--memory", "1GiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json", "--memory", "1GiB"), "CONFIG='nowhere.json'"),
        (("llama-3.1-8b",), "--memory"),
        (("llama-3.1-8b", "--memory", "lots"), "--memory='lots'"),
        (("llama-3.1-8b", "--memory", "1.5"), "--memory='1.5' is not a whole number of bytes"),
        (("llama-3.1-8b", "--memory", "0"), "--memory must be at least 1"),
        (("llama-3.1-8b", "--memory=-1GiB"), "--memory='-1GiB'"),
        ((*LLAMA, "--max-model-len", "long"), "--max-model-len='long'"),
        (
            (*LLAMA, "--max-model-len", "131073"),
            "--max-model-len=131,073 is beyond the model's 131,072",
        ),
        ((*LLAMA, "--kv-dtype", "fp3"), "--kv-dtype='fp3'"),
        ((*LLAMA, "--block-size", "0"), "--block-size must be"),
        ((*LLAMA, "--num-blocks-override", "1"), "--num-blocks-override=1"),
        (
            (*LLAMA, "--num-blocks-override", "600"),
            "--num-blocks-override=600 is more than the 512",
        ),
        ((*LLAMA, "--num-blocks-override", "600"), "or pass --override-beyond-memory\n"),
        (
            (*LLAMA, "--tensor-parallel", "3"),
            "num_kv_heads=8 does not divide among --tensor-parallel=3",
        ),
        ((*LLAMA, "--pipeline-parallel", "0"), "--pipeline-parallel=0 must lie in 1..32"),
        (("gemma-3-4b", "--memory", "9GiB", "--context-parallel", "2"), "--context-parallel=2"),
        ((*LLAMA, "--grouping", "best"), "invalid choice: 'best'"),
        ((*LLAMA, "--state-cache-mode", "some"), "invalid choice: 'some'"),
    ],
)
def test_bad_arguments_get_one_clear_message_and_status_2(capsys, arguments, message) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("qwen3.5-397b-a17b", "--memory", "2GiB", "--max-model-len", "262144"),
        ("llama-3.1-8b", "--memory", "40GiB", "--num-blocks-override", "100"),
        ("gemma-3-27b", "--memory", "8GiB", "--grouping", "least_waste", "--tensor-parallel", "2"),
        ("gpt-oss-20b", "--memory", "1GiB", "--pipeline-parallel", "2"),
        ("llama-3.1-8b", "--memory", "1GiB", "--block-size", "1024"),
    ],
)
def test_every_change_offered_gives_what_it_says(capsys, arguments) -> None:
    data = figures(capsys, *arguments)
    options = {change["option"] for change in data["try"]}
    assert options and ("--block-size" in options or "--block-size" not in arguments)
    for change in data["try"]:
        then = figures(capsys, *changed(arguments, change["option"], change["value"]))
        assert f"requests up to {then['max_model_len']:,} tokens" in change["gives"]
        assert f"{then['requests_that_fit']:,} at once" in change["gives"]


def test_large_blocks_are_grouped_by_the_rule_too(capsys) -> None:
    data = figures(capsys, "qwen3.5-397b-a17b", "--memory", "80GiB", "--grouping", "least_waste")
    assert data["bytes_saved_against_rule"] is not None


def test_the_stages_of_whisper_divide_the_layers_that_keep_a_cache(capsys) -> None:
    data = figures(capsys, "whisper-large-v3", "--memory", "9GiB", "--pipeline-parallel", "2")
    assert len(set(data["bytes_per_block"])) == 1 and min(data["bytes_per_block"])


def test_wrong_types_in_a_configuration_are_a_refusal(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    config = load_config("llama-3.1-8b")
    path.write_text(json.dumps({**config, "num_hidden_layers": 32.0}))
    status, _, err = run(capsys, str(path), "--memory", "9GiB")
    assert status == 2 and "num_hidden_layers must be an int" in err
    path.write_text("[" * 100_000)
    status, _, err = run(capsys, str(path), "--memory", "9GiB")
    assert status == 2 and "CONFIG=" in err
    scaling = {"rope_type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 1}
    path.write_text(json.dumps({**config, "rope_scaling": scaling}))
    status, _, err = run(capsys, str(path), "--memory", "9GiB")
    assert status == 2 and "rope_scaling.factor=inf" in err


def test_the_directory_of_a_config_json_will_do(capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_config("llama-3.1-8b")))
    by_path = figures(capsys, str(tmp_path), "--memory", "9GiB")
    assert by_path == figures(capsys, "llama-3.1-8b", "--memory", "9GiB")


def test_an_override_takes_the_place_of_memory(capsys) -> None:
    data = figures(capsys, "llama-3.1-8b", "--memory", "80GiB", "--num-blocks-override", "2000")
    assert data["num_blocks"] == 2000 and data["max_model_len"] == 1999 * 16
    assert data["binds"] == "the override"


def test_a_reader_that_has_enough_ends_the_command_in_silence() -> None:
    """Such as ``| head -1``."""
    command = [sys.executable, "-m", "jaxkv", "plan", "qwen3-8b", "--memory", "40GiB"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout and running.stderr
    running.stdout.close()
    assert running.wait() == 1 and not running.stderr.read()
    running.stderr.close()
