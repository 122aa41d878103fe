"""`FrozenDict`, a dict whose identity tells its content. No jax."""

from typing import Any, Never


class FrozenDict[K, V](dict[K, V]):
    """A dict that never changes, so that whoever sees the same object again need not compare it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def _refuse(*_args: Any, **_kwargs: Any) -> Never:
    raise TypeError("this dict never changes; change a copy of it: dict(...)")


for _name in "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update".split():
    setattr(FrozenDict, _name, _refuse)
