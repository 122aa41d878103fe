"""The weights of a model, divided among pipeline stages and tensor-parallel ranks. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkv._src.hf_config._families import FAMILIES, open_config
from jaxkv._src.hf_config._weights._matrix import Fields
from jaxkv._src.internal.checks import check_positive
from jaxkv._src.internal.numbers import cdiv


class Part(NamedTuple):
    """The bytes of one matrix, the layers beside which it lies, and its `Matrix.max_ranks`."""

    num_bytes: int
    layers: tuple[int, ...]
    max_ranks: int | None


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a model.

    parameters: number of weights.
    num_bytes: bytes of the checkpoint.
    stored: dtype of the checkpoint, after the quantisation that it has, if any.
    num_layers: layers of the language model.
    parts: the matrices of the checkpoint.
    """

    parameters: int
    num_bytes: int
    stored: str
    num_layers: int = dataclasses.field(repr=False)
    parts: tuple[Part, ...] = dataclasses.field(repr=False)

    def bytes_per_gpu(
        self, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> tuple[int, ...]:
        """Returns the bytes on each GPU of each pipeline stage.

        Layers are divided among stages as in vLLM: equally many for all, and one more for as many
        stages before the last as remain. The first stage has the embedding and the encoders of
        images and sounds, the last one the head and drafts. A head that is the embedding is a
        second copy there.

        Tensor-parallel ranks divide matrices, but as in vLLM each has a KV head at least, and the
        whole of routers, of the down-projections of latent attention, and of indexers.

        Raises:
          ValueError: more stages than layers.
        """
        check_positive(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        counts = layers_per_stage(self.num_layers, pipeline_parallel)
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        sizes = [0] * pipeline_parallel
        for part in self.parts:
            ranks = min(tensor_parallel, part.max_ranks or tensor_parallel)
            for stage in {stage_of[layer] for layer in part.layers}:
                sizes[stage] += cdiv(part.num_bytes, ranks)
        return tuple(sizes)


def num_layers(config: Mapping[str, Any]) -> int:
    """Returns the layers of a language model, those without a cache included.

    Of a model with an encoder they are the decoder's.

    Args:
      config: the content of a ``config.json``.
    """
    reader, _ = open_config(config)
    return count_layers(reader.model_type, reader.fields)


def count_layers(model_type: str, values: Mapping[str, Any]) -> int:
    """Returns the layers of `num_layers` from the fields of a model type, by their usual names."""
    fields, family = Fields(model_type, values), FAMILIES.get(model_type)
    if family is not None and family.encoder in ("tokens", "frames"):
        return fields.number("decoder_layers", "num_decoder_layers", "num_layers")
    return fields.num_layers


def layers_per_stage(layers: int, pipeline_parallel: int) -> list[int]:
    """Returns the number of layers of each pipeline stage, as vLLM cuts a model.

    All stages have equally many. Those that remain go, one each, to the stages before the last,
    the nearest first: the last stage has the head, and the first the embedding.

    Raises:
      ValueError: fewer stages than 1, or more than there are layers.
    """
    if not 1 <= pipeline_parallel <= layers:
        raise ValueError(f"pipeline_parallel={pipeline_parallel} must lie in 1..{layers} (layers)")
    each, rest = divmod(layers, pipeline_parallel)
    last = pipeline_parallel - 1
    return [each + (last - rest <= stage < last) for stage in range(pipeline_parallel)]
