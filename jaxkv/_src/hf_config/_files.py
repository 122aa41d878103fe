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
      name: a preset, or the path of a ``config.json`` or of the directory that holds one.

    Raises:
      TypeError: a name that is neither text nor a path.
      ValueError: neither a preset nor a readable JSON object.
    """
    if not isinstance(name, str | pathlib.PurePath):
        raise TypeError(
            f"config must be the name of a preset or a path, got {type(name).__name__}; what is "
            "read already goes to layers_from_config as it is"
        )
    preset, path = PRESETS / f"{name}.json", pathlib.Path(name)
    if preset.is_file():
        path = preset
    elif path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"config={name!r} is neither a readable JSON file ({path}: {error.strerror or error}) "
            f"nor a preset; presets: {', '.join(preset_names())}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config={name!r} is a file that is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config={name!r} holds a {type(config).__name__}, not an object")
    return config
