"""Layers that keep a recurrent state, and the state shapes of common architectures. No jax."""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, get_args

from jaxkv._src.internal.checks import (
    check_choice,
    check_count,
    check_each,
    check_positive,
    make_ints_plain,
)
from jaxkv._src.internal.text import shown
from jaxkv._src.specs._base import LayerSpec
from jaxkv._src.specs._dtypes import (
    DTYPE_BYTES,
    canonical_dtype,
    check_no_heads,
    packed_bytes,
)
from jaxkv._src.specs._growth import CacheMode, Growth

Shapes = tuple[tuple[int, ...], ...]
FLOATS = ("float32", "bfloat16", "float16")  # of states that are replayed


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpec(LayerSpec):
    """A recurrent state (mamba, gated delta net, linear attention): one page at any length.

    A request never reads a state that it did not write: `jaxkv.read_state` returns zeros for
    a request that has computed nothing, whatever its block contained before.

    The logical blocks of a request, with ``last`` the one of its newest token:

    - ``"none"``: block 0 has the running state, whatever the length; drafts follow it.
    - ``"align"``: block ``last`` has the running state, drafts follow it, and the block
      of the newest computed token keeps the state that the step resumes from.
    - ``"all"``: every block has the state at its end.

    shapes, dtypes: the arrays of one state, stored back to back in one page.
    cache_mode: ``"none"``, ``"align"`` or ``"all"``, as above. Prompts find prefixes with each of
      them: with ``"none"`` and ``"align"`` up to a checkpoint, one of the few states that the block
      manager copies for later prompts (`jaxkv.blocks.PrefixHit.chunk_ends`); with ``"all"`` up to
      any whole block, at the price of a state for each block of the request.
    speculative_blocks: extra states for speculative tokens, in the blocks that follow the
      running state's. With ``"align"`` they move with it: a step that begins another block drops
      them, so write the accepted state with ``at=0`` in the step that accepts it. Verify drafts
      in a step of their own, of at most ``1 + speculative_blocks`` tokens of the request: a longer
      one counts as a part of a prompt, whose newest state alone is kept.
    replay: tokens of a ring, L; 0: none. Instead of the state after each token, a page has a
      checkpoint, the state after the last multiple of L tokens, and a ring of what later tokens
      have added to it: a decode reads both, and writes an L-th of the states. That is faster for
      states in float32 and in bfloat16; 8 is best on an H200.
      The layer has one decay for each head, and no ``speculative_blocks``; read and write its
      states by `jaxkv.gated_delta`, `jaxkv.mamba2` or `jaxkv.linear_attention` alone.
    speculative_tokens: most drafts of a step, with ``replay``, whose ring takes them: a request
      holds one state whatever is verified, and rejected drafts are overwritten. A step writes the
      checkpoint if the ring might be full after the next one, so that of ``replay`` tokens two
      for each draft, and two more, are the least. The first of ``shapes`` has as many inputs more
      (``speculative_tokens`` of the functions that return shapes), and ``cache_mode`` is "none".
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    cache_mode: CacheMode = "none"
    speculative_blocks: int = 0
    replay: int = 0
    speculative_tokens: int = 0
    kind: ClassVar[str] = "state"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        if isinstance(self.dtypes, str) or not isinstance(self.dtypes, Sequence):
            raise TypeError(f"dtypes={shown(self.dtypes)} must be a tuple of names; add a comma")
        object.__setattr__(self, "dtypes", tuple(canonical_dtype(d, "dtypes") for d in self.dtypes))
        check_each(Sequence, "a tuple of ints", shapes=self.shapes)
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ValueError(
                f"shapes and dtypes must name the same arrays, at least one; got "
                f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes"
            )
        if "nvfp4" in self.dtypes:
            raise ValueError("dtypes: nvfp4 packs heads of keys and values, not states")
        for dtype in self.dtypes:
            check_no_heads(dtype, "a state")
        for shape in self.shapes:
            check_positive(**{f"shapes[{i}]": size for i, size in enumerate(shape)})
        check_choice(get_args(CacheMode), cache_mode=self.cache_mode)
        check_count(speculative_blocks=self.speculative_blocks, replay=self.replay)
        check_count(speculative_tokens=self.speculative_tokens)
        if self.replay:
            self._check_replay()
        if self.speculative_tokens:
            self._check_drafts()
        super().__post_init__()

    def _check_replay(self) -> None:
        if len(self.shapes[-1]) != 3 or self._key_heads < 1 or self.dtypes[-1] not in FLOATS:
            raise ValueError(
                f"replay={self.replay} needs states of heads x values x keys in "
                f"{', '.join(FLOATS)}, after the inputs of a convolution over queries, keys and "
                f"values, if there is one; got shapes={self.shapes}, dtypes={self.dtypes}. "
                "Pass replay=0"
            )
        if self.speculative_blocks:
            raise ValueError(
                f"replay={self.replay} and speculative_blocks={self.speculative_blocks}: with "
                f"replay, drafts need no blocks; pass speculative_tokens={self.speculative_blocks}"
            )
        if self.cache_mode == "all" and self.block_size % self.replay:
            raise ValueError(
                f"replay={self.replay} does not divide block_size={self.block_size}, and "
                'cache_mode="all" keeps a checkpoint at the end of each block; pass a divisor'
            )

    def _check_drafts(self) -> None:
        given = f"speculative_tokens={self.speculative_tokens}"
        if not self.replay:
            raise ValueError(f"{given} needs replay; pass speculative_blocks without it")
        if self.replay < (least := 2 * self.speculative_tokens + 2):
            raise ValueError(f"{given} needs replay={least} or more, got {self.replay}")
        if self.cache_mode != "none":
            raise ValueError(f'{given} needs cache_mode="none", got {self.cache_mode!r}')
        if len(self.shapes) == 2 and self.shapes[0][0] <= self.speculative_tokens:
            raise ValueError(
                f"{given}: shapes[0]={self.shapes[0]} has {self.shapes[0][0]} inputs of a "
                "convolution, and drafts need as many more; pass speculative_tokens to the "
                "function that returns the shapes, too"
            )

    @property
    def _key_heads(self) -> int:
        """Heads of keys in a ring, by the channels of the convolution; else as many as states."""
        heads, value_size, key_size = self.shapes[-1]
        if len(self.shapes) == 1:
            return heads
        keys, rest = divmod(self.shapes[0][-1] - heads * value_size, 2 * key_size)
        return 0 if rest or len(self.shapes) != 2 else keys

    @property
    def arrays(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of each array of a page, in order: the state's, and those of a ring.

        A ring has keys, what each adds, and the logarithms of decays; see `pallas_kernels.Replay`.
        """
        arrays = tuple(zip(self.shapes, self.dtypes, strict=True))
        if not self.replay:
            return arrays
        (heads, value_size, key_size), dtype = arrays[-1]
        terms, columns = 1 if DTYPE_BYTES[dtype] == 4 else 3, -(-self.replay // 16) * 16
        keys = self._key_heads, self.replay, key_size
        added = heads, self.replay, value_size
        log_decay = heads, terms + bool(self.speculative_tokens), columns
        return (*arrays, *((shape, dtype) for shape in (keys, added, log_decay)))

    @property
    def array_bytes(self) -> tuple[int, ...]:
        """Bytes of each of `arrays`."""
        return tuple(packed_bytes(math.prod(shape), dtype) for shape, dtype in self.arrays)

    @property
    def data_bytes(self) -> int:
        return sum(self.array_bytes)

    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(
            kind="state",
            block_size=self.block_size,
            cache_mode=self.cache_mode,
            speculative_blocks=self.speculative_blocks,
            speculative_tokens=self.speculative_tokens,
        )

    @property
    def interpretation(self) -> Hashable:
        return ("state", self.shapes, self.dtypes, self.replay, self.speculative_tokens)


def divide(name: str, size: int, ranks: int) -> int:
    """Returns ``size / ranks``, or raises ValueError that names what does not divide."""
    check_positive(**{name: size}, tensor_parallel=ranks)
    if size % ranks:
        raise ValueError(f"{name}={size} does not divide among tensor_parallel={ranks} ranks")
    return size // ranks


def heads_per_rank(num_kv_heads: int, ranks: int) -> int:
    """Returns the KV heads of one rank: divided, or replicated where ranks outnumber heads.

    Raises:
      ValueError: neither number divides the other.
    """
    return _per_rank("num_kv_heads", num_kv_heads, ranks)


def _per_rank(name: str, count: int, ranks: int) -> int:
    check_positive(**{name: count}, tensor_parallel=ranks)
    if ranks > count and ranks % count == 0:
        return 1
    return divide(name, count, ranks)


def _conv_rows(conv_kernel: int, speculative_tokens: int) -> int:
    check_positive(conv_kernel=conv_kernel)
    check_count(speculative_tokens=speculative_tokens)
    return conv_kernel - 1 + speculative_tokens


def mamba1_state(
    *, inner_size: int, state_size: int, conv_kernel: int, tensor_parallel: int = 1
) -> Shapes:
    """Returns the shapes of one mamba1 state on one rank: convolution inputs, state per channel."""
    check_positive(state_size=state_size)
    inner = divide("inner_size", inner_size, tensor_parallel)
    return (_conv_rows(conv_kernel, 0), inner), (inner, state_size)


def mamba2_state(
    *,
    num_heads: int,
    head_size: int,
    state_size: int,
    num_groups: int,
    conv_kernel: int,
    speculative_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Shapes:
    """Returns the shapes of one mamba2 state on one rank.

    The convolution runs over inputs and two group projections. Groups that are fewer than the ranks
    are repeated, so that each rank has one.

    Raises:
      ValueError: heads that do not divide among the ranks, or groups that do not either and of
        whose number does not divide the number of ranks.
    """
    check_positive(num_heads=num_heads, head_size=head_size, state_size=state_size)
    groups = _per_rank("num_groups", num_groups, tensor_parallel) * tensor_parallel
    channels = num_heads * head_size + 2 * groups * state_size
    heads = divide("num_heads", num_heads, tensor_parallel)
    rows = _conv_rows(conv_kernel, speculative_tokens)
    return (rows, divide("channels", channels, tensor_parallel)), (heads, head_size, state_size)


def gated_delta_net_state(
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_size: int,
    value_size: int,
    conv_kernel: int,
    speculative_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Shapes:
    """Returns the shapes of one gated delta net state on one rank (Qwen3-Next).

    The arrays are the convolution inputs over queries, keys and values, and a (value x key)
    matrix for each value head.
    """
    check_positive(num_key_heads=num_key_heads, num_value_heads=num_value_heads)
    check_positive(key_size=key_size, value_size=value_size)
    channels = 2 * num_key_heads * key_size + num_value_heads * value_size
    heads = divide("num_value_heads", num_value_heads, tensor_parallel)
    rows = _conv_rows(conv_kernel, speculative_tokens)
    return (rows, divide("channels", channels, tensor_parallel)), (heads, value_size, key_size)


def kda_state(
    *,
    num_heads: int,
    head_size: int,
    conv_kernel: int,
    speculative_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Shapes:
    """Returns the shapes of one Kimi delta attention state on one rank: q, k and v have heads."""
    check_positive(num_heads=num_heads, head_size=head_size)
    channels = divide("num_heads * head_size", num_heads * head_size, tensor_parallel)
    heads = divide("num_heads", num_heads, tensor_parallel)
    rows = _conv_rows(conv_kernel, speculative_tokens)
    return (rows, 3 * channels), (heads, head_size, head_size)


def linear_attention_state(*, num_heads: int, head_size: int, tensor_parallel: int = 1) -> Shapes:
    """Returns the shape of one linear attention state on one rank (MiniMax): a matrix per head."""
    check_positive(head_size=head_size)
    return ((divide("num_heads", num_heads, tensor_parallel), head_size, head_size),)
