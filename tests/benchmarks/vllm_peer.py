"""vLLM's own Triton code, loaded from a folder of its Python files, to be timed beside ours.

Knows which few names `BlockTables` and the zeroing kernel import from the rest of vLLM and
gives each a stand-in; everything that is timed is vLLM's. Needs torch and triton. The
folder holds ``vllm/``, as unzipped from a wheel:

    pip download --no-deps vllm==0.33.0
    unzip -q vllm-0.33.0-*.whl 'vllm/v1/worker/*.py' -d DIR
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import pathlib
import sys
import types
from typing import Any

PACKAGES = ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu")
MODULES = (
    "vllm.v1.worker.gpu.block_table",
    "vllm.v1.worker.gpu.buffer_utils",
    "vllm.v1.worker.gpu.input_batch",
    "vllm.v1.worker.utils",
)


class VllmPeer:
    """The parts of vLLM that are timed."""

    def __init__(self, folder: str | pathlib.Path):
        root = pathlib.Path(folder)
        if not (root / "vllm/v1/worker/gpu/block_table.py").is_file():
            raise FileNotFoundError(f"{root} holds no vllm/v1/worker/gpu/block_table.py")
        sys.meta_path.insert(0, _StandIns(root))
        self.BlockTables = importlib.import_module(MODULES[0]).BlockTables
        self.prepare_pos_seq_lens = importlib.import_module(MODULES[2]).prepare_pos_seq_lens
        self.zero_kernel = importlib.import_module(MODULES[3])._zero_kv_blocks_kernel
        self.upload = _async_tensor_h2d


class _Anything:
    """A class that any imported name may be: only annotations and base classes use it."""

    def __init__(self, *_: Any, **__: Any):
        pass


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's modules: the timed ones in the folder, stand-ins for all others."""

    def __init__(self, root: pathlib.Path):
        self._root = root

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "vllm":
            return None
        if fullname in MODULES:
            file = self._root / (fullname.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name) if spec.name in PACKAGES else _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _real_names().get(module.__name__, {}).items():
            setattr(module, name, value)


def _real_names() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    logger = logging.getLogger("vllm")
    return {
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.platform_utils": {"is_uva_available": lambda: True},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": _async_tensor_h2d,
            "get_accelerator_view_from_cpu_tensor": _device_view,
        },
        "vllm.utils.math_utils": {"largest_power_of_2_divisor": lambda n: n & -n},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
    }


def _async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """As vLLM: a fresh pinned staging tensor and an asynchronous copy."""
    import torch

    if isinstance(data, list):
        staged = torch.tensor(data, dtype=dtype, pin_memory=True, device="cpu")
    else:
        given = torch.from_numpy(data)
        staged = torch.empty(given.shape, dtype=dtype or given.dtype, pin_memory=True).copy_(given)
    if out is not None:
        return out.copy_(staged, non_blocking=True)
    return staged.to(device=device, dtype=dtype, non_blocking=True)


def _device_view(pinned: Any) -> Any:
    """A pinned host tensor as a CUDA tensor; vLLM's own helper is compiled code."""
    import torch

    view = types.SimpleNamespace()
    view.__cuda_array_interface__ = {
        "shape": tuple(pinned.shape),
        "typestr": "<i4" if pinned.dtype == torch.int32 else "<i8",
        "data": (pinned.data_ptr(), False),
        "version": 2,
    }
    return torch.as_tensor(view, device="cuda")
