"""The logger ``jaxkv``, which is silent until a program configures it. No jax."""

import logging

LOGGER = logging.getLogger("jaxkv")
LOGGER.addHandler(logging.NullHandler())
