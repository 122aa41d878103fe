"""Block keys: a chain of hashes over tokens, equal to vLLM's block hashes. NumPy only.

jaxkv itself finds blocks by comparing tokens; keys are for routers, connectors and other
servers. A key is byte for byte the block hash of vLLM 0.33 with
``--prefix-caching-hash-algo sha256_cbor``: the SHA-256 of the canonical CBOR of ``[key of the
block before, token ids, extra keys or null]``. vLLM's default, ``sha256``, hashes pickled Python
objects instead. With a drafter of the EAGLE family vLLM also hashes the tokens after a block,
unless its speculative config has ``disable_lookahead_block_hashes``.
"""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from jaxkv._src.internal.checks import check_at_most, check_count, check_kind, check_positive
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.internal.text import shown
from jaxkv._src.prefixes._cbor import array_head, encode, encode_tokens
from jaxkv._src.prefixes._extra_keys import ExtraKey, extra_keys_by_block
from jaxkv._src.prefixes._tokens import as_tokens

KEY_BYTES = 32
DEFAULT_SEED = "vllm-none-hash"  # vLLM's, where PYTHONHASHSEED is not set


def root_key(seed: str = DEFAULT_SEED) -> bytes:
    """Returns the parent key of the first block of every chain.

    vLLM's seed is the environment variable PYTHONHASHSEED, or "vllm-none-hash" if that is not
    set. If vLLM runs with PYTHONHASHSEED, pass its value here.

    Args:
      seed: the seed of the processes that compare keys.
    """
    check_kind(str, seed=seed)
    return hashlib.sha256(encode(seed)).digest()


DEFAULT_ROOT = root_key()


def block_keys(
    tokens: Sequence[int] | np.ndarray,
    block_size: int,
    *,
    salt: str | None = None,
    extra_keys: Collection[ExtraKey] = (),
    root: bytes = DEFAULT_ROOT,
    start: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """Returns the keys of all full blocks of a sequence, each of 32 bytes.

    A key covers all tokens up to the end of its block. The keys of a group whose blocks are
    ``n`` times as long are every n-th of these, ``keys[n - 1 :: n]``, as in vLLM.

    To continue where an earlier call ended, pass the tokens that follow, the position of the first
    of them and the last key::

        keys = block_keys(tokens[:4096], 16)
        keys += block_keys(tokens[4096:], 16, start=4096, parent=keys[-1])

    Args:
      tokens: token ids of the sequence from ``start`` on; tokens after the last full block are
        ignored.
      block_size: tokens per block.
      salt: separates sequences that must not share; part of the first block's key.
      extra_keys: extra keys of the sequence, with positions from its beginning.
      root: `root_key` of the seed that all sides use.
      start: position of the first token, a multiple of ``block_size``.
      parent: key of the block that ends at ``start``; None where ``start`` is 0.

    Raises:
      TypeError: tokens that are not ints, or an extra key that is not an `ExtraKey`.
      ValueError: a token id below 0 or past int32, a start inside a block, a start without a
        parent, or a root or parent that is not a key.
    """
    check_positive(block_size=block_size)
    check_at_most(INT32_MAX, block_size=block_size)
    _check_place(start, block_size, root, parent)
    ids = as_tokens("tokens", tokens).astype(np.uint32)
    num_blocks = ids.size // block_size
    blocks = encode_tokens(ids[: num_blocks * block_size], block_size)
    extras = extra_keys_by_block(extra_keys, block_size, num_blocks, salt=salt, start=start)
    encoded = {extra: encode(extra) for extra in set(extras)}
    key = root if parent is None else parent
    first, sha256 = array_head(3) + encode(key)[:-KEY_BYTES], hashlib.sha256
    keys: list[bytes] = []
    for block, extra in zip(blocks, extras, strict=True):
        key = sha256(first + key + block + encoded[extra]).digest()
        keys.append(key)
    return keys


def check_key(**keys: bytes) -> None:
    """Raises ValueError for the first value that is not a key."""
    for name, key in keys.items():
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"{name} must be a key of {KEY_BYTES} bytes, got {shown(key)}")


def _check_place(start: int, block_size: int, root: bytes, parent: bytes | None) -> None:
    """Raises ValueError unless a chain can continue at ``start`` with ``parent``."""
    check_count(start=start)
    check_key(root=root, parent=root if parent is None else parent)
    if start % block_size:
        raise ValueError(f"start={start} must be a multiple of block_size={block_size}")
    if (parent is None) != (start == 0):
        raise ValueError(
            f"start={start} and parent={parent!r} do not fit together; begin at start=0 without a "
            "parent, or pass the key of the block that ends at start"
        )
