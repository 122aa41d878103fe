"""The sizes of a step, and the upload that carries its integers. No jax."""

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from jaxtyping import Int32

from jaxkv._src.internal.checks import (
    check_at_most,
    check_count,
    check_flag,
    check_positive,
    make_ints_plain,
    plain_ints,
)
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.internal.numbers import INT32_MAX, cdiv
from jaxkv._src.planning import Plan, check_rows
from jaxkv._src.specs import Growth
from jaxkv._src.uploads._format import BY_GROUP, UploadFormat

if TYPE_CHECKING:
    from jax import Array

SIZES = ("batch_size", "max_tokens", "max_query_len", "max_seq_len")  # of a `StepShape`
SIZES += ("extra", "block_ids", "zero_ids", "block_copies")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static sizes of a step; each distinct shape is compiled once.

    Make one per bucket with `for_plan`, which derives the other sizes from the plan::

        decode = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=256, max_query_len=1)
        prefill = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=8192)
        manager.start("a")
        upload = manager.step(prefill, {"a": 40})

    In array shapes, B is ``batch_size``, T is ``max_tokens`` and G is the number of groups.

    growths, num_blocks, context_parallel: of the plan.
    max_requests: rows of the block tables, as given to `make_cache` and `BlockManager`.
    batch_size: requests of a step.
    max_tokens: tokens of a step, over all its requests.
    tokens_per_request: width of a rectangular ``[B, tokens_per_request]`` batch; None: the
      tokens of a batch lie end to end.
    max_query_len: tokens of one request in a step. If it is 1, token i of a flat batch belongs to
      request i.
    max_seq_len: tokens of one request after a step.
    max_encoder_tokens: encoder tokens of one request.
    block_ids: table entries that a step writes, over all groups.
    zero_ids: fresh blocks that a step zeroes, over all groups.
    block_copies: blocks that a step copies, over all groups.
    extra: int32s of your own that travel with the step (token ids, say).
    shared_prefixes: groups of requests that read common blocks once; 0: all read their own.
    token_ids: whether ``extra`` begins with the id of each token of the step, so that a step with
      fewer ids is refused, or with other ids than its prompts have.
    reproducible: whether the bits that `attend` returns for a token depend on its request alone.
    """

    growths: tuple[Growth, ...]
    num_blocks: int
    context_parallel: int
    max_requests: int
    batch_size: int
    max_tokens: int
    tokens_per_request: int | None
    max_query_len: int
    max_seq_len: int
    max_encoder_tokens: int
    block_ids: int
    zero_ids: int
    block_copies: int
    extra: int
    shared_prefixes: int
    token_ids: bool
    reproducible: bool

    def __post_init__(self) -> None:
        make_ints_plain(self)
        positive = ("num_blocks", "context_parallel", "max_requests", "batch_size", "max_tokens")
        positive += ("max_query_len", "max_seq_len")
        counts = ("max_encoder_tokens", "block_ids", "zero_ids", "block_copies", "extra")
        counts += ("shared_prefixes",)
        check_positive(**{name: getattr(self, name) for name in positive})
        check_count(**{name: getattr(self, name) for name in counts})
        check_at_most(INT32_MAX, **{name: getattr(self, name) for name in (*positive, *counts)})
        check_flag(token_ids=self.token_ids, reproducible=self.reproducible)
        if self.batch_size > self.max_requests:
            raise ValueError(
                f"batch_size={self.batch_size} is more than max_requests={self.max_requests}, the "
                "rows of the tables; a request is in a batch once"
            )
        if self.tokens_per_request is not None:
            check_positive(tokens_per_request=self.tokens_per_request)
            if self.max_tokens != self.batch_size * self.tokens_per_request:
                raise ValueError(
                    f"max_tokens={self.max_tokens} must be batch_size * tokens_per_request = "
                    f"{self.batch_size * self.tokens_per_request} for a rectangular batch"
                )
        other = {
            f"max_query_len={self.max_query_len}": self.max_query_len > 1,
            f"context_parallel={self.context_parallel}": self.context_parallel > 1,
            "reproducible=True": self.reproducible,
        }
        if self.shared_prefixes and any(other.values()):
            named = " and ".join(name for name, given in other.items() if given)
            raise ValueError(
                f"shared_prefixes={self.shared_prefixes} does not go with {named}; it is for steps "
                "of one token per request, without context parallelism, that need not be "
                "reproducible"
            )

    @classmethod
    @knows_remedies()
    @plain_ints
    def for_plan(
        cls,
        plan: Plan,
        *,
        max_requests: int,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        tokens_per_request: int | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        forks: int = 0,
        cached_tokens: int | None = None,
        extra: int = 0,
        shared_prefixes: int = 0,
        token_ids: bool = False,
        reproducible: bool = False,
    ) -> Self:
        """Derives every size of a step from the plan.

        Example::

            decode = jaxkv.StepShape.for_plan(plan, max_requests=256, batch_size=64, max_tokens=64)
            square = jaxkv.StepShape.for_plan(plan, max_requests=256, tokens_per_request=4)

        Every step within ``batch_size``, ``max_tokens``, ``max_query_len`` and ``max_seq_len``
        fits, because the sizes bound the blocks that its requests can take in one step.

        Args:
          plan: the plan of the cache.
          max_requests: rows of the block tables, as given to `make_cache` and `BlockManager`.
          max_tokens: tokens of a step; omitted for a rectangular batch.
          batch_size: requests of a step; None: ``max_requests``, or ``max_tokens`` if less.
          tokens_per_request: for a rectangular ``[batch_size, tokens_per_request]`` batch.
          max_query_len: tokens of one request in a step; None: as many as the step and
            ``limits.max_in_flight_tokens`` allow. Tables of sliding windows and chunks are
            as wide as this needs.
          max_seq_len: tokens of one request after a step; None: ``plan.max_model_len``. A
            bucket for shorter requests gathers narrower tables.
          forks: requests of a step that write for the first time since a fork, including the
            donors. Each may copy a block in every group.
          cached_tokens: tokens that were in the cache already when requests of the step compute for
            the first time, after a fork or because a prompt begins with them, summed over the
            requests; the step writes the table entries of their blocks. None: ``max_seq_len`` if
            there are ``forks``, else 0. Requests that continue after a recurrent state also count
            as ``forks``.
          extra: integers of your own that travel with the upload.
          shared_prefixes: groups of requests that `attend` may take together, if the shape is of
            ``max_query_len=1``. Requests that begin with the same blocks, after a fork or because a
            prompt begins with cached tokens, read those once for a whole group, in full attention
            and latent vectors. The manager chooses the groups of each step by the tokens that they
            save: a request is in one group at most, a shared prefix has 256 tokens or more, and
            all together save an eighth of what the step would read; otherwise, and in uploads of
            `pack_step`, there are none. 0: every request reads its own.
          token_ids: whether the first of these are the token ids; see `StepShape`.
          reproducible: True: the bits that `attend` returns for a token do not depend on the other
            requests of its step, on rows and block ids, nor on how its prompt was cut into chunks,
            found in the cache or computed again after a preemption. See
            `pallas_kernels.paged_attention`, also for its price. The rest of your model has to
            keep this up: a GEMM adds up in an order of its own for each shape, so run decodes and
            prompts in steps of one shape.

        Returns:
          The shape.

        Raises:
          TypeError, ValueError: sizes that are not positive ints or contradict each other.
        """
        check_rows(plan, max_requests)
        check_count(forks=forks)
        tokens, batch = _token_sizes(max_requests, max_tokens, batch_size, tokens_per_request)
        longest = plan.max_model_len if max_seq_len is None else max_seq_len
        query = tokens if max_query_len is None else max_query_len
        check_positive(max_seq_len=longest, max_query_len=query)
        longest = min(longest, plan.max_model_len)
        query = min(query, tokens, tokens_per_request or tokens, longest)
        query = min(query, plan.limits.max_in_flight_tokens)
        cached = (longest if forks else 0) if cached_tokens is None else cached_tokens
        check_count(cached_tokens=cached)
        return cls(
            growths=tuple(group.growth for group in plan.groups),
            num_blocks=plan.num_blocks,
            context_parallel=plan.context_parallel,
            max_requests=max_requests,
            batch_size=batch,
            max_tokens=tokens,
            tokens_per_request=tokens_per_request,
            max_query_len=query,
            max_seq_len=longest,
            max_encoder_tokens=plan.limits.max_encoder_tokens,
            extra=extra,
            shared_prefixes=shared_prefixes,
            token_ids=token_ids,
            reproducible=reproducible,
            **_block_sizes(plan, batch, tokens, query, forks, cached),
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Logical blocks in a step's table, per group; see `StepBatch.kernel_block_tables`."""
        longest = cdiv(self.max_seq_len, self.context_parallel)
        query = self.max_query_len
        return tuple(
            growth.step_blocks(query, longest, self.max_encoder_tokens) for growth in self.growths
        )

    @functools.cached_property
    def format(self) -> UploadFormat:
        """Offsets of a step's integers in its upload."""
        sizes = (field.name for field in dataclasses.fields(UploadFormat))
        return UploadFormat(**{name: getattr(self, name) for name in sizes})

    @functools.cached_property
    def largest_step(self) -> tuple[int, ...]:
        """The largest step of the shape, in the order of `SIZES`."""
        return tuple(getattr(self, name) for name in SIZES)

    def idle(self, ring: "Ring | None" = None) -> "Upload":
        """Returns the upload of a step without requests, to compile a step before serving.

        It has no number, so that it need not run.
        """
        if ring is None:
            return Upload(data=self.format.padding.copy(), shape=self)
        ring.buffer(self)[:] = self.format.padding
        return Upload(data=ring.flush(), shape=self)

    def check_made_for(self, owner: str, **tables: object) -> None:
        """Raises ValueError unless the shape was made for given tables.

        Args:
          owner: "cache" or "manager", whose tables they are.
          tables: their ``growths``, ``num_blocks``, ``context_parallel`` and ``max_requests``.
        """
        for name, wanted in tables.items():
            mine = getattr(self, name)
            if mine != wanted:
                both = f"its {name} is {mine} and the {owner}'s {wanted}"
                if name == "growths":
                    both = "its groups take other blocks"
                raise ValueError(
                    f"the step shape was made for another plan than the {owner}: {both}; make "
                    "cache, manager and shapes from one plan, with one max_requests"
                )

    def __repr__(self) -> str:
        form = f"{self.max_tokens} tokens"
        if self.tokens_per_request is not None:
            form = f"{self.tokens_per_request} tokens each"
        return (
            f"StepShape({self.batch_size} of {self.max_requests} requests, {form}, up to "
            f"{self.max_seq_len:,} tokens a request, {self.format.size:,} int32s)"
        )

    def __getstate__(self) -> dict[str, object]:  # without the cached properties
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:  # cached: jit hashes the shape at every dispatch
        return self._hash


class Ring(Protocol):
    """A source of upload buffers, such as `jaxkv.UploadRing`."""

    def buffer(self, shape: StepShape) -> Int32[np.ndarray, "ints"]:
        """Returns int32[shape.format.size] to write a step into."""
        ...

    def flush(self) -> "Int32[Array, 'ints']":
        """Returns the last buffer as the array that a step reads."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Upload:
    """All integers of one step, for `apply_step`: a pytree that carries its shape as static data.

    data: int32[shape.format.size], NumPy or jax.
    """

    data: "Int32[np.ndarray | Array, 'ints']"
    shape: StepShape

    def __post_init__(self) -> None:
        register_upload()

    def parts(self) -> dict[str, Int32[np.ndarray, "..."]]:
        """Returns the integers of the upload by name, without padding. Waits for the device.

        ``number`` counts the manager's uploads; it is negative in the first one after
        `BlockManager.reset`. Requests: ``request_rows``, ``num_computed_tokens``,
        ``query_start_loc``, ``encoder_lens``, ``accepted_tokens``, ``extra``. Groups that read
        common blocks together: ``prefix_members``, and of each group ``prefix_ends`` and
        ``prefix_lens``. Table entries, ordered by group: ``entry_rows``, ``entry_logical_blocks``,
        ``entry_ids``, and the end of each group's entries, ``entry_ends``; ``changed_rows`` and
        their ``row_lengths``. Blocks, likewise ordered by group: ``zero_ids``, ``zero_ends``;
        ``copy_sources``, ``copy_destinations``, ``copy_ends``.
        """
        parts = self.shape.format.split(np.asarray(self.data))
        requests, changed = (int((parts[f"{of}_rows"] >= 0).sum()) for of in ("request", "changed"))
        names = "request_rows", "num_computed_tokens", "encoder_lens", "accepted_tokens"
        sizes = dict.fromkeys(names, requests)
        sizes |= {"query_start_loc": requests + 1, "changed_rows": changed, "row_lengths": changed}
        groups = int((parts["prefix_lens"] > 0).sum())
        sizes |= dict.fromkeys(("prefix_ends", "prefix_lens"), groups)
        sizes["prefix_members"] = int((parts["prefix_members"] >= 0).sum())
        for ends, names in BY_GROUP.items():
            sizes |= dict.fromkeys(names, max(parts[ends].tolist(), default=0))
        return parts | {name: parts[name][:size] for name, size in sizes.items()}

    def __repr__(self) -> str:
        if not isinstance(self.data, np.ndarray):
            return f"Upload({self.shape!r})"
        parts = self.parts()
        number, tokens = int(parts["number"][0]), int(parts["query_start_loc"][-1])
        return (
            f"Upload({f'number {abs(number)}' if number else 'not numbered'}: "
            f"{parts['request_rows'].size} requests, {tokens} tokens, "
            f"{parts['entry_ids'].size} table entries, {parts['zero_ids'].size} blocks to zero, "
            f"{parts['copy_sources'].size} to copy)"
        )


def _token_sizes(
    max_requests: int,
    max_tokens: int | None,
    batch_size: int | None,
    tokens_per_request: int | None,
) -> tuple[int, int]:
    """Returns the tokens and the requests of a step."""
    if max_tokens is None and tokens_per_request is None:
        raise TypeError("max_tokens is missing: pass the tokens of a step over all its requests")
    batch = max_requests if batch_size is None else batch_size
    each = 1 if tokens_per_request is None else tokens_per_request
    check_positive(batch_size=batch, tokens_per_request=each)
    tokens = batch * each if max_tokens is None else max_tokens
    check_positive(max_tokens=tokens)
    if batch_size is None and tokens_per_request is None:
        batch = min(batch, tokens)
    return tokens, batch


def _block_sizes(
    plan: Plan, batch: int, tokens: int, query: int, forks: int, cached: int
) -> dict[str, int]:
    """Returns the most blocks that a step takes, zeroes and copies, as `StepShape` names them."""
    each = batch, tokens, query, plan.limits.max_encoder_tokens, plan.context_parallel
    most = [group.growth.most_new_blocks(*each) for group in plan.groups]
    zeroed = sum(n for n, zero in zip(most, plan.groups_to_zero, strict=True) if zero)
    copies = min(forks * len(plan.groups), plan.num_blocks - 1)
    sizes = [group.growth.block_size * plan.context_parallel for group in plan.groups]
    shared = sum(min(batch, cached) + cached // size for size in sizes)
    return {
        "block_ids": min(sum(most) + copies, plan.num_blocks - 1) + shared,
        "zero_ids": min(zeroed, plan.num_blocks - 1),
        "block_copies": copies,
    }


def register_upload() -> None:
    """Registers `Upload` as a pytree once jax is imported, which is not done here."""
    jax: Any = sys.modules.get("jax")
    if not _REGISTERED and hasattr(jax, "tree_util"):
        _REGISTERED.append(Upload)
        jax.tree_util.register_dataclass(Upload, data_fields=["data"], meta_fields=["shape"])


_REGISTERED: list[type] = []
