"""Compiles what the library chooses for a kind of GPU, down to machine code, without a GPU.

``python -m tests.gpu_targets 8.6`` prints a line of JSON for each case: its name, the Mosaic
kernels that it launches, and the bytes of registers that each of them spills. A kernel with more
shared memory than a thread block may have is an error. jaxlib fixes the target at its first
compilation, so that each kind of GPU needs a process of its own. It needs jax's CUDA plugin and
ptxas: `make lane-gpus` installs them.
"""

import functools
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkv
import pallas_kernels as kernels
from jaxkv.step import COMPILER_OPTIONS
from pallas_kernels import _capability

KB = 1024
KERNELS = (
    "zero_blocks",
    "copy_blocks",
    "write_rows",
    "write_token_heads",
    "causal_conv1d",
    "causal_conv1d_tiles",
    "recurrent_step",
    "recurrent_replay",
    "recurrent_prompt_parts",
    "recurrent_prompt_states",
    "paged_attention_decode",
    "paged_attention_prefill",
    "paged_attention_combine",
    "paged_attention_widen",
    "paged_attention_mla_decode",
    "paged_attention_mla_combine",
)


class Target(NamedTuple):
    """A kind of GPU: its SMs, and the shared memory of an SM and of a thread block in KB."""

    name: str
    sms: int
    shared: int
    per_block: int


# NVIDIA's CUDA programming guide, "technical specifications per compute capability".
TARGETS = {
    "8.0": Target("NVIDIA A100-SXM4-80GB", 108, 164, 163),
    "8.6": Target("NVIDIA GeForce RTX 3090", 82, 100, 99),
    "8.9": Target("NVIDIA L40S", 142, 100, 99),
    "9.0": Target("NVIDIA H200", 132, 228, 227),
    "10.0": Target("NVIDIA B200", 148, 228, 227),
    "10.3": Target("NVIDIA GB300", 152, 228, 227),
    "12.0": Target("NVIDIA GeForce RTX 5090", 170, 100, 99),
}


def config_of(capability: str) -> str:
    """Returns what XLA wants to know of a GPU."""
    target, (major, minor) = TARGETS[capability], capability.split(".")
    features = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: {48 * KB} shared_memory_per_core: {target.shared * KB}
          shared_memory_per_block_optin: {target.per_block * KB}
          core_count: {target.sms} fpus_per_core: 128 clock_rate_ghz: 1.8
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: 2000000000000 device_memory_size: 80000000000 l2_cache_size: 41943040
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{target.name}"
    """


def pretend(capability: str) -> None:
    """Lets the library and Mosaic see a default device of this kind."""
    from jax.experimental.mosaic.gpu import core, utils

    major, minor = map(int, capability.split("."))
    _capability.compute_capability = lambda: (major, minor)
    utils._infer_arch = lambda: (major, minor)  # 9.0 otherwise
    core._SMEM_SIZE_BOUND = TARGETS[capability].per_block * KB  # a kernel with more is an error


def lower(run: Any, arguments: Any, where: Any = None) -> tuple[Any, list[str]]:
    """Lowers a function for CUDA. Returns it, and the Mosaic kernels that it launches."""
    arguments = jax.tree.map(lambda a: struct(a.shape, a.dtype, sharding=where), arguments)
    traced = jax.jit(run, compiler_options=COMPILER_OPTIONS).trace(*arguments)
    lowered = traced.lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "custom_call @mosaic_gpu" in line]
    found = [[name for name in KERNELS if f"{name}\\00" in call] for call in calls]
    assert all(found), "a kernel that KERNELS lacks"
    return lowered, sorted({max(names, key=len) for names in found})


# --- kernels --------------------------------------------------------------------------

struct = jax.ShapeDtypeStruct
BF16, F32, FP8, U8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.uint8
IDS = struct((4,), jnp.int32)
STARTS = struct((5,), jnp.int32)
TABLES = struct((4, 64), jnp.int32)
BY_HEADS: list[Any] = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]


def write_all(pages: Any, ids: Any, rows: Any) -> Any:
    """Rows that are moved by 16 bytes, and ones that are moved by elements."""
    write = functools.partial(kernels.write_rows, block_ids=ids, offsets=ids)
    pages = [write(data, rows=row, align=1024) for data, row in zip(pages, rows, strict=True)]
    return [*pages[:-1], write(pages[-1], rows=rows[-1][:, 1:])]


def moving() -> Iterator[tuple[str, Any, Any]]:
    dtypes = [*map(jnp.dtype, _capability.DTYPES)]
    pages = [struct((8, 4096), dtype) for dtype in dtypes]
    yield "zero", kernels.zero_blocks, (pages, IDS)
    yield "zero, odd", kernels.zero_blocks, (struct((8, 515), jnp.uint8), IDS)
    yield "copy", kernels.copy_blocks, (pages, IDS, IDS)
    yield "copy, odd", kernels.copy_blocks, (struct((8, 515), jnp.uint8), IDS, IDS)
    yield "write", write_all, (pages, IDS, [struct((4, 1024), dtype) for dtype in dtypes])
    for packing in BY_HEADS:
        row = kernels.TokenHeadRow(packing, 8, 128, 128)
        write = functools.partial(kernels.write_token_heads, row=row, align=32)
        given = struct((8, 16 * row.row_bytes), U8), IDS, IDS, *[struct((4, 8, 128), BF16)] * 2
        yield f"write of {packing}", write, given


def attend(
    queries: Any, pages: Any, *lists: Any, max_query_len: int | None = None, **fields: Any
) -> Any:
    requests = kernels.RequestPages(*lists, max_query_len=max_query_len)
    rule = kernels.AttentionRule(**fields)
    return kernels.paged_attention(queries, pages, requests, rule)


# Heads, KV heads, width and page of models: GPT-OSS, Qwen3.5, Phi-2 and Llama-3.1.
DECODES = [(64, 8, 64, 16), (16, 2, 256, 16), (32, 32, 80, 16), (32, 8, 128, 32)]


def attention() -> Iterator[tuple[str, Any, Any]]:
    for heads, kv_heads, width, page in DECODES:
        for dtype in (BF16, FP8) if width % 64 == 0 else (BF16,):
            queries, pages = struct((4, heads, width), BF16), (99, page, kv_heads, 2 * width)
            given = queries, struct(pages, dtype), TABLES, IDS
            yield f"decode of {heads}/{kv_heads} x {width}, {dtype.__name__}", attend, given
            given = struct((256, heads, width), BF16), *given[1:], STARTS
            yield f"prompts of {heads}/{kv_heads} x {width}, {dtype.__name__}", attend, given
    for packing in BY_HEADS:
        for heads, kv_heads, width, page in DECODES:
            if width % 64 == 0:
                row = kernels.TokenHeadRow(packing, kv_heads, width, width)
                given = struct((4, heads, width), BF16), struct((99, page, 1, row.row_bytes), U8)
                decode = functools.partial(attend, row_packing=row)
                yield (
                    f"decode of {heads}/{kv_heads} x {width}, {packing}",
                    decode,
                    (*given, TABLES, IDS),
                )
    for packing, heads, kv_heads, width in ((BY_HEADS[1], 16, 2, 256), (BY_HEADS[2], 32, 8, 128)):
        row = kernels.TokenHeadRow(packing, kv_heads, width, width)
        given = struct((256, heads, width), BF16), struct((99, 16, 1, row.row_bytes), U8)
        prompts = functools.partial(attend, row_packing=row)
        name = f"prompts of {heads}/{kv_heads} x {width}, {packing}"
        yield name, prompts, (*given, TABLES, IDS, STARTS)
    drafts = functools.partial(attend, max_query_len=4)
    pages = struct((99, 16, 8, 256), BF16)
    yield "drafts", drafts, (struct((16, 32, 128), BF16), pages, TABLES, IDS, STARTS)
    yield (
        "reproducible",
        functools.partial(attend, reproducible=True),
        (struct((4, 32, 128), BF16), pages, TABLES, IDS),
    )
    of_latents = functools.partial(attend, value_width=512)
    for name, dtype in (("", BF16), (", fp8", FP8), (", int8", jnp.int8)):
        pages, latents = struct((99, 16, 2, 256), dtype), struct((99, 16, 1, 576), dtype)
        yield f"decode{name}", attend, (struct((4, 16, 128), BF16), pages, TABLES, IDS)
        given = struct((256, 16, 128), BF16), pages, TABLES, IDS, STARTS
        yield f"prompts{name}", attend, given
        yield f"latents{name}", of_latents, (struct((4, 16, 576), BF16), latents, TABLES, IDS)
    given = struct((4, 128, 576), BF16), struct((99, 64, 1, 576), BF16), TABLES, IDS
    yield "latents of 128 heads", of_latents, given
    packed = functools.partial(attend, value_width=512, row_packing="fp8_ds_mla")
    for heads, of_heads in ((16, ""), (128, " of 128 heads")):
        queries, lists = struct((4, heads, 576), BF16), (TABLES, IDS)
        given = queries, struct((99, 64, 1, 656), U8), *lists
        yield f"latents, packed{of_heads}", packed, given
        for name, run, width, dtype in (("", of_latents, 576, BF16), (", packed", packed, 656, U8)):
            given = queries, struct((99, 1, 1, width), dtype), *lists
            yield f"rows of latents{name}{of_heads}", run, given


def convolve(dtype: Any, inputs: Any, weights: Any, bias: Any, data: Any, *ids: Any) -> Any:
    pages = kernels.StatePages(data, dtype, (3, inputs.shape[1]), num_pages=8)
    conv, requests = kernels.Convolution(pages, weights, bias), kernels.RequestStates(*ids)
    return kernels.causal_conv1d(inputs, conv, requests)


def delta(inputs: Any, decay: Any, beta: Any, data: Any, *ids: Any) -> Any:
    states = kernels.StatePages(data, F32, (4, 128, 128), num_pages=8)
    requests = kernels.RequestStates(*ids)
    return kernels.gated_delta_rule(inputs, decay, beta, states, requests, num_key_heads=2)


def replay(
    dtype: Any, drafts: int, inputs: Any, decay: Any, beta: Any, weights: Any, data: Any, *ids: Any
) -> Any:
    """Tokens of a layer whose pages have rings of 16 tokens."""
    windows = kernels.StatePages(data, BF16, (3 + drafts, inputs.shape[1]), num_pages=8)
    states = kernels.StatePages(data, dtype, (4, 128, 128), num_pages=8, start=windows.num_bytes)
    parts, start = [], states.start + states.num_bytes
    terms = (1 if states.itemsize == 4 else 3) + (drafts > 0)
    for shape in ((2, 16, 128), (4, 16, 128), (4, terms, 16)):
        parts.append(states._replace(shape=shape, start=start))
        start += parts[-1].num_bytes
    most = {"max_query_len": 1 + drafts} if drafts else {}
    requests = kernels.RequestStates(*ids[:2], *ids[3:], num_computed_tokens=ids[2], **most)
    conv, rings = kernels.Convolution(windows, weights), kernels.Replay(*parts, drafts=drafts)
    given = inputs, decay, beta, states, requests
    return kernels.gated_delta_rule(*given, num_key_heads=2, convolution=conv, replay=rings)


def recurrences() -> Iterator[tuple[str, Any, Any]]:
    for name, dtype in (("", BF16), (", f16", jnp.float16), (", f32", F32)):
        rest = struct((4, 512), dtype), struct((512,), dtype), struct((8, 3 * 512), dtype), IDS, IDS
        run = functools.partial(convolve, dtype)
        yield f"convolution{name}", run, (struct((4, 512), dtype), *rest)
        yield f"convolution, prompts{name}", run, (struct((128, 512), dtype), *rest, STARTS)
    for name, dtype in ((", f32", F32), (", bf16", BF16)):
        given = struct((4, 8 * 128), BF16), struct((4, 4), F32), struct((4, 4), F32)
        given = *given, struct((4, 8 * 128), BF16), struct((8, 2**20), jnp.uint8), IDS, IDS, IDS
        yield f"replay{name}", functools.partial(replay, dtype, 0), given
        drafted = [struct((16, *one.shape[1:]), one.dtype) for one in given[:3]] + [*given[3:]]
        yield f"replay of drafts{name}", functools.partial(replay, dtype, 3), (*drafted, STARTS)
        given = [struct((256, *one.shape[1:]), one.dtype) for one in given[:3]] + [*given[3:]]
        yield f"replay of prompts{name}", functools.partial(replay, dtype, 0), (*given, STARTS)
    for name, key in (("", ()), (", decay per key", (128,))):
        for tokens, starts in ((4, []), (256, [STARTS])):
            given = struct((tokens, 8 * 128), BF16), struct((tokens, 4, *key), F32)
            given = *given, struct((tokens, 4), F32), struct((8, 4 * 128 * 128), F32), IDS, IDS
            yield f"gated delta of {tokens}{name}", delta, (*given, *starts)


# --- whole steps ----------------------------------------------------------------------

KV: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
LAYERS: dict[str, Any] = {
    "full": jaxkv.FullAttentionSpec(**KV),
    "window": jaxkv.SlidingWindowSpec(sliding_window=20, **KV),
    "chunk": jaxkv.ChunkedAttentionSpec(chunk_size=32, **KV),
    "latent": jaxkv.MLASpec(block_size=16, head_size=192, value_size=128),
    "delta": jaxkv.StateSpec(
        block_size=16, shapes=((3, 512), (2, 128, 128)), dtypes=("bf16", "f32")
    ),
    "mamba": jaxkv.StateSpec(block_size=16, shapes=((3, 256), (2, 64, 64)), dtypes=("bf16", "f32")),
    "conv": jaxkv.StateSpec(block_size=16, shapes=((3, 256),), dtypes=("bf16",)),
}


def run_step(x: Any, cache: Any, upload: Any) -> Any:
    """Runs each layer on the same inputs, bf16[T, 512]."""
    step = jaxkv.StepContext(cache, upload, token_ids=jnp.zeros(len(x), jnp.int32))
    gates, heads, out = x[:, :2], x[:, :256].reshape(-1, 4, 64), []
    for layer in LAYERS:
        if layer == "latent":
            out.append(step.attend(layer, x[:, :384].reshape(-1, 2, 192), x[:, :192]))
        elif layer == "delta":
            weights = {"conv_weights": jnp.ones((4, 512), BF16), "num_key_heads": 1}
            out.append(step.gated_delta(layer, x, -gates, gates, **weights))
        elif layer == "mamba":
            weights = {"conv_weights": jnp.ones((4, 256), BF16), "num_groups": 1}
            out.append(step.mamba2(layer, x[:, :256], -gates, gates, **weights))
        elif layer == "conv":
            out.append(step.short_conv(layer, x[:, :256], conv_weights=jnp.ones((4, 256), BF16)))
        else:
            out.append(step.attend(layer, heads, heads[:, :2], heads[:, 2:]))
    return step.done(), out


def steps() -> Iterator[tuple[str, Any, Any]]:
    plan = jaxkv.plan_cache(
        LAYERS, 2**40, max_model_len=96, num_blocks_override=64, override_beyond_memory=True
    )
    cache = jaxkv.make_cache(plan, max_requests=4)
    for name, tokens in (("decodes", 4), ("prompts", 128)):
        most = 1 if name == "decodes" else tokens
        shape = jaxkv.StepShape.for_plan(
            plan, max_requests=4, max_tokens=tokens, max_query_len=most
        )
        yield f"a step of {name}", run_step, (struct((tokens, 512), BF16), cache, shape.idle())


def spills(folder: pathlib.Path) -> dict[str, int]:
    """Returns the bytes of registers that kernels spill, by what ptxas said, and forgets it."""
    found: dict[str, int] = {}
    for path in folder.glob("*"):
        text = path.read_text() if path.suffix == ".ptxas" else ""
        for stores in re.findall(r"(\d+) bytes spill stores", text):
            if int(stores):
                found[path.stem.rpartition("_")[0]] = int(stores)
        path.unlink()
    return found


def main(capability: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        compile_cases(capability, pathlib.Path(folder))


def compile_cases(capability: str, folder: pathlib.Path) -> None:
    from jax.experimental import topologies

    given = {"topology": "1x1x1", "target_config": config_of(capability)}
    topology = topologies.get_topology_desc(platform="cuda", **given)
    where = jax.sharding.SingleDeviceSharding(topology.devices[0])
    pretend(capability)
    for cases in (moving, attention, recurrences, steps):
        for name, run, arguments in cases():
            print(json.dumps(name), end=": ", flush=True)  # if the compiler ends the process
            lowered, found = lower(run, arguments, where)
            # XLA's own kernels take long, and are compiled as a part of the steps.
            if found or cases is steps:
                lowered.compile()
            print(json.dumps({"kernels": found, "spills": spills(folder)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
