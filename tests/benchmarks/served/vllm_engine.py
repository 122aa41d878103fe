"""vLLM's engine over the workloads, in a process of its own: no jax, and no network.

    python -m tests.benchmarks.served.vllm_engine CONFIG.json RESULTS.json WORKLOADS FOLDER OPTIONS

FOLDER holds vLLM and what it needs beside torch, as ``pip install --target`` leaves them. The
configuration is the model's; its weights are random. The results are a mapping from names of
workloads to figures.
"""

import collections
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from tests.benchmarks.served import workloads
from tests.benchmarks.served.workloads import MEMORY_SHARE, Prefill

# The engine core in this process, nothing fetched, and no kernels that a small install lacks.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
TEXT_MODEL = "Qwen3_5ForCausalLM"


class Engine:
    """vLLM's engine, driven one step at a time."""

    def __init__(self, config: dict[str, Any], options: dict[str, Any]):
        from vllm import LLM

        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "config.json").write_text(json.dumps(config))
        self.vocab = config["vocab_size"]
        if config["architectures"] == [TEXT_MODEL]:
            _register_text_model()
        self.engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            disable_log_stats=True,
            max_num_seqs=256,
            gpu_memory_utilization=MEMORY_SHARE,
            **options,
        ).llm_engine
        self._count = 0

    def add(self, prompt: Any, tokens: int, samples: int = 1, prompt_logprobs: bool = False) -> str:
        """Queues a request for samples of these numbers of tokens; a single one is greedy."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        name = str(self._count)
        sampling = SamplingParams(
            n=samples,
            temperature=float(samples > 1),
            max_tokens=tokens,
            logprobs=0 if samples > 1 else None,
            prompt_logprobs=0 if prompt_logprobs else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt.tolist()), sampling)
        return name

    def step(self) -> dict[str, int]:
        """Runs a step. Returns the number of new tokens of each request."""
        made: collections.Counter[str] = collections.Counter()
        for output in self.engine.step():  # each sample may have an output of its own
            made[output.request_id] += sum(len(sample.token_ids) for sample in output.outputs)
        return made

    @property
    def has_work(self) -> bool:
        return self.engine.has_unfinished_requests()


def _register_text_model() -> None:
    """Registers Qwen3.5's language model by itself; vLLM knows it next to its images alone."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import interfaces, qwen3_5

    whole = qwen3_5.Qwen3_5ForConditionalGeneration
    names = ("state_dtype_from_config", "state_shape_from_config", "state_copy_func")
    states = {f"get_mamba_{name}": vars(whole)[f"get_mamba_{name}"] for name in names}
    text = type("TextModel", (qwen3_5.Qwen3_5ForCausalLM, interfaces.IsHybrid), states)
    ModelRegistry.register_model(TEXT_MODEL, text)


def main(config: str, results: str, chosen: str, folder: str, options: str) -> None:
    """Serves the workloads, and writes the figures after each."""
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    started = time.perf_counter()
    engine = Engine(json.loads(pathlib.Path(config).read_text()), json.loads(options))
    workloads.run(engine, Prefill(1, 64, repeats=1))
    found: dict[str, Any] = {"start": {"seconds": time.perf_counter() - started}}
    for workload in workloads.load(chosen):
        found[workloads.name_of(workload)] = workloads.run(engine, workload)._asdict()
        print("vLLM:", *list(found.items())[-1], flush=True)
        pathlib.Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may outlive the work
