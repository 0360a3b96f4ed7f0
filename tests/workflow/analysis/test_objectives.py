"""What each call is to be fast at, from what values are wanted for (Parrot, section 5.2, figure 9)."""

from __future__ import annotations

import pytest

from weft.workflow.analysis.objectives import CallObjective, WantedCall, call_objectives
from weft.workflow.criteria import LATENCY, THROUGHPUT, TTFT, Criterion, deadline


def chain(*needs: tuple[int, ...], many: tuple[int, ...] = ()) -> list[WantedCall]:
    return [WantedCall(each, number in many) for number, each in enumerate(needs)]


def names(calls: list[WantedCall], wanted: dict[int, Criterion]) -> list[str]:
    found = call_objectives(calls, wanted)
    return [_shown(found.get(number)) for number in range(len(calls))]


def _shown(objective: CallObjective | None) -> str:
    if objective is None:
        return "-"
    group = "" if objective.group is None else f" {objective.group}"
    return objective.name + group + ("" if objective.seconds is None else f" {objective.seconds:g}")


CHAIN = chain((), (0,), (1,))
MAPS = chain((), (), (), (0, 1, 2), (3,))
FIGURE_9 = chain((), (), (), (), (0, 1), (2, 3), (4, 5), (6,), (6,))
"""Two pairs, each for a call, those for one call, and two outputs of it."""


@pytest.mark.parametrize(
    ("calls", "wanted", "expected"),
    [
        (CHAIN, {2: LATENCY}, ["latency", "latency", "latency"]),
        (CHAIN, {2: TTFT}, ["latency", "latency", "ttft"]),
        (CHAIN, {2: THROUGHPUT}, ["throughput", "throughput", "throughput"]),
        (CHAIN, {1: LATENCY}, ["latency", "latency", "-"]),
        (CHAIN, {0: LATENCY, 2: THROUGHPUT}, ["latency", "throughput", "throughput"]),
        (CHAIN, {1: TTFT, 2: LATENCY}, ["latency", "latency", "latency"]),
        (CHAIN, {2: deadline(6)}, ["deadline 2", "deadline 4", "deadline 6"]),
        (CHAIN, {1: deadline(1), 2: deadline(6)}, ["deadline 0.5", "deadline 1", "deadline 6"]),
        (CHAIN, {2: deadline(6), 0: LATENCY}, ["latency", "deadline 4", "deadline 6"]),
        (CHAIN, {2: deadline(6), 0: THROUGHPUT}, ["deadline 2", "deadline 4", "deadline 6"]),
        (MAPS, {4: LATENCY}, ["throughput 0", "throughput 0", "throughput 0", "latency", "latency"]),
        (MAPS, {4: LATENCY, 1: LATENCY}, ["throughput 0", "latency", "throughput 0", "latency", "latency"]),
        (MAPS, {4: THROUGHPUT}, ["throughput"] * 5),
        (chain((), (0,), many=(0,)), {1: LATENCY}, ["throughput 0", "latency"]),
        (chain((), (0,), many=(1,)), {1: LATENCY}, ["latency", "throughput 0"]),
        (FIGURE_9, {7: LATENCY, 8: LATENCY}, [*["throughput 0"] * 2, *["throughput 1"] * 2, *["throughput 2"] * 2,
                                              "latency", "latency", "latency"]),
        (chain((), ()), {0: LATENCY, 1: LATENCY}, ["latency", "latency"]),
        (chain((), (), (0, 1), (1,)), {3: LATENCY}, ["-", "latency", "-", "latency"]),
        ([], {}, []),
    ],
)  # fmt: skip
def test_objectives(calls: list[WantedCall], wanted: dict[int, Criterion], expected: list[str]) -> None:
    assert names(calls, wanted) == expected


def test_a_call_of_two_stages_is_at_the_farther_one() -> None:
    """1 is needed by 2 and by 3, which needs 2: it comes before both, and alone."""
    assert names(chain((), (), (0, 1), (1, 2)), {3: LATENCY}) == ["throughput 0", "throughput 0", "latency", "latency"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_deadline_is_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="deadline"):
        deadline(seconds)
