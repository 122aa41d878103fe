"""Reasons of misses and the order of eviction, against their definitions."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np
import pytest

from jaxkv._src.prefixes import PrefixPolicy, PrefixTree
from jaxkv._src.prefixes._checkpoints import EVICTED, WANTED_PART, Checkpoint, Checkpoints
from jaxkv._src.prefixes._lookup import _held_at, _holds_whole, _why_not_held
from jaxkv._src.prefixes._nodes import PromptTree
from jaxkv._src.prefixes._policies import WHOLE
from tests.layer_examples import chunked, full, sliding, state

GROWTHS = {
    "full": full(block_size=4).growth,
    "window": sliding(6, block_size=4).growth,
    "chunk": chunked(6, block_size=4).growth,
    "states": state(block_size=4, cache_mode="all").growth,
}


def blocks_read(name: str, position: int) -> range:
    """The logical blocks that the token at a position reads, where a block ends before it."""
    oldest = {"full": 0, "window": max(position - 5, 0), "chunk": position // 6 * 6}
    return range(oldest.get(name, position - 1) // 4, position // 4)


@pytest.mark.parametrize("name", GROWTHS)
def test_a_miss_is_an_eviction_only_if_an_evicted_block_would_be_read(name: str) -> None:
    policy, draw, seen = PrefixPolicy(GROWTHS[name], 4), np.random.default_rng(0), set()
    for _ in range(200):
        block_ids = draw.choice([EVICTED, 0, 7], 6, p=draw.dirichlet([1, 1, 3]))
        ends = 4 * np.arange(1, 7)
        held = [all(block_ids[c] > 0 for c in blocks_read(name, end)) for end in ends]
        assert _held_at(policy, block_ids, ends).tolist() == held
        assert [_holds_whole(policy, block_ids, end) for end in ends.tolist()] == held
        missing = ends[~np.array(held)]
        missing = missing[draw.random(missing.size) < 0.6]  # other groups have larger blocks
        if missing.size:
            read = {int(block_ids[c]) for end in missing for c in blocks_read(name, end)}
            hole = "no_checkpoint" if name == "states" else "left_window"
            seen.add(_why_not_held(policy, block_ids, missing))
            assert _why_not_held(policy, block_ids, missing) == (
                "evicted" if EVICTED in read else hole
            )
    assert len(seen) == 2


def checkpoint(position: int, *, is_wanted: bool) -> Checkpoint:
    blocks = np.ones(2, np.int32)
    return Checkpoint(position, blocks, position * blocks, is_wanted=is_wanted)


def test_ends_that_nobody_waits_for_are_evicted_first_unless_wanted_ones_crowd_them_out() -> None:
    draw, max_blocks = np.random.default_rng(0), 8
    for _ in range(30):
        kept, order = Checkpoints(), []
        for position in range(40):
            if order and draw.random() < 0.3:  # used again, by a request that may not want it
                at, wanted = order[draw.integers(len(order))], bool(draw.integers(2))
                kept.touch(at, is_wanted=wanted)
                order.remove(at)
                order.append(at)
                assert at.is_wanted or not wanted
            made = checkpoint(position, is_wanted=bool(draw.integers(2)))
            kept.add(made)
            order.append(made)
            wanted = [each for each in order if each.is_wanted]
            unwanted = [each for each in order if not each.is_wanted]
            crowd = 2 * len(wanted) > WANTED_PART * max_blocks or not unwanted
            last = kept.one_too_many(max_blocks)
            if 2 * len(order) <= max_blocks:
                assert last is None
                continue
            assert last is (wanted if crowd else unwanted)[0]
            kept.remove(last)
            order.remove(last)
            assert last not in kept and kept.num_blocks == 2 * len(order)


def any_kept(states: Iterable[Checkpoint]) -> bool:
    return any(state.is_cached for state in states)


def test_prompts_are_found_until_their_tokens_are_forgotten() -> None:
    """Against a list of prompts; those with kept blocks or states are never forgotten."""
    for seed in range(20):
        draw, tree, most = np.random.default_rng(seed), PromptTree([2], 24), 0
        prompts: list[np.ndarray] = []
        for _ in range(80):
            root = prompts[draw.integers(len(prompts))] if prompts and draw.random() < 0.7 else []
            tokens = np.array(
                [*root[: draw.integers(9)], *draw.integers(0, 2, draw.integers(1, 6))]
            )
            path, _ = tree.grow("a", tokens)
            tree.touch(path)
            for node in path:
                if draw.random() < 0.15:
                    node.blocks[0][:] = 1
                elif draw.random() < 0.6:
                    node.blocks[0][:] = EVICTED
                if draw.random() < 0.3:
                    at = int(draw.integers(node.start, node.end)) + 1
                    state = SimpleNamespace(position=at, is_cached=draw.random() < 0.2)
                    node.checkpoints[at] = cast(Checkpoint, state)
            kept = [
                node
                for node in tree.nodes
                if node and ((node.blocks[0] > 0).any() or any_kept(node.checkpoints.values()))
            ]
            before = [node for node in tree.nodes if node is not None]
            tree.prune()
            prompts.append(tokens)
            nodes = [node for node in tree.nodes if node is not None]
            assert set(kept) <= set(nodes)
            for node in nodes:
                assert node.blocks[0].size == node.end // 2 - node.start // 2
                for at, state in node.checkpoints.items():
                    assert node.start < at == state.position <= node.end
                of_node, above = [node.tokens], node
                while (above := above.parent) is not None:
                    of_node.insert(0, above.tokens)
                assert tree.walk("a", np.concatenate(of_node)) == (mock.ANY, node.end)
            assert all(node.parent in [*nodes, tree._roots["a"]] for node in kept)
            tokens_held = sum(node.tokens.size for node in nodes)
            assert tree._num_tokens == tokens_held
            # One pass forgets all that it may, or until a quarter is free.
            leaves = [n for n in nodes if not n.children and n not in kept]
            was_pruned = len(nodes) < most
            assert not was_pruned or tokens_held <= 0.75 * 24 or not leaves
            gone = [node.tokens.size for node in before if node not in nodes]
            assert not gone or tokens_held + max(gone) > 0.75 * 24, "too much is forgotten"
            most = len(nodes)


def test_names_of_forgotten_prompts_are_forgotten() -> None:
    tree = PromptTree([2], 24)
    for name in range(50):
        tree.grow(name, np.arange(6))
        tree.prune()
    assert len(tree._roots) <= 4


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_state_that_is_computed_again_was_just_used(is_wanted: bool) -> None:
    """And is wanted from now on if this prompt names its place."""
    policy, no_ids = PrefixPolicy(state(block_size=4).growth, 4), np.zeros(0, np.int32)
    tree = PrefixTree([policy], np.zeros(9, np.int64), max_tokens=99, host_ids=9)
    for block_id, number in ((1, 0), (2, 1), (3, 0)):
        tokens = np.arange(4) + 10 * number
        made = tree.cache(
            *("a", tokens, [(0, no_ids)], np.array([block_id], np.int32)),
            is_wanted=is_wanted and block_id == 3,
        )
        assert (made is None) == (block_id == 3)  # the older one stays
    first = tree.prompts.walk("a", np.arange(4))[0][-1].checkpoints[4]
    assert first.is_wanted == is_wanted
    last = tree.checkpoints.one_too_many(1)
    assert last is first if is_wanted else last is not None and last.blocks.tolist() == [2]


def test_a_block_of_a_checkpoint_does_not_replace_one_in_host_memory() -> None:
    """It would be forgotten for its block alone, and the checkpoint would stay."""
    tree = PrefixTree(
        [PrefixPolicy(GROWTHS["full"], 4)], np.zeros(9, np.int64), max_tokens=99, host_ids=5
    )
    tokens, here, on_host, partial = np.arange(4), *np.array([[1], [6], [2]])
    tree.cache("a", tokens, [(0, here)])
    tree.move(here, on_host)
    tree.cache("a", tokens[:3], [(0, here[:0])], partial)
    tree.cache("a", tokens, [(0, partial)])
    assert tree.are_cached(on_host) and not tree.are_cached(partial)
    tree.forget(partial)
    assert not tree.checkpoints.num_blocks


@pytest.mark.parametrize(
    ("name", "shares_rows", "ends"),
    [
        ("full", False, {5: 5, 7: 7, 8: 8}),
        ("window", False, {5: 5, 7: 7, 8: 8}),
        ("full", True, {5: 8, 7: 8, 8: 8}),  # the next token's row is that of these
        ("states", False, dict.fromkeys((5, 7, 8), WHOLE)),
        ("states", True, dict.fromkeys((5, 7, 8), WHOLE)),
    ],
)
def test_the_end_of_a_prefix_is_not_written_over(name: str, shares_rows: bool, ends) -> None:
    for position, end in ends.items():
        policy = PrefixPolicy(GROWTHS[name], 4, shares_rows)
        tree = PrefixTree([policy], np.zeros(9, np.int64), max_tokens=99, host_ids=9)
        tree.cache("a", np.arange(position), [(0, np.array([1]))], np.array([2], np.int32))
        assert tree.read_only_until[:3].tolist() == [0, 4, end]


def test_a_tree_forgets_prompts_without_cached_blocks() -> None:
    tree = PrefixTree(
        [PrefixPolicy(GROWTHS["full"], 4)], np.zeros(9, np.int64), max_tokens=16, host_ids=9
    )
    for number in range(9):
        tree.cache("a", np.arange(8) + 10 * number, [(0, np.array([1, 2]))])
        assert sum(node.tokens.size for node in tree.prompts.nodes if node) <= 16
        tree.forget(np.array([1, 2]))


def test_a_block_is_what_its_copy_is_until_others_write_to_it() -> None:
    """Before its kept tokens end, after checkpoints inside it are made and dropped, in any order.

    A request may write from there on, whatever was kept before.
    """
    policy, seen = PrefixPolicy(full(block_size=8).growth, 8), set[bool]()
    here, on_host, no_ids = np.array([1]), np.array([6]), np.zeros(0, np.int64)
    for seed in range(60):
        draw, copy = np.random.default_rng(seed), None
        tree = PrefixTree([policy], np.zeros(9, np.int64), max_tokens=99, host_ids=5)
        content = np.zeros(8, np.int64)
        for turn in range(20):
            kept = int(tree.read_only_until[1])
            what, end = draw.choice(["keep", "move", "drop"]), int(draw.integers(1, 9))
            if what == "keep":
                if end > kept:
                    content[kept:] = turn + 1
                ids = here if end == 8 else no_ids
                tree.cache("a", np.arange(end), [(0, ids)], here if end < 8 else None)
            elif what == "move" and kept:
                is_same = copy is not None and kept <= tree.same_before[1]
                assert is_same == (copy is not None and (content[:kept] == copy[:kept]).all())
                copy = copy if is_same else content.copy()
                tree.move(here, on_host)
                tree.move(on_host, here)
                content = copy.copy()
                seen.add(is_same)
            elif what == "drop" and tree._of_block.get(1):
                tree.drop_checkpoint(tree._of_block[1][draw.integers(len(tree._of_block[1]))])
                if not tree.read_only_until[1]:
                    break  # the block is free
    assert len(seen) == 2
