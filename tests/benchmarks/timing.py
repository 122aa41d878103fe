"""How everything here is timed, and how a run is printed and kept.

Two clocks: the GPU's own record of its kernels (jax's profiler, which reads CUPTI and so
sees torch's and Triton's kernels as well), and the host's, either waiting for every call
or dispatching a chain of them.
"""

import dataclasses
import glob
import json
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ON_GPU = jax.default_backend() == "gpu"
REPEATS, CHAIN = 20, 50


# "host" or "GPU". A process that was profiled once dispatches more slowly ever after, so a
# run first reads the host's clock everywhere, and then goes through all of it again.
clock = "host"


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call. kernels: busy GPU time; None where it was not read."""

    kernels: float | None = None
    launches: float | None = None
    synced: float | None = None
    dispatched: float | None = None


def poll(arrays: Any) -> None:
    """Waits for arrays of one computation awake, as ``torch.cuda.synchronize`` does.

    ``block_until_ready`` sleeps, and a core that slept runs the next step's host code at
    half its speed: that would time the waiting and not the work.
    """
    last = jax.tree.leaves(arrays)[-1]
    while not last.is_ready():
        pass


def measure(call: Callable[[], Any], wait: Callable[[Any], Any] = poll) -> Times:
    """Times one call, after warming it up, by the clock that `clock` names.

    Args:
      call: runs once and returns what ``wait`` waits for.
      wait: blocks until a call is done.
    """
    for _ in range(3):
        wait(call())
    if clock == "GPU":
        return Times(*_kernel_seconds(call, wait))
    synced = []
    for _ in range(CHAIN):
        start = time.perf_counter()
        wait(call())
        synced.append(time.perf_counter() - start)
    dispatched = statistics.median(_dispatch_seconds(call, wait) for _ in range(5))
    return Times(synced=statistics.median(synced), dispatched=dispatched)


def make_matrix() -> jax.Array:
    """What `work` works on."""
    size = 1024 if ON_GPU else 64
    return jnp.full((size, size), 0.01, jnp.bfloat16)


def work(matrix: jax.Array) -> jax.Array:
    """Stands for the step that a caller runs anyway: some 200 us on an H200."""
    for _ in range(20):
        matrix = jnp.tanh(matrix @ matrix)
    return matrix


def added(more: Times, less: Times) -> str:
    """What one call costs more than another, by each clock."""
    texts = []
    for name in ("kernels", "synced", "dispatched"):
        pair = getattr(more, name), getattr(less, name)
        if None not in pair:
            texts.append(f"{name} {1e6 * (pair[0] - pair[1]):.1f} us")
    return ", ".join(texts)


def _dispatch_seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CHAIN):
        last = call()
    seconds = time.perf_counter() - start
    wait(last)
    return seconds / CHAIN


def _kernel_seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """Median GPU time of a call, and its number of kernels and copies."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(REPEATS):
                last = call()
            wait(last)
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
    events = [
        event
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    events.sort(key=lambda event: event.start_ns)
    size = len(events) // REPEATS
    per_call = [
        sum(event.duration_ns for event in events[i * size : (i + 1) * size])
        for i in range(REPEATS)
    ]
    return 1e-9 * statistics.median(per_call), len(events) / REPEATS


class Report:
    """Collects results; prints them when both clocks have been read; keeps them for ``--json``."""

    def __init__(self) -> None:
        device = jax.devices()[0]
        self.about = {
            "device": device.device_kind,
            "num_devices": len(jax.devices()),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        self.rows: list[dict[str, Any]] = []
        self._on_host: dict[tuple[str, str], Times] = {}
        print("  ".join(f"{name} {value}" for name, value in self.about.items()))

    @property
    def _last_pass(self) -> bool:
        return clock == "GPU" or not ON_GPU

    def title(self, text: str) -> None:
        if self._last_pass:
            print(f"\n{text}", flush=True)

    def note(self, text: str) -> None:
        if self._last_pass:
            print(f"  {text}", flush=True)
            self.rows.append({"note": text})

    def add(
        self, case: str, who: str, times: Times, *, num_bytes: int = 0, base: Times | None = None
    ) -> Times:
        """One line. num_bytes: moved by a call; base: ours, to print the ratio to."""
        if not self._last_pass:
            self._on_host[case, who] = times
            return times
        host = self._on_host.get((case, who), times)
        times = dataclasses.replace(times, synced=host.synced, dispatched=host.dispatched)
        row = {"case": case, "who": who, "num_bytes": num_bytes, **dataclasses.asdict(times)}
        text = f"  {case:<36} {who:<16}"
        if times.kernels is not None:
            text += f" GPU {1e6 * times.kernels:9.1f} us in {times.launches:3.0f}"
        text += f"  synced {1e6 * times.synced:9.1f}  async {1e6 * times.dispatched:9.1f}"
        if num_bytes:
            text += f"  {num_bytes / (times.kernels or times.synced) / 1e12:6.3f} TB/s"
        if base is not None:
            row["ours_to_this"] = _ratios(base, times)
            text += "  ours/this " + " ".join(f"{r:5.2f}" for r in row["ours_to_this"].values())
        self.rows.append(row)
        print(text, flush=True)
        return times

    def save(self, path: pathlib.Path) -> None:
        path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")


def _ratios(ours: Times, other: Times) -> dict[str, float]:
    pairs = {n: (getattr(ours, n), getattr(other, n)) for n in ("kernels", "synced", "dispatched")}
    return {name: mine / theirs for name, (mine, theirs) in pairs.items() if mine and theirs}
