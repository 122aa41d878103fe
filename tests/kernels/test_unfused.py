"""Kernels among slices: they read parts of larger arrays, and their results become such parts.

On GPUs XLA fuses a call with slices, and may then return memory that the kernel did not write.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Convolution, RequestStates, StatePages, _capability, gated_delta_rule
from tests.helpers import HAS_MOSAIC, ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.kernels import calls
from tests.kernels.subjects import SUBJECTS

HEADS, PAGES, PAGE_TOKENS = 2, 8, 32
IDS = as_ids([3, 1])
LOC = as_ids([0, 80, 81])  # a prompt and a decode; the other tokens are padding
STATE = (HEADS, 64, 64)


class Program(NamedTuple):
    """A call of kernels.

    run: takes arrays, and returns a tree of them.
    make: makes the arrays by a seed.
    """

    run: Callable[..., Any]
    make: Callable[[int], Any]


def numbers(*shapes: tuple[int, ...], dtypes: str = "bf") -> Callable[[int], Any]:
    def make(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        kinds = [jnp.bfloat16 if letter == "b" else np.float32 for letter in dtypes]
        return [rng.normal(size=s).astype(d) for s, d in zip(shapes, kinds, strict=True)]

    return make


def attention(
    loc: np.ndarray | None = None, key: int = 64, row: int = 128, **options: Any
) -> Program:
    """Returns paged attention of two requests, of which the first fills its pages."""
    tables, lens = as_ids(np.arange(16).reshape(2, 8) % PAGES), as_ids([8 * PAGE_TOKENS, 41])

    def attend(queries: Any, pages: Any) -> Any:
        return calls.attend(
            *(queries, pages, tables, lens, loc),
            return_lse=True,
            implementation="mosaic_gpu",
            **options,
        )

    tokens = 2 if loc is None else 88
    shapes = (tokens, HEADS, key), (PAGES, PAGE_TOKENS, 1, row)
    return Program(attend, numbers(*shapes, dtypes="bb"))


def recurrence(loc: np.ndarray | None = None, width: int = 0) -> Program:
    """Returns a gated delta rule of two requests, after a convolution if that has a width."""
    tokens, channels, state_bytes = 2 if loc is None else 88, 128 + HEADS * 64, 4 * HEADS * 64 * 64

    def recur(inputs: Any, data: Any) -> Any:
        conv = None
        if width:
            saved = (width - 1, channels)
            pages = StatePages(data, jnp.float32, saved, PAGES, start=state_bytes)
            conv = Convolution(pages, jnp.full((width, channels), 1 / width, jnp.bfloat16))
        gates = jnp.full((tokens, HEADS), 0.5, jnp.float32)
        return gated_delta_rule(
            *(inputs, -gates, gates, StatePages(data, jnp.float32, STATE, PAGES)),
            RequestStates(IDS, IDS, loc),
            num_key_heads=1,
            convolution=conv,
            implementation="mosaic_gpu",
        )

    shapes = (tokens, channels), (PAGES, state_bytes // 2)
    return Program(recur, numbers(*shapes))


PROGRAMS = {
    **{
        of.name: Program(
            functools.partial(of.kernel, implementation="mosaic_gpu"),
            lambda seed, of=of: of.make(512, seed=seed),
        )
        for of in SUBJECTS
    },
    "decodes": attention(),
    "decodes in rounds": attention(reproducible=True),
    "prompts": attention(LOC),
    "prompts by the kernel of decodes": attention(LOC, reproducible=True),
    "latents": attention(key=192, row=192, value_width=128),
    "latents in rounds": attention(key=192, row=192, value_width=128, reproducible=True),
    "states": recurrence(),
    "states of a convolution": recurrence(width=4),
    "states after prompts": recurrence(LOC, width=4),
}
# Interpret mode takes seconds for each of the others, and fuses nothing.
RUN = [*PROGRAMS] if ON_GPU else ["zero_counted", "write", "states"]
# They have all kernels between them.
LOWERED = [
    *("zero_counted", "copy_counted", "write", "prompts", "latents"),
    *("states of a convolution", "states after prompts"),
]


@pytest.fixture(autouse=True)
def small_and_interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_MOSAIC:
        return
    from pallas_kernels import _mosaic
    from pallas_kernels._paged_attention import rounds, tasks

    monkeypatch.setattr(rounds, "WORKSPACE", 1)  # each tile needs a round
    monkeypatch.setattr(tasks, "SPLIT", 2)
    monkeypatch.setattr(tasks, "LATENT_SPLIT", 2)
    if not ON_GPU:
        monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
        monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 3)


def among_slices(run: Callable[..., Any], arrays: Any) -> tuple[Any, Any]:
    """Runs a program on each part of larger arrays, in a loop; and `amid_sevens` on the second."""
    each = jax.lax.map(lambda part: run(*part), arrays)
    return each, amid_sevens(run, [array[1] for array in arrays])


def amid_sevens(run: Callable[..., Any], arrays: Any) -> Any:
    """Runs a program, and returns arrays of sevens with its results between them."""

    def place(result: jax.Array) -> jax.Array:
        return jnp.full((3, *result.shape), 7, result.dtype).at[1].set(result)

    return jax.tree.map(place, run(*arrays))


@needs_mosaic
@pytest.mark.parametrize("name", RUN)
def test_results_among_slices_are_those_alone(name: str) -> None:
    program = PROGRAMS[name]
    parts = [program.make(seed) for seed in range(2)]
    arrays = [np.stack(each) for each in zip(*parts, strict=True)]
    with kernels_run():
        each, placed = jax.jit(functools.partial(among_slices, program.run))(arrays)
        alone = [jax.jit(program.run)(*part) for part in parts]
    for i, of_part in enumerate(alone):
        jax.tree.map(lambda found, one, i=i: check_close(found[i], one), each, of_part)
    jax.tree.map(lambda found, one: check_close(found[1], one), placed, alone[1])
    assert all((np.asarray(array)[[0, 2]] == 7).all() for array in jax.tree.leaves(placed))


def check_close(found: jax.Array, alone: jax.Array) -> None:
    """Checks bytes, and numbers but for what XLA may add up in another order."""
    if found.dtype == jnp.uint8:
        np.testing.assert_array_equal(found, alone)
        return
    found, alone = (np.asarray(array, np.float32) for array in (found, alone))
    assert np.abs(alone[np.isfinite(alone)]).max() > 0.1
    np.testing.assert_allclose(found, alone, rtol=0.02, atol=0.02)


@needs_mosaic
@pytest.mark.parametrize("name", LOWERED)
def test_barriers_are_around_all_that_enters_and_leaves_kernels(name: str) -> None:
    program = PROGRAMS[name]
    traced = jax.jit(functools.partial(amid_sevens, program.run)).trace(program.make(0))
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    kernels = [of for of in operations_of(module.operation) if "mosaic_gpu" in target_of(of)]
    assert kernels
    for kernel in kernels:
        for operand in kernel.operands:
            assert is_apart(operand.owner), operand
        for result in kernel.results:
            assert all(is_apart(use.owner) for use in result.uses), result


def is_apart(other: Any) -> bool:
    """Returns whether XLA cannot fuse a kernel with an operation, or with one beyond it."""
    if not hasattr(other, "attributes"):  # of a function or a loop, which takes no slices
        return True
    if other.name in ("stablehlo.optimization_barrier", "stablehlo.return", "func.return"):
        return True
    return target_of(other) in ("AllocateBuffer", "mosaic_gpu_v2")


def target_of(operation: Any) -> str:
    is_call = operation.name == "stablehlo.custom_call"
    return operation.attributes["call_target_name"].value if is_call else ""


def operations_of(operation: Any) -> Iterator[Any]:
    for block in (block for region in operation.regions for block in region.blocks):
        for inner in block.operations:
            yield inner.operation
            yield from operations_of(inner.operation)
