"""Prompts cut at checkpoints, for kernels that know states alone."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels._recurrence.rule import Replay, Requests, Spans


def cut_at_checkpoints(
    replay: Replay, requests: Requests, spans: Spans
) -> tuple[tuple[Requests, Spans], tuple[Requests, Spans], tuple[Requests, Spans]]:
    """Cuts the tokens of requests into those before a checkpoint, whole rings of them, and a rest.

    Each part resumes from what the one before has left in the page that takes the last state, which
    is the first one of each part, and gets its last state.
    """
    length, computed = replay.rows, requests.tokens_before()
    starts, counts, after = spans.arrays()
    filled = computed % length
    first = jnp.where(filled > 0, jnp.minimum(counts, length - filled), 0)
    whole = (counts - first) // length * length
    last_page = requests.last_page()

    def part(begin: Array, count: Array) -> tuple[Requests, Spans]:
        read_ids = jnp.where(begin > 0, last_page, requests.read_ids)
        if spans.write_after is None:
            own = Spans(starts + begin, count, None)
            return Requests(read_ids, requests.write_ids, own, computed + begin), own
        until = after - begin[:, None]
        others = (
            (until > 0) & (until <= count[:, None]) & (requests.write_ids != last_page[:, None])
        )
        until = jnp.concatenate([count[:, None], jnp.where(others, until, 0)], axis=1)
        write_ids = jnp.concatenate([last_page[:, None], requests.write_ids], axis=1)
        own = Spans(starts + begin, count, until)
        return Requests(read_ids, write_ids, own, computed + begin), own

    rest = counts - first - whole
    return part(jnp.zeros_like(first), first), part(first, whole), part(first + whole, rest)
