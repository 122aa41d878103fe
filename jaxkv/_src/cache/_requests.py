"""The requests and tokens of a step, before a layer reads them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from jaxkv._src.cache._layout import CacheLayout
from jaxkv._src.internal.indexing import group_of, take
from jaxkv._src.uploads import StepShape

PAD_ROW = -1  # table row of a batch entry that is padding


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BatchRequests:
    """The requests of one step and their tokens: the part of `StepBatch` without layers."""

    block_ids: Int32[Array, "requests width"]  # the `tables` of all groups side by side
    data: Int32[Array, "ints"]  # `UploadFormat.batch_fields` of the upload
    status: Int32[Array, "2"]  # `KVCache.status` after the step's upload
    shape: StepShape = dataclasses.field(metadata={"static": True})
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"StepBatch({self.shape!r})"

    @property
    def tables(self) -> tuple[Int32[Array, "requests width"], ...]:
        """Per group int32[B, W_g], logical ids from `first_blocks` on."""
        ends = itertools.accumulate(self.shape.widths, initial=0)
        return tuple(self.block_ids[:, start:end] for start, end in itertools.pairwise(ends))

    # --- requests -----------------------------------------------------------------

    @property
    def request_rows(self) -> Int32[Array, "requests"]:
        """int32[B], each request's row of the block tables; `PAD_ROW` for padding."""
        return self._uploaded("request_rows")

    @property
    def num_computed_tokens(self) -> Int32[Array, "requests"]:
        """int32[B], tokens of each request that were in the cache before this step."""
        return self._uploaded("num_computed_tokens")

    @property
    def query_start_loc(self) -> Int32[Array, "requests+1"]:
        """int32[B + 1], this step's tokens of all earlier requests; the last entry is the total."""
        return self._uploaded("query_start_loc")

    @property
    def query_lens(self) -> Int32[Array, "requests"]:
        """int32[B], tokens that each request computes in this step; 0 for padding."""
        return jnp.diff(self.query_start_loc)

    @property
    def seq_lens(self) -> Int32[Array, "requests"]:
        """int32[B], tokens of each request, including this step's; 0 for padding."""
        return self.num_computed_tokens + self.query_lens

    @property
    def last_tokens(self) -> Int32[Array, "requests"]:
        """int32[B], index of each request's last token in a token array; 0 for padding.

        It indexes [T] in a flat batch, and the request's own row in a rectangular one.
        """
        last = self.query_lens if self.is_rectangular else self.query_start_loc[1:]
        return jnp.where(self.query_lens > 0, last - 1, 0)

    @property
    def encoder_lens(self) -> Int32[Array, "requests"]:
        """int32[B], encoder tokens of each request; 0 without cross attention."""
        if not self.shape.format.has_encoder:
            return jnp.zeros(self.shape.batch_size, jnp.int32)
        return self._uploaded("encoder_lens")

    @property
    def accepted_tokens(self) -> Int32[Array, "requests"]:
        """int32[B], tokens of each request's last step that were accepted, for states of drafts.

        0 without states of ``cache_mode="none"`` that have ``speculative_blocks``.
        """
        if not self.shape.format.has_drafts:
            return jnp.zeros(self.shape.batch_size, jnp.int32)
        return self._uploaded("accepted_tokens")

    @property
    def prefix_groups(
        self,
    ) -> tuple[
        Int32[Array, "requests"], Int32[Array, "prefix_groups"], Int32[Array, "prefix_groups"]
    ]:
        """Groups of requests that read a shared prefix together, up to ``shape.shared_prefixes``.

        Returns:
          ``members``, int32[B], requests by their index in the batch, group after group, then -1;
          ``ends``, int32[G], where the members of each group end; ``lens``, int32[G], the tokens
          in the common blocks of each group.
        """
        names = ("prefix_members", "prefix_ends", "prefix_lens")
        members, ends, lens = (self._uploaded(name) for name in names)
        return members, ends, lens

    @property
    def extra(self) -> Int32[Array, "extra"]:
        """int32[shape.extra], the ``extra`` integers that you passed to `BlockManager.step`."""
        return self._uploaded("extra")

    # --- tokens -------------------------------------------------------------------

    @property
    def is_rectangular(self) -> bool:
        """Whether token arrays are [B, T / B] instead of [T]."""
        return self.shape.tokens_per_request is not None

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of token arrays: [T], or [B, T / B] for a rectangular batch."""
        if self.shape.tokens_per_request is None:
            return (self.shape.max_tokens,)
        return self.shape.batch_size, self.shape.tokens_per_request

    @property
    def token_requests(self) -> Int32[Array, "*tokens"]:
        """int32 token array, the index of each token's request in the batch; -1 for padding."""
        if self.is_rectangular:
            requests = jnp.arange(self.shape.batch_size, dtype=jnp.int32)[:, None]
            inside = self._token_offsets < self.query_lens[:, None]
        elif self.shape.max_query_len == 1:  # token i is of request i, see `gather_batch`
            requests = jnp.arange(self.shape.max_tokens, dtype=jnp.int32)
            inside = take(self.query_start_loc, requests + 1) == requests + 1
        else:
            ends = self.query_start_loc[1:]
            requests = group_of(jnp.arange(self.shape.max_tokens, dtype=jnp.int32), ends)
            inside = requests < self.shape.batch_size
        return jnp.where(inside, requests, -1)

    @property
    def positions(self) -> Int32[Array, "*tokens"]:
        """int32 token array, the position of each token in its request; -1 for padding."""
        return _positions(self)

    @property
    def _token_offsets(self) -> Array:
        """int32[1, T / B], indices of tokens in a row of a rectangular batch."""
        return jnp.arange(self.token_shape[-1], dtype=jnp.int32)[None]

    def _uploaded(self, name: str) -> Array:
        where, start = self.shape.format.fields[name], self.shape.format.batch_fields.start
        return self.data[where.start - start : where.stop - start]


@jax.jit  # because models ask for positions in every layer
def _positions(batch: BatchRequests) -> Array:
    requests = batch.token_requests
    starts = batch._token_offsets
    if not batch.is_rectangular:
        starts = jnp.arange(batch.shape.max_tokens, dtype=jnp.int32)
        starts = starts - take(batch.query_start_loc, requests)
    return jnp.where(requests >= 0, take(batch.num_computed_tokens, requests) + starts, -1)
