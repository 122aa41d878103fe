"""Configurations from files: a ``config.json``, or a preset of this package. No jax."""

import json
import pathlib
from typing import Any

PRESETS = pathlib.Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Returns the names of the configurations that ship with the package."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def load_config(name: str) -> dict[str, Any]:
    """Reads the configuration of a model.

    Args:
      name: name of a preset, or path of a ``config.json`` or of the directory that holds one.

    Raises:
      ValueError: neither a preset nor a readable JSON object.
    """
    preset, path = PRESETS / f"{name}.json", pathlib.Path(name)
    if preset.is_file():
        path = preset
    elif path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"config={name!r} is neither a readable JSON file ({error}) nor a preset; presets: "
            f"{', '.join(preset_names())}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"config={name!r} holds a {type(config).__name__}, not an object")
    return config
