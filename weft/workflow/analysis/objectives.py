"""What each call is to be fast at, deduced backwards from what values are wanted for (Parrot, section 5.2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.core.objectives import OBJECTIVES, Objective, check_objective
from weft.workflow.analysis.operators import Unrolled
from weft.workflow.criteria import Criterion, is_stricter

OutputObjectives = Objective | Mapping[str, Objective]
"""What outputs are wanted for: all, or by name, the others for throughput."""


class WantedOutputs(NamedTuple):
    """What the outputs of a run are wanted for."""

    objective: OutputObjectives = "throughput"
    deadline_s: float | None = None
    """Of outputs with a deadline, in seconds from the beginning of the run."""

    def by_output(self, outputs: Collection[str]) -> Mapping[str, Criterion]:
        """The criterion of each output. Raises `ValueError` for an output or an objective that does not exist, and
        `InvalidRequest` for a deadline without its seconds, or the other way round."""
        given = self.objective if isinstance(self.objective, Mapping) else dict.fromkeys(outputs, self.objective)
        for name, objective in given.items():
            if name not in outputs:
                raise ValueError(f"there is no output {name!r}; there are {', '.join(outputs)}")
            if objective not in OBJECTIVES:
                raise ValueError(f"{objective!r} is not an objective; there are {', '.join(OBJECTIVES)}")
        check_objective("deadline" if "deadline" in given.values() else "throughput", self.deadline_s)
        objectives = {name: given.get(name, "throughput") for name in outputs}
        return {
            name: Criterion(objective, self.deadline_s if objective == "deadline" else None)
            for name, objective in objectives.items()
        }


class WantedCall(NamedTuple):
    """A call, or calls that are wanted together, among others."""

    needs: tuple[int, ...]
    """Numbers of earlier calls whose answers it depends on."""
    is_many: bool = False
    """Whether it stands for the calls of a map."""


class CallObjective(NamedTuple):
    """How a call is to be scheduled."""

    name: Objective
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
    a part of it, in proportion to its stage: of three calls in a chain the first has a third. What only batch needs is
    for batch, all else for throughput. Of a call that several wanted ones need, latency counts first, then the earliest
    deadline.
    """
    hurried = {number for number, criterion in wanted.items() if criterion.name in ("latency", "ttft")}
    stages = _stages(calls, hurried)
    groups = _task_groups(calls, stages, hurried)
    found = {number: CallObjective("batch") for number in _stages(calls, wanted)}
    sooner = (number for number, criterion in wanted.items() if criterion.name != "batch")
    found.update((number, CallObjective("throughput")) for number in _stages(calls, sooner))
    for number, seconds in _deadlines(calls, wanted).items():
        found[number] = CallObjective("deadline", None, seconds)
    for number, stage in stages.items():
        if number in groups:
            found[number] = CallObjective("throughput", groups[number])
        else:
            is_first_token = stage == 0 and wanted[number].name == "ttft"
            found[number] = CallObjective("ttft" if is_first_token else "latency")
    return found


def node_objectives(unrolled: Unrolled, wanted: WantedOutputs) -> dict[str, CallObjective]:
    """By label of a node; seconds of a deadline are from the beginning of the run. Of a node in a loop, the round
    nearest to the outputs says it. A node that no output needs is for throughput, or for batch if all outputs are.
    Raises as `WantedOutputs.by_output`."""
    outputs = dict(unrolled.goals)
    by_output = wanted.by_output(outputs)
    criteria: dict[int, Criterion] = {}
    for name, criterion in by_output.items():
        for number in outputs[name]:
            if number not in criteria or is_stricter(criterion, criteria[number]):
                criteria[number] = criterion
    calls = [WantedCall(operator.needs, operator.items > 1) for operator in unrolled.operators]
    objectives = call_objectives(calls, criteria)
    is_batch = bool(by_output) and all(criterion.name == "batch" for criterion in by_output.values())
    unneeded = CallObjective("batch" if is_batch else "throughput")
    hurried = _stages(calls, (number for number in criteria if criteria[number].name in ("latency", "ttft")))
    stages, last = _stages(calls, criteria), len(calls)
    found: dict[str, tuple[tuple[int, int], CallObjective]] = {}
    for number, operator in enumerate(unrolled.operators):
        rank = hurried.get(number, last), stages.get(number, last)
        if operator.node not in found or rank < found[operator.node][0]:
            found[operator.node] = rank, objectives.get(number, unneeded)
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
