"""Layers from a JSON file, for models without a readable configuration. No jax.

The file holds an object::

    {"max_model_len": 131072,
     "layers": [{"kind": "full", "count": 32, "num_kv_heads": 8, "head_size": 128}]}

An entry has the fields of the spec of its kind, and ``count``. An entry with ``layers`` of its own
repeats them: ``{"count": 8, "layers": [...]}``. Layers are called ``layers.0``, ``layers.1`` ...
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv._src.internal.checks import check_count, check_positive
from jaxkv._src.internal.files import read_json
from jaxkv._src.internal.text import shown
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    RingSpec,
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
    "ring": RingSpec,
    "state": StateSpec,
    "shared": SharedKVSpec,
    "encoder_only": EncoderOnlySpec,
}
BLOCK_SIZE = 16
MAX_LAYERS = 10_000
SEE_HELP = "python -m jaxkv plan --help shows such a file"


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


def load_specs(path: str) -> SpecsFile:
    """Reads a file of specs.

    Raises:
      TypeError, ValueError: the file cannot be read, or an entry, which is named, is no spec.
    """
    try:
        data = read_json(pathlib.Path(path))
    except ValueError as error:
        raise ValueError(
            f"--specs={shown(path)} is not a readable JSON file ({error}); {SEE_HELP}"
        ) from error
    known = {"max_model_len", "max_encoder_tokens", "layers"}
    if not isinstance(data, Mapping) or not known >= set(data) >= {"max_model_len", "layers"}:
        raise ValueError(
            f"--specs={shown(path)} must hold an object with max_model_len, layers and, for cross "
            f"attention, max_encoder_tokens, got {_told(data)}; {SEE_HELP}"
        )
    encoder = data.get("max_encoder_tokens", 0)
    check_positive(**{"max_model_len of --specs": data["max_model_len"]})
    check_count(**{"max_encoder_tokens of --specs": encoder})
    specs = list(_specs(data["layers"], "layers"))
    layers = {f"layers.{i}": spec for i, spec in enumerate(specs)}
    return SpecsFile(layers, data["max_model_len"], encoder)


def _specs(entries: Any, path: str) -> Iterator[Spec]:
    if not isinstance(entries, list):
        raise TypeError(f"{path} of --specs must be a list of objects, got {shown(entries)}")
    for i, entry in enumerate(entries):
        here = f"{path}[{i}]"
        if not isinstance(entry, Mapping):
            raise TypeError(f"{here} of --specs must be an object, got {shown(entry)}")
        count = entry.get("count", 1)
        check_positive(**{f"{here}.count of --specs": count})
        specs = _inner(entry, here) if "layers" in entry else [_spec(entry, here)]
        if count * len(specs) > MAX_LAYERS:
            raise ValueError(f"{here}.count of --specs makes more than {MAX_LAYERS:,} layers")
        yield from specs * count


def _inner(entry: Mapping[str, Any], here: str) -> list[Spec]:
    """Returns the layers that an entry repeats."""
    if unknown := sorted(set(entry) - {"count", "layers"}):
        raise ValueError(
            f"{here} of --specs repeats layers and has no field {', '.join(unknown)}; its fields "
            "are layers and count"
        )
    return list(_specs(entry["layers"], f"{here}.layers"))


def _spec(entry: Mapping[str, Any], here: str) -> Spec:
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{here}.kind={shown(kind)} of --specs; use one of {', '.join(KINDS)}")
    fields = {name: v for name, v in entry.items() if name not in ("kind", "count")}
    if issubclass(KINDS[kind], LayerSpec):
        fields = {"block_size": BLOCK_SIZE, **fields}
    known = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(
            f"{here} of --specs: kind={kind!r} has no field {', '.join(unknown)}; its fields are "
            f"{', '.join(known)} and count"
        )
    missing = [name for name in known if name not in fields and _is_required(known[name])]
    if missing:
        raise ValueError(f"{here} of --specs: kind={kind!r} also needs {', '.join(missing)}")
    try:
        return KINDS[kind](**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{here} of --specs: {error}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _told(data: Any) -> str:
    """Returns the form of a file's content, for an error."""
    if isinstance(data, Mapping):
        return f"one with {', '.join(map(str, data)) or 'nothing'}"
    return f"a {type(data).__name__}"


def change_specs(
    layers: Mapping[str, Spec], *, kv_dtype: str | None, block_size: int | None
) -> dict[str, Spec]:
    """Returns layers with another dtype of keys and values, another block size, or both.

    Rows whose ``bytes_per_token`` is set keep these bytes.
    """
    changed = dict(layers)
    for name, spec in layers.items():
        changes: dict[str, Any] = {}
        if kv_dtype is not None and isinstance(spec, FullAttentionSpec | MLASpec):
            changes["dtype"] = kv_dtype
        if block_size is not None and isinstance(spec, LayerSpec) and spec.kind != "ring":
            changes["block_size"] = block_size
        if changes:
            changed[name] = dataclasses.replace(spec, **changes)
    return changed
