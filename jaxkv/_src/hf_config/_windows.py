"""Rules that tell layers with a window from full ones. No jax.

A rule returns the kind of every layer, and the field that decided it or None. ``layer_types`` has
precedence over every rule, and must not contradict the field that decided.
"""

from collections.abc import Callable

from jaxkv._src.hf_config._build import FULL, SLIDING
from jaxkv._src.hf_config._reader import ConfigReader

Rule = Callable[[ConfigReader], tuple[list[str], str | None]]

KINDS = {FULL: FULL, SLIDING: SLIDING}


def window_kinds(reader: ConfigReader, rule: Rule, field: str = "layer_types") -> list[str]:
    """Returns the kind of every layer from ``layer_types`` or, where that is absent, from the rule.

    If ``layer_types`` gives no layer a window, the fields of the window are ignored.
    """
    if reader.value(field) is None:
        return rule(reader)[0]
    known = {FULL: FULL} if rule is all_full else KINDS
    kinds = reader.layer_kinds(known, field=field)
    if SLIDING not in kinds:
        reader.ignore("sliding_window", "use_sliding_window", "max_window_layers")
    ruled, decided = rule(reader)
    if decided and ruled != kinds:
        raise reader.refusal(decided, f"it contradicts {field}")
    return kinds


def by_list(reader: ConfigReader) -> tuple[list[str], str | None]:
    """Returns the entries of ``layer_types``, which must be there."""
    return reader.layer_kinds(KINDS), None


def all_full(reader: ConfigReader) -> tuple[list[str], str | None]:
    """Returns full layers only, and reads no window: one that is set will be refused."""
    return [FULL] * reader.layer_count(), None


def all_windowed(reader: ConfigReader) -> tuple[list[str], str | None]:
    """Returns layers with a window only, or full ones only where the window is null."""
    kind = FULL if reader.value("sliding_window") is None else SLIDING
    return [kind] * reader.layer_count(), None


def idle(reader: ConfigReader) -> tuple[list[str], str | None]:
    """Returns full layers only: ``use_sliding_window`` is false, so the window is ignored."""
    said = reader.expect("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    decided = None if said is None else "use_sliding_window"
    return [FULL] * reader.layer_count(), decided


def from_layer(reader: ConfigReader) -> tuple[list[str], str | None]:
    """Returns a window for layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    if not reader.expect("use_sliding_window", True, False):
        return idle(reader)
    if not reader.has("sliding_window"):
        raise reader.lacks("sliding_window")
    if reader.value("sliding_window") is None:
        reader.ignore("max_window_layers")
        return [FULL] * reader.layer_count(), None
    first = reader.count("max_window_layers")
    kinds = [SLIDING if i >= first else FULL for i in range(reader.layer_count())]
    return kinds, None  # not "max_window_layers": classes default it, and layer_types may differ


def without_rope(reader: ConfigReader) -> tuple[list[str], str | None]:
    """Returns full layers only (SmolLM3), whether they have rotary positions or not."""
    reader.ignore("no_rope_layers", "no_rope_layer_interval")
    return idle(reader)


def periodic(period: int, *names: str, first: bool = False, null: bool = False) -> Rule:
    """Returns the rule that one layer of every ``period`` is full.

    Args:
      period: layers of a period where the file names none.
      names: fields that may name another period, as a number or as a text such as "LLLG".
      first: whether the first layer of a period is the full one; else the last one is.
      null: whether a null window makes all layers full.
    """

    def rule(reader: ConfigReader) -> tuple[list[str], str | None]:
        count, every, decided = reader.layer_count(), period, None
        for name in names:
            if reader.value(name):
                every, decided = _period(reader, name, None if decided is None else every), name
        if null and reader.value("sliding_window") is None:
            return [FULL] * count, None
        full = 0 if first else every - 1
        return [FULL if i % every == full else SLIDING for i in range(count)], decided

    return rule


def _period(reader: ConfigReader, name: str, before: int | None) -> int:
    """Returns the layers of a period from a field, which must agree with an earlier field."""
    value = reader.value(name)
    if isinstance(value, str):
        if value != "L" * (len(value) - 1) + "G":
            raise reader.refusal(name, "it must be a pattern such as 'LLLG'")
        value = len(value)
    else:
        value = reader.number(name)
    if before not in (None, value):
        raise reader.refusal(name, f"another field says {before}")
    return value
