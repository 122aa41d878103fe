"""What is left of a layer on one of several tensor-parallel ranks."""

from jaxkv.checks import check_positive


def divide(name: str, size: int, ranks: int) -> int:
    """``size / ranks``, or a refusal that names what does not divide."""
    check_positive(**{name: size}, tensor_parallel=ranks)
    if size % ranks:
        raise ValueError(f"{name}={size} does not divide among tensor_parallel={ranks} ranks")
    return size // ranks


def heads_per_rank(num_kv_heads: int, ranks: int) -> int:
    """KV heads on one rank: divided, or replicated when there are more ranks than heads.

    Raises:
      ValueError: neither number divides the other.
    """
    check_positive(num_kv_heads=num_kv_heads, tensor_parallel=ranks)
    if ranks > num_kv_heads and ranks % num_kv_heads == 0:
        return 1
    return divide("num_kv_heads", num_kv_heads, ranks)
