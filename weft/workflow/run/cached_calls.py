"""What the prompt cache would answer of a run: the run is played, and no call is made.

A call that the cache has no answer to fails, and with it all that needs it; so does a node that others answer,
such as a function of Python. So what is found is a lower bound, and nothing outside changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from weft.workflow.actuals import CachedFigures
from weft.workflow.graph.nodes import AnyNode, Body, FunctionNode, WorkflowGraph
from weft.workflow.graph.values import PartRanges, RowError
from weft.workflow.passes import CachedResult, OperatorCall
from weft.workflow.run.backend import KnowsTokens, ModelBackend, NamesModels
from weft.workflow.run.bounds import EvaluationBudget
from weft.workflow.run.calls import ModelAnswer, ModelRequest, request_with
from weft.workflow.run.driver import Driver, RunServices, Turn, next_pass
from weft.workflow.run.frames import RowFailure
from weft.workflow.run.instructions import RowDone, TaskName
from weft.workflow.run.prompt_cache import PromptCache
from weft.workflow.run.state import RunState


class CachedCalls(NamedTuple):
    """The calls of a run that the cache has the answers of."""

    by_node: Mapping[str, int] = {}
    """How many calls, by label of their node; those that are merged with equal ones included."""
    whole_rows: frozenset[int] = frozenset()
    """Rows no call of which would be made."""
    texts: Mapping[str, str] = {}
    """Answers, by the key of their requests."""

    @property
    def figures(self) -> CachedFigures:
        """Number of cached calls by node, and of rows without calls."""
        return CachedFigures(self.by_node, len(self.whole_rows))

    def lookup(self, call: OperatorCall) -> CachedResult | None:
        """As `Lookup`, of the optimiser."""
        if call.op != "llm":
            return None
        fields = {name: value for name, value in call.fields.items() if name != "schema"}
        text = self.texts.get(request_with(fields, call.fields["schema"]).key or "")
        return None if text is None else CachedResult(text)


class _CacheAlone:
    """A `ModelBackend` that makes no call. It knows tokens, or names its models, where the other backend does: the
    cache's keys are made of them."""

    def __init__(self, backend: ModelBackend):
        self._backend = backend
        if isinstance(backend, KnowsTokens):
            self.prompt_digest = backend.prompt_digest
        elif isinstance(backend, NamesModels):
            self.model_of = backend.model_of

    async def complete(self, request: ModelRequest, started: Any) -> ModelAnswer:
        raise RowError("the answer is not in the prompt cache")

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        return await self._backend.split(text, ranges)


class _NotedCache:
    """A `PromptCache` that is read, and notes the texts that it gives."""

    def __init__(self, cache: PromptCache):
        self.texts: dict[str, str] = {}
        self._cache = cache

    async def get(self, key: str) -> ModelAnswer | None:
        found = await self._cache.peek(key)
        if found is not None:
            self.texts[key.partition(" ")[0]] = found.text
        return found

    async def answer(
        self, key: str, make: Callable[[], Awaitable[ModelAnswer]], waits: Callable[[], None]
    ) -> ModelAnswer:
        return await self.get(key) or await make()


class _CountingState(RunState):
    """Counts answers, each of equal calls apart."""

    def __init__(self, graph: WorkflowGraph, budget: EvaluationBudget | None):
        super().__init__(graph, budget=budget)
        self.by_node: Counter[str] = Counter()

    def answered(self, name: TaskName, answer: ModelAnswer) -> None:
        self.by_node.update(self._tasks[each].label for each in self.answered_by(name))
        super().answered(name, answer)


async def cached_calls(
    graph: WorkflowGraph,
    rows: Sequence[Mapping[str, Any]] | None,
    backend: ModelBackend,
    cache: PromptCache,
    budget: EvaluationBudget | None = None,
    turn: Turn = next_pass,
) -> CachedCalls:
    """What the cache has of a run of the graph that the optimiser made; with no rows known (None), of calls that need
    none. `budget` and `turn` are as those of `RunState` and `Driver`."""
    noted = _NotedCache(cache)
    unknown = RowFailure("", RowError("the row is not known"))
    given: Iterable[Mapping[str, Any]] = rows if rows is not None else [dict.fromkeys(graph.inputs, unknown)]
    plain = replace(graph, nodes=_without_retries(graph.nodes))
    state = _CountingState(plain, budget=budget)
    whole = set()
    services = RunServices(_CacheAlone(backend), cache=noted)  # type: ignore[arg-type]
    async with aclosing(Driver(state, iter(enumerate(given)), services, turn=turn).results()) as results:
        async for done in results:
            assert isinstance(done, RowDone)
            if done.failure is None and rows is not None:
                whole.add(done.row)
    return CachedCalls(dict(state.by_node), frozenset(whole), noted.texts)


def _without_retries(nodes: tuple[AnyNode, ...]) -> tuple[AnyNode, ...]:
    """The same nodes, whose functions fail at once."""
    made: list[AnyNode] = []
    for node in nodes:
        bodies = {
            place: Body(nodes=_without_retries(body.nodes), outputs=body.outputs) for place, body in node.bodies.items()
        }
        alike = replace(node, retries=0) if isinstance(node, FunctionNode) else node.with_bodies(bodies)
        made.append(cast(AnyNode, alike))
    return tuple(made)
