"""Bytes of a token, of a state and of a request. No jax."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from jaxkv._src.planning import Plan
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, MLASpec, RingSpec, StateSpec


class TokenBytes(NamedTuple):
    """The bytes of a token in the layers of one kind.

    layers: number of layers.
    kind: kind of their specs.
    span: tokens of their window or chunk; None: they keep all tokens.
    num_bytes: bytes of a token in all these layers.
    """

    layers: int
    kind: str
    span: int | None
    num_bytes: int

    def __str__(self) -> str:
        text = (
            f"{self.num_bytes:,} bytes in {self.layers} {self.kind} layer{'s' * (self.layers != 1)}"
        )
        if self.kind == "cross":
            return f"{text} (of the encoder)"
        return text if self.span is None else f"{text} (last {self.span:,} tokens)"


def token_bytes(layers: Mapping[str, Any]) -> list[TokenBytes]:
    """Returns the bytes of a token in the layers of each kind, without states and rings."""
    sums: dict[tuple[str, int | None], tuple[int, Fraction]] = {}
    for spec in layers.values():
        if isinstance(spec, LayerSpec) and not isinstance(spec, StateSpec | RingSpec):
            span = getattr(spec, "sliding_window", None) or getattr(spec, "chunk_size", None)
            count, size = sums.get((spec.kind, span), (0, Fraction(0)))
            sums[spec.kind, span] = count + 1, size + Fraction(spec.data_bytes, spec.block_size)
    return [
        TokenBytes(count, kind, span, math.ceil(size))
        for (kind, span), (count, size) in sums.items()
    ]


def attention_dtypes(layers: Mapping[str, Any]) -> list[str]:
    """Returns the dtypes of keys, values and latent vectors, each once."""
    specs = [spec for spec in layers.values() if isinstance(spec, FullAttentionSpec | MLASpec)]
    return list(dict.fromkeys(spec.dtype for spec in specs))


def state_bytes(layers: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of layers with a state or a ring, and the bytes of one request's."""
    fixed = [spec for spec in layers.values() if isinstance(spec, StateSpec | RingSpec)]
    drafts = [getattr(spec, "speculative_blocks", 0) for spec in fixed]
    return len(fixed), sum(s.data_bytes * (1 + n) for s, n in zip(fixed, drafts, strict=True))


def replay_bytes(layers: Mapping[str, Any]) -> int:
    """Returns the bytes of a request's states that are rings of inputs since a checkpoint."""
    states = [spec for spec in layers.values() if isinstance(spec, StateSpec)]
    return sum(sum(spec.array_bytes[len(spec.shapes) :]) for spec in states)


def ring_tokens(layers: Mapping[str, Any]) -> int:
    """Returns the tokens of a ring beside recurrent states; 0: none."""
    return max((getattr(spec, "replay", 0) for spec in layers.values()), default=0)


def bytes_per_request(plan: Plan, num_tokens: int) -> int:
    """Returns the bytes that a request holds while it decodes, over all workers."""
    return plan.steady_blocks(num_tokens) * sum(plan.bytes_per_block)


def bytes_charged(plan: Plan, num_tokens: int) -> int:
    """Returns the bytes that admission charges for a request, over all workers."""
    return plan.admission_blocks(num_tokens) * sum(plan.bytes_per_block)
