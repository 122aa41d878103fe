"""Bytes of a quantised checkpoint's matrices, by its ``quantization_config``. No jax."""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv._src.hf_config._weights._matrix import Matrix, Role
from jaxkv._src.internal.numbers import cdiv

SKIPPED = tuple(
    "modules_to_not_convert ignore ignored_layers exclude_modules llm_int8_skip_modules".split()
)
LAYERS: frozenset[Role] = frozenset({"linear", "expert"})
HEAD: frozenset[Role] = frozenset({"head"})
TOWER: frozenset[Role] = frozenset({"tower"})
EXPERTS: frozenset[Role] = frozenset({"expert"})
PREFIXES = "", "model.", "language_model.model.", "model.language_model.", "language_model."


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The stored form of quantised matrices; all others keep the model's dtype.

    name: name of the method, with its element type.
    bits: bits of an element.
    group: elements of a row that share a scale; 0: the whole row.
    rows: rows that share a scale.
    scale_bits: bits of a scale together with its zero point, if it has one.
    roles: roles of the matrices that are quantised.
    skipped: names or patterns of modules that are not quantised.
    experts: the scheme of experts, if it is another one.
    """

    name: str
    bits: int
    group: int = 0
    rows: int = 1
    scale_bits: int = 32
    roles: frozenset[Role] = LAYERS
    skipped: tuple[str, ...] = ()
    experts: "Scheme | None" = None

    def stores(self, matrix: Matrix) -> bool:
        """Returns whether a matrix is quantised."""
        return matrix.role in self.roles and not _is_named(matrix.name, self.skipped)

    def num_bytes(self, matrix: Matrix) -> int:
        """Returns the bytes of a quantised matrix with its scales."""
        if self.experts is not None and matrix.role == "expert":
            return self.experts.num_bytes(matrix)
        groups = cdiv(matrix.inputs, self.group or max(matrix.inputs, 1))
        scales = cdiv(matrix.outputs, self.rows) * groups
        bits = matrix.outputs * matrix.inputs * self.bits + scales * self.scale_bits
        return matrix.count * cdiv(bits, 8)


def read_scheme(config: Any, expert_dtype: Any = None) -> Scheme | None:
    """Returns the scheme of a ``quantization_config``, or None if it is empty.

    Args:
      config: content of the field.
      expert_dtype: "fp4" means experts in mxfp4 (DeepSeek-V4).

    Raises:
      ValueError: a method that is not understood.
    """
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config={config!r} must be an object")
    method = str(config.get("quant_method") or config.get("quant_algo")).lower()
    if method not in METHODS:
        raise ValueError(
            f"quantization_config.quant_method={method!r} is not understood, so the bytes of the "
            f"weights are not known; understood: {', '.join(METHODS)}"
        )
    lists = [config.get(key) for key in SKIPPED]
    names = [name for listed in lists if isinstance(listed, list) for name in listed]
    scheme = METHODS[method](config)
    if expert_dtype == "fp4":
        scheme = dataclasses.replace(scheme, name=f"mxfp4, {scheme.name}", experts=_mxfp4(config))
    return dataclasses.replace(scheme, skipped=tuple(map(str, names)))


def _number(config: Mapping[str, Any], *names: str, default: int) -> int:
    """Returns the first of the fields that is set; -1, the whole row, counts as 0."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ValueError(f"quantization_config.{names[0]}={value!r} must be an int")
    return max(value, 0)


def _awq(config: Mapping[str, Any]) -> Scheme:
    bits = _number(config, "bits", "w_bit", default=4)
    group = _number(config, "group_size", "q_group_size", default=128)
    return Scheme(f"awq int{bits}", bits, group, scale_bits=16 + bits)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    bits = _number(config, "bits", default=4)
    group = _number(config, "group_size", default=128)
    roles: frozenset[Role] = LAYERS | HEAD if config.get("lm_head") else LAYERS
    return Scheme(f"gptq int{bits}", bits, group, scale_bits=16 + bits, roles=roles)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    if block is None:
        return Scheme("fp8", 8)
    if not isinstance(block, Sequence) or [type(size) for size in block] != [int, int]:
        raise ValueError(f"quantization_config.weight_block_size={block!r} must be two ints")
    return Scheme("fp8", 8, group=max(block[1], 0), rows=max(block[0], 1))


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", 4, group=32, scale_bits=8, roles=EXPERTS)


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    roles = LAYERS | TOWER
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        return Scheme("bitsandbytes int8", 8, roles=roles)
    scale = 8 if config.get("bnb_4bit_use_double_quant") else 32
    kind = str(config.get("bnb_4bit_quant_type") or "fp4")
    return Scheme(f"bitsandbytes {kind}", 4, group=64, scale_bits=scale, roles=roles)


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    algorithm = str(config.get("quant_algo") or "").lower()
    if algorithm.startswith("fp8"):
        return Scheme("modelopt fp8", 8)
    if "nvfp4" in algorithm:
        return Scheme("modelopt nvfp4", 4, group=16, scale_bits=8)
    raise ValueError(
        f"quantization_config.quant_algo={config.get('quant_algo')!r} is not understood, so the "
        "bytes of the weights are not known; understood: FP8, NVFP4"
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups")
    members = groups.values() if isinstance(groups, Mapping) else ()
    weights = [g["weights"] for g in members if isinstance(g, Mapping) and g.get("weights")]
    stored = [w for w in weights if isinstance(w, Mapping)]
    sizes = {tuple(map(str, map(w.get, ("num_bits", "type", "group_size")))) for w in stored}
    bits = _number(stored[0], "num_bits", default=0) if stored else 0
    if len(sizes) != 1 or len(stored) != len(weights) or not bits:
        raise ValueError(
            "quantization_config.config_groups must store all weights in one form; the bytes of "
            "several are not understood"
        )
    group, kind = _number(stored[0], "group_size", default=0), stored[0].get("type")
    zero = 0 if stored[0].get("symmetric", True) else bits
    scale = 8 if kind == "float" and bits == 4 else 16 + zero  # nvfp4 scales are fp8
    name = f"compressed-tensors {'fp' if kind == 'float' else 'int'}{bits}"
    return Scheme(name, bits, group, scale_bits=scale, roles=LAYERS | HEAD)


METHODS = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}


def _is_named(module: str, patterns: Sequence[str]) -> bool:
    """Returns whether a list of modules that are not quantised names this one.

    Lists hold names, ends or beginnings of names, globs, and regular expressions after ``re:``.
    Wrappers add prefixes of their own to the names of the language model.
    """
    names = [f"{prefix}{module}" for prefix in PREFIXES]
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(re.match(pattern[3:], name) for name in names):
                return True
        elif any(fnmatch.fnmatchcase(name, pattern) for name in names) or (
            pattern.strip("*.") and f".{pattern.strip('*.')}." in f".{names[0]}."
        ):
            return True
        elif any(name.startswith(f"{pattern}.") for name in names):
            return True
    return False
