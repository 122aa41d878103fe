"""Messages of the library in the words of the command. No jax."""

import re

FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("max_model_len", "request_len", "kv_dtype", "block_size", "num_blocks_override"),
        *("override_beyond_memory", "tensor_parallel", "pipeline_parallel", "context_parallel"),
        *(
            "max_in_flight_tokens",
            "max_encoder_tokens",
            "state_cache_mode",
            "speculative_tokens",
            "grouping",
        ),
    )
} | {"config": "CONFIG", "memory_bytes": "--memory"}
PHRASES = {  # calls of the library that have a flag of their own
    "give max_model_len to plan_cache and do not ask for the model's own": "give --max-model-len",
    "give Limits(max_encoder_tokens=...)": "give --max-encoder-tokens",
    "limits.max_encoder_tokens": "--max-encoder-tokens",
}
SPECS = re.compile(r"([Ww])rite its layer specs by hand( and pass them to plan_cache: \{.*?\})?")


def in_flags(message: str, *, memory: str = "--memory") -> str:
    """Returns a message of the library with its arguments as a user of the command writes them.

    ``name=value`` becomes ``--flag=value``. A bare name changes too if it has an underscore,
    because others may be words. Calls that the message quotes stay as they are.

    Args:
      message: of an error.
      memory: what the user calls the memory for the cache.
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
    message = SPECS.sub(r"\1rite its layers into a file and give it as --specs FILE", message)
    return re.sub(rf"(?<![\w.])(?<!\w\()(?P<name>{names})(?P<equals>=True\b|=|\b)", flag, message)
