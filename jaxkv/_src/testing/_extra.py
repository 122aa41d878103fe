"""Imports of packages that the extra ``testing`` installs."""

import contextlib
from collections.abc import Generator


@contextlib.contextmanager
def extra() -> Generator[None]:
    """Wraps imports of packages that the extra ``testing`` installs.

    Raises:
      ImportError: one of them is not installed; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ImportError(
            f'jaxkv.testing needs {package}, which is not installed: pip install "jaxkv[testing]"',
            name=error.name,
        ) from error
