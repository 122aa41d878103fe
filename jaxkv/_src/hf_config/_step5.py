"""Step 5: windows, and full layers whose tokens are chosen by summaries of eight. No jax."""

import dataclasses
import math

from jaxkv._src.hf_config._build import FULL, SLIDING, Layers, Options, name_layers
from jaxkv._src.hf_config._local import step3p5
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, MLASpec, RingSpec

SUMMARY, RING = "region_summaries", "region_ring"
REGION, SUMMARY_BYTES, ROW = 8, 256, 512  # tokens of a summary, its bytes, elements of a ring's row


def step5(reader: ConfigReader, options: Options) -> Layers:
    """Step 5: keys and values as in Step 3.5, and what chooses tokens in full layers.

    vllm/models/step5/nvidia/sparse_summary_cache.py and csa_tail_ring.py: with a ``sparse_config``
    that is not disabled, a full layer has a summary in fp8 per eight tokens, and a ring of rows for
    the region that is not whole, which vLLM makes as large as a page of keys and values.
    """
    sparse = reader.value("sparse_config")
    if isinstance(sparse, dict):
        reader.inner("sparse_config").expect("enabled", True, False)
    reader.ignore("layer_types_with_mtp")
    layers = step3p5(reader, options)
    if not isinstance(sparse, dict) or sparse.get("enabled") is False:
        return layers
    kinds = [name.rpartition(".")[2] for name in layers]
    specs: dict[str, LayerSpec] = {}
    for name, kind in zip(layers, kinds, strict=True):
        spec = layers[name]
        if isinstance(spec, FullAttentionSpec):
            block = math.lcm(spec.block_size, REGION)
            specs[kind] = dataclasses.replace(spec, block_size=block)
    full = specs.get(FULL)
    if full is None:
        return layers
    specs[SUMMARY] = MLASpec(
        block_size=full.block_size,
        head_size=SUMMARY_BYTES,
        dtype="fp8_e4m3",
        compress_ratio=REGION,
    )
    rows = max(full.page_bytes // (2 * ROW), REGION + options.speculative_tokens)
    specs[RING] = RingSpec(block_size=rows, group_size=REGION, head_size=ROW, dtype="bfloat16")
    return name_layers([(k,) if k == SLIDING else (k, SUMMARY, RING) for k in kinds], specs)
