"""The matrices of feed-forward layers: dense, experts, shared experts. No jax."""

from collections.abc import Iterable

from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix, feed_forward
from jaxkv._src.internal.numbers import cdiv

EXPERTS = "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
EXPERT_WIDTH = "moe_intermediate_size", "intermediate_size", "ffn_hidden_size"
SHARED = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"
SHARED_WIDTH = tuple(
    """
    shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size
    share_expert_dim shared_experts_intermediate_size
    """.split()
)
DENSE_WIDTH = tuple(
    """
    dense_intermediate_size intermediate_size_mlp intermediate_size ffn_dim n_inner
    ffn_hidden_size decoder_ffn_dim d_ff block_ff_dim
    """.split()
)
# Classes whose dense layers are four hidden sizes wide where a file does not say.
FOUR_TIMES = frozenset("bloom codegen falcon gpt2 gpt_bigcode gpt_neo gptj mpt".split())
# Classes whose experts are as wide as ``intermediate_size``.
AS_WIDE = frozenset(
    """
    aria_text cohere2_moe dbrx flex_olmo gpt_oss granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared hunyuan_v1_moe jamba llama4_text minimax minimax_m1 minimax_m2 minimax_m3_text
    minimax_m3_vl_text minimax_text_01 mixtral olmoe phimoe
    """.split()
)
FIRST = tuple("first_k_dense_replace num_dense_layers moe_layer_start_index dense_mlp_idx".split())
STEP = "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"


def dense(fields: Fields, layer: int, *, gated: bool) -> Iterable[Matrix]:
    """Yields the matrices of a dense feed-forward layer."""
    default = 4 * fields.hidden if fields.model_type in FOUR_TIMES else None
    width = fields.number(*DENSE_WIDTH, default=default, layer=layer)
    if fields.first("use_double_wide_mlp"):  # Gemma 4, in layers that read another's cache
        shared = fields.number("num_kv_shared_layers", default=0)
        width *= 1 + (layer >= fields.num_layers - shared)
    if fields.first("block_auto_adjust_ff_dim"):  # LFM2
        step = fields.number("block_multiple_of", default=256, least=1)
        factor = fields.first("block_ffn_dim_multiplier") or 1
        width = cdiv(int(2 * width / 3 * factor), step) * step
    return feed_forward(f"layers.{layer}.mlp", fields.hidden, width, gated=gated)


def experts(fields: Fields, layer: int, *, gated: bool) -> Iterable[Matrix]:
    """Yields the router, the routed and the shared experts of a layer."""
    name, hidden = f"layers.{layer}.mlp", fields.hidden
    fields.read.update(DENSE_WIDTH)  # where no layer is dense
    count = fields.number(*EXPERTS, layer=layer)
    names = EXPERT_WIDTH if fields.model_type in AS_WIDE else EXPERT_WIDTH[:1]
    width = fields.number(*names, layer=layer)
    yield Matrix(f"{name}.gate", count, hidden, "other", max_ranks=WHOLE)
    # Nemotron 3 and Kimi-K3: experts behind a projection, which Kimi-K3 does not quantise.
    latent = fields.number("moe_latent_size", "routed_expert_hidden_size", default=0)
    if latent:
        role = "linear" if fields.first("moe_latent_size") else "other"
        yield Matrix(f"{name}.fc1_latent_proj", latent, hidden, role, max_ranks=WHOLE)
        yield Matrix(f"{name}.fc2_latent_proj", hidden, latent, role, max_ranks=WHOLE)
    routed = f"{name}.experts.0"
    yield from feed_forward(
        routed, latent or hidden, width, gated=gated, role="expert", count=count
    )
    if shared := _shared_width(fields, layer, width):
        yield from feed_forward(f"{name}.shared_experts", hidden, shared, gated=gated)


def _shared_width(fields: Fields, layer: int, width: int) -> int:
    """Returns the width of all shared experts of a layer together; 0: there are none."""
    if fields.model_type == "llama4_text":
        return width
    if fields.first(*SHARED) is None:
        return fields.number(*SHARED_WIDTH, default=0)
    return fields.number(*SHARED, layer=layer) * fields.number(*SHARED_WIDTH, default=width)


def expert_layers(fields: Fields) -> frozenset[int]:
    """Returns the layers that have experts, by a list of them or by a rule."""
    if not fields.first(*EXPERTS):
        if fields.first(*EXPERTS) is None and fields.first(*EXPERT_WIDTH[:1]):
            fields.number(*EXPERTS)  # refuses
        fields.read.update((*EXPERT_WIDTH, *SHARED_WIDTH))
        return frozenset()
    listed = _listed_expert_layers(fields)
    return _regular_expert_layers(fields) if listed is None else listed


def _listed_expert_layers(fields: Fields) -> frozenset[int] | None:
    if (kinds := fields.listed("mlp_layer_types")) is not None:
        return frozenset(i for i, kind in enumerate(kinds) if kind != "dense")
    for name in ("moe_layer_freq", "is_moe_layer"):
        if (flags := fields.listed(name)) is not None:
            return frozenset(i for i, flag in enumerate(flags) if flag)
    if isinstance(numbers := fields.first("moe_layers_enum"), str):  # Step 3.5: "3,4,5"
        return frozenset(int(number) for number in numbers.split(",") if number.strip().isdecimal())
    if listed := fields.listed("moe_layers", "moe_layers_enum"):
        return frozenset(listed)
    return None


def _regular_expert_layers(fields: Fields) -> frozenset[int]:
    layers = range(fields.num_layers)
    if period := fields.number("expert_layer_period", default=0):
        offset = fields.number("expert_layer_offset", default=0)
        return frozenset(i for i in layers if i % period == offset)
    first = fields.number(*FIRST, default=0)
    last = fields.first("moe_layer_end_index")
    end = last + 1 if isinstance(last, int) and last >= 0 else len(layers)
    # Qwen, Llama 4 and ERNIE count from 1; DeepSeek's frequency counts from 0.
    step, period = fields.number(*STEP, default=1), fields.number("moe_layer_freq", default=1)
    if not step or not period:  # Qwen: no layer has experts
        return frozenset()
    regular = (i for i in layers[first:end] if (i + 1) % step == 0 and i % period == 0)
    without = fields.listed("mlp_only_layers") or ()
    return frozenset(i for i in regular if i not in without)
