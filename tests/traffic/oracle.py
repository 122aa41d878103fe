"""The models of the traffic by their definition: whole numbers over whole sequences. NumPy alone.

A hidden state is `WIDTH` integers modulo `MODULUS`. Each kind of layer is a rule over all tokens
that come before, so that one wrong, missing or stale token in a cache changes what comes next.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

VOCAB, WIDTH, MODULUS = 29, 4, 17  # 17: squares of residues are exact in bfloat16
SMALL = 4  # modulus of what recurrent layers take, so that sums of products stay small
OFFSET = 24  # SiLU changes nothing from there on, in float32
FAR = 10**6  # outweighs every position
ROWS = {"full": 4, "sliding": 4, "chunked": 4, "mla": 4, "sliding_mla": 4, "shared": 4}
ROWS |= {"linear": 5, "delta": 5, "mamba": 5, "conv": 2, "pooled": 2}  # matrices of a layer
Numbers = np.ndarray


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as its definition has it.

    kind: a key of `ROWS`.
    heads, width: KV heads of attention, and elements of a key.
    span: tokens of its window, of its chunk, or of a group that it pools.
    taps: width of its convolution.
    owner: of the keys and values, or the pooled rows, of a "shared" layer.
    largest: number that is stored where tokens have a scale for each head, which then differ: of
      three values in turn one is as it is, one twice and one four times as large. 0: without.
    """

    kind: str
    heads: int = 1
    width: int = 0
    span: int = 0
    taps: int = 2
    owner: str = ""
    largest: int = 0


@functools.lru_cache(256)
def make_weights(layers: tuple[tuple[str, Layer], ...], seed: int) -> dict[str, Any]:
    """Returns the weights of a model, int32."""
    rng = np.random.default_rng(seed)

    def numbers(below: int, *shape: int) -> Numbers:
        return rng.integers(0, below, shape).astype(np.int32)

    weights: dict[str, Any] = {"embed": numbers(MODULUS, VOCAB, WIDTH)}
    weights |= {"turn": 1 + numbers(MODULUS - 1, WIDTH), "head": numbers(VOCAB, 2, WIDTH)}
    for name, layer in layers:
        matrices = numbers(MODULUS, ROWS[layer.kind], WIDTH, WIDTH)
        weights[name] = {"matrices": matrices, "taps": numbers(2, layer.taps, WIDTH)}
    return weights


def candidates(
    layers: tuple[tuple[str, Layer], ...], weights: dict[str, Any], ids: list[int]
) -> tuple[Numbers, Numbers, Numbers]:
    """Returns the likeliest token after each of a sequence, the second one, and hidden states."""
    places = np.arange(len(ids))
    x = (weights["embed"][ids] + (places[:, None] + 1) * weights["turn"]) % MODULUS
    stored: dict[str, tuple[Numbers, Numbers]] = {}
    for name, layer in layers:
        of = weights[name]
        if layer.kind in ("linear", "delta", "mamba", "conv"):
            y = _recurrent(layer, x, of["matrices"], of["taps"])
        elif dict(layers)[layer.owner or name].kind == "pooled":
            if layer.kind == "pooled":
                stored[name] = _pooled(layer, x @ of["matrices"][0] % MODULUS)
            open_groups, whole_groups = stored[layer.owner or name]
            y = whole_groups + open_groups * (layer.kind == "pooled")
        else:
            if layer.kind != "shared":
                stored[name] = _stored(layer, x, of["matrices"])
            kept = stored[layer.owner or name]
            y = _attention(_seen(dict(layers)[layer.owner or name], places), x, of, *kept)
        x = (x + y % MODULUS @ of["matrices"][-1]) % MODULUS
    first = x @ weights["head"][0] % VOCAB
    return first, (first + 1 + x @ weights["head"][1] % (VOCAB - 1)) % VOCAB, x


def _seen(layer: Layer, places: Numbers) -> Numbers:
    """Returns which tokens (columns) each token sees: bool[T, T]."""
    query, key = places[:, None], places[None]
    seen = key <= query
    if layer.kind.startswith("sliding"):
        seen &= key > query - layer.span
    if layer.kind == "chunked":
        seen &= key // layer.span == query // layer.span
    return seen


def _stored(layer: Layer, x: Numbers, matrices: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the value of each token and head, [T, heads, WIDTH], and its class, [T, heads]."""
    heads = np.arange(1, layer.heads + 1)
    values = (x @ matrices[0])[:, None] * heads[:, None] % MODULUS
    if layer.largest:
        values = values * factors(np.arange(len(x)))[:, None, None]
    return values, (x @ matrices[1])[:, : layer.heads] % MODULUS


def factors(places: Any) -> Any:
    """Returns what values are multiplied by where tokens have scales."""
    return 1 << places % 3


def _pooled(layer: Layer, values: Numbers) -> tuple[Numbers, Numbers]:
    """Returns sums for each token, [T, WIDTH] each: of its own group, and of the whole ones.

    A token counts once more for each that follows it up to the one that asks, in its group; a whole
    group once more than the one before it.
    """
    places = np.arange(len(values))
    back = places[:, None] - places[None]
    in_group = (back >= 0) & (back <= places[:, None] % layer.span)
    own = (in_group * (back + 1)) @ values
    whole = (places[:, None] + 1) // layer.span > places[None] // layer.span
    return own, (whole * (places[None] // layer.span + 1)) @ values


def _attention(
    seen: Numbers, x: Numbers, of: dict[str, Numbers], values: Numbers, classes: Numbers
) -> Numbers:
    """Returns a sum of two numbers for each head, [T, WIDTH].

    One is the sum of all values that the token sees; the other the newest value of those whose
    class is nearest to the one that it asks for.
    """
    asked = x @ of["matrices"][2] % MODULUS
    total = np.zeros_like(x)
    for head in range(values.shape[1]):
        distance = (asked[:, head, None] - classes[None, :, head]) ** 2 * FAR - np.arange(len(x))
        nearest = np.where(seen, distance, np.iinfo(np.int64).max).argmin(axis=1)
        total += (2 * head + 1) * (seen @ values[:, head]) + (2 * head + 3) * values[nearest, head]
    return total


def _recurrent(layer: Layer, x: Numbers, matrices: Numbers, taps: Numbers) -> Numbers:
    """Returns the outputs of a recurrent layer, token by token, [T, WIDTH]: two heads of two."""
    given = [x @ matrix % MODULUS for matrix in matrices[:-1]]
    small = [one % SMALL for one in given]
    if layer.kind == "conv":
        return _convolved(small[0], taps)
    state, outputs = np.zeros((2, 2, 4 if layer.kind == "delta" else 2), np.int64), []
    convolved = [_convolved(one, taps) + OFFSET for one in small]
    # Queries and keys of the delta rule are unit vectors; those of the queries come one token late.
    units = np.eye(4, dtype=np.int64)
    late = np.concatenate([np.zeros((1, 4), np.int64), units[small[0][:-1, 0]]])
    for t in range(len(x)):
        decay = (given[3][t, :2] % SMALL != 0)[:, None, None]
        if layer.kind == "linear":
            query, key, value = (one[t].reshape(2, 2) for one in small[:3])
            state = state * decay + value[:, :, None] * key[:, None]
        elif layer.kind == "mamba":
            value = convolved[0][t].reshape(2, 2)
            key, query = (np.tile(one, (2, 1)) for one in convolved[1][t].reshape(2, 2))
            steps = (given[2][t, :2] % 3)[:, None, None]
            state = state * decay + steps * value[:, :, None] * key[:, None]
        else:
            value, key = convolved[2][t].reshape(2, 2), units[small[1][t, 0]]
            query, key = np.tile(late[t], (2, 1)), np.tile(key, (2, 1))
            beta = (given[3][t, 2:] % 3 != 0)[:, None]
            state = state * decay
            delta = beta * (value - np.einsum("hvk,hk->hv", state, key))
            state = state + delta[:, :, None] * key[:, None]
        outputs.append(np.einsum("hvk,hk->hv", state, query).reshape(WIDTH))
    return np.array(outputs)


def _convolved(x: Numbers, taps: Numbers) -> Numbers:
    """Returns a causal convolution, the newest input's weights last."""
    padded = np.concatenate([np.zeros((len(taps) - 1, x.shape[1]), x.dtype), x])
    return sum(tap * padded[at : at + len(x)] for at, tap in enumerate(taps))
