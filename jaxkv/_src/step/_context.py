"""`StepContext`, a step as a model sees it."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32, PyTree, Shaped

from jaxkv._src.attention import attend, top_blocks, top_tokens
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_array, check_flag, check_int32
from jaxkv._src.internal.indexing import take
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.internal.text import shown
from jaxkv._src.pool import read_state, write_state
from jaxkv._src.recurrent import gated_delta, linear_attention, mamba2, short_conv
from jaxkv._src.step._apply import apply_step
from jaxkv._src.step._record import StepRecord
from jaxkv._src.uploads import Upload
from pallas_kernels import Implementation, LatentPacking


@jax.tree_util.register_pytree_node_class
class StepContext:
    """One step as the model sees it: its tokens, and the layers' calls into the cache.

    Made inside ``jit``, from a cache and an upload. It threads the cache through all calls, so
    that a model cannot lose one::

        @jax.jit(donate_argnums=1)
        def step(params, cache, upload):
            context = jaxkv.StepContext(cache, upload)
            x = params + jnp.ones((64, 1, 8))  # in a model: params["embed"][context.token_ids]
            for layer in layers:
                x = x + context.attend(layer, queries=x, keys=x, values=x)
            return context.done(), x[context.last_tokens]

    While the step is traced, it raises if a layer is written twice, read before it was written, or
    never written.

    It is a pytree. A scan over layers carries it, ``(step, x), _ = jax.lax.scan(body, (step, x),
    xs)``, and names each layer by ``layer_index=``; so does a `jax.jit` inside of the model.

    Shapes: B requests, T tokens. Arrays of tokens are [T, ...]; [1, T, ...] is taken, too, and
    returned; or [B, T / B, ...] for a rectangular batch (``tokens_per_request``).
    """

    def __init__(
        self,
        cache: KVCache,
        upload: Upload,
        *,
        token_ids: Int32[Array, "*tokens"] | None = None,
        newest_tokens: Int32[Array, "newest"] | None = None,
        implementation: Implementation | None = None,
    ):
        """Brings the cache up to date with the step; see `jaxkv.apply_step`.

        Args:
          cache: as the previous step returned it.
          upload: from `BlockManager.step`.
          token_ids: int32[T] or [B, T / B]; None: the first T of the upload's ``extra``.
          newest_tokens: int32[N], tokens that earlier steps sampled: the id ``-1 - i`` stands
            for the i-th of them, so that tokens stay on the device. None: ids are as given.
          implementation: as for `jaxkv.apply_step`.

        Raises:
          TypeError, ValueError: as `jaxkv.apply_step`; no token ids, or of another shape.
        """
        self._cache, self._batch = apply_step(cache, upload, implementation=implementation)
        self._token_ids = _token_ids(self._batch, token_ids)
        if newest_tokens is not None:
            check_int32(newest_tokens=newest_tokens)
            newest = take(newest_tokens, -1 - self._token_ids)
            self._token_ids = jnp.where(self._token_ids < 0, newest, self._token_ids)
        self._record, self._calls = StepRecord(self._cache.layout), 0

    def tree_flatten(self) -> tuple[tuple[KVCache, StepBatch, Array], Hashable]:
        return (self._cache, self._batch, self._token_ids), self._record

    @classmethod
    def tree_unflatten(cls, record: StepRecord, children: tuple[KVCache, StepBatch, Array]) -> Self:
        new = object.__new__(cls)
        new._cache, new._batch, new._token_ids = children
        new._record, new._calls = record, record.calls
        return new

    def __repr__(self) -> str:
        return f"StepContext({self._batch.shape!r}, {self._record})"

    # --- tokens -------------------------------------------------------------------

    @property
    def batch(self) -> StepBatch:
        """The requests of the step: block tables, slots, lengths."""
        return self._batch

    @property
    def token_ids(self) -> Int32[Array, "*tokens"]:
        """int32[T] or [B, T / B], the tokens to compute; any id for padding."""
        return self._token_ids

    @property
    def positions(self) -> Int32[Array, "*tokens"]:
        """int32[T] or [B, T / B], the position of each token in its request; -1 for padding."""
        return self._batch.positions

    @property
    def last_tokens(self) -> Int32[Array, "requests"]:
        """int32[B], index of each request's last token; see `StepBatch.last_tokens`."""
        return self._batch.last_tokens

    # --- layers -------------------------------------------------------------------

    def attend(
        self,
        layer: str,
        queries: Float[Array, "*tokens heads key_size"],
        keys: Float[Array, "... key_size"] | None = None,
        values: Float[Array, "*tokens kv_heads value_size"] | None = None,
        *,
        write: bool = True,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
        selected: Int32[Array, "*tokens chosen"]
        | Int32[Array, "*tokens kv_heads chosen"]
        | None = None,
        sparse_block_size: int = 1,
        row_packing: LatentPacking | None = None,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "*tokens heads value_size"]:
        """Writes keys and values into a layer and attends; see `jaxkv.attend`.

        Args:
          write: False, together with no keys, attends to a layer that this step does not write.

        Returns:
          The output, with the leading axes of ``queries``.

        Raises:
          ValueError: no keys for a layer that the step has not written (``write=True``), or keys
            for one that it has; as `jaxkv.attend`.
        """
        check_flag(write=write)
        if keys is None and write and values is None:
            self._record.check_readable(layer, layer_index)
        if selected is not None:
            by_head = np.ndim(selected) == np.ndim(queries)
            (selected,), _ = _without_batch_axis(self._batch, 1 + by_head, (selected,))
        options = dict(
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            selected=selected,
            sparse_block_size=sparse_block_size,
            row_packing=row_packing,
            layer_index=layer_index,
            implementation=implementation,
        )
        arrays, writes = (queries, keys, values), keys is not None
        return self._call(attend, layer, arrays, options, features=2, writes=writes)

    def top_tokens(
        self,
        layer: str,
        queries: Float[Array, "*tokens heads key_size"],
        weights: Float[Array, "*tokens heads"],
        keys: Float[Array, "*tokens key_size"] | None = None,
        *,
        count: int,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Int32[Array, "*tokens count"]:
        """Writes index keys and chooses the tokens to attend to; see `jaxkv.top_tokens`."""
        options = dict(count=count, layer_index=layer_index, implementation=implementation)
        return self._call(
            top_tokens,
            layer,
            (queries, weights, keys),
            options,
            features=2,
            writes=keys is not None,
        )

    def top_blocks(
        self,
        layer: str,
        queries: Float[Array, "*tokens heads key_size"],
        keys: Float[Array, "*tokens key_size"] | None = None,
        *,
        count: int,
        sparse_block_size: int,
        init_blocks: int = 0,
        local_blocks: int = 0,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Int32[Array, "*tokens heads count"]:
        """Writes index keys and chooses blocks by them; see `jaxkv.attention.top_blocks`."""
        options = dict(
            count=count,
            sparse_block_size=sparse_block_size,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            layer_index=layer_index,
            implementation=implementation,
        )
        writes = keys is not None
        return self._call(top_blocks, layer, (queries, keys), options, features=2, writes=writes)

    def gated_delta(
        self,
        layer: str,
        qkv: Float[Array, "*tokens channels"],
        log_decay: Float[Array, "*tokens value_heads"]
        | Float[Array, "*tokens value_heads key_size"],
        beta: Float[Array, "*tokens value_heads"],
        *,
        conv_weights: Float[Array, "width channels"],
        num_key_heads: int,
        conv_bias: Float[Array, "channels"] | None = None,
        scale: float | None = None,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "*tokens value_heads value_size"]:
        """Runs the gated delta rule over a layer's states; see `jaxkv.gated_delta`."""
        options = dict(
            conv_weights=conv_weights,
            num_key_heads=num_key_heads,
            conv_bias=conv_bias,
            scale=scale,
            layer_index=layer_index,
            implementation=implementation,
        )
        return self._call(gated_delta, layer, (qkv, log_decay, beta), options, features=1)

    def mamba2(
        self,
        layer: str,
        xbc: Float[Array, "*tokens channels"],
        log_decay: Float[Array, "*tokens heads"],
        steps: Float[Array, "*tokens heads"],
        *,
        conv_weights: Float[Array, "width channels"],
        num_groups: int,
        conv_bias: Float[Array, "channels"] | None = None,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "*tokens heads value_size"]:
        """Runs Mamba-2 over a layer's states; see `jaxkv.mamba2`."""
        options = dict(
            conv_weights=conv_weights,
            num_groups=num_groups,
            conv_bias=conv_bias,
            layer_index=layer_index,
            implementation=implementation,
        )
        return self._call(mamba2, layer, (xbc, log_decay, steps), options, features=1)

    def linear_attention(
        self,
        layer: str,
        qkv: Float[Array, "*tokens channels"],
        log_decay: Float[Array, "*tokens value_heads"] | Float[Array, "value_heads"],
        *,
        num_key_heads: int | None = None,
        scale: float = 1.0,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "*tokens value_heads value_size"]:
        """Runs linear attention with decay over states; see `jaxkv.linear_attention`."""
        options = dict(
            num_key_heads=num_key_heads,
            scale=scale,
            layer_index=layer_index,
            implementation=implementation,
        )
        return self._call(linear_attention, layer, (qkv, log_decay), options, features=1)

    def short_conv(
        self,
        layer: str,
        inputs: Float[Array, "*tokens channels"],
        *,
        conv_weights: Float[Array, "width channels"],
        conv_bias: Float[Array, "channels"] | None = None,
        silu: bool = False,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "*tokens channels"]:
        """Runs a causal convolution over a layer's last inputs; see `jaxkv.short_conv`."""
        options = dict(
            conv_weights=conv_weights,
            conv_bias=conv_bias,
            silu=silu,
            layer_index=layer_index,
            implementation=implementation,
        )
        return self._call(short_conv, layer, (inputs,), options, features=1)

    def read_state(
        self,
        layer: str,
        *,
        at: Int32[Array, "requests"] | None = None,
        layer_index: LayerIndex = None,
    ) -> tuple[Shaped[Array, "requests ..."], ...]:
        """Reads the state that each request resumes from; see `jaxkv.read_state`."""
        return self._call(read_state, layer, (), dict(at=at, layer_index=layer_index))

    def write_state(
        self,
        layer: str,
        arrays: Sequence[Shaped[Array, "requests ..."]],
        *,
        at: Int32[Array, "requests"] | None = None,
        layer_index: LayerIndex = None,
        implementation: Implementation | None = None,
    ) -> None:
        """Writes a state per request; see `jaxkv.write_state`. With ``at``, more than once."""
        options = dict(at=at, layer_index=layer_index, implementation=implementation)
        self._call(write_state, layer, (arrays,), options, again=at is not None)

    def call(
        self, function: Callable[..., PyTree], layer: str, *arrays: PyTree, **options: object
    ) -> PyTree:
        """Calls ``function(cache, layer, batch, *arrays, **options)``, and goes on with its cache.

        For other functions of jaxkv and your own: ``step.call(jaxkv.write_rows, layer, rows)``.

        Args:
          function: returns a cache, a cache and an output, or only an output if it writes nothing.

        Returns:
          The output; None if there is none.
        """
        if not callable(function):
            raise TypeError(f"function must be a function of a cache, got {shown(function)}")
        return self._call(function, layer, arrays, options)

    def skip_ended(self) -> Bool[Array, "requests"]:
        """Makes requests whose last token id is negative write nothing, and returns which they are.

        For several steps in one program: a sampled token of -1 in ``newest_tokens`` ends its
        request. Call it before the layers.
        """
        has_ended = take(self._token_ids.reshape(-1), self._batch.last_tokens) < 0
        ids = jnp.where(has_ended[:, None], NULL_BLOCK, self._batch.block_ids)
        self._batch = dataclasses.replace(self._batch, block_ids=ids)
        self._token_ids = jnp.maximum(self._token_ids, 0)
        return has_ended

    def done(self) -> KVCache:
        """Ends the step, and returns the next cache.

        Raises:
          ValueError: a layer of the plan was never written, or the step has ended before.
        """
        self._record.check_current("done()", self._calls, self._cache.status)
        self._record.end()
        return self._cache

    def _call(
        self,
        function: Callable[..., Any],
        layer: str,
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        features: int | None = None,
        writes: bool = True,
        again: bool = False,
    ) -> Any:
        """Calls a layer, stores the returned cache, and returns the output.

        Args:
          arrays, options: arguments of the function after the batch.
          features: axes of the first array after the axes of tokens; None: it has no such axes.
          writes, again: whether the call writes the layer, and may write it another time.
        """
        self._record.check_current(f"layer={layer!r}", self._calls, self._cache.status)
        given, restore = _without_batch_axis(self._batch, features, arrays)
        result = function(self._cache, layer, self._batch, *given, **options)
        pair = result if isinstance(result, tuple) else (result, None)
        if not pair or not isinstance(pair[0], KVCache):
            return restore(result)
        self._cache, out = pair
        self._record.calls += 1
        self._calls = self._record.calls
        if writes:
            self._record.note_written(layer, options.get("layer_index"), again=again)
        return restore(out)


def _token_ids(batch: StepBatch, token_ids: Array | np.ndarray | None) -> Array:
    """Returns the token ids of a step in the shape of its token arrays."""
    shape, tokens = batch.token_shape, batch.shape.max_tokens
    if token_ids is not None:
        check_array(token_ids=token_ids)
        if token_ids.shape != shape:
            raise ValueError(f"token_ids has shape {token_ids.shape}; this step wants {shape}")
        return jnp.asarray(token_ids)
    if batch.shape.extra < tokens:
        raise ValueError(
            f"the step's shape has extra={batch.shape.extra} and {tokens} tokens: send their ids "
            "with the upload (extra=), or pass token_ids"
        )
    return batch.extra[:tokens].reshape(shape)


def _without_batch_axis(
    batch: StepBatch, features: int | None, arrays: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Callable[[Any], Any]]:
    """Removes the first axis of [1, T, ...] arrays. Returns a function that restores it."""
    axes, first = len(batch.token_shape) + 1, arrays[0] if arrays else None
    is_batched = first is not None and features is not None and np.ndim(first) == axes + features
    if not is_batched or first.shape[0] != 1:
        return arrays, lambda out: out
    return tuple(x if x is None else x[0] for x in arrays), lambda out: out[None]
