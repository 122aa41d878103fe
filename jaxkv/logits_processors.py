"""Logits processors for `jaxkv.Engine`: they change the logits before a token is drawn.

Example::

    processors = RepetitionPenalty(vocab_size), MinTokens(vocab_size)
    engine = jaxkv.Engine(forward, params, plan, logits_processors=processors, ...)
    sampling = jaxkv.Sampling(processors={RepetitionPenalty: 1.1, MinTokens: (4, [eos])})

They run in the order in which the engine has them, each for the requests that ask for it.
Write your own as a class with the three methods of `LogitsProcessor`.
"""

from jaxkv._src.logits_processors import (
    AllowedTokens,
    FrequencyPenalty,
    LogitBias,
    LogitsProcessor,
    MinTokens,
    PresencePenalty,
    RepetitionPenalty,
    TokenAutomaton,
    TokenTable,
)

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
