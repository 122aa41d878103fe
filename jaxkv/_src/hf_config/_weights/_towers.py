"""The matrices of encoders of images and sounds next to a language model. No jax."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._src.hf_config._fields import inner_config, nested
from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix, feed_forward
from jaxkv._src.hf_config._weights._other_towers import (
    apertus_vision,
    dots3_audio,
    dots3_vision,
    inkling_audio,
    inkling_vision,
    wavtokenizer,
    whisper,
)
from jaxkv._src.hf_config._wrappers import WRAPPERS

QWEN = frozenset(
    """
    cosmos3_omni qwen2_vl qwen2_5_vl qwen2_5_omni_thinker qwen3_vl qwen3_vl_moe
    qwen3_omni_moe_thinker qwen3_5 qwen3_5_moe qwen4_exp
    """.split()
)
GLM = frozenset("glm4v glm4v_moe glm46v glm5_next glmga".split())
GATED = GLM | frozenset(
    """
    qwen2_5_vl qwen2_5_omni_thinker mistral3 mistral_large4 gemma4 lighton_ocr deepseek_v41
    """.split()
)
ONE_PROJECTION = frozenset("gemma3 shieldgemma2 paligemma gemma4 idefics3 smolvlm".split())
TWO_PROJECTIONS = frozenset(
    """
    llava llava_next llava_next_video llava_onevision vipllava internvl llama4 mistral3
    lighton_ocr kimi_k25 kimi_vl mistral_large4 deepseek_v41 minimax_m3 minimax_m3_vl hy_v4_vl
    inkling2 step3p7 bailing_moe_v3_vl video_llama_3 qianfan_ocr
    """.split()
)
WHISPER = frozenset(
    """
    audioflamingo3 glmasr moss_transcribe_diarize musicflamingo qwen2_audio voxtral qwen3_asr
    qwen2_5_omni_thinker qwen3_omni_moe_thinker
    """.split()
)
ALIGNED = frozenset("aya_vision cohere2_vision".split())
# Model type of a tower -> what yields its matrices.
OF_THEIR_OWN = {
    "dots3_note_vision_encoder": dots3_vision,
    "dots3_note_audio_encoder": dots3_audio,
    "inkling_vision": inkling_vision,
    "inkling_audio": inkling_audio,
    "apertus1p5_vision_tokenizer": apertus_vision,
    "wavtokenizer_encoder": wavtokenizer,
}
UNDERSTOOD = QWEN | GLM | ONE_PROJECTION | TWO_PROJECTIONS | ALIGNED | WHISPER
UNDERSTOOD |= {"mllama", "kimi_k3"}
# Model type of a tower -> what its class of transformers 5.24 assumes, beside width and depth.
TIMES_2 = {"temporal_patch_size": 2, "spatial_merge_size": 2}
BASE, QWEN3 = {"intermediate_size": 3072}, {"intermediate_size": 4304, "patch_size": 16, **TIMES_2}
GLM4V = {"patch_size": 14, **TIMES_2}
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {**BASE, "patch_size": 32},
    "idefics3_vision": {**BASE, "patch_size": 32},
    "smolvlm_vision": {**BASE, "patch_size": 32},
    "siglip_vision_model": {**BASE, "patch_size": 16},
    "pixtral": {"intermediate_size": 4096, "patch_size": 16},
    "internvl_vision": {"intermediate_size": 4096, "patch_size": 14},
    "kimi_k25_vision": {"intermediate_size": 4304, "patch_size": 14},
    "llama4_vision_model": {"intermediate_size": 5632, "patch_size": 14},
    "step3p5_vision": {"patch_size": 14},
    # vllm/transformers_utils/configs/step5.py, version 0.33, of Step 3.7
    "perception_encoder": {"patch_size": 14, "mlp_ratio": 8960 / 1536},
    "hy_v4_vl_vision": {"intermediate_size": 6144, "patch_size": 16, "spatial_merge_size": 2},
    "inkling2_vision": {"patch_size": 20, "spatial_merge_size": 2},
    "minimax_m3_vl_vision": {"intermediate_size": 5120, "patch_size": 14, **TIMES_2},
    "qwen2_vl_vision": {"embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, **TIMES_2},
    "qwen2_5_vl_vision": {"intermediate_size": 3420, "patch_size": 14, **TIMES_2},
    "qwen2_5_omni_vision_encoder": {"intermediate_size": 3420, "patch_size": 14, **TIMES_2},
    "qwen3_omni_moe_vision_encoder": {**QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_vl_vision": {**QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_vl_moe_vision": {**QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    **dict.fromkeys(("qwen3_5_vision", "qwen3_5_moe_vision", "qwen4_exp_vision"), QWEN3),
    "qwen3_moe_vit": QWEN3,  # vllm/transformers_utils/configs/bailing_moe_v3_vl.py, version 0.33
    **dict.fromkeys(("glm4v_vision", "glm4v_moe_vision", "glm5_next_vision"), GLM4V),
    "mllama_vision_model": {
        **{"intermediate_size": 5120, "patch_size": 14, "image_size": 448, "max_num_tiles": 4},
        **{"num_global_layers": 8, "vision_output_dim": 7680, "supported_aspect_ratios": [1] * 8},
    },
}
# Model type of a tower -> wrappers whose files leave it out; of others it is theirs, "_vision".
USUAL = {
    "clip_vision_model": "llava llava_next llava_next_video vipllava",
    "siglip_vision_model": """
        aya_vision cohere2_vision gemma3 llava_onevision paligemma shieldgemma2
    """,
    "glm4v_vision": "glm46v glmga",
    "qwen2_5_omni_vision_encoder": "qwen2_5_omni_thinker",
    "qwen3_omni_moe_vision_encoder": "qwen3_omni_moe_thinker",
    "qwen3_vl_vision": "cosmos3_omni",
    "llama4_vision_model": "llama4",
    "mllama_vision_model": "mllama",
    "pixtral": "lighton_ocr mistral3 mistral_large4",
    "qwen3_moe_vit": "bailing_moe_v3_vl",
    "step3p5_vision": "step3p7",
}
TOWER_OF = {outer: tower for tower, names in USUAL.items() for outer in names.split()}
TOWERS = "vision_config", "audio_config"
# Wrappers with towers of their own kinds; files may leave them out.
TEXT_ALONE = frozenset("apertus1p5 dots3_note inkling_mm_model".split())


def towers(config: Mapping[str, Any], hidden: int) -> Iterable[Matrix]:
    """Yields the matrices of the towers of a multimodal wrapper, projectors included.

    Args:
      config: configuration of the wrapper, or of a plain language model.
      hidden: width of the language model.

    Raises:
      ValueError: a wrapper with towers that are not understood.
    """
    for level in nested(config):
        outer = str(level.get("model_type"))
        if outer in WRAPPERS and outer not in UNDERSTOOD | TEXT_ALONE:
            found = inner_config(config) if outer == config.get("model_type") else None
            alone = f"; pass the content of {found[0]} to count what it has" if found else ""
            raise ValueError(
                f"the sizes of the towers of model_type={outer!r} are not known{alone}"
            )
        for name in TOWERS:
            values = level.get(name)
            if not isinstance(values, Mapping) or not values:
                continue
            if own := OF_THEIR_OWN.get(str(values.get("model_type"))):
                yield from own(Fields(outer, values))
                continue
            if outer not in UNDERSTOOD:
                raise ValueError(f"the sizes of the {name} of model_type={outer!r} are not known")
            fields = Fields(outer, {**_sizes(level), **_assumed(outer, values), **values})
            tower = _kimi_k3 if outer == "kimi_k3" else _tower
            if name == "audio_config" and outer in WHISPER:
                tower = whisper
            if values.get("model_type") == "gemma4_audio":
                tower = _conformer
            yield from tower(fields, hidden)


def _sizes(level: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a wrapper that size its projector."""
    names = "alignment_intermediate_size", "downsample_factor"
    return {name: level[name] for name in names if name in level}


def _assumed(outer: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what the class of a tower assumes where a file leaves it out."""
    usual = TOWER_OF.get(outer, f"{outer}_vision")
    return ASSUMED.get(str(values.get("model_type") or usual), {})


def _conformer(fields: Fields, text_width: int) -> Iterable[Matrix]:
    """Yields the matrices of Gemma's encoder of sounds.

    A layer has two feed-forward parts that are four times as wide, attention with relative
    positions, and a gated convolution.
    """
    width, depth = fields.number("hidden_size"), fields.number("num_hidden_layers")
    yield Matrix("audio.layer", 2 * 8 * width + 5 * width + 3 * width, width, "tower", depth)
    yield Matrix("audio.project", text_width, width, "tower")


def _kimi_k3(fields: Fields, text_width: int) -> Iterable[Matrix]:
    """Yields the matrices of Kimi-K3's encoder of images, and of the projector behind it."""
    width, depth = fields.number("vt_hidden_size"), fields.number("vt_num_hidden_layers")
    attention = fields.number("qkv_hidden_size", default=1536)
    inner, patch = fields.number("vt_intermediate_size", default=4 * width), 14
    yield Matrix("visual.layer", 4 * attention + 2 * inner, width, "tower", depth)
    yield Matrix("visual.patch_embed", width, 3 * patch**2, "other", max_ranks=WHOLE)
    yield Matrix("visual.pos_emb", 64 * 64, width, "other", max_ranks=WHOLE)
    yield Matrix("visual.merger", 4 * width + text_width, 4 * width, "tower", max_ranks=WHOLE)


def _tower(fields: Fields, text_width: int) -> Iterable[Matrix]:
    """Yields the matrices of an encoder of images, and of the projector behind it."""
    width = fields.number("vt_hidden_size", "hidden_size", "width")
    if fields.model_type == "qwen2_vl":  # its hidden_size belongs to the language model
        width = fields.number("embed_dim", default=width)
    depth = fields.number("depth", "vt_num_hidden_layers", "num_hidden_layers", "layers")
    ratio = fields.first("mlp_ratio")
    default = int(width * ratio + 1e-6) if isinstance(ratio, int | float) else None
    inner = fields.number("vt_intermediate_size", "intermediate_size", default=default)
    if fields.model_type in GLM:
        inner = fields.number("out_hidden_size")
    gated = fields.model_type in GATED
    depth += fields.number("num_global_layers", default=0)
    yield Matrix("visual.qkv", 3 * width, width, "tower", depth)
    yield Matrix("visual.proj", width, width, "tower", depth)
    yield from feed_forward("visual", width, inner, gated=gated, role="tower", count=depth)
    sides = fields.listed("patch_size") or [fields.number("patch_size")] * 2
    pixels = 3 * math.prod(sides) * fields.number("temporal_patch_size", default=1)
    yield Matrix("visual.patch_embed", width, pixels, "other", max_ranks=WHOLE)
    projector = _tiles if fields.number("max_num_tiles", default=0) else _projector
    yield from projector(fields, width, text_width)


def _tiles(fields: Fields, width: int, text_width: int) -> Iterable[Matrix]:
    """Yields the embeddings of tiles and the projector of Llama 3.2 Vision."""
    tiles = fields.number("max_num_tiles")
    ratios = len(fields.listed("supported_aspect_ratios") or ()) + 1
    patches = (fields.number("image_size") // fields.number("patch_size", least=1)) ** 2 + 1
    yield Matrix("visual.tiles", ratios, tiles * (patches + 2) * width, "other", max_ranks=WHOLE)
    yield Matrix("visual.projector", text_width, fields.number("vision_output_dim"), "tower")


def _projector(fields: Fields, width: int, text_width: int) -> Iterable[Matrix]:
    """Yields the matrices between a tower and the language model."""
    name = "visual.merger"
    merged = width * fields.number("spatial_merge_size", default=1) ** 2
    if fields.model_type in ONE_PROJECTION:
        yield Matrix(name, text_width, width, "tower")
    elif fields.model_type in QWEN:
        times = 1 + len(fields.listed("deepstack_visual_indexes") or ())
        yield Matrix(f"{name}.fc1", merged, merged, "tower", times)
        yield Matrix(f"{name}.fc2", text_width, merged, "tower", times)
    elif fields.model_type in GLM:
        inner = fields.number("intermediate_size")
        yield Matrix(f"{name}.downsample", text_width, 4 * width, "tower")
        yield from feed_forward(name, text_width, inner, gated=True, role="tower")
    elif fields.model_type in ALIGNED:
        inner = fields.number("alignment_intermediate_size", default=36_864)
        merged = width * fields.number("downsample_factor", default=2) ** 2
        yield Matrix(f"{name}.fc1", inner, merged, "tower")
        yield Matrix(f"{name}.fc2", text_width, inner // 2, "tower")
    else:
        yield Matrix(f"{name}.fc1", text_width, merged, "tower")
        yield Matrix(f"{name}.fc2", text_width, text_width, "tower")
