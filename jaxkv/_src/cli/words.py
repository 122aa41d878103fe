"""Messages of the library with the flags of the command instead of arguments. No jax."""

import re

SAME_NAME = """
    max_model_len request_len kv_dtype block_size num_blocks_override override_beyond_memory
    tensor_parallel pipeline_parallel context_parallel max_in_flight_tokens max_encoder_tokens
    state_cache_mode speculative_tokens grouping
"""
FLAGS = {name: f"--{name.replace('_', '-')}" for name in SAME_NAME.split()}
FLAGS |= {"config": "CONFIG", "memory_bytes": "--memory"}
PHRASES = {  # calls of the library that a flag replaces
    "give a max_model_len of your own to plan_cache": "give --max-model-len",
    "give Limits(max_encoder_tokens=...)": "give --max-encoder-tokens",
    "limits.max_encoder_tokens": "--max-encoder-tokens",
}
SPECS = re.compile(r"([Ww])rite its layer specs by hand( and pass them to plan_cache: \{.*?\})?")


def in_flags(message: str, *, memory: str = "--memory") -> str:
    """Returns a message of the library with flags in place of arguments.

    ``name=value`` becomes ``--flag=value``. A name alone changes only if it has an underscore,
    because other names are also words. Calls that the message quotes stay as they are.

    Args:
      message: text of an error.
      memory: replaces the argument ``memory_bytes`` where it has no value.
    """

    def flag(match: re.Match[str]) -> str:
        name, equals = match["name"], match["equals"]
        if not equals and "_" not in name:
            return name
        if name == "memory_bytes" and not equals:
            return memory
        return FLAGS[name] + equals.removesuffix("=True")

    names = "|".join(FLAGS)
    for phrase, words in PHRASES.items():
        message = message.replace(phrase, words)
    message = SPECS.sub(
        r"\1rite its layers into a file and give it as --specs FILE (--help shows one)", message
    )
    return re.sub(rf"(?<![\w.])(?<!\w\()(?P<name>{names})(?P<equals>=True\b|=|\b)", flag, message)
