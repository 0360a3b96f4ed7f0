"""Two models after the same tokens: how many likeliest tokens differ, and how clear the first model was of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.gguf_witness import Comparison


def logprobs(*rows: tuple[float, float, float]) -> list[np.ndarray]:
    return [np.log(np.array(rows))]


def test_tokens_that_differ_are_counted_with_the_clearest_one() -> None:
    true = logprobs((0.6, 0.3, 0.1), (0.5, 0.4, 0.1), (0.2, 0.2, 0.6))
    other = logprobs((0.3, 0.6, 0.1), (0.4, 0.5, 0.1), (0.2, 0.2, 0.6))
    found = Comparison.of(true, other)
    assert found[:2] == (3, 2)
    assert found.margin == pytest.approx(math.log(2))
    assert found.divergence == pytest.approx((0.3 * math.log(2) + 0.1 * math.log(5 / 4)) / 3)


def test_models_that_agree_have_no_margin() -> None:
    one = logprobs((0.6, 0.3, 0.1))
    assert Comparison.of(one, one) == (1, 0, 0.0, 0.0)
