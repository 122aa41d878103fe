"""Starts the processes of a scene, and collects what they say."""

import os
import pathlib
import pickle
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import jax

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 240  # of a scene, on a machine that has much else to do


class Scene(NamedTuple):
    """Processes that play a scene, and the folder of their results."""

    processes: list[subprocess.Popen]
    folder: pathlib.Path

    @classmethod
    def start(cls, name: str, count: int, folder: pathlib.Path) -> "Scene":
        """Starts all processes on this machine, with a device each."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for index in range(count):
            command = [sys.executable, "-m", "tests.hosts", name, str(index), str(count)]
            with open(folder / f"{index}.log", "w") as log:
                process = subprocess.Popen(
                    [*command, str(port), str(folder)],
                    env=environment(index, count),
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                )
            processes.append(process)
        return cls(processes, folder)

    def end(self) -> list[int]:
        """Waits for all processes; returns what each exited with."""
        try:
            return [process.wait(timeout=TIMEOUT_S) for process in self.processes]
        finally:
            self.stop()

    def stop(self) -> None:
        """Kills the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def results(self) -> list[Any]:
        statuses = self.end()
        for index, status in enumerate(statuses):
            assert status == 0, (self.folder / f"{index}.log").read_text()[-4000:]
        return [self.result(index) for index in range(len(statuses))]

    def result(self, index: int) -> Any:
        return pickle.loads((self.folder / f"{index}.pickle").read_bytes())


def environment(index: int, count: int) -> dict[str, str]:
    """Of a process with one device; strings hash differently in each."""
    own = {"PYTHONHASHSEED": str(index + 1), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if count <= num_gpus():
        return os.environ | own | {"CUDA_VISIBLE_DEVICES": str(index)}
    return os.environ | own | {"JAX_PLATFORMS": "cpu"}


def num_gpus() -> int:
    return len(jax.devices()) if jax.default_backend() == "gpu" else 0
