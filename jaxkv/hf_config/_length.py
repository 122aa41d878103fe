"""The longest request of a model, and the longest input of its encoder. No jax."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv._internal.checks import check_count, check_positive
from jaxkv.hf_config._families import open_config
from jaxkv.hf_config._fields import Config

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
# Kinds of RoPE whose files name the stretched length already, or that stretch nothing.
NOT_LENGTHENED = frozenset(
    """
    default llama3 longrope su yarn deepseek_yarn deepseek_llama_scaling mrope proportional axial
    """.split()
)
MAX_STRETCHED = 2**53  # tokens up to which a product with a float is exact
ALREADY = "gemma3"  # its files name the length after linear scaling


def model_len(config: Config) -> int:
    """Returns the model's own longest request, in tokens.

    It is the smallest length that the file names, or its ``model_max_length`` if there is one.
    The factor of linear and dynamic RoPE scaling multiplies it (Vicuna-16k: 4,096 * 4). That
    of YaRN does not, as in vLLM 0.33: published files name the stretched length, and whoever
    adds YaRN to a file raises ``max_position_embeddings`` too. LongRoPE counts as stretched.

    Args:
      config: the content of a ``config.json``.

    Raises:
      ValueError: the configuration does not say, or names an impossible length or factor.
    """
    reader, _ = open_config(config)
    fields = reader.fields
    given = {name: fields[name] for name in LENGTHS if fields.get(name) is not None}
    if fields.get("model_max_length") is not None:
        given = {"model_max_length": fields["model_max_length"]}
    if not given:
        raise ValueError(
            f"the configuration lacks {LENGTHS[0]!r}, its longest request; "
            "give max_model_len to plan_cache and do not ask for the model's own"
        )
    check_positive(**given)
    length, factor = min(given.values()), _factor(fields)
    if factor == 1 or ALREADY in reader.model_type:
        return length
    if length > MAX_STRETCHED or not math.isfinite(length * factor):
        raise ValueError(f"{length} tokens times a RoPE factor of {factor} is no length")
    return int(length * factor)


def _factor(fields: Config) -> float:
    """Returns what RoPE scaling multiplies the length by, 1 where it does not."""
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


def encoder_len(config: Config) -> int:
    """Returns the longest encoder input, in tokens; 0 without an encoder.

    It is the `Limits.max_encoder_tokens` of a plan for this model. Of Llama 3.2 Vision it is
    one image at its most tiles.

    Args:
      config: the content of a ``config.json``.

    Raises:
      ValueError: an encoder whose longest input the configuration does not name.
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
    """Returns the tokens of an image of Llama 3.2 Vision: per tile its patches and one more."""
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
