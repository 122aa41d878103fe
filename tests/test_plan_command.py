"""``python -m jaxkv plan``: figures, advice that was planned, refusals."""

import json
import re

import pytest

from jaxkv.__main__ import main
from jaxkv.models import load_config
from jaxkv.plan_command import MAX_TRIES, parse_bytes, split_stages


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
    for name in ("num_blocks", "usable_blocks", "admission_blocks", "tokens_that_fit"):
        assert f"{data[name]:,}" in page
    for change in data["try"]:
        assert "try {option} {value}: {gives}".format(**change) in page


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
    assert err.startswith(f"jaxkv plan: max_model_len={int(arguments[-1]):,} needs ")
    offered = re.findall(r"^try (--\S+) (\S+): (.*)$", err, flags=re.MULTILINE)
    assert {"--max-model-len", "--memory"} <= {option for option, _, _ in offered}
    for option, value, text in offered:
        changed = list(arguments)
        if option in changed:
            changed[changed.index(option) + 1] = value
        else:
            changed += [option, value]
        data = figures(capsys, *changed)
        if option in ("--max-model-len", "--memory"):
            assert "error" not in data, (option, value)
        else:  # what it promises it gives
            assert f"{data['max_model_len']:,} tokens" in text


def test_the_memory_advised_is_exact(capsys) -> None:
    arguments = ["llama-3.1-8b", "--max-model-len", "131072"]
    _, _, err = run(capsys, *arguments, "--memory", "8GiB")
    (memory,) = re.findall(r"try --memory (\d+):", err)
    assert "error" not in figures(capsys, *arguments, "--memory", memory)
    assert "error" in figures(capsys, *arguments, "--memory", str(int(memory) - 1))


def test_a_refusal_as_data_has_the_figures(capsys) -> None:
    data = figures(capsys, "llama-3.1-8b", "--memory", "1GiB", "--max-model-len", "131072")
    assert data["needed_blocks"] == 8192 and data["usable_blocks"] == 511
    assert data["longest_len"] == 511 * 16 and data["try"]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json", "--memory", "1GiB"], "config='nowhere.json'"),
        (["llama-3.1-8b"], "--memory"),
        (["llama-3.1-8b", "--memory", "lots"], "memory='lots'"),
        (["llama-3.1-8b", "--memory", "1.5"], "not a whole number of bytes"),
        (["llama-3.1-8b", "--memory", "0"], "memory_bytes must be at least 1"),
        (["llama-3.1-8b", "--memory=-1GiB"], "memory='-1GiB'"),
        (["llama-3.1-8b", "--memory", "1GiB", "--max-model-len", "long"], "max_model_len='long'"),
        (
            ["llama-3.1-8b", "--memory", "1GiB", "--max-model-len", "131073"],
            "beyond the model's 131,072",
        ),
        (["llama-3.1-8b", "--memory", "1GiB", "--kv-dtype", "fp3"], "kv_dtype='fp3'"),
        (["llama-3.1-8b", "--memory", "1GiB", "--block-size", "0"], "block_size must be"),
        (
            ["llama-3.1-8b", "--memory", "1GiB", "--num-blocks-override", "1"],
            "num_blocks_override=1",
        ),
        (
            ["llama-3.1-8b", "--memory", "1GiB", "--num-blocks-override", "600"],
            "num_blocks_override=600 is more than the 512",
        ),
        (["llama-3.1-8b", "--memory", "1GiB", "--tensor-parallel", "3"], "num_kv_heads=8"),
        (["llama-3.1-8b", "--memory", "1GiB", "--pipeline-parallel", "0"], "pipeline_parallel"),
        (["gemma-3-4b", "--memory", "9GiB", "--context-parallel", "2"], "context_parallel=2"),
        (["llama-3.1-8b", "--memory", "1GiB", "--grouping", "best"], "invalid choice: 'best'"),
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
    ],
)
def test_every_change_offered_gives_what_it_says(capsys, arguments) -> None:
    data = figures(capsys, *arguments)
    assert data["try"]
    for change in data["try"]:
        changed = list(arguments)
        if change["option"] in changed:
            changed[changed.index(change["option"]) + 1] = change["value"]
        else:
            changed += [change["option"], change["value"]]
        then = figures(capsys, *changed)
        assert f"requests up to {then['max_model_len']:,} tokens" in change["gives"]
        assert f"{then['requests_that_fit']:,} at once" in change["gives"]


def test_large_blocks_are_grouped_by_the_rule_too(capsys) -> None:
    data = figures(capsys, "qwen3.5-397b-a17b", "--memory", "80GiB", "--grouping", "least_waste")
    assert data["bytes_saved_against_rule"] is not None


def test_whisper_s_stages_divide_the_layers_that_keep_a_cache(capsys) -> None:
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
    assert status == 2 and "config=" in err


def test_an_override_takes_the_place_of_memory(capsys) -> None:
    data = figures(capsys, "llama-3.1-8b", "--memory", "80GiB", "--num-blocks-override", "2000")
    assert data["num_blocks"] == 2000 and data["max_model_len"] == 1999 * 16
    assert data["binds"] == "the override"
