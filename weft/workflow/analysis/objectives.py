"""What each call is to be fast at, deduced backwards from what values are wanted for (Parrot, section 5.2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from weft.workflow.analysis.operators import Unrolled
from weft.workflow.criteria import Criterion, CriterionName

OutputObjective = Literal["latency", "throughput"]


class WantedCall(NamedTuple):
    """A call, or calls that are wanted together, among others."""

    needs: tuple[int, ...]
    """Numbers of earlier calls whose answers it depends on."""
    is_many: bool = False
    """Whether it stands for the calls of a map."""


class CallObjective(NamedTuple):
    """How a call is to be scheduled."""

    name: CriterionName
    group: int | None = None
    """Calls of one task group are wanted together: that the last of them is done soon is what counts, so they are
    scheduled for throughput. None: of no group."""
    seconds: float | None = None
    """Of a deadline."""


def call_objectives(calls: Sequence[WantedCall], wanted: Mapping[int, Criterion]) -> dict[int, CallObjective]:
    """By number of a call that a wanted one needs, or that is wanted itself; other calls are left out. Each call stands
    after those that it needs.

    A call that is wanted for its latency, or for its first token, has this objective. Before it, stage by stage: a call
    that is alone in its stage is latency-critical too, because the first token waits for its end as the last one does;
    calls that are needed by the same call, and the calls of a map, are a task group. What is needed for a deadline has
    a part of it, in proportion to its stage: of three calls in a chain the first has a third. All else that is needed
    is for throughput. Of a call that several wanted ones need, latency counts first, then the earliest deadline.
    """
    hurried = {number for number, criterion in wanted.items() if criterion.name in ("latency", "ttft")}
    stages = _stages(calls, hurried)
    groups = _task_groups(calls, stages, hurried)
    found = {number: CallObjective("throughput") for number in _stages(calls, wanted)}
    for number, seconds in _deadlines(calls, wanted).items():
        found[number] = CallObjective("deadline", None, seconds)
    for number, stage in stages.items():
        if number in groups:
            found[number] = CallObjective("throughput", groups[number])
        else:
            is_first_token = stage == 0 and wanted[number].name == "ttft"
            found[number] = CallObjective("ttft" if is_first_token else "latency")
    return found


def by_output(
    wanted: Mapping[str, OutputObjective] | OutputObjective, outputs: Collection[str]
) -> Mapping[str, OutputObjective]:
    """The objectives of outputs by name. Raises `ValueError` for an output that does not exist, and for another
    objective."""
    given = wanted if isinstance(wanted, Mapping) else dict.fromkeys(outputs, wanted)
    for name, objective in given.items():
        if name not in outputs:
            raise ValueError(f"there is no output {name!r}; there are {', '.join(outputs)}")
        if objective not in get_args(OutputObjective):
            raise ValueError(f"{objective!r} is not an objective; there are {', '.join(get_args(OutputObjective))}")
    return given


def node_objectives(
    unrolled: Unrolled, wanted: Mapping[str, OutputObjective] | OutputObjective
) -> dict[str, CallObjective]:
    """By label of a node. `wanted` says it for the outputs: for all, or by name, the others for throughput. Of a node
    in a loop, the round nearest to the outputs says it. Raises as `by_output`."""
    outputs = dict(unrolled.goals)
    given = by_output(wanted, outputs)
    critical = {number for name in given if given[name] == "latency" for number in outputs[name]}
    calls = [WantedCall(operator.needs, operator.items > 1) for operator in unrolled.operators]
    stages = _stages(calls, critical)
    objectives = call_objectives(calls, dict.fromkeys(critical, Criterion("latency")))
    found: dict[str, tuple[int, CallObjective]] = {}
    for number, operator in enumerate(unrolled.operators):
        rank = stages.get(number, len(calls))
        if operator.node not in found or rank < found[operator.node][0]:
            found[operator.node] = rank, objectives.get(number, CallObjective("throughput"))
    return {node: objective for node, (_, objective) in found.items()}


def _stages(calls: Sequence[WantedCall], ends: Iterable[int]) -> dict[int, int]:
    """By call that one of the ends needs: the calls on the longest way from it to an end, 0 for those that are ends and
    are needed by no other."""
    stages = dict.fromkeys(ends, 0)
    for number in range(max(stages, default=-1), -1, -1):
        if number in stages:
            for need in calls[number].needs:
                stages[need] = max(stages.get(need, 0), stages[number] + 1)
    return stages


def _deadlines(calls: Sequence[WantedCall], wanted: Mapping[int, Criterion]) -> dict[int, float]:
    due: dict[int, float] = {}
    for end, criterion in wanted.items():
        if criterion.seconds is None:
            continue
        stages = _stages(calls, [end])
        count = max(stages.values()) + 1
        for number, stage in stages.items():
            due[number] = min(due.get(number, criterion.seconds), criterion.seconds * (count - stage) / count)
    return due


def _task_groups(calls: Sequence[WantedCall], stages: Mapping[int, int], wanted: set[int]) -> dict[int, int]:
    """By call in a task group, the number of the group. Groups are counted from the first call on. A single call that
    is wanted itself is in none."""
    leader = {number: number for number in stages if number not in wanted or calls[number].is_many}

    def first_of(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for number in sorted(stages):
        stage = stages[number] + 1
        together = [need for need in calls[number].needs if stages.get(need) == stage and need in leader]
        for one in together[1:]:
            low, high = sorted((first_of(together[0]), first_of(one)))
            leader[high] = low
    members: dict[int, list[int]] = {}
    for number in sorted(leader):
        members.setdefault(first_of(number), []).append(number)
    whole = [each for each in members.values() if len(each) > 1 or calls[each[0]].is_many]
    return {number: group for group, each in enumerate(whole) for number in each}
