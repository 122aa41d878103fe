"""Work items of the kernels over blocks, and the launch that runs them for all buffers.

A work item is a part of a page of a listed block. Thread blocks stride over the items of one
buffer after another. The stride continues across buffers, so that all thread blocks are busy even
if each buffer has few items.

The buffers are passed as mutable references: a kernel writes into them, and XLA reuses their
memory, so that nothing is copied under donation.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _capability
from pallas_kernels._arguments import IdLists, PagedBuffer
from pallas_kernels._mosaic import call_kernel, writable, written
from pallas_kernels._tiling import tile_page

THREAD_BLOCKS_PER_SM = 4  # more of them gained nothing on an H200
INT32_MAX = 2**31 - 1


class Item(NamedTuple):
    """A work item of one buffer: a part of a page of a listed block, in int32 scalars."""

    entry: Array  # index into the id lists
    listed_page: Array  # index among the listed pages of all outer indices
    first_page: Array | int  # page of block 0 of the outer index
    part: Array  # index among the parts of the page
    num_blocks: int  # of the buffer


class Task(NamedTuple):
    """All work items of one buffer."""

    buffer: PagedBuffer
    num_entries: int  # of its id lists
    parts: int  # of a page

    @property
    def num_items(self) -> int:
        """Number of items when all entries count."""
        return self.num_entries * self.items_per_entry

    @property
    def items_per_entry(self) -> int:
        """Parts of the pages of one block."""
        return self.buffer.outer * self.parts


# Runs one item of a buffer: (item, the buffer's id lists, its references).
Body = Callable[[Item, Sequence[jax.Ref], Sequence[jax.Ref]], None]
# Launches kernels on references to the pages of the tasks' buffers.
Launches = Callable[[Sequence[Task], Sequence[jax.Ref]], None]


def run_in_place(buffers: Sequence[PagedBuffer], ids: IdLists, launches: Launches) -> list[Array]:
    """Calls ``launches(tasks, refs)`` for the buffers that have work items.

    Returns:
      The pages of all buffers, whether they were written or not.
    """
    tasks = [make_task(buffer, ids.lists[buffer.list_index][0].size) for buffer in buffers]
    busy = [task for task in tasks if task.num_items]
    if not busy:
        return [buffer.pages for buffer in buffers]
    refs = [writable(task.buffer.pages) for task in busy]
    launches(busy, refs)
    done = iter([written(ref) for ref in refs])
    return [next(done) if task.num_items else task.buffer.pages for task in tasks]


def make_task(buffer: PagedBuffer, num_entries: int) -> Task:
    """Returns the work items of one buffer.

    Raises:
      ValueError: more items than int32 counts.
    """
    num_pages, page = buffer.pages.shape
    if not page:
        return Task(buffer, 0, 1)
    tiling = tile_page(page, buffer.pages.dtype.itemsize)
    task = Task(buffer, num_entries, tiling.items if tiling else 1)
    if task.num_items > INT32_MAX - _capability.max_thread_blocks(THREAD_BLOCKS_PER_SM):
        raise ValueError(
            f"{num_entries} block ids over {num_pages} pages are {task.num_items} work items, "
            "more than int32 counts; split the ids over several calls"
        )
    return task


def launch(
    name: str,
    body: Body,
    ids: IdLists,
    tasks: Sequence[Task],
    refs: Sequence[jax.Ref | Array],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
) -> Sequence[Array]:
    """Runs ``body(item, lists, refs)`` for every work item of every buffer, in one launch.

    The device reads the number of ids, so that entries beyond it cost nothing.

    Args:
      refs: references that the kernel works on: the first one of every buffer, then the second.
    """
    flat_ids = [listed for lists in ids.lists for listed in lists]
    per_buffer = len(ids.lists[0])
    counts: list[Array] = [] if ids.num_ids is None else [ids.num_ids.reshape(1)]
    grid = min(
        sum(task.num_items for task in tasks),
        _capability.max_thread_blocks(THREAD_BLOCKS_PER_SM),
    )

    def kernel(*all_refs: jax.Ref) -> None:
        count_refs, rest = all_refs[: len(counts)], all_refs[len(counts) :]
        id_refs, buffer_refs = rest[: len(flat_ids)], rest[len(flat_ids) :]
        num_ids = count_refs[0][0] if counts else None
        first = lax.axis_index("cta")
        for i, task in enumerate(tasks):
            start = task.buffer.list_index * per_buffer
            lists, refs = id_refs[start : start + per_buffer], buffer_refs[i :: len(tasks)]
            remainder = _run_task(body, task, num_ids, lists, refs, first, grid)
            first = lax.rem(first + grid - remainder, grid)  # continue where this buffer ended

    return call_kernel(
        kernel,
        name=name,
        num_thread_blocks=grid,
        operands=[*counts, *flat_ids],
        refs=refs,
        out_type=out_type,
    )


def _run_task(
    body: Body,
    task: Task,
    num_ids: Array | None,
    lists: Sequence[jax.Ref],
    refs: Sequence[jax.Ref],
    first: Array,
    grid: int,
) -> Array | int:
    """Runs the items first, first + grid, ... of a buffer; returns how many it has, modulo grid."""
    num_entries = task.num_entries
    if num_ids is not None:
        num_entries = jnp.minimum(jnp.maximum(num_ids, 0), num_entries)
    num_items = num_entries * task.items_per_entry

    @pl.loop(first, num_items, step=grid)
    def _(index: Array) -> None:
        body(find_item(task, num_entries, index), lists, refs)

    return num_items % grid if isinstance(num_items, int) else lax.rem(num_items, grid)


def find_item(task: Task, num_entries: Array | int, index: Array) -> Item:
    """Returns a work item of a buffer: parts vary fastest, then entries, then outer indices."""
    num_blocks = task.buffer.num_blocks
    listed_page, part = lax.div(index, task.parts), lax.rem(index, task.parts)
    if task.buffer.outer == 1:
        return Item(listed_page, listed_page, 0, part, num_blocks)
    outer_index, entry = lax.div(listed_page, num_entries), lax.rem(listed_page, num_entries)
    return Item(entry, listed_page, outer_index * num_blocks, part, num_blocks)
