"""What did not fit or made no sense, as bits that the device sets and the host reads."""

from jax import Array

from jaxkv.checks import FlagsError, check_int32

TOO_MANY_PAGES = 1

MISSING_PAGE = 2

BAD_PAGE_ID = 4

BAD_BATCH = 8

_REASONS = {
    TOO_MANY_PAGES: (
        "more pages than the lists hold, so some are left out; raise max_num_seqs or "
        "max_model_len, or set pages_are_shared=True"
    ),
    MISSING_PAGE: (
        "a visible position whose page is null, past the table's width or past max_model_len; "
        "gather a wider table, or grow the request before its step"
    ),
    BAD_PAGE_ID: "a page id outside the pool; num_blocks counts kernel blocks, as the ids do",
    BAD_BATCH: (
        "token_ends that decrease or pass max_num_batched_tokens, or a first position below 0 or "
        "too large; nothing is listed"
    ),
}


class MetadataError(FlagsError):
    """Metadata is not whole. ``flags``: the bits that say why."""

    what, reasons = "attention over this metadata would be wrong", _REASONS


def check_metadata(problems: Array) -> None:
    """Raises what the device found. Waits for it, so call it off the hot path.

    Args:
      problems: int32[], of a `PageLists` or `PageCSR`, or as a function returned it.

    Raises:
      MetadataError: at least one bit is set.
      TypeError: no array of int32, such as the lists themselves.
    """
    check_int32(problems=problems)
    flags = int(problems)
    if flags:
        raise MetadataError(flags)
