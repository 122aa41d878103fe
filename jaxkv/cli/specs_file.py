"""Layers from a JSON file, for models that no configuration describes. No jax.

The file holds an object::

    {"max_model_len": 131072,
     "layers": [{"kind": "full", "count": 32, "num_kv_heads": 8, "head_size": 128}]}

An entry has the fields of the spec of its kind, and ``count``. An entry with ``layers`` of its own
repeats them: ``{"count": 8, "layers": [...]}``. Layers are called ``layers.0``, ``layers.1`` ...
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv._internal.checks import check_count, check_positive
from jaxkv.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    SharedKVSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)

Spec = LayerSpec | SharedKVSpec | EncoderOnlySpec

KINDS: dict[str, type[Any]] = {
    "full": FullAttentionSpec,
    "sliding": SlidingWindowSpec,
    "chunked": ChunkedAttentionSpec,
    "cross": CrossAttentionSpec,
    "mla": MLASpec,
    "sliding_mla": SlidingWindowMLASpec,
    "state": StateSpec,
    "shared": SharedKVSpec,
    "encoder_only": EncoderOnlySpec,
}
BLOCK_SIZE = 16
MAX_LAYERS = 10_000


@dataclasses.dataclass(frozen=True)
class SpecsFile:
    """The layers of one rank, and the model's own length.

    layers: name -> spec.
    max_model_len: tokens of the longest request.
    max_encoder_tokens: tokens of the longest encoder input.
    """

    layers: dict[str, Spec]
    max_model_len: int
    max_encoder_tokens: int = 0


class SpecsFileError(ValueError):
    """The file does not hold specs; the message names the entry."""


def load_specs(path: str) -> SpecsFile:
    """Reads a file of specs.

    Raises:
      SpecsFileError: not such a file.
    """
    try:
        return _load(path)
    except (TypeError, ValueError) as error:
        raise SpecsFileError(str(error)) from error


def _load(path: str) -> SpecsFile:
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--specs={path!r} is not a readable JSON file ({error})") from error
    known = {"max_model_len", "max_encoder_tokens", "layers"}
    if not isinstance(data, Mapping) or not known >= set(data) >= {"max_model_len", "layers"}:
        raise ValueError(
            f"--specs={path!r} must hold an object with max_model_len, layers and, for cross "
            "attention, max_encoder_tokens"
        )
    encoder = data.get("max_encoder_tokens", 0)
    check_positive(**{"max_model_len of --specs": data["max_model_len"]})
    check_count(**{"max_encoder_tokens of --specs": encoder})
    specs = list(_specs(data["layers"], "layers"))
    layers = {f"layers.{i}": spec for i, spec in enumerate(specs)}
    return SpecsFile(layers, data["max_model_len"], encoder)


def _specs(entries: Any, place: str) -> Iterator[Spec]:
    if not isinstance(entries, list):
        raise TypeError(f"{place} of --specs must be a list of objects, got {entries!r}")
    for i, entry in enumerate(entries):
        here = f"{place}[{i}]"
        if not isinstance(entry, Mapping):
            raise TypeError(f"{here} of --specs must be an object, got {entry!r}")
        count = entry.get("count", 1)
        check_positive(**{f"{here}.count of --specs": count})
        inner = [*_specs(entry["layers"], f"{here}.layers")] if "layers" in entry else None
        specs = [_spec(entry, here)] if inner is None else inner
        if count * len(specs) > MAX_LAYERS:
            raise ValueError(f"{here}.count of --specs makes more than {MAX_LAYERS:,} layers")
        yield from specs * count


def _spec(entry: Mapping[str, Any], here: str) -> Spec:
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{here}.kind={kind!r} of --specs; use one of {', '.join(KINDS)}")
    fields = {name: _frozen(v) for name, v in entry.items() if name not in ("kind", "count")}
    if issubclass(KINDS[kind], LayerSpec):
        fields = {"block_size": BLOCK_SIZE, **fields}
    try:
        return KINDS[kind](**fields)
    except (TypeError, ValueError) as error:
        reason = str(error).partition("__init__() ")[2] or str(error)
        raise ValueError(f"{here} of --specs: {reason}") from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def change_specs(
    layers: Mapping[str, Spec], *, kv_dtype: str | None, block_size: int | None
) -> dict[str, Spec]:
    """Returns layers with another dtype of keys and values, another block size, or both.

    Rows of a size of their own (``bytes_per_token``) keep it.
    """
    changed = dict(layers)
    for name, spec in layers.items():
        changes: dict[str, Any] = {}
        if kv_dtype is not None and isinstance(spec, FullAttentionSpec | MLASpec):
            changes["dtype"] = kv_dtype
        if block_size is not None and isinstance(spec, LayerSpec):
            changes["block_size"] = block_size
        if changes:
            changed[name] = dataclasses.replace(spec, **changes)
    return changed
