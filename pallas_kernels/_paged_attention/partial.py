"""The softmax of some of the keys. Does not import Mosaic."""

from typing import NamedTuple


class PartialSoftmax[T](NamedTuple):
    """The softmax of some of the keys; or references to several, or the layouts of its parts.

    out: float32, weighted sums of values.
    highest: float32, highest scores in base 2, of the last axes of ``out``.
    total: as ``highest``, sums of weights.
    """

    out: T
    highest: T
    total: T
