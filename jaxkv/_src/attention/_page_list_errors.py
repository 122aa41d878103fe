"""Error flags of page lists, set on the device and read by the host."""

from jaxkv._src.cache import BAD_BATCH, BAD_LAYER_INDEX
from jaxkv._src.internal.checks import FlagsError

TOO_MANY_PAGES = 1

MISSING_PAGE = 2

BAD_PAGE_ID = 4

_REASONS = {
    TOO_MANY_PAGES: (
        "more pages than the lists hold, so some are left out; set pages_are_shared=True, because "
        "requests share pages"
    ),
    MISSING_PAGE: (
        "a visible token whose page the request does not hold, or past the shape's max_seq_len; "
        "the manager did not grow the request, or an upload was lost"
    ),
    BAD_PAGE_ID: "a page id outside the pool",
    BAD_BATCH: (
        "query_start_loc that decreases or passes the shape's max_tokens, or num_computed_tokens "
        "below 0 or too large; nothing is listed"
    ),
    BAD_LAYER_INDEX: "a period beyond the layers of its group; every page is null",
}


class PageListError(FlagsError):
    """Page lists lack pages that tokens see, raised by `check_errors`.

    flags: bits such as `jaxkv.attention.MISSING_PAGE`; the message explains each that is set.
    """

    what, reasons = "attention over these page lists would be wrong", _REASONS
