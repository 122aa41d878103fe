"""Slips that a programmer makes, each of which a test must find; `python -m tests.mutants`.

A slip is planted into a copy of the code, and the tests that should find it run until one fails.
"""

import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Slip:
    """A wrong change of one place, and the tests that find it.

    file: below the root of the project.
    old, new: the text that is there once, and the one that takes its place.
    tests: arguments of pytest, those first that find it soonest; separated by blanks.
    """

    file: str
    old: str
    new: str
    tests: str

    def planted(self) -> str:
        """Returns the text of the file with the slip.

        Raises:
          ValueError: the file does not hold the old text exactly once.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file} holds {text.count(self.old)} times {self.old!r}; a slip replaces a "
                "text that is there once"
            )
        return text.replace(self.old, self.new)
