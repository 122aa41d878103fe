"""Copies against NumPy: chains, swaps, duplicates, bad ids, counts, promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv.testing import assert_same_bytes, reference_copy_blocks
from pallas_kernels import copy_blocks
from tests.helpers import IMPLEMENTATIONS, ON_GPU, TREES, as_ids, garbage, kernels_run, runs_of
from tests.kernels.arg_specs import BLOCKS, INTERPRETED_BUFFERS, SMALL_BUFFERS

PAIRS = 6
bad_ids = st.sampled_from([-(2**31), -2, -1, BLOCKS, BLOCKS + 1, 2**31 - 1])
id_lists = st.tuples(*[st.integers(0, BLOCKS - 1) | bad_ids] * PAIRS)
# What a promise of disjoint lists allows; bad ids may be in both.
low_ids = st.tuples(*[st.integers(0, 4) | bad_ids] * PAIRS)
high_ids = st.tuples(*[st.integers(5, BLOCKS - 1) | bad_ids] * PAIRS)
counts = st.integers(-1, PAIRS + 2) | st.sampled_from([-(2**31), 2**31 - 1])


@functools.partial(jax.jit, static_argnames=("axis", "implementation", "disjoint"))
def copy(buffers, sources, destinations, num_ids=None, axis=0, **options):
    return copy_blocks(buffers, sources, destinations, num_ids=num_ids, block_axis=axis, **options)


def check(spec, sources, destinations, num_ids, **options) -> None:
    """Compares copies within one buffer with the reference."""
    buffer = garbage(spec.shape, "bfloat16")
    pairs = [ids[: max(num_ids, 0)] for ids in (sources, destinations)]
    expected = reference_copy_blocks(buffer, *pairs, block_axis=spec.block_axis)
    with kernels_run():
        got = copy(
            jnp.array(buffer),
            as_ids(sources),
            as_ids(destinations),
            np.int32(num_ids),
            axis=spec.block_axis,
            **options,
        )
    assert_same_bytes(got, expected)


@pytest.mark.parametrize(
    ("implementation", "spec"), runs_of(SMALL_BUFFERS, INTERPRETED_BUFFERS), ids=str
)
@settings(max_examples=8 if ON_GPU else 2)
@given(sources=id_lists, destinations=id_lists, num_ids=counts)
@example((1, 2, 3, 4, 5, 6), (2, 3, 4, 5, 6, 7), PAIRS)  # a chain
@example((1, 2, 3, 4, 5, 0), (2, 1, 4, 5, 3, 0), PAIRS)  # a swap and a ring; block 0 stays
@example((1, 2, 3, 4, 9, -1), (5, 5, 5, 6, 5, 6), PAIRS)  # the last good one counts
@example((1, 5, 5, 2, 3, 0), (5, 5, 6, 3, 0, 7), PAIRS)  # a block onto itself, and block 0
@example((1, 2, 3, 4, 5, 6), (5, 6, 1, 5, 3, 2), 3)  # what is not counted overrules nothing
def test_destinations_become_what_sources_were(
    implementation, spec, sources, destinations, num_ids
) -> None:
    check(spec, sources, destinations, num_ids, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", SMALL_BUFFERS[3:5], ids=str)
@settings(max_examples=12)
@given(sources=low_ids, destinations=high_ids, num_ids=counts)
def test_disjoint_lists_are_copied_directly(
    implementation, spec, sources, destinations, num_ids
) -> None:
    check(spec, sources, destinations, num_ids, implementation=implementation, disjoint=True)


@pytest.mark.parametrize(("implementation", "num_ids"), TREES)
def test_a_tree_of_unlike_buffers_is_copied_in_one_call(implementation, num_ids) -> None:
    buffers = {
        "idle": garbage((5, 640), "bfloat16"),
        "kv": garbage((2, 5, 96), "float8_e4m3fn"),
        "state": (garbage((7, 33), "float32"), garbage((BLOCKS, 640), "bfloat16")),
    }
    axes = {"idle": 0, "kv": 1, "state": (0, 0)}
    none, of_states = as_ids([]), (as_ids([6, 1]), as_ids([8, 3, 3, 2]))
    sources = {"idle": none, "kv": as_ids([4, 5, 1]), "state": of_states}
    of_states = as_ids([1, 6]), as_ids([3, 8, 7, 7])
    destinations = {"idle": none, "kv": as_ids([1, 2, 4]), "state": of_states}
    run = functools.partial(copy_blocks, block_axis=axes, implementation=implementation)
    count = None if num_ids is None else np.int32(num_ids)
    with kernels_run():
        got = jax.jit(run)(buffers, sources, destinations, num_ids=count)
    expected = jax.tree.map(
        lambda buffer, axis, *pairs: reference_copy_blocks(
            buffer, *[ids[:num_ids] for ids in pairs], block_axis=axis
        ),
        buffers,
        axes,
        sources,
        destinations,
    )
    assert_same_bytes(got, expected)


@pytest.mark.parametrize("shared", ["sources", "destinations"])
def test_buffers_may_share_one_of_the_two_lists(shared) -> None:
    buffers = [jnp.array(garbage((BLOCKS, n), "uint8")) for n in (1, 3, 17)]
    one, each = as_ids([0, 1, 2]), [as_ids(ids) for ids in ([6, 5, 4], [8, 7, 6], [6, 5, 4])]
    lists = (one, each) if shared == "sources" else (each, one)
    got = copy(buffers, *lists, implementation="xla")
    for array, buffer, own in zip(got, buffers, each, strict=True):
        pair = (one, own) if shared == "sources" else (own, one)
        assert_same_bytes(array, reference_copy_blocks(np.asarray(buffer), *pair))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_range_of_ids_depends_on_the_buffer(implementation) -> None:
    buffers = [garbage((4, 130), "uint8"), garbage((8, 130), "uint8")]
    pairs = as_ids([1, 6, 3]), as_ids([2, 2, 5])  # the second wins where there is a block 6
    with kernels_run():
        got = copy([jnp.array(b) for b in buffers], *pairs, implementation=implementation)
    for array, buffer in zip(got, buffers, strict=True):
        assert_same_bytes(array, reference_copy_blocks(buffer, *pairs))
