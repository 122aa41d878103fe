"""Planning: 96 hybrid layers over 8 workers, with the length fitted."""

import statistics
import subprocess
import sys
import time

from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, StateSpec
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

ATTENTION = FullAttentionSpec(block_size=544, num_kv_heads=2, head_size=256)
STATE = StateSpec(
    block_size=544,
    shapes=((3, 8192), (32, 128, 128)),
    dtypes=("bf16", "bf16"),
    cache_mode="align",
)
LAYERS: dict[str, LayerSpec] = {
    f"layers.{i}": STATE if (i + 1) % 4 else ATTENTION for i in range(96)
}


def repeats() -> int:
    return by_size(full=101, small=101, smallest=3)


def stages() -> list[dict[str, LayerSpec]]:
    names = list(LAYERS)
    return [{name: LAYERS[name] for name in names[i : i + 12]} for i in range(0, 96, 12)]


def measure(workers: list[dict[str, LayerSpec]]) -> float:
    """Returns the median milliseconds of one plan."""
    times = []
    for _ in range(repeats()):
        start = time.perf_counter()
        plan_cache(workers, [40 * 2**30] * 8, max_model_len=262144, fit_max_model_len=True)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def import_milliseconds() -> float:
    """Returns the median milliseconds of ``import jaxkv.planning`` in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import jaxkv.planning; "
    code += "print(time.perf_counter() - t)"
    runs = [
        subprocess.check_output([sys.executable, "-c", code])
        for _ in range(by_size(full=9, small=9, smallest=1))
    ]
    return 1e3 * statistics.median(float(run) for run in runs)


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # its planner needs all of vLLM
    report.title(f"Planning, median of {repeats()} on the host")
    report.note(f"8 pipeline stages of 12 layers   {measure(stages()):6.2f} ms")
    report.note(f"8 tensor-parallel ranks of 96    {measure([LAYERS] * 8):6.2f} ms")
    report.note(f"import jaxkv.planning            {import_milliseconds():6.1f} ms")
