"""Changes of configurations, each with the fields that a question about it asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxkv._src.hf_config._fields import inner_config

Config = dict[str, Any]
# Answers a question about a configuration, and says which fields it asked for; those inside of a
# field are told by "outer/inner". The name is that of the field that is changed.
Ask = Callable[[Config, str], tuple[str, set[str]]]

COUNTS = tuple(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers layers".split()
)
PLAIN = (True, False, 0, 1, 2, -1, "x", None)
ABSENT = (*PLAIN, [0, 1, 0, 2, 1, 0], ["full_attention", "sliding_attention"], {"x": 1})
# Values of fields that files rarely have, next to those above.
RARE: dict[str, tuple[Any, ...]] = {
    "per_layer_config": (
        {"0": {"head_dim": 24}},
        {"0": {"head_dim": 24, "num_key_value_heads": 1}, "1": {"head_dim": 24}},
        {"1": {"conv_window": 3}},
        {"99": {}},
        {"first": {}},
    ),
    "quantization_config": (
        {"kv_cache_scheme": {"num_bits": 8}},
        {"kv_cache_quant_algo": "FP8"},
        {"quant_method": "fp8"},
    ),
    "compression_config": ({"kv_cache_scheme": {"num_bits": 8}}, {"quant_method": "fp8"}),
    "mamba_d_head": ("auto",),
    "torch_dtype": ("float32", "float8_e4m3fn"),
    "dtype": ("float32",),
}


def instead(value: Any) -> Iterator[Any]:
    """Yields values in the place of another."""
    if isinstance(value, bool) or value is None:
        yield from (v for v in PLAIN if v is not value)
    elif isinstance(value, int | float):
        yield from (value + 1, 2 * value, 0, 1, 2, -1, True, "x", None)
    elif isinstance(value, list):
        yield from ([*value[1:], *value[:1]], value[1:], [*value, *value[:1]], [], [-1, *value[1:]])
        alike = [v for i, v in enumerate(value) if v not in value[:i]][:3]
        yield from ([v] * len(value) for v in alike)
        yield from (1, "x", None)
        if value and isinstance(value[0], dict | list):
            yield from ([other, *value[1:]] for other in instead(value[0]))
    elif isinstance(value, Mapping):
        yield from ({}, 1, None)
        for name, inner in value.items():
            yield {other: value[other] for other in value if other != name}
            yield from ({**value, name: other} for other in instead(inner))
    else:
        yield from ("x", None, 3, {}, value[1:], value + value[:1])


def innermost(config: Config) -> Config:
    """Returns the configuration of the language model."""
    found = inner_config(config)
    return config if found is None else innermost(dict(found[1]))


def changed(config: Config, field: str, *values: Any) -> Config:
    """Returns the configuration with a field of its language model left out, or set to a value."""
    if found := inner_config(config):
        return {**config, found[0]: changed(dict(found[1]), field, *values)}
    name, _, inner = field.partition("/")
    if inner:
        return {**config, name: changed(config[name], inner, *values)}
    left = {other: v for other, v in config.items() if other != name}
    return {**left, name: values[0]} if values else left


def walk(
    config: Config,
    ask: Ask,
    known: Mapping[str, list[Any]],
    absent: tuple[Any, ...],
    done: set[str],
) -> Iterator[str]:
    """Yields the answers about all configurations that differ in one field that is asked for.

    Where the change of one field makes others be asked for, these are changed as well.

    Args:
      config: the configuration that is changed.
      ask: answers a question, see `Ask`.
      known: field -> values of other configurations, for files without the field.
      absent: more values for those.
      done: fields that are not changed any more; those that are come to them.
    """
    line, asked = ask(config, "")
    yield line
    fields, asked_first = innermost(config), sorted(asked - done)
    done |= asked
    for field in asked_first:
        if inner_config(config):  # next to the language model
            yield ask({**config, field: 1}, field)[0]
        seen: list[set[str]] = []
        for other in with_field(config, field, (*known.get(field, ()), *absent)):
            line, more = ask(other, field)
            yield line
            if (fresh := more - asked) and fresh not in seen and len(seen) < 3:
                seen.append(fresh)
                for name in sorted(fresh - {field} - set(fields)):
                    values = *known.get(name, ()), *absent
                    yield from (ask(changed(other, name, v), name)[0] for v in values)


def with_field(config: Config, field: str, absent: tuple[Any, ...]) -> Iterator[Config]:
    """Yields the configurations in which a field is left out, or has others of its values."""
    fields = innermost(config)
    outer, _, inner = field.partition("/")
    here = fields.get(outer) if inner else fields
    if not isinstance(here, Mapping):
        return
    name = inner or outer
    if name in here:
        yield changed(config, field)
        values: Iterable[Any] = [*instead(here[name]), *RARE.get(field, ())]
    else:
        counts = [v for n, v in fields.items() if n in COUNTS and isinstance(v, int)]
        values = *RARE.get(field, ()), *absent, *(c * v for v in counts for c in (1, 2))
    for value in values:
        yield changed(config, field, value)


def pairs(base: Config, fields: Mapping[str, tuple[Any, ...]]) -> Iterator[Config]:
    """Yields the base with one field set or left out, and with every two of them."""
    every = [(name, value) for name, values in fields.items() for value in values]
    for i, (name, value) in enumerate(every):
        first = base | {name: value}
        yield first
        yield from (first | {n: v} for n, v in every[i + 1 :] if n != name)


def shortened(config: Config, most: int) -> Iterator[Config]:
    """Yields configurations of few layers, whose changes are read quickly: first those of all
    kinds, then the first layers alone."""
    fields = innermost(config)
    counts = {n: fields[n] for n in COUNTS if isinstance(fields.get(n), int)}
    if not counts and inner_config(config):  # the class has a number of its own
        counts = {COUNTS[0]: most}
    lists = {
        n: v
        for n, v in fields.items()
        if isinstance(v, list | str) and len(v) > most and len(v) in counts.values()
    }
    numbers = {
        n: v
        for n, v in fields.items()
        if isinstance(v, list) and n not in lists and all(type(i) is int for i in v)
    }
    for kept in (layers_of_all_kinds(lists, most), range(most)):
        short: Config = {n: min(v, most) for n, v in counts.items()}
        short |= {n: [i for i in v if i < most] for n, v in numbers.items()}
        for name, value in lists.items():
            few = [value[i] for i in kept]
            short[name] = "".join(few) if isinstance(value, str) else few
        other = config
        for name, value in short.items():
            other = changed(other, name, value)
        yield other


def layers_of_all_kinds(lists: Mapping[str, Any], most: int) -> list[int]:
    """Returns so many layers: of each kind that the lists tell the first, and the last of all."""
    values = list(lists.values())
    firsts = [i for v in values for i in range(len(v)) if v[i] not in v[:i]]
    last = [len(v) - 1 for v in values[:1]]
    found = list(dict.fromkeys([*last, *firsts, *range(most)]))
    return sorted(found[:most])
