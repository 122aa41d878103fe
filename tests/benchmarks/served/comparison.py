"""The models and the workloads that both engines serve, and the comparison of their figures."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

import jaxkv
from jaxkv._src.specs import PER_TOKEN_HEAD
from tests.benchmarks import timing
from tests.benchmarks.served import alone, jaxkv_engine, workloads
from tests.benchmarks.served.workloads import MEMORY_SHARE, Decode, Trace, Workload
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
# Models that are not among the presets, as changes to one that is.
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3-8b",
        {
            **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "tie_word_embeddings": True},
        },
    ),
    # Attention of DeepSeek-V2-Lite, with dense layers alone.
    "deepseek-v2-lite": (
        "llama-3.1-8b",
        {
            **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944},
            **{"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16},
            **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
            **{"v_head_dim": 128, "q_lora_rank": None, "vocab_size": 102_400},
        },
    ),
}


class Case(NamedTuple):
    """A model, the workloads that it serves, and the dtype of its keys and values.

    has_peer: whether vLLM's engine serves it, too.
    shared_prefixes: of an engine of ours, None is the default; each runs in a process of its own.
    """

    model: str
    kv_dtype: str | None = None
    chosen: tuple[Workload, ...] = workloads.FULL
    has_peer: bool = True
    shared_prefixes: tuple[int | None, ...] = (None,)

    @property
    def has_groups(self) -> bool:
        """Whether several samples of a prompt are asked for."""
        return any(isinstance(w, Trace) and w.samples > 1 for w in self.chosen)

    @property
    def name(self) -> str:
        text = self.model + (f", {self.kv_dtype}" if self.kv_dtype else "")
        return text + (", rollouts" if self.has_groups else "")


# Keys and values of 256 requests of Gemma-3-12B do not fit next to its weights.
OF_128 = tuple(Decode(128, 1024) if w == Decode(256, 1024) else w for w in workloads.FULL)
CASES = (
    Case("llama-3.1-8b"),
    Case("llama-3.1-8b", chosen=workloads.ROLLOUTS, shared_prefixes=(None, 0)),
    Case("qwen3.5-4b", chosen=workloads.ROLLOUTS[:2], shared_prefixes=(None, 0)),
    Case("llama-3.1-8b", "fp8", (Decode(256, 1024),)),
    Case("qwen3-0.6b", None, (Decode(1, 2048), Decode(64, 2048))),
    Case("qwen3.5-4b"),
    Case("gemma-3-12b", chosen=OF_128),
    Case("deepseek-v2-lite", has_peer=False),
    *(Case("llama-3.1-8b", dtype, workloads.DECODES, has_peer=False) for dtype in PER_TOKEN_HEAD),
)
# Over several devices (`timing.served_devices`).
DIVIDED = tuple(
    Case(model, chosen=workloads.DIVIDED) for model in ("llama-3.1-8b", "qwen3-32b", "qwen3.5-4b")
)
TINY = {
    **{"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 256},
    **{"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
TIMEOUT_S = 560
OPTIONS = {"max_num_batched_tokens": 8192, "max_model_len": jaxkv_engine.MAX_LEN}  # of vLLM


def run(report: Report, peer: VllmPeer | None) -> None:
    """Serves the workloads with both engines, each in a process of its own, in turns."""
    del peer
    report.title("Served models: seconds of a decode step, a prefill or a trace, and tokens/s")
    if timing.vllm_engine is None:
        report.note("vLLM's engine is not timed: give --vllm-engine the folder that holds it")
    cases = DIVIDED if timing.served_devices > 1 else CASES
    chosen = [case for case in cases if case.name == timing.served_case]
    chosen = chosen or cases[: None if timing.every_case else 2]
    for case in by_size(full=chosen, small=(), smallest=()):
        _run_case(report, case)
    if timing.size == "full" and timing.every_case and timing.served_case is None:
        config = text_config(CASES[0].model)
        _compare(report, CASES[0].name, _in_process("alone", config, [alone.TRACE]), {})
    if timing.size != "full":
        for devices in by_size(full=(), small=sorted({1, _two()}), smallest=(_two(),)):
            _compare(report, f"tiny on {devices}", _serve_tiny(devices), {})


def run_rollouts(report: Report, peer: VllmPeer | None) -> None:
    """Serves groups of samples with both engines: by default, and each sample by itself."""
    del peer
    report.title("Rollouts: seconds of all of them, in the order given and by generate")
    for case in by_size(full=[case for case in CASES if case.has_groups], small=(), smallest=()):
        _run_case(report, case)
    if timing.size != "full":
        _compare(report, "tiny", _serve_tiny(_two(), workloads.SMALLEST[:1]), {})


def _run_case(report: Report, case: Case) -> None:
    """Serves a model with both engines."""
    config, folder = text_config(case.model), timing.vllm_engine
    found = {groups: _serve(config, case, groups) for groups in case.shared_prefixes}
    theirs = {}
    if folder and case.has_peer:
        options = OPTIONS | {"enable_prefix_caching": case.has_groups}
        options |= {"tensor_parallel_size": timing.served_devices}
        options |= {"kv_cache_dtype": case.kv_dtype} if case.kv_dtype else {}
        if dtype := config.get("mamba_ssm_dtype"):
            options |= {"mamba_ssm_cache_dtype": dtype, "gdn_prefill_backend": "triton"}
        same = [w for w in case.chosen if not (isinstance(w, Trace) and w.by_generate)]
        theirs = _in_process("vllm_engine", config, same, str(folder), json.dumps(options))
    for groups, ours in found.items():
        text = "" if groups is None else f", shared_prefixes={groups}"
        _compare(report, case.name + text, ours, theirs)


def _serve(config: dict[str, Any], case: Case, groups: int | None) -> dict[str, Any]:
    """Returns our figures; the first case starts twice, again with jax's compilation cache."""
    groups_text = "" if groups is None else str(groups)
    options = case.kv_dtype or "", groups_text, str(timing.served_devices)
    with tempfile.TemporaryDirectory() as cache:
        kept = {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_CLIENT_MEM_FRACTION": str(MEMORY_SHARE)}
        kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        ours = _in_process("jaxkv_engine", config, case.chosen, *options, **kept)
        if case is CASES[0]:
            again = _in_process("jaxkv_engine", config, (), *options, **kept)
            ours |= {"start, compiled before": again["start"]} if "start" in again else {}
    return ours


def text_config(model: str) -> dict[str, Any]:
    """Returns the configuration of a model's text part, as vLLM reads it."""
    preset, changes = CHANGED.get(model, (model, {}))
    config = jaxkv.load_config(preset)
    text = {**config, **config.get("text_config", {}), **changes}
    for name in ("text_config", "vision_config"):
        text.pop(name, None)
    if text["model_type"] == "qwen3_5_text":  # else vLLM asks for the positions of images, too
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7}
    return text | {"architectures": [ARCHITECTURES.get(text["model_type"])]}


def _two() -> int:
    """Returns a number of devices: two where there are."""
    return min(2, len(jax.devices()))


def _serve_tiny(devices: int, chosen: Sequence[Workload] = workloads.SMALLEST) -> dict[str, Any]:
    """Serves a tiny model in this process, so that the benchmark itself is tested anywhere."""
    sizes = {"max_requests": 4, "max_tokens": 8, "memory_bytes": 7168, "max_model_len": 50}
    server = jaxkv_engine.Server(TINY, devices=devices, **sizes)
    return {
        workloads.name_of(workload): workloads.run(server, workload)._asdict()
        for workload in chosen
    }


def _in_process(
    module: str,
    config: dict[str, Any],
    chosen: Sequence[Workload],
    *arguments: str,
    **variables: str,
) -> dict[str, Any]:
    """Returns the figures of one engine; those that it reached, if it ended early.

    Args:
      variables: of its environment, besides this one's.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, name) for name in ("config.json", "results.json")]
        paths[0].write_text(json.dumps(config))
        command = [sys.executable, "-m", f"tests.benchmarks.served.{module}"]
        command += [*map(str, paths), workloads.dump(chosen), *arguments]
        try:
            subprocess.run(command, timeout=TIMEOUT_S, check=True, env=os.environ | variables)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"  {module} ended early: {error}", flush=True)
        return json.loads(paths[1].read_text()) if paths[1].exists() else {}


def _compare(report: Report, model: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, figures in ours.items():
        if "seconds" not in figures:
            report.note(f"{model:<40} {name}: {figures}")
            continue
        text = f"{model:<40} {name:<46} {1e3 * figures['seconds']:10.2f} ms"
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
