"""Progress of what takes long. No jax."""

from collections.abc import Iterable, Iterator


def with_progress[T](done: Iterable[T], total: int, verb: str, unit: str) -> Iterator[T]:
    """Yields what is done, and shows how much it is if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(done)
    return iter(tqdm(done, desc=verb, total=total, unit=unit, disable=None))
