"""Paged KV caches for LLM serving in JAX on NVIDIA GPUs.

jaxkv plans the cache memory of a model, allocates it on the device, and keeps track on the host of
the blocks of each request. One array of integers per step, the upload, brings the device up
to date. On the device all work is done by pure functions over one pytree, the cache, inside your
own ``jit``::

    import jax
    import jaxkv

    spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
    plan = jaxkv.plan_cache({"layer": spec}, memory_bytes=2**30, max_model_len=8192)
    cache = jaxkv.make_cache(plan, max_requests=256)        # on the device: block tables, pool
    manager = jaxkv.BlockManager(plan, max_requests=256)    # on the host: blocks of requests
    shape = jaxkv.StepShape.for_plan(plan, max_requests=256, max_tokens=64)

    @jax.jit(donate_argnums=0)
    def step(cache, upload, x):                             # a model of one attention layer
        cache, batch = jaxkv.apply_step(cache, upload)
        return jaxkv.attend(cache, "layer", batch, queries=x, keys=x, values=x)

    manager.start("a")
    upload = manager.step(shape, {"a": 40})                 # the first 40 tokens of request "a"
    cache, out = step(cache, upload, jax.numpy.ones((64, 8, 128)))

Call ``help(jaxkv.attend)`` to read about one name. Names, by task:

Describe the layers of a model, or read them from its config.json
    FullAttentionSpec, SlidingWindowSpec, ChunkedAttentionSpec, CrossAttentionSpec, MLASpec,
    SlidingWindowMLASpec, RingSpec, StateSpec, SharedKVSpec, EncoderOnlySpec, load_config,
    layers_from_config
Plan the memory: groups of layers, number of blocks, longest request
    plan_cache, Plan, Limits, KVCacheCapacityError
Choose the work of each step: admission, chunked prefill, preemption
    Scheduler
Give blocks to requests, share prefixes, and pack the upload of a step
    BlockManager, StepShape, UploadRing, ExtraKey, OutOfBlocksError
Pack uploads with the block ids of your own scheduler
    pack_step, TableEntry
Generate tokens with a model, or only thread the cache through it
    Engine, Sampling, Output, TopLogprobs, Stats, ModelOutput, StepContext
Allocate the cache, and bring it up to date in each step
    make_cache, KVCache, set_scales, apply_step, StepBatch, check_errors, CacheError
Update the block tables by yourself
    append_block_ids, TableEntries, pack_entries, expand_blocks
Write, read and attend in the model
    attend, top_tokens, gated_delta, mamba2, linear_attention, short_conv, write_tokens,
    read_tokens, write_state, read_state, write_rows, read_rows
Use your own kernels and connectors
    layer_view, with_layer_view
Free device memory for a while
    sleep, wake_up
Offload blocks to host memory
    HostMemory, HostBlocks

Modules with more: `jaxkv.planning`, `jaxkv.specs`, `jaxkv.hf_config`, `jaxkv.layout` (physical
orders), `jaxkv.blocks`, `jaxkv.scheduler`, `jaxkv.cache` (error flags), `jaxkv.pool` (blocks),
`jaxkv.attention` (block masks), `jaxkv.prefixes` (keys and events), `jaxkv.step` (several
processes), `jaxkv.logits_processors`, `jaxkv.drafts`, `jaxkv.sleeping`, `jaxkv.interop.vllm`,
`jaxkv.testing`, `jaxkv.plotting`. Kernels over plain arrays are in the package `pallas_kernels`. In
a shell, ``python -m jaxkv plan --help`` says what fits into a GPU, and ``python -m jaxkv demo``
serves a small model.

Importing jaxkv is quick: a name is imported when it is first used, and planning, the manager and
the scheduler do not load jax.
"""

import ast
import functools
import importlib
import pathlib
import pkgutil
import sys
import types
from typing import Any

__version__ = "0.1.0.dev0"

_HERE = pathlib.Path(__file__)


def _imported_by(path: pathlib.Path) -> dict[str, str]:
    """Returns the names that a file imports from jaxkv, with the modules that define them."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxkv._src")
        for alias in node.names
    }


# The stub is the one list of names: type checkers read it, and so does this module.
_MODULE_OF = _imported_by(_HERE.with_suffix(".pyi"))
_MODULES = {name for _, name, _ in pkgutil.iter_modules(__path__) if name[0] != "_"}

__all__: list[str] = []  # else help(jaxkv) prints every class in full


def __getattr__(name: str) -> Any:
    """Imports a name, or a public module, when it is first used."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
    elif name in _MODULES:
        value = importlib.import_module(f"jaxkv.{name}")
    else:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}{_alike(name)}")
    _show_public_modules()
    return value


def _alike(name: str) -> str:
    """Returns a hint at a public name that is spelled like this one."""
    import difflib  # only for mistakes

    places = {each: public for each, _, public in _public_modules()[::-1]}
    near = difflib.get_close_matches(name, [*places, *_MODULES], n=1, cutoff=0.7)
    return f"; did you mean {places.get(near[0], 'jaxkv')}.{near[0]}?" if near else ""


@functools.cache
def _public_modules() -> list[tuple[str, str, str]]:
    """Returns each public name, the module that defines it, and its public module."""
    lists = {f"jaxkv.{name}": _HERE.with_name(f"{name}.py") for name in _MODULES - {"interop"}}
    lists |= {"jaxkv.interop.vllm": _HERE.with_name("interop") / "vllm.py"}
    names = [(name, module, "jaxkv") for name, module in _MODULE_OF.items()]
    for public, path in lists.items():
        names += [(name, module, public) for name, module in _imported_by(path).items()]
    return names


def _show_public_modules() -> None:
    """Makes errors, reprs and pickles name public modules, in all packages imported so far."""
    for name, module, public in _public_modules():
        value = getattr(sys.modules.get(module), name, None)
        if isinstance(value, type | types.FunctionType):
            value.__module__ = public


def __dir__() -> list[str]:
    return sorted({"__version__", *_MODULE_OF, *_MODULES})
