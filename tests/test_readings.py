"""The answers about configurations, recorded, so that no change of one goes unseen.

The other tests hold answers against sources outside. This one holds every answer, and every
refusal, against those of before, for the configurations of ``golden/`` and for each of their fields
left out, changed or added. ``golden/readings.json`` keeps a digest of them per model type.

    python -m tests.test_readings llama    # prints the answers, to compare those of two commits
    python -m tests.test_readings --write  # records them
"""

import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from jaxkv._src.hf_config import (
    count_weights,
    encoder_len,
    layers_from_config,
    load_config,
    model_len,
    preset_names,
    shipped_dtype,
)
from jaxkv._src.hf_config._build import Options
from jaxkv._src.hf_config._families import open_config
from jaxkv._src.hf_config._fields import inner_config
from jaxkv._src.hf_config._weights._matrix import Fields
from jaxkv._src.hf_config._weights._traits import TRAITS
from tests.test_hf_families import DEFAULTS, GOLDEN, PUBLISHED, expanded
from tests.test_weights import GOLDEN as PARAMETERS

READINGS = pathlib.Path(__file__).parent / "golden" / "readings.json"
OPTIONS: tuple[dict[str, Any], ...] = (
    {"kv_dtype": "bfloat16"},
    {},
    {"kv_dtype": "fp8", "tensor_parallel": 2},
    {"kv_dtype": "bf16", "block_size": 32, "speculative_tokens": 2, "state_cache_mode": "align"},
)
COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)
FORMS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"quant_method": "fp8", "weight_block_size": [48, 112]},
    {"quant_method": "gptq", "bits": 3, "group_size": 96, "lm_head": True},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "mxfp4"},
    {"quant_method": "awq"},
    {"quant_method": "gptq", "group_size": -1},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["layers.0", "*o_proj"]},
)
SIZES = {"vocab_size": 1000, "intermediate_size": 352, "moe_intermediate_size": 96}
SIZES |= {"num_experts": 4, "num_local_experts": 4}


Configs = dict[str, list[dict[str, Any]]]


def configurations() -> tuple[Configs, Configs]:
    """The configurations of caches, and those of weights, by their model type."""
    presets = [load_config(name) for name in preset_names()]
    rows = *DEFAULTS.values(), *GOLDEN["drawn"]
    configs = [*PUBLISHED.values(), *(row["config"] for row in rows)]
    weighed = [model["config"] for model in PARAMETERS["models"]]
    caches, weights = by_type([*map(expanded, configs), *presets]), by_type([*weighed, *presets])
    for kind in sorted(
        set(caches) & set(TRAITS) - set(weights)
    ):  # their files have no sizes of weights
        weights[kind] = [SIZES | caches[kind][0]]
    return caches, weights


def by_type(configs: list[dict[str, Any]]) -> Configs:
    found: Configs = {}
    for config in configs:
        found.setdefault(config["model_type"], []).append(config)
    return found


def shortened(config: dict[str, Any], most: int) -> dict[str, Any]:
    """The configuration with few layers, so that its many changes are read quickly."""
    name, inner = inner_config(config) or ("", config)
    counts = {n: inner[n] for n in COUNTS if isinstance(inner.get(n), int)}
    if name and not counts:  # the class has a number of its own
        counts = {COUNTS[0]: most}
    long = {n: v for n, v in inner.items() if isinstance(v, list) and len(v) in counts.values()}
    short = {n: v[:most] for n, v in long.items()} | {n: min(v, most) for n, v in counts.items()}
    return {**config, name: {**inner, **short}} if name else {**inner, **short}


def odd(value: Any, turn: int) -> Any:
    """A value in the place of another; which one takes turns."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return (value + 1, 0, -1, 2 * value, "x", None)[turn % 6]
    if isinstance(value, list):
        turned = [*value[1:], *value[:1]]
        return (value[1:], [], turned, [-1, *value[1:]], 1, None)[turn % 6]
    return ("x", None, 3, {})[turn % 4]


def asked_for(config: dict[str, Any]) -> set[str]:
    """The names of the fields that questions read, whether the file has them or not."""
    asked: set[str] = set()

    def first(fields: Fields, *names: str) -> Any:
        asked.update(names)
        return next((v for n in names if (v := fields.values.get(n)) is not None), None)

    reader, family = open_config(config, "bfloat16")
    with mock.patch.object(Fields, "first", first):
        answer(count_weights, config)
    if family is not None:
        answer(lambda _: family.read(reader, Options(kv_dtype="bfloat16")), config)
    return asked | reader._read


def edited(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configurations that lack one field of this, or of a part of it, or have it changed."""
    for turn, (name, value) in enumerate(config.items(), len(config)):
        yield {other: config[other] for other in config if other != name}
        for other in (*edited(value), {}) if isinstance(value, dict) else [odd(value, turn)]:
            yield {**config, name: other}


def changed(config: dict[str, Any], known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configurations that differ from this by one field left out, changed or added."""
    yield from edited(config)
    name, inner = inner_config(config) or ("", config)
    for turn, field in enumerate(sorted(asked_for(config) - set(inner)), len(config)):
        value = known.get(field, (1, 0, [0, 1, 0, 2, 1, 0], 2, "x")[turn % 5])
        for other in (value, odd(value, turn)):
            added = {**inner, field: other}
            yield {**config, name: added} if name else added


def answer(question: Any, *args: Any, **options: Any) -> str:
    """The answer to a question, or the kind of the refusal, whose text may be improved."""
    try:
        answered = question(*args, **options)
    except (TypeError, ValueError) as refusal:
        assert str(refusal)
        return type(refusal).__name__
    if isinstance(answered, dict):
        names: dict[Any, list[str]] = {}
        for name, spec in answered.items():
            names.setdefault(spec, []).append(name)
        return f"{list(answered)} {names}"
    return repr(answered)


def about_caches(config: dict[str, Any], turn: int) -> Iterator[str]:
    """The answers about the caches of a configuration."""
    yield answer(layers_from_config, config, **OPTIONS[turn % len(OPTIONS)])
    for question in (model_len, encoder_len, shipped_dtype):
        yield answer(question, config)


def about_weights(config: dict[str, Any], turn: int) -> Iterator[str]:
    """The answer about the weights of a configuration, in one of several forms."""
    if form := FORMS[turn % len(FORMS)]:
        config = {**config, "quantization_config": form}
    yield answer(count_weights, config, drafts=turn % 2 == 1)


def code_of(config: dict[str, Any]) -> Any:
    """Returns the traits by which the code tells model types apart."""
    reader, family = open_config(config)
    towers = config["model_type"] if "vision_config" in config else None
    return id(family), TRAITS.get(reader.model_type), towers


def every_answer() -> dict[str, list[str]]:
    """Model type -> all answers about its configurations.

    Of the types that the code does not tell apart, the first is also asked with changes.
    """
    answers: dict[str, list[str]] = {}
    caches, weights = configurations()
    every = itertools.chain(*caches.values(), *weights.values())
    inner = ((inner_config(config) or ("", config))[1] for config in every)
    known = {name: value for config in inner for name, value in config.items()}
    for about, types, most in ((about_caches, caches, 6), (about_weights, weights, 4)):
        walked = set()
        for kind, configs in types.items():
            asked = list(configs)
            if (code := code_of(configs[0])) not in walked:
                walked.add(code)
                towers = about is about_weights and "vision_config" in configs[0]
                short = shortened(configs[0], 1 if towers else most)
                readable = "Error" not in next(about(short, 0))
                asked += changed(short if readable else configs[0], known)
            lines = (line for turn, config in enumerate(asked) for line in about(config, turn))
            answers.setdefault(kind, []).extend(lines)
    return answers


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
