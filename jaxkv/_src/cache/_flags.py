"""Error flags that jitted functions set in a cache."""

import enum


class CacheFlags(enum.IntFlag):
    """Errors of jitted functions, one bit each; `KVCache.error_flags` holds them as an int32.

    A jitted function drops what it cannot do, and sets the flag until `jaxkv.check_errors` raises
    it on the host as a `jaxkv.CacheError`, whose message explains each flag.
    """

    BAD_ROW = enum.auto()
    BAD_BLOCK_ID = enum.auto()
    BAD_LOGICAL_BLOCK = enum.auto()
    NO_BLOCK = enum.auto()
    TOO_LONG = enum.auto()
    BAD_BATCH = enum.auto()
    LOST_UPLOAD = enum.auto()
    REPEATED_UPLOAD = enum.auto()
    BAD_LAYER_INDEX = enum.auto()
    STALE_BATCH = enum.auto()


_RUN_ONCE = (
    "Run every upload once, in order, on the cache that the last one returned, or call "
    "BlockManager.reset and compute all requests again"
)
_REASONS = {
    CacheFlags.BAD_ROW: "a row out of range",
    CacheFlags.BAD_BLOCK_ID: "a block id outside the pool",
    CacheFlags.BAD_LOGICAL_BLOCK: "more blocks for a row than the tables have for its group",
    CacheFlags.NO_BLOCK: (
        "a request lacks a block: the manager did not grow it, or an upload was lost"
    ),
    CacheFlags.TOO_LONG: "a request with more tokens than the step's shape allows",
    CacheFlags.BAD_BATCH: (
        "new tokens that are negative, more than the step's shape allows, or not where the step "
        "looks for them"
    ),
    CacheFlags.LOST_UPLOAD: (
        f"an upload was lost: the numbers of two uploads in a row have a gap. {_RUN_ONCE}"
    ),
    CacheFlags.REPEATED_UPLOAD: f"an upload was applied twice, or to another cache. {_RUN_ONCE}",
    CacheFlags.BAD_LAYER_INDEX: "a layer_index beyond the layers of its group",
    CacheFlags.STALE_BATCH: (
        "a batch of another step than the cache's: go on with the cache that each call returns, "
        "and with the batch that apply_step returned with it"
    ),
}


class CacheError(RuntimeError):
    """Errors that jitted functions recorded in a cache, raised by `check_errors`.

    flags: `jaxkv.cache.CacheFlags`; the message explains each.
    upload: the number of the last upload that the cache took, counted from 1; 0 or None: not known.
    """

    def __init__(self, flags: int, upload: int | None = None):
        self.flags, self.upload = CacheFlags(flags), upload
        reasons = "; ".join(_REASONS[flag] for flag in self.flags)
        until = f", at upload {upload:,} or before" if upload else ""
        super().__init__(f"the device found errors{until}: {reasons}")

    def __reduce__(self):  # errors travel between the processes of a serving stack
        return type(self), (int(self.flags), self.upload)
