"""Logits processors: what changes the logits of a request before a token is drawn."""

from jaxkv._src.logits_processors._automaton import TokenAutomaton, TokenTable
from jaxkv._src.logits_processors._masks import AllowedTokens, LogitBias, MinTokens
from jaxkv._src.logits_processors._penalties import (
    FrequencyPenalty,
    PresencePenalty,
    RepetitionPenalty,
)
from jaxkv._src.logits_processors._protocol import LogitsProcessor

__all__ = [
    "AllowedTokens",
    "FrequencyPenalty",
    "LogitBias",
    "LogitsProcessor",
    "MinTokens",
    "PresencePenalty",
    "RepetitionPenalty",
    "TokenAutomaton",
    "TokenTable",
]
