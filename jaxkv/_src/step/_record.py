"""The calls of one step while it is traced, and checks of their order."""

from collections.abc import Sequence

import jax
from jax import Array

from jaxkv._src.cache import CacheLayout, LayerIndex
from jaxkv._src.pool import token_spec

IN_A_SCAN = (
    "pass the step in, and use the one returned: (step, x), _ = jax.lax.scan(body, (step, x), xs)"
)


class StepRecord:
    """The calls of one step so far, shared by all copies of its context.

    It is static data of the context, so that a copy inside a scan or a jit finds it again.

    calls: number of calls that changed the cache.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.calls = 0
        self._layout, self._written, self._has_ended = layout, set[str](), False

    def __repr__(self) -> str:
        return f"{len(self._written)} layers written"

    def check_current(self, what: str, calls: int, status: Array) -> None:
        """Raises ValueError unless a copy of the context is the one to go on with.

        Args:
          calls: after how many calls the copy was returned.
          status: of its cache.
        """
        if self._has_ended:
            raise ValueError(f"{what}: this step has ended; make a StepContext of the next upload")
        if calls != self.calls:
            raise ValueError(
                f"{what}: a copy of this step has written since, in a scan or in a jit of its own; "
                f"{IN_A_SCAN}; a forward function returns jaxkv.ModelOutput(logits, step) then"
            )
        here = status + 0  # jax has no public name for the trace that runs
        if getattr(here, "_trace", None) is not getattr(status, "_trace", None):
            raise ValueError(
                f"{what}: this step is used in a scan or a jit that it was not passed to; "
                f"{IN_A_SCAN}"
            )

    def check_readable(self, layer: str, layer_index: LayerIndex) -> None:
        """Raises TypeError or ValueError unless a layer of tokens is written, or need not be."""
        token_spec(layer, self._layout.placement_of(layer).spec)
        owner = self._layout.owner_of(layer)
        if self._stores_encoder(layer) or owner in self._written:
            return
        if self._layers(layer, layer_index)[0][0] not in self._written:
            raise ValueError(
                f"layer={layer!r} is read and this step has not written it: pass keys and values, "
                "or write=False to attend to earlier tokens only"
            )

    def note_written(self, layer: str, layer_index: LayerIndex, *, again: bool) -> None:
        """Notes that a call has written a layer; raises ValueError for a second time.

        Args:
          again: whether a layer may be written more than once.
        """
        layers, is_known = self._layers(layer, layer_index)
        if is_known and not again and layers[0] in self._written:
            raise ValueError(
                f"layer={layers[0]!r} is written twice in one step: each layer of the model needs "
                "a name of its own"
            )
        self._written.update(layers)

    def end(self) -> None:
        """Ends the step; raises ValueError if a layer of the plan was never written."""
        names = self._layout.layer_numbers
        missing = [n for n in names if n not in self._written and not self._stores_encoder(n)]
        if missing:
            raise ValueError(
                f"the step ends, and it never wrote {_some(missing)}: the model calls each layer "
                "of the plan once; leave layers out of the plan that the model does not have"
            )
        self._has_ended = True

    def _stores_encoder(self, layer: str) -> bool:
        return self._layout.growths[self._layout.placement_of(layer).group].stores == "encoder"

    def _layers(self, layer: str, layer_index: LayerIndex) -> tuple[tuple[str, ...], bool]:
        """Returns the layers that a call may write, and whether it is certain to write them."""
        if layer_index is None:
            return (layer,), True
        layers = self._layout.buffers.stacked_layers(layer)
        if isinstance(layer_index, jax.core.Tracer):
            return layers, False
        return layers[int(layer_index) :][:1] or layers, True


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:3]))
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} other layers"
