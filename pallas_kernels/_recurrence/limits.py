"""Limits of the Mosaic GPU kernels of recurrent layers. Does not import Mosaic."""

import math

import jax.numpy as jnp

from pallas_kernels import _capability
from pallas_kernels._recurrence.rule import Convolution, Replay, Requests, Rule, Tokens
from pallas_kernels._recurrence.step_shape import LOADED, step_shape

MAX_STEP_TOKENS = 8  # of a request, for the kernels of a step
MAX_WIDTH = 256  # of keys and of values
THREADS, ACCESS_BYTES = 128, 16
PROMPT_BYTES = 3072  # of shared memory, beside matrices, of the kernel of parts
INT32_MAX = 2**31 - 1


def why_not_step(rule: Rule, tokens: Tokens, requests: Requests, most: int) -> str | None:
    """Returns why the Mosaic kernel of a step does not support a call, or None if it does.

    Args:
      most: most tokens of a request; other kernels compute requests with more than
        `MAX_STEP_TOKENS`.
    """
    states, item = tokens.states, tokens.states.itemsize
    if tokens.replay is not None and (reason := _why_not_replay(rule, tokens.replay, requests)):
        return reason
    inner = min(item, tokens.inputs.dtype.itemsize)
    line = 128 // inner  # elements of a memory transaction
    if rule.key_size % line or rule.value_size % line:
        return (
            f"keys are {rule.key_size} wide and values {rule.value_size}, and the kernel takes "
            f"multiples of {line} of these dtypes"
        )
    if max(rule.key_size, rule.value_size) > MAX_WIDTH:
        return f"keys or values are wider than {MAX_WIDTH}"
    row = rule.key_size * item
    if states.start % row or states.extent_bytes % row:
        return f"states, or the bytes between them, are not multiples of {row} bytes"
    if _capability.instructions_of("recurrent_step") == "cp.async" and (
        rule.key_size % 64
        or rule.value_size % 64
        or math.gcd(states.start, states.extent_bytes) % (8 * row)
    ):
        return (
            "the kernel needs compute capability 9.0 for keys and values that are no multiples of "
            f"64, and for states that do not begin at multiples of {8 * row} bytes"
        )
    if states.data.size * states.data.dtype.itemsize // row > INT32_MAX:
        return "pages have more rows than int32 counts"
    few = most if most <= MAX_STEP_TOKENS else 1
    needed = step_shape(rule, tokens, requests, None, few).shared_bytes
    if needed > (limit := _capability.shared_memory_bytes()):
        return (
            f"keys are {rule.key_size} wide and values {rule.value_size}, for which the kernel "
            f"needs {needed} bytes of shared memory, and this GPU has {limit}"
        )
    return None


def _why_not_replay(rule: Rule, replay: Replay, requests: Requests) -> str | None:
    """Returns why the kernel does not support rings, or None if it does."""
    if rule.key_size != 128 or rule.value_size not in (64, 128):
        return (
            f"keys are {rule.key_size} wide and values {rule.value_size}, and with replay the "
            "kernel takes keys of 128, and values of 64 or 128"
        )
    if replay.rows not in (LOADED // 2, LOADED):
        return f"replay has {replay.rows} tokens, and the kernel takes {LOADED // 2} or {LOADED}"
    if replay.drafts and requests.spans is not None and requests.spans.write_after is not None:
        return "replay takes drafts, and requests have write_after"
    if any(part.start % (rule.key_size * part.itemsize) for part in replay.arrays):
        return "rings do not begin at multiples of a key's bytes"
    return None


def why_not_prompt(rule: Rule, tokens: Tokens, out: jnp.dtype) -> str | None:
    """Returns why the Mosaic kernels of prompts do not support a call, or None if they do."""
    if tokens.inputs.dtype != jnp.bfloat16:
        return f"inputs are {tokens.inputs.dtype}, and the kernels take bfloat16"
    if out.itemsize != 2:  # Mosaic stores no wider ones transposed
        return f"outputs are {out}, and the kernels give bfloat16 or float16"
    if rule.key_size not in (64, 128) or rule.value_size % 64:
        return (
            f"keys are {rule.key_size} wide and values {rule.value_size}, and the kernels take "
            "keys of 64 and 128, and multiples of 64"
        )
    per_key = tokens.log_decay.ndim == 3
    squares = (4 if per_key else 2) * rule.key_size // 64 + rule.value_size // 64 + 3 * rule.delta
    needed = squares * 2 * 64**2 + PROMPT_BYTES
    if needed > (limit := _capability.shared_memory_bytes()):
        return (
            f"keys are {rule.key_size} wide and values {rule.value_size}, for which the kernels "
            f"need {needed} bytes of shared memory, and this GPU has {limit}"
        )
    return None


def why_not_convolution(conv: Convolution) -> str | None:
    """Returns why the Mosaic kernels of a convolution do not support it, or None if they do."""
    channels = conv.weights.shape[1]
    if not channels_per_thread(conv):
        return f"{channels} channels are no multiple of {THREADS}, or extents are no whole elements"
    return None


def channels_per_thread(conv: Convolution) -> int:
    """Returns the channels of a thread of the kernel; 0 if it does not support the shape."""
    pages, channels = conv.pages, conv.weights.shape[1]
    vector = ACCESS_BYTES // jnp.dtype(pages.dtype).itemsize
    start = math.gcd(pages.start, pages.extent_bytes)
    while vector and (channels % (THREADS * vector) or start % (vector * pages.itemsize)):
        vector //= 2
    return vector
