"""Token ids for random requests: prompts that begin alike, and what is generated after them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

ALPHABET = 2  # token ids, so that what is generated is now and then the same, too
REMEMBERED = 6  # texts of requests that ended, for prompts that go on from them


@dataclasses.dataclass
class Text:
    """Tokens of a running request.

    namespace: epoch and salt.
    tokens: those that are known, computed or not.
    num_prompt_tokens: tokens that the request was started with.
    """

    namespace: tuple[int, str | None]
    tokens: list[int]
    num_prompt_tokens: int


class Texts:
    """The tokens of running requests, and the texts that prompts are cut from.

    num_ended: texts of this epoch that ended.
    running: by request.
    """

    def __init__(self, max_tokens: int):
        """Starts with two texts that part in their middle, for prompts of ``max_tokens``."""
        self._max_tokens = max_tokens
        self._rng = np.random.default_rng(0)
        first = [i // 2 % ALPHABET for i in range(max_tokens)]
        half = max_tokens // 2
        self._roots = [first, [*first[:half], *(1 - token for token in first[half:])]]
        self._ended: list[list[int]] = []
        self.epoch = self.num_ended = 0
        self.running: dict[int, Text] = {}

    def cut(self, which: int, part: int, more: Sequence[int]) -> list[int]:
        """Returns a prompt: the beginning of a text, and some tokens.

        Args:
          part: of text ``which``, from its first token, for 0, to all of it, for 15.
          more: tokens after it.
        """
        texts = [*self._roots, *self._ended]
        text = texts[which % len(texts)]
        return [*text[: 1 + part * (len(text) - 1) // 15], *more][: self._max_tokens]

    def start(self, request: int, prompt: Sequence[int], salt: str | None) -> Text:
        """Begins the text of a request. Returns it."""
        text = self.running[request] = Text((self.epoch, salt), list(prompt), len(prompt))
        return text

    def fork(self, request: int, donor: int, num_tokens: int) -> None:
        """Begins a text with the first tokens of another one, if that has any."""
        if donor in self.running:
            self.running[request] = dataclasses.replace(self.running[donor])
            self.rewind(request, num_tokens)

    def rewind(self, request: int, num_tokens: int) -> None:
        """Forgets all but the first tokens; those that follow may be others."""
        if request in self.running:
            text = self.running[request]
            text.tokens = text.tokens[:num_tokens]
            text.num_prompt_tokens = min(text.num_prompt_tokens, num_tokens)

    def first(self, request: int, num_tokens: int) -> list[int]:
        """Returns the first tokens, and generates those that are not known."""
        if request not in self.running:
            return []
        tokens = self.running[request].tokens
        missing = max(0, num_tokens - len(tokens))
        tokens += self._rng.integers(0, ALPHABET, missing).tolist()
        return tokens[:num_tokens]

    def finish(self, request: int) -> Text:
        """Ends a text, which prompts may then go on from. Returns it."""
        text = self.running.pop(request)
        self._ended = [*self._ended, text.tokens][-REMEMBERED:]
        self.num_ended += text.namespace[0] == self.epoch
        return text

    def begin_epoch(self) -> None:
        """Starts afresh: later prompts agree with no earlier one."""
        self.epoch, self.num_ended = self.epoch + 1, 0
