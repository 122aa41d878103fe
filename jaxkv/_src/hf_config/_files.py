"""Configurations from files: a ``config.json``, or a preset of this package. No jax."""

import difflib
import pathlib
import re

from jaxkv._src.hf_config._params_json import from_mistral, is_mistral
from jaxkv._src.internal.files import read_json
from jaxkv._src.internal.text import shown

NAMED = re.compile(r"(\w[\w.-]*/)?[^/]+")  # a model, with or without its organization
ORGANIZED = re.compile(r"\w[\w.-]{0,99}/\w[\w.-]{0,99}")
PRESETS = pathlib.Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Returns the names of the configurations that ship with the package."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def load_config(config: str | pathlib.PurePath) -> dict[str, object]:
    """Reads the configuration of a model.

    Args:
      config: a preset, whatever its case and with or without its organization, such as
        ``"qwen3-8b"`` or ``"Qwen/Qwen3-8B"``; or the path of a ``config.json`` or of the directory
        that holds one. A path that exists goes before a preset. Mistral's ``params.json`` is read,
        too, by the names of Transformers.

    Raises:
      TypeError: a name that is neither text nor a path.
      ValueError: neither a preset nor a readable JSON object; the message names presets like it.
    """
    if not isinstance(config, str | pathlib.PurePath):
        raise TypeError(
            f"config must be the name of a preset or a path, got {type(config).__name__}; what is "
            "read already goes to layers_from_config as it is"
        )
    name = str(config)
    key = name.rpartition("/")[2].lower()
    path = pathlib.Path(name)
    where = ""
    try:
        if not path.exists() and NAMED.fullmatch(name):
            path = PRESETS / f"{key}.json"
        if path.is_dir():
            names = [n for n in ("config.json", "params.json") if (path / n).exists()]
            path, where = path / (names or ["config.json"])[0], "config.json: "
        found = read_json(path)
    except (OSError, ValueError) as error:  # an OSError: a name that no path can have
        raise ValueError(
            f"config={shown(name)} is neither a preset nor a readable JSON file "
            f"({where}{getattr(error, 'strerror', None) or error})"
            + _alike(name, key, isinstance(error.__cause__, FileNotFoundError))
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"config={shown(name)} holds a {type(found).__name__}, not an object")
    return from_mistral(found) if is_mistral(found) else found


def _alike(name: str, key: str, missing: bool) -> str:
    """Returns a hint at the presets with a name like this one, and at how to get a file."""
    near = difflib.get_close_matches(key[:100], preset_names(), n=3, cutoff=0.5)
    if key.endswith(".json") or not (near or missing):
        return ""
    model = name if ORGANIZED.fullmatch(name) else "ORGANIZATION/MODEL"
    how = (
        f"nothing is downloaded here; `hf download {model} config.json` prints the path of the "
        f"file that it fetches, or take it from https://huggingface.co/{model}"
    )
    if near:
        return f"; did you mean {' or '.join(near)}? If not, {how}"
    return f"; {how}. The presets are {', '.join(preset_names())}"
