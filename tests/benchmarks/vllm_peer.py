"""vLLM's own code, loaded from a folder of its Python files, to be timed next to ours.

Only the modules that are timed are vLLM's; every other module of vLLM that they import is a
stand-in. `VllmPeer.manager` is pure Python and runs anywhere; without torch, which it needs
for the names of dtypes alone, torch is a stand-in as well. The tables, the zeroing kernel and
unified attention are Triton code: they need torch, Triton and a GPU. FA3 is compiled code. The
folder holds ``vllm/``, as unzipped from a wheel::

    pip download --no-deps vllm==0.33.0
    unzip -q vllm-0.33.0-*.whl 'vllm/*.py' '*/_vllm_fa3_C.abi3.so' '*/ops/configs/*.json' -d DIR
"""

import contextlib
import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import pathlib
import sys
import types
from typing import Any

PACKAGES = (
    *("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.worker", "vllm.v1.worker.gpu"),
    *("vllm.v1.attention", "vllm.v1.attention.ops"),
)
MANAGER_MODULES = (
    "vllm.utils.math_utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.request",
)
TABLE_MODULES = (
    "vllm.v1.worker.gpu.block_table",
    "vllm.v1.worker.gpu.buffer_utils",
    "vllm.v1.worker.gpu.input_batch",
    "vllm.v1.worker.utils",
)
ATTENTION_MODULES = (
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.v1.attention.ops.triton_attention_helpers",
)
RECURRENT_OPS, MAMBA_OPS = (
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.model_executor.layers.mamba.ops",
)
# The kernels that are timed, by the module that holds them; these import others of their folders.
RECURRENT_KERNELS = {
    "chunk_gated_delta_rule": f"{RECURRENT_OPS}.chunk",
    "fused_recurrent_gated_delta_rule": f"{RECURRENT_OPS}.fused_recurrent",
    "fused_recurrent_gated_delta_rule_packed_decode": f"{RECURRENT_OPS}.fused_recurrent",
    "causal_conv1d_fn": f"{MAMBA_OPS}.causal_conv1d",
    "causal_conv1d_update": f"{MAMBA_OPS}.causal_conv1d",
    "selective_state_update": f"{MAMBA_OPS}.mamba_ssm",
}
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


class VllmPeer:
    """The parts of vLLM that are timed, each loaded when it is first used."""

    def __init__(self, folder: str | pathlib.Path):
        root = self._root = pathlib.Path(folder)
        if not (root / "vllm/v1/core/kv_cache_manager.py").is_file():
            raise FileNotFoundError(f"{root} holds no vllm/v1/core/kv_cache_manager.py")
        sys.meta_path.insert(0, _StandIns(root))

    @functools.cached_property
    def has_tables(self) -> bool:
        """Whether the tables and the zeroing kernel can run here."""
        if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
            return False
        import torch

        return torch.cuda.is_available()

    @functools.cached_property
    def manager(self) -> types.SimpleNamespace:
        """`KVCacheManager`, `Request` and the specs of groups, by name."""
        torch = None if importlib.util.find_spec("torch") else _StandIn("torch")
        if torch:
            sys.modules["torch"] = torch
        try:
            modules = [importlib.import_module(name) for name in MANAGER_MODULES]
        finally:
            if torch:
                del sys.modules["torch"]
        names = {name: value for module in modules for name, value in vars(module).items()}
        return types.SimpleNamespace(**names)

    @functools.cached_property
    def tables(self) -> types.SimpleNamespace:
        """`BlockTables`, the kernel of positions, and how inputs are uploaded."""
        return types.SimpleNamespace(
            BlockTables=importlib.import_module(TABLE_MODULES[0]).BlockTables,
            prepare_pos_seq_lens=importlib.import_module(TABLE_MODULES[2]).prepare_pos_seq_lens,
            upload=_async_tensor_h2d,
        )

    @functools.cached_property
    def attention(self) -> types.SimpleNamespace:
        """`unified_attention`, Triton code."""
        module = importlib.import_module(ATTENTION_MODULES[0])
        return types.SimpleNamespace(unified_attention=module.unified_attention)

    @functools.cached_property
    def recurrent(self) -> types.SimpleNamespace:
        """Triton code of recurrent layers, by the names of `RECURRENT_KERNELS`."""
        modules = {
            name: importlib.import_module(where) for name, where in RECURRENT_KERNELS.items()
        }
        return types.SimpleNamespace(
            **{name: getattr(module, name) for name, module in modules.items()}
        )

    def flash_attention_3(self) -> Any:
        """Returns the forward pass of FA3, as torch knows it.

        Raises:
          FileNotFoundError: the folder does not hold its library.
        """
        import torch

        if not (self._root / FA3).is_file():
            raise FileNotFoundError(f"{self._root} holds no {FA3}")
        torch.ops.load_library(str(self._root / FA3))
        return torch.ops._vllm_fa3_C.fwd

    @functools.cached_property
    def zero_kernel(self) -> Any:
        """The Triton kernel that zeroes blocks."""
        return importlib.import_module(TABLE_MODULES[3])._zero_kv_blocks_kernel


class _AnyClass(type):
    """Gives a class any attribute: a function that returns None."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Anything(metaclass=_AnyClass):
    """A class that any imported name may be: only annotations and idle code use it."""

    def __init__(self, *_: Any, **__: Any):
        pass


class _Platform(_Anything):
    @staticmethod
    def fp8_dtype() -> Any:
        import torch

        return torch.float8_e4m3fn

    @staticmethod
    def is_cuda() -> bool:
        return True

    @staticmethod
    def is_cuda_alike() -> bool:
        return True

    @staticmethod
    def is_arch_support_pdl() -> bool:
        return False


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
        file = self._root / (fullname.replace(".", "/") + ".py")
        is_recurrent = (
            fullname.startswith((f"{RECURRENT_OPS}.", f"{MAMBA_OPS}.")) and file.is_file()
        )
        if is_recurrent or fullname in (*MANAGER_MODULES, *TABLE_MODULES, *ATTENTION_MODULES):
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name) if spec.name in PACKAGES else _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _real_names(module.__name__).items():
            setattr(module, name, value)


def _real_names(module: str) -> dict[str, Any]:
    """Returns the names that have to be more than a stand-in."""
    logger: Any = logging.getLogger("vllm")
    logger.info_once = logger.warning_once = lambda *_, **__: None
    if module == "vllm.triton_utils":
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice

        return {"tl": tl, "triton": triton, "tldevice": libdevice, "HAS_TRITON": True}
    return {
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda ids, embeds: len(ids)},
        "vllm.utils.platform_utils": {
            "is_uva_available": lambda: True,
            "get_device_name_as_file_name": _device_name,
        },
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": _async_tensor_h2d,
            "get_accelerator_view_from_cpu_tensor": _device_view,
            "get_dtype_size": {"bf16": 2, "f32": 4}.__getitem__,
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.platforms": {"current_platform": _Platform},
        "vllm.v1.attention.backends.registry": {
            "MambaAttentionBackendEnum": enum.Enum("MambaAttentionBackendEnum", "MAMBA2")
        },
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1, "NULL_BLOCK_ID": 0},
        "vllm.v1.utils": {"ConstantList": lambda values: values},  # theirs refuses to be changed
    }.get(module, {})


def _async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """As vLLM: a fresh pinned staging tensor and an asynchronous copy."""
    import torch

    if isinstance(data, list):
        staged = torch.tensor(data, dtype=dtype, pin_memory=True, device="cpu")
    else:
        given = data if torch.is_tensor(data) else torch.from_numpy(data)
        staged = torch.empty(given.shape, dtype=dtype or given.dtype, pin_memory=True).copy_(given)
    if out is not None:
        return out.copy_(staged, non_blocking=True)
    return staged.to(device=device, dtype=dtype, non_blocking=True)


def _device_name() -> str:
    """As vLLM: the name of its tuned configurations."""
    import torch

    return torch.cuda.get_device_name().replace(" ", "_")


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
