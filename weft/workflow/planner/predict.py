"""What a run of a plan is expected to take, by node and in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.core.cost.model import StepShape
from weft.workflow.analysis.analyse import AnalysedGraph
from weft.workflow.analysis.bounds import (
    EngineWork,
    call_bound_s,
    chain_bound_s,
    min_prefill_tokens,
    operator_work,
    work_bound_s,
)
from weft.workflow.analysis.operators import Unrolled
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.analysis.row_prompts import RowPrompts
from weft.workflow.planner.arrange import Arrangement
from weft.workflow.planner.cache_model import CacheModel, PlacedPin, PromptSources
from weft.workflow.planner.cost import decode_usage
from weft.workflow.planner.pins import PrefixPin
from weft.workflow.planner.place import PlanEngine


class Predicted(NamedTuple):
    """Expected figures of a run. `prompt_tokens` are `cached_tokens`, `continued_tokens` and `prefill_tokens`."""

    calls: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV is found, apart from those that are continued."""
    continued_tokens: int
    """Prompt tokens whose KV is found, of the turn that a prompt continues: its prompt and its answer."""
    prefill_tokens: int
    output_tokens: int
    min_prefill_tokens: int
    """Prompt tokens that are surely computed."""
    token_steps: float
    """Of all: when the last call completes. Of a node: the usage of its calls."""
    seconds: float | None
    """Of all: until the last call completes. Of a node: of the engines, in full batches. None where an engine has no
    profile."""
    lower_bound_s: float | None
    """The larger of all work, with each different token computed once, and the longest chain of calls; of a node its
    work. None as above."""


class _Speed(NamedTuple):
    """Seconds on one engine."""

    prefill_s: float
    """Per prompt token, in full steps."""
    decode_s: float
    """Of a step that decodes as many calls as fit."""
    batch: int
    """How many that are."""


class Prediction:
    """Calls, tokens and seconds that a schedule is expected to take, in all and by node."""

    def __init__(
        self,
        unrolled: Unrolled,
        tree: PrefixTree,
        prompts: RowPrompts,
        engines: Sequence[PlanEngine],
        arrangement: Arrangement,
        pins: Sequence[PrefixPin] = (),
    ):
        self._operators = unrolled.operators
        self._prompts = prompts
        self._engines = engines
        self._arrangement = arrangement
        self._least = min_prefill_tokens(unrolled, tree, prompts)
        calls = [
            (operator, row, part.group.engine) for part in arrangement.parts for operator, row in part.group.calls()
        ]
        self._calls = calls
        self._cache_model = CacheModel(unrolled, tree, prompts, engines)
        self._sources = self._cache_model.replay(calls, _placed(pins, arrangement))
        used: list[dict[int, None]] = [{} for _ in self._operators]
        for part in arrangement.parts:
            for operator in part.group.operators:
                used[operator][part.group.engine] = None
        self._on = [sorted(each) for each in used]
        """[operators] their engines."""
        self._speeds = self._speeds_of()

    def by_node(self) -> dict[str, Predicted]:
        """By label, its rounds together."""
        found: dict[str, list[int]] = {}
        for number, operator in enumerate(self._operators):
            found.setdefault(operator.node, []).append(number)
        return {node: self._of(numbers) for node, numbers in found.items()}

    def whole(self) -> Predicted:
        """Of the run: the sums of the nodes', and the times of the schedule."""
        sums = self._of(range(len(self._operators)))
        nodes = list(self.by_node().values())
        return sums._replace(
            **{name: sum(getattr(node, name) for node in nodes) for name in _SUMMED},
            calls=round(sum(node.calls for node in nodes), 6),
            token_steps=self._arrangement.token_steps,
            seconds=self._seconds(),
            lower_bound_s=self._bound_s(),
        )

    def row_by_row_prefill_tokens(self) -> int:
        """What would be computed if each engine took its rows one after the other, each as a whole."""
        by_row = sorted(self._calls, key=lambda call: (call[1], call[0]))
        return round(sum(sources.prefill_tokens for sources in self._cache_model.replay(by_row)))

    def _of(self, numbers: Sequence[int]) -> Predicted:
        sources = PromptSources()
        for number in numbers:
            sources = sources.plus(self._sources[number])
        prompt, cached, continued = (round(value) for value in sources)
        rows = self._prompts.num_rows
        operators = [self._operators[number] for number in numbers]
        return Predicted(
            calls=round(sum(rows * operator.calls for operator in operators), 6),
            prompt_tokens=prompt,
            cached_tokens=cached,
            continued_tokens=continued,
            prefill_tokens=prompt - cached - continued,
            output_tokens=round(sum(rows * operator.calls * operator.output_tokens for operator in operators)),
            min_prefill_tokens=round(sum(self._least[number] for number in numbers)),
            token_steps=round(sum(map(self._usage, numbers)), 6),
            seconds=None if self._speeds is None else sum(self._busy_s(number) for number in numbers),
            lower_bound_s=self._work_bound_s(numbers),
        )

    def _usage(self, number: int) -> float:
        """Token steps of an operator's calls, by what is not in the cache."""
        operator = self._operators[number]
        if not self._on[number]:
            return 0.0
        decode = self._prompts.num_rows * operator.calls * decode_usage(operator.output_tokens)
        usage = operator.output_tokens * self._sources[number].prefill_tokens + decode
        return usage / self._engines[self._on[number][0]].kv_tokens

    # ---- seconds

    def _speeds_of(self) -> list[_Speed] | None:
        """[engines]; None where one that is used has no profile."""
        used = sorted({engine for engines in self._on for engine in engines})
        speeds = [_Speed(0.0, 0.0, 1)] * len(self._engines)
        for number in used:
            engine = self._engines[number]
            forward = engine.forward
            if forward is None:
                return None
            mine = [one for one, engines in enumerate(self._on) if number in engines]
            calls = sum(self._prompts.num_rows * self._operators[one].calls / len(self._on[one]) for one in mine)
            tokens = sum((self._sources[one].prompt_tokens + self._outputs(one)) / len(self._on[one]) for one in mine)
            context = max(1, round(tokens / max(calls, 1.0)))
            batch = max(1, min(engine.kv_tokens // context, round(calls)))
            speeds[number] = _Speed(
                forward.predict_s(StepShape.chunk(engine.max_step_tokens, 0, 1)) / engine.max_step_tokens,
                forward.predict_s(StepShape.decodes(batch, batch * context)),
                batch,
            )
        return speeds

    def _outputs(self, number: int) -> float:
        operator = self._operators[number]
        return self._prompts.num_rows * operator.calls * operator.output_tokens

    def _busy_s(self, number: int) -> float:
        """Seconds that engines compute for an operator, in full batches."""
        assert self._speeds is not None
        if not self._on[number]:
            return 0.0
        speed = self._speeds[self._on[number][0]]
        prefill_s = speed.prefill_s * self._sources[number].prefill_tokens
        return prefill_s + speed.decode_s / speed.batch * self._outputs(number)

    def _seconds(self) -> float | None:
        """The busiest engine's work, or the longest chain of calls in full batches, whichever is longer."""
        if self._speeds is None:
            return None
        loads = [0.0] * len(self._engines)
        ends: list[float] = []
        for number, operator in enumerate(self._operators):
            start = max((ends[need] for need in operator.needs), default=0.0)
            on = self._on[number]
            for engine in on:
                loads[engine] += self._busy_s(number) / len(on)
            own_s = self._speeds[on[0]].decode_s * operator.output_tokens if on and operator.calls >= 1 else 0.0
            ends.append(start + own_s)
        return max([*loads, *ends], default=0.0)

    def _work_bound_s(self, numbers: Sequence[int]) -> float | None:
        """Of all engines of each model together, were each as fast as the fastest of them."""
        longest = 0.0
        for model in dict.fromkeys(self._operators[number].model for number in numbers):
            engines = [engine for engine in self._engines if engine.model == model]
            work = EngineWork()
            for number in numbers:
                if self._operators[number].model == model:
                    prompt = self._prompts.prompt_tokens(number).astype(np.float64)
                    work = work.plus(operator_work(self._operators[number], prompt, self._least[number]))
            bounds = [
                work_bound_s(work, engine.forward, engine.max_step_tokens, engine.kv_tokens)
                for engine in engines
                if engine.forward is not None
            ]
            if len(bounds) < len(engines):
                return None
            longest = max(longest, min(bounds) / len(engines))
        return longest

    def _bound_s(self) -> float | None:
        work_s = self._work_bound_s(range(len(self._operators)))
        if work_s is None:
            return None
        call_s = []
        for number, operator in enumerate(self._operators):
            prompt = self._prompts.prompt_tokens(number).astype(np.float64)
            alone = [
                call_bound_s(operator, prompt, engine.forward)
                for engine in self._engines
                if engine.model == operator.model and engine.forward is not None
            ]
            call_s.append(np.min(alone, axis=0))
        return max(work_s, chain_bound_s(self._operators, call_s))


def token_step_s(analysed: AnalysedGraph, engines: Sequence[PlanEngine]) -> float | None:
    """Seconds of a token step: a step in which as many calls of mean length decode as the KV of an engine has room for,
    on the first of these engines. None without a profile, or without engines and calls."""
    operators, prompts = analysed.unrolled.operators, analysed.prompts
    if not engines or engines[0].forward is None or not prompts.num_rows:
        return None
    calls = sum(operator.calls for operator in operators)
    tokens = sum(
        operator.calls * (float(prompts.prompt_tokens(number).mean()) + operator.output_tokens)
        for number, operator in enumerate(operators)
    )
    context = max(1, round(tokens / max(calls, 1.0)))
    batch = max(1, min(engines[0].kv_tokens // context, round(calls * prompts.num_rows)))
    return engines[0].forward.predict_s(StepShape.decodes(batch, batch * context))


def _placed(pins: Sequence[PrefixPin], arrangement: Arrangement) -> list[PlacedPin]:
    starts = [0]
    for part in arrangement.parts:
        starts.append(starts[-1] + len(part.group.operators) * (part.group.rows[1] - part.group.rows[0]))
    return [PlacedPin(pin, starts[pin.start], starts[pin.end + 1]) for pin in pins]


_SUMMED = (
    "prompt_tokens",
    "cached_tokens",
    "continued_tokens",
    "prefill_tokens",
    "output_tokens",
    "min_prefill_tokens",
)
