"""Columns: what goes in comes out, number by number or as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from weft.sched.columns import SHORT, as_array, extremes, ints, put


def test_numbers_and_arrays_in_one_column() -> None:
    column = ints([1])
    put(column, np.arange(12, dtype=np.int32)[::3])  # not contiguous
    column.append(-7)
    put(column, np.empty(0, np.int32))
    found = as_array(column)
    assert found.dtype == np.int32
    assert found.tolist() == [1, 0, 3, 6, 9, -7]
    assert as_array(ints()).shape == (0,)


@pytest.mark.parametrize("length", [1, SHORT, SHORT + 1, 1000])
def test_extremes(length: int) -> None:
    values = np.random.default_rng(length).integers(-(2**31), 2**31, length).astype(np.int32)
    column = ints()
    put(column, values)
    assert extremes(column) == (int(values.min()), int(values.max()))
