"""Whole models of published sizes, served by `jaxkv.Engine` next to vLLM's engine."""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jaxkv
from tests.benchmarks import timing
from tests.benchmarks.served import jaxkv_engine, workloads
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

# Presets, as vLLM reads them: a config.json of text alone.
MODELS = ("llama-3.1-8b", "gemma-3-12b", "qwen3.5-4b")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
TINY = {
    **{"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 256},
    **{"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
TIMEOUT_S = 560


def run(report: Report, peer: VllmPeer | None) -> None:
    """Serves the workloads with both engines, each in a process of its own, in turns."""
    del peer
    report.title("Served models: seconds of a decode step, a prefill or a trace, and tokens/s")
    if timing.vllm_engine is None:
        report.note("vLLM's engine is not timed: give --vllm-engine the folder that holds it")
    for model in by_size(full=MODELS, small=(), smallest=()):
        if not timing.every_case and model != MODELS[0]:
            continue
        config = text_config(model)
        ours = _in_process("jaxkv_engine", [], config)
        folder = timing.vllm_engine
        theirs = _in_process("vllm_engine", [str(folder)], config) if folder else {}
        _compare(report, model, ours, theirs)
    if timing.size != "full":
        _compare(report, "tiny", _serve_tiny(), {})


def text_config(model: str) -> dict[str, Any]:
    """Returns the configuration of a preset's language model."""
    config = jaxkv.load_config(model)
    text = {**config, **config.get("text_config", {})}
    for name in ("text_config", "vision_config"):
        text.pop(name, None)
    return text | {"architectures": [ARCHITECTURES[text["model_type"]]]}


def _serve_tiny() -> dict[str, Any]:
    """Serves a tiny model in this process, so that the benchmark itself is tested anywhere."""
    sizes = {"max_requests": 2, "max_tokens": 16, "memory_bytes": 2**20, "max_model_len": 64}
    server = jaxkv_engine.Server(TINY, **sizes)
    return {
        workloads.name_of(workload): workloads.run(server, workload)._asdict()
        for workload in workloads.SMALLEST
    }


def _in_process(module: str, arguments: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of one engine; those that it reached, if it ended early."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, name) for name in ("config.json", "results.json")]
        paths[0].write_text(json.dumps(config))
        command = [sys.executable, "-m", f"tests.benchmarks.served.{module}"]
        command += [*arguments, *map(str, paths)]
        try:
            subprocess.run(command, timeout=TIMEOUT_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"  {module} ended early: {error}", flush=True)
        return json.loads(paths[1].read_text()) if paths[1].exists() else {}


def _compare(report: Report, model: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, figures in ours.items():
        if "seconds" not in figures:
            report.note(f"{model:<14} {name}: {figures}")
            continue
        text = f"{model:<14} {name:<28} {1e3 * figures['seconds']:10.2f} ms"
        extra = {"seconds": figures["seconds"]}
        if tokens := figures.get("tokens"):
            text += f" {tokens / figures['seconds']:10,.0f} tokens/s"
        if any(figures.get("first", ())):
            first, between = figures["first"], figures["between"]
            text += f"  first token {first[0]:.3f} and {first[1]:.3f} s (p50, p99)"
            text += f", between tokens {1e3 * between[0]:.1f} and {1e3 * between[1]:.1f} ms"
        if other := theirs.get(name):
            extra["vllm_seconds"] = other["seconds"]
            ratio = other["seconds"] / figures["seconds"]
            text += f"  vLLM {1e3 * other['seconds']:.2f} ms: {ratio:.2f} times as fast"
            if any(other.get("first", ())):
                text += f" (first {other['first']}, between {other['between']})"
        report.note(text, **extra)
