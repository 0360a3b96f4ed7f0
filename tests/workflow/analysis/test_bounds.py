"""The least time of work, against steps of any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.cost.model import ForwardModel
from weft.workflow.analysis.bounds import EngineWork, work_bound_s

MAX_STEP_TOKENS = 100
SECONDS = st.floats(0.0, 0.1)


def forward(base_s: float, knots: tuple[int, ...], slopes: tuple[float, ...]) -> ForwardModel:
    """Without the cost of rows, outputs and KV."""
    return ForwardModel(base_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, knots, slopes)


def bound_s(model: ForwardModel, tokens: int) -> float:
    return work_bound_s(EngineWork(prefill_tokens=tokens), model, MAX_STEP_TOKENS, kv_tokens=1)


@pytest.mark.parametrize(
    ("base_s", "expected_s"),
    [
        pytest.param(0.01, 10 * (0.01 + 92 * 0.001), id="ten full steps"),
        pytest.param(0.004, 125 * 0.004, id="125 steps of eight, whose tokens are free"),
    ],
)
def test_where_few_tokens_are_free_the_others_are_not(base_s: float, expected_s: float) -> None:
    assert bound_s(forward(base_s, (8,), (0.0, 0.001)), 1000) == pytest.approx(expected_s)


def test_where_later_tokens_cost_less_full_steps_are_best() -> None:
    model = forward(0.01, (50,), (0.002, 0.001))
    assert bound_s(model, 200) == pytest.approx(2 * model.tokens_s(100) + 2 * 0.01)
    # Of 150 tokens the last step has 50; three halves of a full one cost no more.
    assert bound_s(model, 150) == pytest.approx(2 * 0.01 + 1.5 * model.tokens_s(100))


@st.composite
def forwards(draw: st.DrawFn) -> ForwardModel:
    knots = sorted(draw(st.sets(st.integers(1, 2 * MAX_STEP_TOKENS), max_size=4)))
    slopes = draw(st.lists(SECONDS, min_size=len(knots) + 1, max_size=len(knots) + 1))
    return forward(draw(SECONDS), tuple(knots), tuple(slopes))


@given(forwards(), st.lists(st.integers(1, MAX_STEP_TOKENS), min_size=1, max_size=20))
def test_no_steps_take_less(model: ForwardModel, sizes: list[int]) -> None:
    took_s = sum(model.base_s + model.tokens_s(size) for size in sizes)
    assert bound_s(model, sum(sizes)) <= took_s + 1e-9
