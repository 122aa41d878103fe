"""Slips that a programmer makes, each of which a test must find; `make mutants` plants them.

``slips.txt`` has a paragraph for each file and the tests that find its slips. A line that begins
with "-" is a text that is in the file once, and the next one, with "+", is what takes its place.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Slip:
    """A wrong change of one place, and the tests that find it.

    file: below the root of the project.
    tests: arguments of pytest, those first that find it soonest.
    old, new: the text that is there once, and the one that takes its place.
    """

    file: str
    tests: tuple[str, ...]
    old: str
    new: str

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


def read_slips() -> Iterator[Slip]:
    """Yields the slips of the list, in order."""
    for paragraph in (pathlib.Path(__file__).parent / "slips.txt").read_text().split("\n\n"):
        head, *lines = paragraph.strip().splitlines()
        file, _, tests = head.partition(" | ")
        for old, new in zip(lines[::2], lines[1::2], strict=True):
            assert old.startswith("- ") and new.startswith("+ "), paragraph
            yield Slip(file, tuple(tests.split()), old[2:], new[2:])
