"""The least that a workload could cost: tokens computed from prompts, and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.workflows import tokens
from weft.core.cost.model import ForwardModel, StepShape
from weft.workflow.analysis.bounds import EngineWork, work_bound_s
from weft.workflow.graph import WorkflowGraph, canonical
from weft.workflow.graph.nodes import uses

PAGE_SIZE = 16
POOLS = {"small": 1 / 3, "large": 1.25}
"""Pool -> its tokens over those of the trie. Copies of partial pages and pages of running calls need a margin."""
Calls = Mapping[tuple[int, str], tuple[Sequence[int], Sequence[int]]]
"""(row, node) -> token ids of the prompt and of the answer."""


class FloorEngines(NamedTuple):
    """Engines as far as the lower bound in time goes."""

    forward: ForwardModel
    kv_tokens: int
    max_running: int
    max_step_tokens: int
    count: int = 1


class Floor(NamedTuple):
    """What no schedule can do without, each of several equal calls made once."""

    trie: int
    """Tokens of the trie of all prompts and outputs."""
    minimum: int
    """Of these, tokens that no call decodes: what has to be computed from prompts."""
    longest: int
    """Tokens of the longest call, its output included."""
    work_s: float | None
    """Of all engines together, by the cost model: each different token computed once, in the best of steps. None:
    without a cost model."""
    path_s: float | None
    """Of the longest chain of calls that need each other, each alone, and its prompt's KV there but for one token."""

    @property
    def seconds(self) -> float | None:
        """The lower bound in time."""
        return None if self.work_s is None or self.path_s is None else max(self.work_s, self.path_s)

    def pool_tokens(self, part: float) -> int:
        """KV tokens of a pool that holds a part of the trie, and the longest call in any case."""
        wanted = max(part * self.trie, self.longest + 4 * PAGE_SIZE)
        return -(-int(wanted) // PAGE_SIZE) * PAGE_SIZE


def floor_of(graph: WorkflowGraph, calls: Calls, engines: FloorEngines | None) -> Floor:
    """Of a graph whose nodes are all calls; equal ones may be left out."""
    counted = tokens.count(calls.values())
    longest = max(len(prompt) + len(output) for prompt, output in calls.values())
    if engines is None:
        return Floor(counted.total, counted.prefill, longest, None, None)
    distinct = {(tuple(prompt), len(output)) for prompt, output in calls.values()}
    lengths = [(len(prompt), output) for prompt, output in distinct]
    own_kv = sum(output * (output - 1) // 2 for _, output in lengths)
    work = EngineWork(
        prefill_tokens=counted.prefill,
        decodes=sum(output - 1 for _, output in lengths),
        outputs=sum(output for _, output in lengths),
        decode_kv=sum((output - 1) * prompt for prompt, output in lengths) + own_kv,
        own_kv=own_kv,
    )
    work_s = work_bound_s(work, engines.forward, engines.max_step_tokens, engines.kv_tokens, engines.max_running)
    rows = {row for row, _ in calls}
    path_s = max(_path_s(graph, calls, row, engines.forward) for row in rows)
    return Floor(counted.total, counted.prefill, longest, work_s / engines.count, path_s)


def _path_s(graph: WorkflowGraph, calls: Calls, row: int, forward: ForwardModel) -> float:
    """Seconds of the longest chain of a row. A call that is not there was equal to another one, and takes none."""
    ends: dict[str, float] = {}
    for node in canonical(graph).nodes:
        before = [ends.get(use.reference.name, 0.0) for use in uses(node)]
        own_s = 0.0
        if (row, node.id) in calls:
            prompt, output = map(len, calls[row, node.id])
            kv = output * prompt + output * (output - 1) // 2
            own_s = output * forward.predict_s(StepShape.decodes(1, 0)) + forward.per_decode_kv_s * kv
        ends[node.id] = max(before, default=0.0) + own_s
    return max(ends.values())
