"""The matrices of encoders of images and sounds that are like no other model's. No jax."""

import itertools
import math
from collections.abc import Iterable, Iterator

from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix, feed_forward
from jaxkv._src.internal.numbers import cdiv

DOTS3_EXPERTS = (-1,) * 25 + (*range(4, 65, 4), 64)  # of each layer, where a file names none


def dots3_vision(fields: Fields) -> Iterator[Matrix]:
    """Yields the matrices of dots3's encoder of images: some of its layers have experts.

    transformers/models/dots3_note/modeling_dots3_note.py, version 5.24.
    """
    width, depth = fields.number("hidden_size"), fields.number("num_hidden_layers")
    kinds, counts = fields.listed("mlp_layer_types"), fields.listed("pyramid_num_routed")
    if counts is None and kinds is None:
        counts = DOTS3_EXPERTS
    if counts is not None:
        kinds = ["dense" if count <= 0 else "sparse" for count in counts]
    if kinds is None or len(kinds) != depth:
        raise fields.lacks("mlp_layer_types")
    yield Matrix("visual.qkv", 4 * width, width, "tower", depth)
    for layer, kind in enumerate(kinds):
        if kind == "dense":
            yield from feed_forward(
                "visual", width, fields.number("intermediate_size"), gated=True, role="tower"
            )
            continue
        listed = None if counts is None else counts[layer]
        experts = fields.at_layer(layer).number("num_local_experts", default=listed)
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


def apertus_vision(fields: Fields) -> Iterator[Matrix]:
    """Yields the convolutions and the codebook that make tokens of Apertus 1.5's images.

    transformers/models/apertus1p5/modeling_apertus1p5.py, version 5.24.
    """
    base, latent = fields.number("base_channels"), fields.number("latent_channels")
    width, total = base, base * 9 * fields.number("in_channels", default=3)
    widths = [base * times for times in fields.listed("channel_multiplier") or (1, 1, 2, 2, 4)]
    attended = fields.listed("attn_resolutions")
    side = fields.number("resolution", default=256)
    for stage, out in enumerate(widths):
        blocks = fields.number("num_res_blocks")
        total += 9 * (width * out + (2 * blocks - 1) * out**2)
        total += width * out if width != out else 0
        if side >> stage in ((16,) if attended is None else attended):
            total += blocks * 4 * out**2
        total += 9 * out**2 if stage < len(widths) - 1 else 0
        width = out
    total += (4 * 9 + 4) * width**2 + 9 * width * latent
    yield Matrix("visual.convs", total, 1, "other", max_ranks=WHOLE)
    codes = fields.number("codebook_size") + latent
    yield Matrix("visual.codes", codes, fields.number("embed_dim"), "other", max_ranks=WHOLE)


def wavtokenizer(fields: Fields) -> Iterator[Matrix]:
    """Yields the convolutions and the LSTM that make tokens of Apertus 1.5's sounds."""
    width, hidden = fields.number("num_filters"), fields.number("hidden_size")
    total = width * fields.number("kernel_size") * fields.number("audio_channels", default=1)
    for ratio in reversed(fields.listed("upsampling_ratios") or (6, 5, 5, 4)):
        inner = width // fields.number("compress", default=2)
        block = width * inner * (fields.number("residual_kernel_size", default=3) + 1)
        block += width**2 if fields.first("use_conv_shortcut") is not False else 0
        total += fields.number("num_residual_layers", default=1) * block
        total += 2 * width * width * 2 * ratio
        width *= 2
    total += fields.number("num_lstm_layers", default=2) * 8 * width**2
    total += hidden * width * fields.number("last_kernel_size", default=7)
    yield Matrix("audio.convs", total, 1, "other", max_ranks=WHOLE)


# Wrappers of Whisper's encoder whose projector takes four frames at once.
FOUR_FRAMES = frozenset("glmasr moss_transcribe_diarize voxtral".split())
# Those without learnt positions, which name the width of what they return.
OMNI = frozenset("qwen2_5_omni_thinker qwen3_asr qwen3_omni_moe_thinker".split())


def whisper(fields: Fields, text_width: int) -> Iterator[Matrix]:
    """Yields the matrices of Whisper's encoder before a language model, and of its projector.

    modeling_voxtral.py, modeling_glmasr.py, modeling_qwen2_audio.py, modeling_audioflamingo3.py and
    modeling_qwen3_omni_moe.py of transformers 5.24.
    """
    outer, width = fields.model_type, fields.number("hidden_size", "d_model")
    inner = fields.number("intermediate_size", "encoder_ffn_dim")
    depth = fields.number("num_hidden_layers", "encoder_layers")
    yield Matrix("audio.layer", 4 * width + 2 * inner, width, "tower", depth)
    bins = fields.number("num_mel_bins", default=128)
    default = 480 if outer in ("qwen3_asr", "qwen3_omni_moe_thinker") else 0  # as their classes do
    if channels := fields.number("downsample_hidden_size", default=default):
        yield Matrix("audio.convs", channels, 9 * (1 + 2 * channels), "other", max_ranks=WHOLE)
        yield Matrix("audio.conv_out", width, channels * cdiv(bins, 8), "tower")
    else:
        yield Matrix("audio.convs", 3 * (bins + width), width, "other", max_ranks=WHOLE)
    if outer not in OMNI | {"glmasr"}:
        positions = fields.number("max_source_positions", default=1500)
        yield Matrix("audio.positions", positions, width, "other", max_ranks=WHOLE)
    if outer in OMNI:
        text_width = fields.number("output_dim", default=3584)
    if outer in ("qwen2_audio", "qwen2_5_omni_thinker"):
        yield Matrix("audio.project", text_width, width, "tower")
        return
    between = {"glmasr": 2 * text_width, **dict.fromkeys(OMNI, width)}.get(outer, text_width)
    yield Matrix("audio.project", between, inner if outer in FOUR_FRAMES else width, "tower")
    yield Matrix("audio.project", text_width, between, "tower")
