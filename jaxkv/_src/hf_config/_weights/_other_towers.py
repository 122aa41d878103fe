"""The matrices of encoders of images and sounds that are like no other model's. No jax."""

import itertools
import math
from collections.abc import Iterable, Iterator

from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix, feed_forward


def dots3_vision(fields: Fields) -> Iterator[Matrix]:
    """Yields the matrices of dots3's encoder of images: some of its layers have experts.

    transformers/models/dots3_note/modeling_dots3_note.py, version 5.24.
    """
    width, depth = fields.number("hidden_size"), fields.number("num_hidden_layers")
    kinds = fields.listed("mlp_layer_types") or ["dense"] * depth
    yield Matrix("visual.qkv", 4 * width, width, "tower", depth)
    for layer, kind in enumerate(kinds[:depth]):
        if kind == "dense":
            yield from feed_forward(
                "visual", width, fields.number("intermediate_size"), gated=True, role="tower"
            )
            continue
        experts = fields.at_layer(layer).number("num_local_experts")
        inner = fields.number("moe_intermediate_size")
        yield Matrix("visual.gate", experts, width, "other", max_ranks=WHOLE)
        yield from feed_forward("visual", width, inner, gated=True, role="tower", count=experts)
    yield Matrix("visual.patch_embed", width, 3 * fields.number("patch_size") ** 2, "other")
    merged = fields.number("adapter_in_dim") * fields.number("adapter_merge_size") ** 2
    yield Matrix("visual.merger", merged + fields.number("adapter_out_dim"), merged, "tower")


def dots3_audio(fields: Fields) -> Iterator[Matrix]:
    """Yields the matrices of dots3's encoder of sounds."""
    width, depth = fields.number("hidden_size"), fields.number("num_hidden_layers")
    channels, out = fields.number("downsample_hidden_size"), fields.number("adapter_out_dim")
    yield Matrix("audio.attn", 4 * width, width, "tower", depth)
    inner = fields.number("intermediate_size")
    yield from feed_forward("audio", width, inner, gated=True, role="tower", count=depth)
    yield Matrix("audio.convs", channels, 9 * (1 + 2 * channels), "other", max_ranks=WHOLE)
    yield Matrix("audio.conv_out", width, fields.number("conv_output_size"), "tower")
    yield Matrix("audio.adapter", out, fields.number("adapter_input_size") + out, "tower")


def inkling_audio(fields: Fields) -> Iterator[Matrix]:
    """Yields the embeddings of Inkling's sounds: of each bin of a spectrogram, its levels."""
    levels = fields.number("n_mel_bins") * fields.number("mel_vocab_size")
    yield Matrix("audio.embed", levels, fields.number("text_hidden_size"), "other")


def inkling_vision(fields: Fields) -> Iterator[Matrix]:
    """Yields the projections of Inkling's images: each folds neighbours into channels, or none.

    The layers follow the scales nearest to those of a regular growth, as `plan_out_scales` of
    transformers/models/inkling/modeling_inkling.py, version 5.24, chooses them.
    """
    layers, channels = fields.number("n_layers", "num_hidden_layers"), fields.number("num_channels")
    patch, frames = fields.number("patch_size"), fields.number("temporal_patch_size")
    scales = [(1, channels), *_folded(patch, frames, channels)]
    if layers < len(scales):
        raise ValueError(f"n_layers={layers} of vision_config must be at least {len(scales)}")
    last = math.log(patch**2 * frames * channels)

    def nearest(layer: int) -> tuple[int, int]:
        ideal = layer / layers * last
        return min(scales, key=lambda scale: abs(math.log(scale[0]) - ideal))

    chosen = [scales[0], *map(nearest, range(1, layers)), scales[-1]]
    for layer, (before, after) in enumerate(itertools.pairwise(chosen)):
        outputs = fields.number("text_hidden_size") if layer == layers - 1 else after[1]
        yield Matrix("visual.layer", outputs, before[1] * (after[0] // before[0]), "tower")


def _folded(patch: int, frames: int, channels: int) -> Iterable[tuple[int, int]]:
    """Yields how many pixels are folded into one, and the channels then: of an image, of frames."""
    side = time = 1
    for factor in reversed(_prime_factors(patch)):
        side *= factor
        yield side**2, -(-(side**2) * channels // 64) * 64
    for factor in reversed(_prime_factors(frames)):
        time *= factor
        yield side**2 * time, -(-(side**2) * channels * time // 64) * 64


def _prime_factors(number: int) -> list[int]:
    factors = []
    for prime in range(2, number + 1):
        while number % prime == 0:
            factors.append(prime)
            number //= prime
    return factors
