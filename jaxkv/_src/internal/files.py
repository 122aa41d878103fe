"""JSON from files that a user names: anything but a regular file is refused. No jax."""

import json
import pathlib
import stat
from typing import Any


def read_json(path: pathlib.Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      ValueError: there is no such file, it is no regular file (reading a pipe or a device may
        never end), or it is not JSON. The message is the reason alone, on one line.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("not a regular file")
        text = path.read_text()
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not text in UTF-8: {error.reason}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
