"""Families that tell layers with a window in a way of their own, or run layers again. No jax."""

from jaxkv._src.hf_config._build import (
    FULL,
    SLIDING,
    Layers,
    Options,
    full_attention,
    head_size,
    sliding,
)
from jaxkv._src.hf_config._dense import attention_layers, dense, given
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._windows import by_list, periodic


def dory(reader: ConfigReader, options: Options) -> Layers:
    """Dory: full layers and windows between feed-forward ones, some of which run several times.

    vllm/model_executor/models/dory.py: each of the ``n_recurrent_loops`` passes through the
    ``n_recurrent_layers`` has a cache of its own, named like a layer behind the last one, unless
    ``recurrent_kv_cache_mode`` is "last_loop".
    """
    reader.default(n_input_layers=8, n_output_layers=8, n_recurrent_loops=2)
    count = reader.layer_count()
    kinds = reader.layer_kinds({FULL: FULL, SLIDING: SLIDING, "mlp": "mlp"})
    once = attention_layers(reader, options, [k if k != "mlp" else FULL for k in kinds], given)
    layers = {name: s for (name, s), k in zip(once.items(), kinds, strict=True) if k != "mlp"}
    first, last = reader.count("n_input_layers", 0), count - reader.count("n_output_layers", 0)
    last = first + reader.count("n_recurrent_layers", last - first)
    loops = reader.number("n_recurrent_loops", default=1)
    if reader.expect("recurrent_kv_cache_mode", "per_loop", "last_loop") == "last_loop":
        loops = 1
    for loop in range(1, min(loops, MAX_LOOPS)):
        for i in range(first, min(last, count)):
            if kinds[i] != "mlp":
                layers[f"layers.{loop * count + i}.{kinds[i]}"] = layers[f"layers.{i}.{kinds[i]}"]
    return layers


MAX_LOOPS = 100


def step3p5(reader: ConfigReader, options: Options) -> Layers:
    """Step 3.5 and 3.7: windows and full layers, which may differ in query heads, but not in KV.

    Files of its makers name the heads of layers with a window in ``attention_other_setting``.
    """
    reader.expect("att_impl_type", "GQA")
    if reader.value("attention_other_setting") is not None:
        other = reader.inner("attention_other_setting")
        other.expect("attention_type", SLIDING)
        other.expect("num_attention_groups", reader.number("num_key_value_heads"))
        other.expect("head_dim", reader.number("head_dim"))
        other.check_all_read()
    reader.default(layer_types=[FULL] * reader.layer_count())
    return dense(reader, options, rule=by_list, attention=given)


def plamo3(reader: ConfigReader, options: Options) -> Layers:
    """PLaMo 3: windows, and a full layer at the end of every ``sliding_window_pattern`` layers.

    vllm/model_executor/models/plamo3.py, and configuration_plamo.py of pfnet/plamo-3-nict-8b-base,
    which also writes the window of each layer, null for none, into ``interleaved_sliding_window``.
    """
    reader.default(sliding_window_pattern=8, sliding_window=2048, num_key_value_heads=4)
    reader.default(head_dim=128)
    rule = periodic(8, "sliding_window_pattern")
    if reader.value("interleaved_sliding_window") is not None:
        windows = reader.listed("interleaved_sliding_window")
        kinds = [FULL if window is None else SLIDING for window in windows]
        wrong = {*windows} - {None, reader.number("sliding_window")} or kinds != rule(reader)[0]
        if wrong:
            raise reader.refusal("interleaved_sliding_window", "it contradicts the other fields")
    return dense(reader, options, rule=rule, attention=given)


def loop_coder(reader: ConfigReader, options: Options) -> Layers:
    """IQuest-LoopCoder: each layer runs ``loop_num`` times, later with a window of its own.

    vllm/model_executor/models/iquest_loopcoder.py: the cache of a later pass is named like a layer
    behind the last one, and keeps ``loop_window_size`` tokens; it also reads the first pass's.
    """
    count, full = reader.layer_count(), full_attention(reader, options)
    window = sliding(full, reader.number("loop_window_size", default=64))
    layers: Layers = {f"layers.{i}.{FULL}": full for i in range(count)}
    for loop in range(1, min(reader.number("loop_num", default=2), MAX_LOOPS)):
        layers |= {f"layers.{loop * count + i}.{SLIDING}": window for i in range(count)}
    return layers


def nanbeige(reader: ConfigReader, options: Options) -> Layers:
    """Nanbeige: each layer runs ``num_loops`` times, with a cache of its own each time.

    models/nanbeige.py of SGLang 0.5.23: the cache of a later pass is named like a layer behind the
    last one. Files with a weight of the loss for each later pass tell the number by those.
    """
    for name in ("loop_share_kv", "enable_double_loop_split"):
        reader.expect(name, False)
    weights = reader.listed("loop_loss_weights", [])
    loops = len(weights) + 1 if weights else reader.number("num_loops")
    full = full_attention(reader, options, width=head_size(reader))
    total = reader.layer_count() * min(loops, MAX_LOOPS)
    return {f"layers.{i}.{FULL}": full for i in range(total)}


def iquest_q1(reader: ConfigReader, options: Options) -> Layers:
    """IQuest-Q1: first layers, blocks of full ones and windows over and over, and last layers.

    configs/iquest_q1.py of SGLang 0.5.23, with its defaults. A learnt key in each layer is a
    weight, and in no cache.
    """
    first = reader.listed("first_layers_types", [FULL])
    block = reader.listed("hybrid_layers_types_block", [FULL, SLIDING, SLIDING, SLIDING])
    last = reader.listed("last_layers_types", [FULL] * 3)
    kinds = [*first, *block * min(reader.count("num_hybrid_layers_block", 21), 1000), *last]
    reader.ignore("layer_types", "enable_sink_attention", "no_rope_layers")
    hybrid = reader.expect("use_hybrid_layers", True, False) is not False
    if not (reader.expect("use_sliding_window", True, False) is not False and hybrid):
        kinds = [FULL] * reader.layer_count()
    reader.check_layer_count("hybrid_layers_types_block", len(kinds))
    if unknown := {*kinds} - {FULL, SLIDING}:
        raise reader.refusal("hybrid_layers_types_block", f"{unknown} are none of the known types")
    reader.default(sliding_window=4096, num_key_value_heads=8, head_dim=128)
    return attention_layers(reader, options, kinds, given)
