"""Clocks and sizes of all benchmarks, and the report that prints and keeps a run.

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
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

ON_GPU = jax.default_backend() == "gpu"
REPEATS, CHAIN, ROUNDS = 20, 50, 5
Size = Literal["smallest", "small", "full"]

# "host" or "GPU". A process that was profiled once dispatches more slowly ever after, so a
# run first reads the host's clock everywhere, and then goes through all of it again.
clock = "host"
every_case = False  # also those that the default run leaves out, because they take minutes
size: Size = "full" if ON_GPU else "small"
served_case: str | None = None  # the only one that the part `served` runs
served_devices = 1  # over which the part `served` divides models
vllm_engine: pathlib.Path | None = None  # folder of vLLM and of what it needs beside torch


def by_size[T](*, full: T, small: T, smallest: T) -> T:
    """Returns what goes with the size of this run."""
    return {"full": full, "small": small, "smallest": smallest}[size]


def device_counts() -> list[int]:
    """Returns the numbers of devices to compare: 1, 2, 4 and 8, if there are that many."""
    most = by_size(full=8, small=8, smallest=2)
    return [count for count in (1, 2, 4, 8) if count <= min(most, len(jax.devices()))]


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


class Subject(NamedTuple):
    """A call to time.

    call: runs once and returns what ``wait`` waits for.
    wait: blocks until a call is done.
    prepare: runs before each call, untimed, and returns what ``wait`` waits for.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = poll
    prepare: Callable[[], Any] | None = None


def measure(call: Callable[[], Any], wait: Callable[[Any], Any] = poll) -> Times:
    """Times one call, after warming it up, by the clock that `clock` names."""
    (times,) = measure_in_turns(Subject(call, wait))
    return times


def measure_in_turns(*subjects: Subject) -> list[Times]:
    """Times calls that are compared, by the clock that `clock` names.

    They take turns, because a host that others use too may run at half its speed for seconds.
    """
    counts = [_affordable_calls(subject) for subject in subjects]
    if clock == "GPU":
        return [Times(*_kernel_seconds(*subject)) for subject in subjects]
    synced: list[list[float]] = [[] for _ in subjects]
    dispatched: list[list[float]] = [[] for _ in subjects]
    for _ in range(ROUNDS):
        for i, (subject, count) in enumerate(zip(subjects, counts, strict=True)):
            if len(subjects) > 1 and subject.prepare is None:
                _warm_up(subject)  # the others' data lie in the caches
            synced[i] += [_synced_seconds(subject) for _ in range(max(1, count // ROUNDS))]
            dispatched[i] += _dispatch_seconds(subject, count)
    return [
        Times(synced=statistics.median(waited), dispatched=statistics.median(chains))
        for waited, chains in zip(synced, dispatched, strict=True)
    ]


def _warm_up(subject: Subject) -> float:
    """Makes some calls, and returns the seconds of the last one."""
    for _ in range(2 if size == "smallest" else 3):
        last = _synced_seconds(subject)
    return last


def _affordable_calls(subject: Subject) -> int:
    """Warms a call up. Returns how often to repeat it: ``CHAIN`` times, or for about a second."""
    share = 1 if subject.prepare is None else 4
    most = 2 if size == "smallest" else CHAIN // share
    return max(2, min(most, int(1 / max(_warm_up(subject), 1e-6))))


def _synced_seconds(subject: Subject) -> float:
    _prepare(subject)
    started = time.perf_counter()
    subject.wait(subject.call())
    return time.perf_counter() - started


def _dispatch_seconds(subject: Subject, count: int) -> list[float]:
    """Returns the seconds of calls that are not waited for: of a chain each, or of each call."""
    if subject.prepare is None:
        return [_chain_seconds(subject, count) / count]
    found = []
    for _ in range(max(1, count // ROUNDS)):
        _prepare(subject)
        found.append(_chain_seconds(subject, 1))
    return found


def _chain_seconds(subject: Subject, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        last = subject.call()
    seconds = time.perf_counter() - started
    subject.wait(last)
    return seconds


def _prepare(subject: Subject) -> None:
    if subject.prepare is not None:
        subject.wait(subject.prepare())


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the median of each list of seconds, in microseconds."""
    return {name: 1e6 * statistics.median(seconds) for name, seconds in samples.items()}


def make_matrix() -> jax.Array:
    """A matrix for `work`."""
    size = 1024 if ON_GPU else 64
    return jnp.full((size, size), 0.01, jnp.bfloat16)


def work(matrix: jax.Array) -> jax.Array:
    """Stands for the step that a caller runs anyway: some 200 us on an H200."""
    for _ in range(20):
        matrix = jnp.tanh(matrix @ matrix)
    return matrix


def added(more: Times, less: Times) -> str:
    """Returns the extra cost of one call over another, by each clock, as text."""
    texts = []
    for name in ("kernels", "synced", "dispatched"):
        pair = getattr(more, name), getattr(less, name)
        if None not in pair:
            texts.append(f"{name} {1e6 * (pair[0] - pair[1]):.1f} us")
    return ", ".join(texts)


def _kernel_seconds(
    call: Callable[[], Any], wait: Callable[[Any], Any], prepare: Callable[[], Any] | None
) -> tuple[float, float]:
    """Median GPU time of a call, and its number of kernels and copies."""
    if prepare is None:
        events = [ns for _, _, ns in gpu_events(call, wait, REPEATS)]
        each = len(events) // REPEATS
        per_call = [sum(events[i * each : (i + 1) * each]) for i in range(REPEATS)]
        return 1e-9 * statistics.median(per_call), len(events) / REPEATS
    traces: list[list[float]] = []
    for _ in range(REPEATS // 4):
        wait(prepare())
        traces.append([ns for _, _, ns in gpu_events(call, wait, 1)])
    launches = statistics.median(len(events) for events in traces)
    return 1e-9 * statistics.median(map(sum, traces)), launches


class KernelEvent(NamedTuple):
    """A kernel or copy that a GPU ran."""

    name: str
    start_ns: float
    duration_ns: float


def gpu_events(
    call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, *, device: str = ""
) -> list[KernelEvent]:
    """Returns the kernels and copies of some calls, in order; none where there is no GPU.

    Args:
      device: the number of one GPU; "": of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                last = call()
            wait(last)
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
    events = [
        KernelEvent(event.name, event.start_ns, event.duration_ns)
        for plane in data.planes
        if plane.name.startswith(f"/device:GPU:{device}")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(events, key=lambda event: event.start_ns)


class Report:
    """Collects results; prints them when both clocks have been read; keeps them for ``--json``.

    prints: whether this pass prints; the pass before it reads the host's clock alone.
    """

    def __init__(self) -> None:
        device = jax.devices()[0]
        self.about = {
            "device": device.device_kind,
            "num_devices": len(jax.devices()),
            "size": size,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        self.rows: list[dict[str, Any]] = []
        self.prints = True
        self._on_host: dict[tuple[str, str], Times] = {}
        print("  ".join(f"{name} {value}" for name, value in self.about.items()))

    def title(self, text: str) -> None:
        if self.prints:
            print(f"\n{text}", flush=True)

    def note(self, text: str, **figures: float) -> None:
        """One line of text; ``figures`` go with it into ``--json``."""
        if self.prints:
            print(f"  {text}", flush=True)
            self.rows.append({"note": text, **figures})

    def add(
        self, case: str, who: str, times: Times, *, num_bytes: int = 0, base: Times | None = None
    ) -> Times:
        """One line. num_bytes: moved by a call; base: ours, to print the ratio to."""
        if not self.prints:
            self._on_host[case, who] = times
            return times
        host = self._on_host.get((case, who), times)
        times = dataclasses.replace(times, synced=host.synced, dispatched=host.dispatched)
        row = {"case": case, "who": who, "num_bytes": num_bytes, **dataclasses.asdict(times)}
        text = f"  {case:<40} {who:<16}"
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
