"""`HostMemory`, the host memory that a manager may use, and when it loads. No jax."""

import dataclasses

from jaxkv._src.internal.checks import check_count, check_positive, make_ints_plain
from jaxkv._src.planning import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Page-locked host memory for blocks that leave the device's memory.

    A prefix is loaded if that saves at least ``min_tokens`` tokens, and costs at most
    ``max_bytes_per_token`` for each of them; other prefixes are computed again. The same rule
    applies to a preempted request of which a block has left the device, for all of its tokens.
    The default is what a link of 50 GB/s carries while a GPU computes a token of a prompt, at
    50,000 tokens a second.

    num_bytes: bytes of blocks; with a mesh, on each of its devices.
    min_tokens: the fewest tokens that a load brings.
    max_bytes_per_token: the most bytes that it brings for each of them.
    """

    num_bytes: int
    min_tokens: int = 64
    max_bytes_per_token: int = 2**20

    def __post_init__(self) -> None:
        make_ints_plain(self)
        check_positive(num_bytes=self.num_bytes, min_tokens=self.min_tokens)
        check_positive(max_bytes_per_token=self.max_bytes_per_token)

    def is_worth_it(self, num_tokens: int, num_bytes: int) -> bool:
        """Returns whether to load blocks, rather than compute their tokens."""
        check_count(num_tokens=num_tokens, num_bytes=num_bytes)
        return num_tokens >= self.min_tokens and num_bytes <= num_tokens * self.max_bytes_per_token


def block_bytes(plan: Plan) -> tuple[int, ...]:
    """Returns, per group, the bytes of a block on the worker where it has most."""
    return tuple(
        max(layout.group_bytes(group) for layout in plan.layouts)
        for group in range(len(plan.groups))
    )
