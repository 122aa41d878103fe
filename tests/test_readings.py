"""The answers about configurations, recorded, so that no change of one goes unseen.

The other tests hold answers against sources outside. This one holds every answer, and every
refusal, against those of before: for the configurations of ``golden/``, for each field that the
code asks of them left out or set to other values, and for parts of the code by themselves with
every two of their fields. ``golden/readings.json`` keeps a digest for each model type and part
(`tests.reading_parts`).

    python -m tests.test_readings llama    # prints the answers, to compare those of two commits
    python -m tests.test_readings --write  # records them
"""

import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jaxkv._src.hf_config import (
    _layers,
    count_weights,
    encoder_len,
    layers_from_config,
    load_config,
    model_len,
    preset_names,
    shipped_dtype,
)
from jaxkv._src.hf_config._families import open_config
from jaxkv._src.hf_config._mla import V4_KINDS
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._weights import _feed_forward
from jaxkv._src.hf_config._weights._matrix import Fields
from jaxkv._src.hf_config._weights._traits import TRAITS
from tests.changed_configs import ABSENT, Config, changed, innermost, shortened, walk
from tests.reading_parts import FEED_FORWARD, PARTS, TOWER, answer
from tests.test_hf_families import DEFAULTS, GOLDEN, KINDS, PUBLISHED, expanded
from tests.test_weights import GOLDEN as PARAMETERS

READINGS = pathlib.Path(__file__).parent / "golden" / "readings.json"
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_dtype": "bf16"},
    {"kv_dtype": "bf16", "tensor_parallel": 2},
    {"kv_dtype": "fp8", "tensor_parallel": 3},
    {"kv_dtype": "fp8", "block_size": 32, "speculative_tokens": 2, "state_cache_mode": "align"},
)
DTYPES = ("torch_dtype", "dtype", "quantization_config", "compression_config")
FORMS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"quant_method": "fp8", "weight_block_size": [48, 112]},
    {"quant_method": "gptq", "bits": 3, "group_size": 96, "lm_head": True},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "mxfp4"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["layers.0", "*o_proj"]},
)
SIZES = {"vocab_size": 1000, "intermediate_size": 352, "moe_intermediate_size": 96}
SIZES |= {"num_experts": 4, "num_local_experts": 4}
Configs = dict[str, list[Config]]


def configurations() -> tuple[Configs, Configs]:
    """The configurations of caches, and those of weights, by their model type."""
    presets = [load_config(name) for name in preset_names()]
    rows = *DEFAULTS.values(), *GOLDEN["drawn"]
    configs = [*PUBLISHED.values(), *(row["config"] for row in rows)]
    weighed = [model["config"] for model in PARAMETERS["models"]]
    v4 = load_config("deepseek-v4-flash")
    kinds = {ratio: kind for kind, ratio in V4_KINDS.items()}
    by_kind = {"layer_types": [kinds[r] for r in v4["compress_ratios"]], "compress_ratios": None}
    presets.append(v4 | by_kind)
    counts = {"num_hidden_layers": 7, "num_layers": 7}
    configs += [counts | config | {"model_type": kind} for kind, (config, _) in KINDS.items()]
    caches, weights = by_type([*map(expanded, configs), *presets]), by_type([*weighed, *presets])
    for kind in sorted(
        set(caches) & set(TRAITS) - set(weights)
    ):  # their files have no sizes of weights
        weights[kind] = [SIZES | caches[kind][0]]
    return caches, weights


def by_type(configs: list[Config]) -> Configs:
    found: Configs = {}
    for config in configs:
        found.setdefault(config["model_type"], []).append(config)
    return found


def ask_caches(config: Config, field: str) -> tuple[str, set[str]]:
    """The layers of a configuration, and the fields that are read for them."""
    opened: list[ConfigReader] = []
    inside: list[tuple[str, ConfigReader]] = []

    def spied_open(*args: Any) -> Any:
        reader, family = open_config(*args)
        opened.append(reader)
        return reader, family

    def spied_inner(reader: ConfigReader, name: str) -> ConfigReader:
        inside.append((name, INNER(reader, name)))
        return inside[-1][1]

    with (
        mock.patch.object(_layers, "open_config", spied_open),
        mock.patch.object(ConfigReader, "inner", spied_inner),
    ):
        plain = field in DTYPES or config.get("model_type") == "deepseek_v4"  # which refuses bf16
        options = OPTIONS[0] if plain else OPTIONS[1]
        line = answer(layers_from_config, config, **options)
    asked = {field for reader in opened for field in reader._read}
    return line, asked | {f"{name}/{f}" for name, reader in inside for f in reader._read}


INNER, FIRST = ConfigReader.inner, Fields.first


def ask_weights(config: Config, field: str) -> tuple[str, set[str]]:
    """The weights of a configuration, and the fields that are read for their sizes.

    Of those that all types have, which parts by themselves are asked for, only the ones there.
    """
    asked: set[str] = set()

    def spied(fields: Fields, *names: str) -> Any:
        asked.update(names)
        return FIRST(fields, *names)

    with mock.patch.object(Fields, "first", spied):
        line = answer(count_weights, config, drafts=True)
    return line, asked - {*FEED_FORWARD, *TOWER} | asked & set(innermost(config))


def base_answers(config: Config, turn: int, weights: bool) -> Iterator[str]:
    """The answers about a configuration as it is."""
    if weights:
        for form in (None, FORMS[turn % len(FORMS)]):
            quantized = {"quantization_config": form} if form else {}
            yield answer(count_weights, config | quantized, drafts=not form)
        return
    options = OPTIONS[open_config(config)[0].named_dtype() is None]
    yield answer(layers_from_config, config, **options)
    yield from (answer(question, config) for question in (model_len, encoder_len, shipped_dtype))


def without_defaults(config: Config) -> Config:
    """The configuration in 70 layers, without the fields for which its class has values."""
    _, family = open_config(config)
    for name in (*family.defaults, *family.inner, *family.same) if family else ():
        config = changed(config, name)
    return changed(config, "num_hidden_layers", 70)


NAMED = {"llama4_text", "nemotron_h", "zamba2", "whisper", "t5"}  # in the code of weights


def code_of(config: Config, ask: Any) -> Any:
    """Returns the traits by which the code tells model types apart."""
    reader, family = open_config(config)
    if ask is ask_caches:
        return id(family)
    if reader.model_type in NAMED:
        return reader.model_type
    layers = layers_from_config(changed(config, "torch_dtype", "bfloat16"))
    experts = any(innermost(config).get(name) for name in _feed_forward.EXPERTS)
    return TRAITS.get(reader.model_type), {name.split(".")[-1] for name in layers}, experts


def answers_by_type() -> Iterator[tuple[str, Iterator[str]]]:
    """Yields each model type with the answers about its configurations.

    Of the types that the code does not tell apart, the first is also asked with changes.
    """
    caches, weights = configurations()
    known: dict[str, list[Any]] = {}
    for config in itertools.chain(*caches.values(), *weights.values()):
        for name, value in innermost(config).items():
            values = known.setdefault(name, [])
            if not isinstance(value, list) and value not in values and len(values) < 3:
                values.append(value)
    for types, ask, most, absent in (
        (caches, ask_caches, 6, ABSENT),
        (weights, ask_weights, 4, (0, 2, True, "x", [2, 0, 1, 3])),
    ):
        walked: list[tuple[Any, set[str]]] = []
        for kind, configs in types.items():
            for turn, config in enumerate(configs):
                yield kind, base_answers(config, turn, types is weights)
            code = code_of(configs[0], ask)
            done: set[str] = next((fields for other, fields in walked if other == code), set())
            walked.append((code, done))
            for config in configs:
                base = readable(config, ask, most)
                if not done >= ask(base, "")[1]:
                    yield kind, walk(base, ask, known, absent, done)
                    if types is caches:
                        yield kind, under_options(base)


def readable(config: Config, ask: Any, most: int) -> Config:
    """Returns the configuration with few layers, if that can be read."""
    short = (c for c in shortened(config, most) if not ask(c, "")[0].endswith("Error"))
    return next(short, config)


def under_options(config: Config) -> Iterator[str]:
    """The layers of a configuration with and without the fields that have defaults."""
    for other in (config, without_defaults(config)):
        for options in OPTIONS:
            yield answer(layers_from_config, other, **options)


def every_answer() -> dict[str, list[str]]:
    """Model type or part of the code -> all answers about its configurations."""
    answers: dict[str, list[str]] = {}
    for kind, lines in answers_by_type():
        answers.setdefault(kind, []).extend(lines)
    return answers | {part: list(lines()) for part, lines in PARTS.items()}


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def test_what_is_read_of_every_configuration_is_what_was_read_before() -> None:
    found = {kind: digest(lines) for kind, lines in every_answer().items()}
    recorded = json.loads(READINGS.read_text())
    assert {kind for kind in found | recorded if found.get(kind) != recorded.get(kind)} == set(), (
        "if these answers were to change, record them: see the head of this file"
    )


if __name__ == "__main__":
    found = every_answer()
    if sys.argv[1:] == ["--write"]:
        digests = {kind: digest(lines) for kind, lines in sorted(found.items())}
        READINGS.write_text(json.dumps(digests, indent=0) + "\n")
    else:
        print(*(line for kind in sys.argv[1:] for line in found[kind]), sep="\n")
