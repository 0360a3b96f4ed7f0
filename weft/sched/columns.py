"""Columns of int32 that grow number by number or run by run, and become arrays of a step without a copy.

A step has a handful of columns and hundreds of rows, most of them of one token. Collecting an array for every row and
joining them costs microseconds per row; a buffer per column costs tens of nanoseconds per number.
"""

from __future__ import annotations

from array import array

import numpy as np

from weft.core.step import I32

SHORT = 16
"""Numbers that are handled one by one: for fewer, arrays cost more than they save."""


def as_array(column: array[int]) -> I32:
    """The column [n] as an array over the same memory: the column cannot grow any more."""
    found: I32 = np.asarray(column, np.int32)
    return found


def extremes(column: array[int]) -> tuple[int, int]:
    """The smallest and the largest number of a column that is not empty."""
    if len(column) <= SHORT:
        return min(column), max(column)
    found = as_array(column)
    return int(found.min()), int(found.max())
