"""Logits processors for `jaxkv.Engine`: they change the logits before a token is drawn.

Example::

    processors = RepetitionPenalty(vocab_size=32_000), MinTokens(vocab_size=32_000)
    options = {"logits_processors": processors}             # of jaxkv.Engine
    sampling = jaxkv.Sampling(processors={RepetitionPenalty: 1.1, MinTokens: (4, [2])})

`LogitBias`, `AllowedTokens` and `MinTokens` leave tokens out; `RepetitionPenalty`,
`PresencePenalty` and `FrequencyPenalty` make those less likely that a request has; `TokenAutomaton`
keeps answers to a grammar, a `TokenTable`. They run in the order in which the engine has them, each
for the requests that ask for it. Your own are classes with the three methods of `LogitsProcessor`.
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
