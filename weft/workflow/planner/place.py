"""Which engine takes which rows, or, of fewer rows than engines, which operators."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from weft.core.cost.model import ForwardModel
from weft.workflow.analysis.operators import Operator
from weft.workflow.analysis.prefix_tree import PrefixTree


class PlanEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that a plan may use."""

    model: str
    kv_tokens: Annotated[int, Meta(ge=1)]
    """KV capacity."""
    page_size: Annotated[int, Meta(ge=1)] = 16
    """Tokens of a page."""
    max_step_tokens: Annotated[int, Meta(ge=1)] = 2048
    """Query tokens of a step at most."""
    forward: ForwardModel | None = None
    """How long its steps take; None: not measured."""
    replica: Annotated[int, Meta(ge=0)] = 0
    """Its number among the engines that serve the model."""


class EnginePlacement(NamedTuple):
    """Ranges of rows, from first to last row, and the engine of each operator in each of them."""

    ranges: tuple[tuple[int, int], ...]
    engines: tuple[tuple[int, ...], ...]
    """[operators][ranges]"""


class NoEngine(ValueError):
    """A workflow calls a model that no engine serves."""


def place(
    operators: Sequence[Operator], work: Sequence[int], tree: PrefixTree, engines: Sequence[PlanEngine], num_rows: int
) -> EnginePlacement:
    """Rows to the engines of each model, in proportion to their KV capacity; the calls of a row stay on one engine of
    each model, so that they share. With fewer rows than engines, what shares a prefix stays together and the heaviest
    goes first to the engine with the least to do; `work` [operators] says how heavy. Raises `NoEngine`."""
    numbers = engines_by_model(operators, engines)
    cuts = {0, num_rows}
    if all(len(mine) <= num_rows for mine in numbers.values()):
        for mine in numbers.values():
            cuts.update(_shares([engines[number].kv_tokens for number in mine], num_rows))
        ordered = sorted(cuts)
        ranges = tuple(itertools.pairwise(ordered))
        owner = {model: _owners(mine, engines, ranges, num_rows) for model, mine in numbers.items()}
        return EnginePlacement(ranges, tuple(owner[operator.model] for operator in operators))
    loads = [0] * len(engines)
    chosen: dict[int, int] = {}
    for _, cluster in sorted(_clusters(work, tree), key=lambda one: (-one[0], one[1])):
        for operator in cluster:
            mine = numbers[operators[operator].model]
            together = [chosen[other] for other in cluster if other in chosen and chosen[other] in mine]
            engine = together[0] if together else min(mine, key=lambda number: (loads[number], number))
            loads[engine] += work[operator]
            chosen[operator] = engine
    return EnginePlacement(((0, num_rows),), tuple((chosen[number],) for number in range(len(operators))))


def engines_by_model(operators: Sequence[Operator], engines: Sequence[PlanEngine]) -> Mapping[str, list[int]]:
    """The numbers of the engines of each model that is called. Raises `NoEngine`."""
    found: dict[str, list[int]] = {}
    for operator in operators:
        mine = [number for number, engine in enumerate(engines) if engine.model == operator.model]
        if not mine:
            served = ", ".join(sorted({engine.model for engine in engines})) or "none"
            raise NoEngine(f"{operator.node} calls {operator.model!r}, and the engines serve {served}")
        found.setdefault(operator.model, mine)
    return found


def _shares(weights: Sequence[int], num_rows: int) -> list[int]:
    """The first row of each share, and the end: in proportion to the weights, at least one row each."""
    bounds, total = [0], sum(weights)
    for number in range(1, len(weights)):
        bound = round(num_rows * sum(weights[:number]) / total)
        bounds.append(min(max(bound, bounds[-1] + 1), num_rows - (len(weights) - number)))
    return [*bounds, num_rows]


def _owners(
    mine: Sequence[int], engines: Sequence[PlanEngine], ranges: Sequence[tuple[int, int]], num_rows: int
) -> tuple[int, ...]:
    bounds = _shares([engines[number].kv_tokens for number in mine], num_rows)
    owners = []
    for start, _ in ranges:
        place = next(number for number in range(len(mine)) if start < bounds[number + 1])
        owners.append(mine[place])
    return tuple(owners)


def _clusters(work: Sequence[int], tree: PrefixTree) -> list[tuple[int, tuple[int, ...]]]:
    """Operators whose prompts share a value, with their work."""
    by_prefix: dict[tuple[bool, int], list[int]] = {}
    for number, path in enumerate(tree.paths):
        value = next((node for node in path if tree.nodes[node].placeholder is not None), None)
        by_prefix.setdefault((False, number) if value is None else (True, value), []).append(number)
    return [(sum(work[number] for number in each), tuple(each)) for each in by_prefix.values()]
