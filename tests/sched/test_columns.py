"""Columns: what goes in comes out, number by number or as arrays."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from weft.sched.columns import SHORT, as_array, extremes


def test_a_column_as_an_array() -> None:
    found = as_array(array("i", [1, -7]))
    assert found.dtype == np.int32
    assert found.tolist() == [1, -7]
    assert as_array(array("i")).shape == (0,)


@pytest.mark.parametrize("length", [1, SHORT, SHORT + 1, 1000])
def test_extremes(length: int) -> None:
    values = np.random.default_rng(length).integers(-(2**31), 2**31, length).astype(np.int32)
    assert extremes(array("i", values.tobytes())) == (int(values.min()), int(values.max()))
