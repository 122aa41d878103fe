"""The choice of blocks of tokens for each KV head, by the keys of an index."""

from jax import Array
from jaxtyping import Float, Int32

from jaxkv._src.attention._scores import choose_blocks
from jaxkv._src.attention._top_tokens import check_index_queries, index_spec, store_keys
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_count, check_positive
from jaxkv._src.internal.persistent_jit import persistent_jit
from jaxkv._src.pool import SAME, BoundLayer, bind, check_latents, on_devices, put_back
from pallas_kernels import Implementation


def top_blocks(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    queries: Float[Array, "*tokens heads key_size"],
    keys: Float[Array, "*tokens key_size"] | None = None,
    *,
    count: int,
    sparse_block_size: int,
    init_blocks: int = 0,
    local_blocks: int = 0,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Int32[Array, "*tokens heads count"]]:
    """Writes a step's index keys into a layer, then chooses blocks of tokens for each KV head.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        size = 128
        cache, blocks = jaxkv.attention.top_blocks(
            cache, "indexer", batch, index_queries, index_keys,
            count=16, sparse_block_size=size, local_blocks=1,
        )
        cache, out = jaxkv.attend(
            cache, "layer", batch, queries, keys, values, selected=blocks, sparse_block_size=size
        )

    Block i holds the positions ``i * sparse_block_size`` and on. The score of a block for a query
    is that of MiniMax-M3's indexer: the highest ``query @ key`` of its tokens, in float32, where
    the tokens of the query's own request up to itself compete. Each head of the index chooses for
    itself, and for the KV head of the same number. Bytes that the request did not write are never
    chosen, whatever they hold.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer of one key per token, as for `top_tokens`.
      queries: [T, heads, K], or [B, T / B, heads, K] for a rectangular batch, as many heads as
        there are KV heads.
      keys: [T, K], or [B, T / B, K]. None: nothing is written.
      count: blocks to choose (``sparse_topk_blocks`` in a ``config.json``), with those that are
        always chosen.
      sparse_block_size: tokens per block; blocks of the cache may have any other size.
      init_blocks: first blocks of a request that are always chosen.
      local_blocks: last blocks that are always chosen: the query's own, and those before it.
      layer_index, implementation: as for `attend`; XLA scores and chooses.

    Returns:
      The cache with the keys written, and int32[T, heads, count] or [B, T / B, heads, count]:
      numbers of blocks, those always chosen first, then of the highest score first and of equal
      ones the first; -1 after the last, and for padding.

    Raises:
      TypeError: a layer of another kind, or arrays that are not floats.
      ValueError: shapes that do not fit the layer and the batch; a layer of groups of tokens.
    """
    check_positive(count=count, sparse_block_size=sparse_block_size)
    check_count(init_blocks=init_blocks, local_blocks=local_blocks)
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec = index_spec(layer, bound)
    if spec.compress_ratio > 1:
        raise ValueError(
            f"layer={layer!r} has a key for each {spec.compress_ratio} tokens; top_blocks wants "
            "one per token, top_tokens chooses groups"
        )
    check_index_queries(layer, bound, queries)
    if keys is not None:
        check_latents(layer, bound, keys)
    buffer, chosen = _choose(
        bound,
        queries,
        keys,
        sizes=(int(count), int(sparse_block_size), int(init_blocks), int(local_blocks)),
    )
    return put_back(cache, layer, bound, buffer), chosen


@persistent_jit
def _choose(
    bound: BoundLayer, queries: Array, keys: Array | None, *, sizes: tuple[int, int, int, int]
) -> tuple[Array | None, Array]:
    def run(bound: BoundLayer, queries: Array, keys: Array | None) -> tuple[Array | None, Array]:
        buffer, bound = store_keys(bound, keys)
        return buffer, choose_blocks(bound, queries, *sizes)

    return on_devices(
        run,
        *(bound, queries, keys),
        in_specs=(SAME, SAME),
        out_specs=(bound.layout.buffer_spec, SAME),
    )
