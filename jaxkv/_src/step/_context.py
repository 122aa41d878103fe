"""`StepContext`, a step as a model sees it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.attention import attend
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_array, check_flag, check_int32
from jaxkv._src.internal.indexing import take
from jaxkv._src.internal.text import shown
from jaxkv._src.pool import read_state, write_state
from jaxkv._src.recurrent import gated_delta, linear_attention, mamba2, short_conv
from jaxkv._src.step._apply import apply_step
from jaxkv._src.uploads import Upload
from pallas_kernels import Implementation

IN_A_SCAN = (
    "carry the step through the function that uses it, and go on with the one that comes back: "
    "(step, x), _ = jax.lax.scan(body, (step, x), xs)"
)


class _Record:
    """The calls of one step so far, shared by all copies of its context.

    written: layers that the step has written.
    calls: number of calls that changed the cache.
    """

    def __init__(self) -> None:
        self.written: set[str] = set()
        self.calls = 0
        self.has_ended = False


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
        token_ids: Array | None = None,
        newest_tokens: Array | None = None,
        implementation: Implementation | None = None,
    ):
        """Brings the cache up to date with the step; see `jaxkv.apply_step`.

        Args:
          cache: as the previous step returned it.
          upload: from `BlockManager.step`.
          token_ids: int32[T] or [B, T / B]; None: the first T of the upload's ``extra``.
          newest_tokens: int32[N], tokens that earlier steps drew: the id ``-1 - i`` stands for
            the i-th of them, so that tokens need not pass through the host. None: ids are as given.
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
        self._record, self._calls = _Record(), 0

    def tree_flatten(self) -> tuple[tuple[Any, ...], Hashable]:
        return (self._cache, self._batch, self._token_ids), self._record

    @classmethod
    def tree_unflatten(cls, record: _Record, children: Sequence[Any]) -> Self:
        new = object.__new__(cls)
        new._cache, new._batch, new._token_ids = children
        new._record, new._calls = record, record.calls
        return new

    def __repr__(self) -> str:
        return f"StepContext({self._batch.shape!r}, {len(self._record.written)} layers written)"

    # --- tokens -------------------------------------------------------------------

    @property
    def batch(self) -> StepBatch:
        """The requests of the step: block tables, slots, lengths."""
        return self._batch

    @property
    def token_ids(self) -> Array:
        """int32[T] or [B, T / B], the tokens to compute; any id for padding."""
        return self._token_ids

    @property
    def positions(self) -> Array:
        """int32[T] or [B, T / B], the position of each token in its request; -1 for padding."""
        return self._batch.positions

    @property
    def last_tokens(self) -> Array:
        """int32[B], index of each request's last token; see `StepBatch.last_tokens`."""
        return self._batch.last_tokens

    # --- layers -------------------------------------------------------------------

    def attend(
        self,
        layer: str,
        queries: Array,
        keys: Array | None = None,
        values: Array | None = None,
        *,
        write: bool = True,
        layer_index: LayerIndex = None,
        **options: Any,
    ) -> Array:
        """Writes keys and values into a layer and attends; see `jaxkv.attend`.

        Args:
          layer, queries, keys, values, period: as for `jaxkv.attend`.
          write: False, together with no keys, attends to a layer that this step does not write.
          options: other arguments of `jaxkv.attend`, by name.

        Returns:
          The output, with the leading axes of ``queries``.

        Raises:
          ValueError: no keys for a layer that the step has not written (``write=True``), or keys
            for one that it has; as `jaxkv.attend`.
        """
        check_flag(write=write)
        if keys is None and write and values is None:
            self._check_readable(layer, layer_index)
        options |= {"layer_index": layer_index, "writes": keys is not None}
        return self._call(attend, layer, queries, keys, values, features=2, **options)

    def gated_delta(
        self, layer: str, qkv: Array, log_decay: Array, beta: Array, **options: Any
    ) -> Array:
        """Runs the gated delta rule over a layer's states; see `jaxkv.gated_delta`."""
        return self._call(gated_delta, layer, qkv, log_decay, beta, features=1, **options)

    def mamba2(
        self, layer: str, xbc: Array, log_decay: Array, steps: Array, **options: Any
    ) -> Array:
        """Runs Mamba-2 over a layer's states; see `jaxkv.mamba2`."""
        return self._call(mamba2, layer, xbc, log_decay, steps, features=1, **options)

    def linear_attention(self, layer: str, qkv: Array, log_decay: Array, **options: Any) -> Array:
        """Runs linear attention with decay over states; see `jaxkv.linear_attention`."""
        return self._call(linear_attention, layer, qkv, log_decay, features=1, **options)

    def short_conv(self, layer: str, inputs: Array, **options: Any) -> Array:
        """Runs a causal convolution over a layer's last inputs; see `jaxkv.short_conv`."""
        return self._call(short_conv, layer, inputs, features=1, **options)

    def read_state(
        self, layer: str, *, at: Array | None = None, layer_index: LayerIndex = None
    ) -> tuple[Array, ...]:
        """Reads the state that each request resumes from; see `jaxkv.read_state`."""
        return self._call(read_state, layer, at=at, layer_index=layer_index)

    def write_state(
        self,
        layer: str,
        arrays: Sequence[Array],
        *,
        at: Array | None = None,
        layer_index: LayerIndex = None,
        **options: Any,
    ) -> None:
        """Writes a state per request; see `jaxkv.write_state`. With ``at``, more than once."""
        options |= {"at": at, "layer_index": layer_index}
        self._call(write_state, layer, arrays, again=at is not None, **options)

    def call(self, function: Callable[..., Any], layer: str, *arrays: Any, **options: Any) -> Any:
        """Calls ``function(cache, layer, batch, *arrays, **options)`` and keeps its cache.

        For other functions of jaxkv and your own: ``step.call(jaxkv.write_rows, layer, rows)``.

        Args:
          function: returns a cache, a cache and an output, or only an output if it writes nothing.

        Returns:
          The output; None if there is none.
        """
        if not callable(function):
            raise TypeError(f"function must be a function of a cache, got {shown(function)}")
        return self._call(function, layer, *arrays, **options)

    def done(self) -> KVCache:
        """Ends the step, and returns the next cache.

        Raises:
          ValueError: a layer of the plan was never written, or the step has ended before.
        """
        self._check_current("done()")
        growths, layout = self._cache.layout.growths, self._cache.layout
        missing = [
            name
            for name in layout.layer_numbers
            if name not in self._record.written
            and growths[layout.placement_of(name).group].stores != "encoder"
        ]
        if missing:
            raise ValueError(
                f"the step ends, and it never wrote {_some(missing)}: the model calls each layer "
                "of the plan once; leave layers out of the plan that the model does not have"
            )
        self._record.has_ended = True
        return self._cache

    # --- checks -------------------------------------------------------------------

    def _call(
        self,
        function: Callable[..., Any],
        layer: str,
        *arrays: Any,
        features: int | None = None,
        writes: bool = True,
        again: bool = False,
        **options: Any,
    ) -> Any:
        """Calls a layer, keeps its cache, and returns its output.

        Args:
          features: axes of the first array after those of the tokens, if arrays have any of these.
        """
        self._check_current(f"layer={layer!r}")
        given, restore = _without_batch_axis(self._batch, features, arrays)
        result = function(self._cache, layer, self._batch, *given, **options)
        pair = result if isinstance(result, tuple) else (result, None)
        if not pair or not isinstance(pair[0], KVCache):
            return restore(result)
        self._cache, out = pair
        self._record.calls += 1
        self._calls = self._record.calls
        if writes:
            self._note_written(layer, options.get("layer_index"), again=again)
        return restore(out)

    def _note_written(self, layer: str, layer_index: LayerIndex, *, again: bool) -> None:
        layers, is_known = self._layers(layer, layer_index)
        if is_known and not again and layers[0] in self._record.written:
            raise ValueError(
                f"layer={layers[0]!r} is written twice in one step: each layer of the model needs "
                "a name of its own"
            )
        self._record.written.update(layers)

    def _layers(self, layer: str, layer_index: LayerIndex) -> tuple[tuple[str, ...], bool]:
        """Returns the layers that a call may write, and whether it is certain to write them."""
        if layer_index is None:
            return (layer,), True
        layers = self._cache.stacked_layers(layer)
        if isinstance(layer_index, jax.core.Tracer):
            return layers, False
        return layers[int(layer_index) :][:1] or layers, True

    def _check_readable(self, layer: str, layer_index: LayerIndex) -> None:
        layout = self._cache.layout
        is_encoder = layout.growths[layout.placement_of(layer).group].stores == "encoder"
        if is_encoder or layout.owner_of(layer) in self._record.written:
            return
        if self._layers(layer, layer_index)[0][0] not in self._record.written:
            raise ValueError(
                f"layer={layer!r} is read and this step has not written it: pass keys and values, "
                "or write=False to attend to earlier tokens only"
            )

    def _check_current(self, what: str) -> None:
        if self._record.has_ended:
            raise ValueError(f"{what}: this step has ended; make a StepContext of the next upload")
        if self._calls != self._record.calls:
            raise ValueError(
                f"{what}: a copy of this step has written since, in a scan or in a jit of its own; "
                f"{IN_A_SCAN}; a forward function returns (logits, step) then"
            )
        here = self._cache.status + 0  # jax has no public name for the trace that runs
        if getattr(here, "_trace", None) is not getattr(self._cache.status, "_trace", None):
            raise ValueError(
                f"{what}: this step is used in a scan or a jit that it was not passed to; "
                f"{IN_A_SCAN}"
            )


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


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:3]))
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} other layers"
