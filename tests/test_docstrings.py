"""Docstrings open with a verb or a noun phrase, and the examples in them run."""

import ast
import functools
import importlib
import json
import pathlib
import re
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import pallas_kernels
from jaxkv._src.block_tables import pack_entries
from jaxkv._src.interop import vllm

TESTS = pathlib.Path(__file__).parent
PACKAGES = [pathlib.Path(str(package.__file__)).parent for package in (jaxkv, pallas_kernels)]
QUESTION = re.compile(r'^ *"""(?:What|Which|Who|Whose|Where|How|When|Knows)\b.*', re.MULTILINE)
LAYERS = {"layer": jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)}
INDEXED = dict.fromkeys(("layer", "indexer"), jaxkv.MLASpec(block_size=16, head_size=8))
BLOCKS = LAYERS | {"indexer": INDEXED["indexer"]}
STATES = {"state": jaxkv.StateSpec(block_size=16, shapes=((8,),), dtypes=("f32",))}
ON_DEVICE = re.compile(
    r"\bdef step\(|\bjaxkv\.(apply_step|attend|(read|write)_|layer_view)|= pallas_kernels\."
)
ROOM = {"num_groups": 1, "max_requests": 256, "max_block_ids": 4, "max_rows": 1}
ROWS = jax.ShapeDtypeStruct((64, 1, 8), jnp.float32)
LATENTS, WEIGHTS = (jax.ShapeDtypeStruct((64, size), jnp.float32) for size in (8, 1))


def files(*folders: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


# --- first words ----------------------------------------------------------------------


def test_no_docstring_opens_with_a_question_word() -> None:
    notebooks = TESTS.parent / "notebooks"
    paths = [*files(*PACKAGES, TESTS, notebooks), *notebooks.glob("*.ipynb")]
    texts = {str(path): path.read_text() for path in paths}
    assert sum(text.count('"""') // 2 for text in texts.values()) > 1500
    found = {path: QUESTION.findall(text) for path, text in texts.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("first", "is_bad"), [("Whose bytes", True), ("Whole", False), ("Knows", True), ("", False)]
)
def test_a_question_word_is_found(first: str, is_bad: bool) -> None:
    texts = f'"""{first}"""', f'def f():\n    """{first}\n    """'
    assert all(bool(QUESTION.search(text)) is is_bad for text in texts)


# --- examples -------------------------------------------------------------------------


def example_in(docstring: str) -> str:
    """Returns the indented blocks that follow a double colon."""
    blocks = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", docstring + "\n")
    return "\n".join(textwrap.dedent(block).strip() for block in blocks)


def docstrings(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the names and the docstrings of a file that may have examples in them."""
    if not (text := path.read_text()).count("::\n\n"):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "name", ""), ast.get_docstring(node) or ""


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGES[0].parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


EXAMPLES = {
    (module_of(path), name): example
    for path in files(*PACKAGES)
    for name, text in docstrings(path)
    if (example := example_in(text))
}
WANTED = {
    *("", "plan_cache", "make_cache", "KVCache", "BlockManager", "StepShape", "Scheduler"),
    *("apply_step", "StepBatch", "attend", "write_tokens", "read_tokens", "write_state"),
    *("read_state", "write_rows", "read_rows", "layer_view", "check_errors", "sleep", "wake_up"),
    *("zero_blocks", "copy_blocks", "paged_attention", "StepContext", "Engine"),
    "gated_delta_rule",
}


def forward(params: jax.Array, step: jaxkv.StepContext) -> jax.Array:
    """A model whose token ids are numbers of one head."""
    x = jax.nn.one_hot(step.token_ids[:, None], 8) + params
    return step.attend("layer", x, x, x)[step.last_tokens, 0]


@functools.cache
def settled(layers: str = "layer") -> dict[str, Any]:
    """Returns what examples take for granted: a model, its plan, cache and shape."""
    specs = {"layer": LAYERS, "state": STATES, "index": INDEXED, "blocks": BLOCKS}[layers]
    plan = jaxkv.plan_cache(specs, 2**20, max_model_len=8192)
    sizes = {"max_requests": 256, "max_tokens": 64, "forks": 4, "cached_tokens": 64, "extra": 64}
    shape = jaxkv.StepShape.for_plan(plan, **sizes)
    manager = jaxkv.BlockManager(plan, max_requests=256)
    manager.start("before")
    recorded = json.loads((TESTS / "golden" / "vllm_0_33.json").read_text())["traces"][0]
    return {
        **{name: getattr(jaxkv, name) for name in dir(jaxkv)},
        **{"jax": jax, "jnp": jnp, "np": np, "jaxkv": jaxkv, "vllm": vllm},
        "pallas_kernels": pallas_kernels,
        **{"layers": LAYERS, "layer": "layer", "plan": plan},
        **{"memory_bytes": 2**20, "host_bytes": 2**20},
        **{"cache": jaxkv.make_cache(plan, max_requests=256), "shape": shape, "shapes": [shape]},
        **{"upload": manager.step(shape, {"before": 1}), "work": {}, "longest": 42},
        **{"params": jnp.zeros(()), "model": jaxkv.apply_step, "forward": forward},
        "prompts": [[1, 2, 3], [4]],
        "scheduler": jaxkv.Scheduler(
            jaxkv.BlockManager(plan, max_requests=256), max_tokens=64, tokens={}
        ),
        "step": lambda params, cache, upload: (cache, np.zeros(256, np.int32)),
        "mesh": jax.make_mesh((1,), ("hosts",), devices=jax.devices()[:1]),
        "entries": pack_entries([jaxkv.TableEntry(0, [[1]])], **ROOM),
        "kv_cache_config": recorded["configs"],
        "max_model_len": recorded["max_model_len"],
        "scheduler_output": recorded["steps"][0]["output"],
        "batch": SimpleNamespace(sequence=3),
        "encode_events": lambda batch: b"",
        "socket": SimpleNamespace(send_multipart=len),
    }


def run(code: str, names: dict[str, Any]) -> None:
    """Runs an example; one that computes on the device, or defines a step, is only traced."""
    compiled = compile(code, "docstring", "exec")
    arrays = {"cache": names["cache"], "upload": names["upload"]}
    arrays |= dict.fromkeys(("queries", "keys", "values", "index_queries"), ROWS)
    arrays |= dict.fromkeys(("latents", "index_keys"), LATENTS) | {"weights": WEIGHTS}

    def traced(arrays: dict[str, Any]) -> None:
        names.update(arrays)
        exec(compiled, names)
        if "def step(" in code and "= step(" not in code:
            names["step"].__wrapped__(names["params"], names["cache"], names["upload"])

    if ON_DEVICE.search(code):
        jax.eval_shape(traced, arrays)
    else:
        exec(compiled, names)


def test_the_names_that_a_reader_meets_first_have_examples() -> None:
    assert {name for _, name in EXAMPLES} >= WANTED


@pytest.mark.parametrize("where", EXAMPLES, ids=".".join)
def test_an_example_runs(where: tuple[str, str]) -> None:
    module, name = where
    if EXAMPLES[where].startswith("{"):
        assert json.loads(EXAMPLES[where])["layers"]
        return
    tokens = np.arange(8192) if name == "block_keys" else {"a": [*range(40)], "b": [7]}
    manager = jaxkv.BlockManager(settled()["plan"], max_requests=256)
    layers = "state" if "_state(" in EXAMPLES[where] else "layer"
    layers = "index" if "top_tokens(" in EXAMPLES[where] else layers
    layers = "blocks" if "top_blocks(" in EXAMPLES[where] else layers
    names = vars(importlib.import_module(module)) | settled(layers)
    run(EXAMPLES[where], names | {"manager": manager, "tokens": tokens})
