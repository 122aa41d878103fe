"""The spec of every layer, read from a configuration. No jax."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import get_args

from jaxkv._src.hf_config._build import Layers, Options, Replay
from jaxkv._src.hf_config._families import FAMILIES, open_config
from jaxkv._src.hf_config._fields import Config, check_config, inner_config
from jaxkv._src.hf_config._params_json import is_mistral
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._refused import REFUSED
from jaxkv._src.hf_config._wrappers import WRAPPERS
from jaxkv._src.internal.checks import check_choice, check_count, check_positive
from jaxkv._src.specs import CacheMode, EncoderOnlySpec, LayerSpec, SharedKVSpec

DEFAULTS = Options()
CLASS_ENDING = re.compile(r"(For\w+|Model|LMHeadModel)$")  # Qwen3MoeForCausalLM
SEPARATORS = re.compile(r"[^a-z0-9]")


def layers_from_config(
    config: Mapping[str, object],
    *,
    kv_dtype: str | None = None,
    block_size: int | None = None,
    tensor_parallel: int = 1,
    state_cache_mode: CacheMode = "none",
    speculative_tokens: int = 0,
    replay: Replay = 0,
) -> dict[str, LayerSpec | SharedKVSpec | EncoderOnlySpec]:
    """Returns the spec of every layer on one rank, by name and in the order of the model.

    A layer with several caches has a name for each: ``layers.3.full_attention`` and
    ``layers.3.mamba``.

    Args:
      config: the content of a ``config.json``. A multimodal model is read by its language model:
        ``text_config``, ``llm_config``, ``language_config`` or ``thinker_config``.
      kv_dtype: dtype of keys and values, such as "bf16", "fp8_e4m3" or "int4_per_token_head"
        (see `FullAttentionSpec`); None: the one that the file names, else the one that the family
        ships (`shipped_dtype`).
      block_size: tokens per block; None: the family's usual, 16, or 64 for latent attention.
        `plan_cache` takes a multiple of it where a block must hold a recurrent state.
      tensor_parallel: ranks among which KV heads and states are divided.
      state_cache_mode: ``cache_mode`` of a `StateSpec`; other layers ignore it.
      speculative_tokens: draft tokens per step; for each, a recurrent state keeps a block, or two
        rows of its ring with ``replay``; other layers ignore it.
      replay: tokens of a ring beside recurrent states, as for `StateSpec`; other layers ignore it.
        "auto": 8 where decodes were faster for it on an H200 (float32 or bfloat16, keys of 128,
        values of 64 or 128, one decay for each head, no draft tokens), and 0 for other states.

    Raises:
      TypeError: a configuration or a field of the wrong type.
      ValueError: an architecture or a field that is not understood, fields that contradict each
        other, or a missing field; states that cannot be replayed.
    """
    if block_size is not None:
        check_positive(block_size=block_size)
    check_positive(tensor_parallel=tensor_parallel)
    check_count(speculative_tokens=speculative_tokens)
    if isinstance(replay, str) and replay != "auto":
        raise ValueError(f'replay={replay!r} must be a number of tokens, or "auto"')
    if not isinstance(replay, str):
        check_count(replay=replay)
    check_choice(get_args(CacheMode), state_cache_mode=state_cache_mode)
    options = Options(
        kv_dtype=kv_dtype,
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        state_cache_mode=state_cache_mode,
        speculative_tokens=speculative_tokens,
        replay=replay,
    )
    return read_layers(config, options)[0]


def read_layers(config: Config, options: Options = DEFAULTS) -> tuple[Layers, ConfigReader]:
    """Returns the layers of `layers_from_config`, and a record of the fields that were read."""
    check_config(config)
    if str(outer := config.get("model_type")) in REFUSED:
        raise _not_understood(config, str(outer))
    reader, family = open_config(config, options.kv_dtype)
    if family is None:
        raise _not_understood(config, reader.model_type)
    layers = family.read(reader, options)
    reader.check_all_read()
    return layers, reader


def _not_understood(config: Config, model_type: str) -> ValueError:
    by_hand = (
        "Write its layer specs by hand and pass them to plan_cache: {'layers.0': "
        "FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128), ...}; the command line "
        "reads them from --specs FILE"
    )
    if model_type in REFUSED:
        return ValueError(f"model_type={model_type!r} is refused: {REFUSED[model_type]}. {by_hand}")
    if config.get("model_type") is None and not config.get("architectures"):
        if reason := _other_file(config):
            return ValueError(f"config is no config.json of a language model: {reason}")
        given = ", ".join(sorted(map(str, config))[:8]) or "nothing"
        return ValueError(
            f"config has no model_type, as every config.json of Hugging Face has; it has {given}. "
            f"{by_hand}"
        )
    named = config.get("model_type") if inner_config(config) is None else model_type
    known = [*FAMILIES, *WRAPPERS]
    nearest = _nearest(model_type, config.get("architectures"), known)
    near = f"; the nearest of {len(known)} that are: {', '.join(nearest)}" if nearest else ""
    return ValueError(
        f"model_type={named!r} (architectures={config.get('architectures')}) is not understood"
        f"{near}. {by_hand}"
    )


def _other_file(config: Config) -> str | None:
    """Returns what a file without a model type is, and which one to take; None: unknown."""
    if "_class_name" in config or "_diffusers_version" in config:
        return (
            f"diffusers writes such a file, of a {config.get('_class_name')}. It denoises and "
            "keeps no cache; plan the config.json of a language model inside of it, if it has one"
        )
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        return f"it is an adapter; pass the config.json of its base model, {base}"
    if is_mistral(config):
        return (
            "it is Mistral's params.json; load_config(path) reads it by the names of Transformers"
        )
    if {"dim", "n_layers"} <= {*config}:
        return (
            "it is a params.json, in a form of the model's makers; pass the config.json of "
            "Transformers, in the same repository or in one whose name ends in -HF or -hf"
        )
    return None


def _nearest(model_type: str, architectures: object, known: Sequence[str]) -> list[str]:
    """Returns up to five of the known model types like this one, or like its architectures.

    Args:
      model_type: what the file names.
      architectures: names of classes, such as ``["Qwen3MoeForCausalLM"]``; anything else counts as
        none.
      known: the model types that are understood.
    """
    classes = architectures if isinstance(architectures, Sequence) else ()
    plain = {SEPARATORS.sub("", name): name for name in reversed(known)}

    def near(word: str, cutoff: float) -> list[str]:
        word = SEPARATORS.sub("", word[:100].lower())
        return [plain[name] for name in difflib.get_close_matches(word, plain, 5, cutoff)]

    found = near(model_type, 0.7)
    for name in classes[:4]:
        found += near(CLASS_ENDING.sub("", str(name)[:100]), 0.7)
    return list(dict.fromkeys(found))[:5]


def shipped_dtype(config: Config) -> str | None:
    """Returns the dtype that the family ships; None if it is not known, or if the file names one.

    Args:
      config: the content of a ``config.json``.
    """
    reader, family = open_config(config)
    return family.dtype if family and reader.named_dtype() is None else None
