"""The longest request of a model, and the longest input of its encoder. No jax."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv._src.hf_config._families import open_config
from jaxkv._src.hf_config._fields import Config
from jaxkv._src.internal.checks import check_count, check_positive

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Kinds of RoPE scaling that stretch nothing, or whose files name the stretched length.
NOT_LENGTHENED = frozenset(
    """
    default llama3 longrope su yarn deepseek_yarn deepseek_llama_scaling mrope proportional axial
    """.split()
)
MAX_STRETCHED = 2**53  # tokens; a product with a float is exact up to here
STRETCHED = "gemma3"  # its files name the length after linear scaling


def model_len(config: Mapping[str, object]) -> int:
    """Returns the model's own longest request, in tokens.

    It is ``model_max_length`` if the file names that, else the smallest length that it names.
    Linear and dynamic RoPE scaling multiply it (Vicuna-16k: 4,096 * 4). YaRN and LongRoPE do
    not, as in vLLM 0.33, because published files name the stretched length; if you add YaRN to
    a file, raise ``max_position_embeddings`` too.

    Args:
      config: the content of a ``config.json``.

    Raises:
      ValueError: no length, or an impossible length or factor.
    """
    reader, _ = open_config(config)
    fields = reader.fields
    given = {name: fields[name] for name in LENGTHS if fields.get(name) is not None}
    if fields.get("model_max_length") is not None:
        given = {"model_max_length": fields["model_max_length"]}
    if not given:
        raise ValueError(
            f"the configuration lacks {LENGTHS[0]!r}, its longest request; "
            "give a max_model_len of your own to plan_cache"
        )
    check_positive(**given)
    length, factor = min(given.values()), _factor(fields)
    if factor == 1 or STRETCHED in reader.model_type:
        return length
    if length > MAX_STRETCHED or not math.isfinite(length * factor):
        raise ValueError(
            f"{length} tokens cannot be multiplied by a RoPE factor of {factor}; "
            "give a max_model_len of your own to plan_cache"
        )
    return int(length * factor)


def _factor(fields: Config) -> float:
    """Returns the factor of the length in RoPE scaling; 1 for none."""
    factor = 1.0
    for name, scaling in _rope(fields):
        value = scaling.get("factor")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}.factor={value!r} must be a number")
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name}.factor={value} must be a finite number above 0")
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if kind not in NOT_LENGTHENED:
            factor = max(factor, value)
    return factor


def _rope(fields: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the name and content of every RoPE scaling; files may have one per layer type."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if isinstance(scaling, Mapping):
            yield name, scaling
            for kind, inner in scaling.items():
                if isinstance(inner, Mapping):
                    yield f"{name}.{kind}", inner


def encoder_len(config: Mapping[str, object]) -> int:
    """Returns the longest encoder input, in tokens; 0 without an encoder.

    Pass it to a plan as `Limits.max_encoder_tokens`. For Llama 3.2 Vision it is one image with
    the most tiles.

    Args:
      config: the content of a ``config.json``.

    Raises:
      ValueError: an encoder, and no field with its longest input.
    """
    reader, family = open_config(config)
    fields = reader.fields
    if family is not None and family.encoder == "tiles":
        return _tiles(config)
    names = ["max_source_positions", "max_encoder_position_embeddings"]
    if family is not None and family.encoder == "tokens":
        names += ["n_positions", "max_position_embeddings"]
    given = [name for name in names if fields.get(name) is not None]
    if given:
        check_count(**{given[0]: fields[given[0]]})
        return fields[given[0]]
    if family is not None and family.encoder:
        raise ValueError(
            "the configuration names no longest encoder input; give Limits(max_encoder_tokens=...)"
        )
    return 0


def _tiles(config: Config) -> int:
    """Returns the tokens of an image of Llama 3.2 Vision: per tile its patches, and one more."""
    vision = config.get("vision_config")
    names = "max_num_tiles", "image_size", "patch_size"
    sizes: list[Any] = (
        [vision.get(name) for name in names] if isinstance(vision, Mapping) else [None]
    )
    if None in sizes:
        raise ValueError(f"vision_config must name {', '.join(names)}")
    check_positive(**dict(zip(names, sizes, strict=True)))
    tiles, image, patch = sizes
    return tiles * ((image // patch) ** 2 + 1)
