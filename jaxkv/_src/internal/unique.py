"""`Unique`, the base of objects that are never copied. No jax."""

from typing import ClassVar, NoReturn


class Unique:
    """Refuses copies and pickles.

    why: why there is none, and what to do instead.
    """

    why: ClassVar[str]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {self.why}")
