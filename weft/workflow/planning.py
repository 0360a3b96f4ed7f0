"""Plans of workflows for users: from what they have to what the planner takes.

Reads tokenizers by the names of models; everything else is the planner's, which is pure.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from weft.abi.errors import InvalidRequest, WeftError
from weft.config import PINNED_PART
from weft.tokenizers.load import load_tokenizer
from weft.workflow.actuals import RunActuals
from weft.workflow.analysis.analyse import analyse
from weft.workflow.analysis.objectives import OutputObjectives, WantedOutputs
from weft.workflow.analysis.operators import TooLarge
from weft.workflow.analysis.prompts import PromptTokens, TokensOf
from weft.workflow.analysis.statistics import range_mistakes
from weft.workflow.backend.prompt_tokens import EstimatedPrompts, TokenizerPrompts
from weft.workflow.explain.report import Explanation
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph.check import check
from weft.workflow.graph.digest import digest
from weft.workflow.graph.json import graph_from_dict
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.mistakes import MAX_SHOWN, InvalidGraph, Mistake, bounded_hints, listed, listing, nearest
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import LlmNode, SwitchNode, WorkflowGraph, count_nodes
from weft.workflow.passes import Lookup, nothing_cached
from weft.workflow.passes import optimise as optimise_graph
from weft.workflow.planner.place import NoEngine, PlanEngine
from weft.workflow.planner.plan import Plan, PlanOptions, make_plan
from weft.workflow.run.cached_calls import CachedCalls
from weft.workflow.run.planning import PlanSources

MAX_EXPLAINED_NODES = 200_000
"""Nodes of all rows, for which a plan is made to explain a run; it takes seconds."""
ASSUMED_KV_TOKENS = 65_536
"""KV capacity of a server of which nothing is known."""


class HasGraph(Protocol):
    """A `Workflow`, for example a flow."""

    @property
    def graph(self) -> WorkflowGraph:
        """The graph, checked and canonical."""
        ...

    def table(self, rows: Any) -> Any:
        """The rows as plans take them; a number of rows is itself. Raises `InvalidRows`."""
        ...


PlannableGraph = WorkflowGraph | HasGraph | Mapping[str, Any]


@functools.cache
def tokenizer_prompts(model: str) -> PromptTokens:
    """The `PromptTokens` of a model by its name: `weft-tiny`, a directory, a GGUF file, or a hub id. Raises
    `ModelLoadError`."""
    return TokenizerPrompts(load_tokenizer(model))


def plan(
    graph: PlannableGraph,
    rows: Any,
    model: str,
    engines: Sequence[Mapping[str, Any] | PlanEngine],
    statistics: Mapping[str, Any] | None = None,
    *,
    objective: OutputObjectives = "throughput",
    deadline_s: float | None = None,
    optimise: bool = True,
    tokens: TokensOf = tokenizer_prompts,
    pinned_part: float = PINNED_PART,
    lookup: Lookup = nothing_cached,
) -> Plan:
    """The plan of a workflow's run over rows, or over a number of rows whose values are not known.

    `model` is that of calls that name none. `engines` have `model`, `kv_tokens`, and where known `page_size`,
    `max_step_tokens` and `forward`, the fitted times of steps, without which no times are predicted. `statistics` are
    known figures by the label of a node or the name of an input: `output_tokens`, `items` of a map, `rounds` of a
    loop, `shares` of a switch. `objective` is that of all outputs, or by name; `deadline_s` is that of outputs with a
    deadline, from the beginning of the run. Pins hold at most `pinned_part` of each engine's pages. `lookup` has the
    answers of a prompt cache. Equal arguments give equal plans, in every process.

    Raises `InvalidGraph`, `InvalidRows`, `InvalidRequest` for engines, statistics and objectives that do not fit, and
    `ModelLoadError` for a model whose tokenizer cannot be read.
    """
    whole = _graph_of(graph)
    made = _engines_of(engines)
    table = rows if isinstance(graph, (WorkflowGraph, Mapping)) else graph.table(rows)
    given = rows if isinstance(rows, int) else list(Rows(table).check(whole))
    if isinstance(given, int) and (isinstance(given, bool) or given < 0):
        raise InvalidRequest(f"rows is {given}: give rows, or how many there are", "rows")
    optimised = optimise_graph(whole, lookup) if optimise else None
    passes = [] if optimised is None else [report.to_dict() for report in optimised.reports]
    runs = whole if optimised is None else optimised.graph
    check_statistics(statistics or {}, whole, runs)
    if not 0 <= pinned_part <= 1:
        raise InvalidRequest(f"pinned_part is {pinned_part}: a part of the pages is from 0 to 1", "pinned_part")
    wanted = WantedOutputs(objective, deadline_s)
    options = PlanOptions(wanted=wanted, passes=passes, digest=digest(whole), pinned_part=pinned_part)
    try:
        analysed = analyse(runs, given, model, statistics or {}, tokens)
    except TooLarge as error:
        raise InvalidRequest(f"this graph cannot be planned: {error}", "graph") from None
    try:
        return make_plan(analysed, made, options)
    except NoEngine as error:
        raise InvalidRequest(f"engines: {error}", "engines") from None
    except ValueError as error:
        raise InvalidRequest(f"objective: {error}", "objective") from None


def explain(
    graph: PlannableGraph,
    rows: Any,
    model: str,
    engines: Sequence[Mapping[str, Any] | PlanEngine],
    statistics: Mapping[str, Any] | None = None,
    *,
    keeps_kv: bool = True,
    cached: CachedCalls | None = None,
    **options: Any,
) -> Explanation:
    """The plan of a run, in forms for people. As `plan`; without pins where engines keep no KV on request
    (`keeps_kv`). What a prompt cache has (`cached`) is not planned: rows without a call, and calls that are constants
    of the graph."""
    if not keeps_kv:
        options["pinned_part"] = 0.0
    if cached is not None:
        options["lookup"] = cached.lookup
        if not isinstance(rows, int):
            checked = enumerate(Rows(rows).check(_graph_of(graph)))
            rows = [row for number, row in checked if number not in cached.whole_rows] or 0
    made = plan(graph, rows, model, engines, statistics, **options)
    return Explanation(_graph_of(graph), made, keeps_kv=keeps_kv, cached=None if cached is None else cached.figures)


def explain_run(
    graph: WorkflowGraph,
    rows: Sequence[Mapping[str, Any]] | None,
    sources: PlanSources,
    actual: RunActuals,
    statistics: Mapping[str, Any] | None = None,
    *,
    optimise: bool = True,
    plan_options: Mapping[str, Any] | None = None,
    why_no_rows: str = "",
) -> Explanation:
    """What a run was expected to do, with the figures that were known before it, beside what it did. Without a plan
    where the rows are gone (None), too many, or cannot be planned. `plan_options` are `objective`, `deadline_s` and
    `pinned_part` of `plan`."""
    optimised = optimise_graph(whole_graph := _graph_of(graph)) if optimise else None
    passes = [] if optimised is None else [report.to_dict() for report in optimised.reports]
    why = why_no_rows or "the rows of the run are gone"
    if rows is not None:
        num_nodes = count_nodes((whole_graph if optimised is None else optimised.graph).nodes)
        why = f"it has more than {MAX_EXPLAINED_NODES:,} nodes of rows"
        if len(rows) * num_nodes <= MAX_EXPLAINED_NODES:
            options: dict[str, Any] = {"optimise": optimise, "tokens": sources.tokens, **(plan_options or {})}
            if not sources.keeps_kv:
                options["pinned_part"] = 0.0
            try:
                made = plan(graph, rows, sources.model, sources.engines, statistics, **options)
                return Explanation(graph, made, actual, keeps_kv=sources.keeps_kv)
            except (WeftError, ValueError) as error:
                why = str(error)
    return Explanation(graph, None, actual, passes=passes, why_no_plan=why)


@bounded_hints()
def check_statistics(statistics: Mapping[str, Any], *graphs: WorkflowGraph) -> None:
    """Raise `InvalidRequest` for figures that do not exist or cannot be true, and for names and cases that occur
    neither in the user's graph nor in the optimised one: one error has all mistakes."""
    if not isinstance(statistics, Mapping):
        raise InvalidRequest("statistics: an object is needed, with figures by node", "statistics")
    known = dict.fromkeys(name for graph in graphs for name in graph.inputs)
    cases: dict[str, dict[str, None]] = {}
    for graph in graphs:
        for label, node in labelled_nodes(graph.nodes):
            known[label] = None
            if isinstance(node, SwitchNode):
                cases.setdefault(label, {}).update(dict.fromkeys(node.bodies))
    longest = max(map(len, known), default=0)
    mistakes: list[Mistake] = []
    for name, fields in statistics.items():
        if not _is_known(str(name), known, longest):
            mistakes.append(Mistake("", f"nothing is called {name!r}.{nearest(str(name), known)}"))
            continue
        mistakes += range_mistakes(name, fields)
        shares = fields.get("shares") if isinstance(fields, Mapping) else None
        for case in shares if isinstance(shares, Mapping) else ():
            if case not in cases.get(name, {}):
                known_cases = f"there are {listed(tuple(cases[name]))}" if name in cases else f"{name} is no switch"
                mistakes.append(Mistake(f"{name}.shares", f"there is no case {case!r}; {known_cases}"))
    if len(mistakes) == 1:
        raise InvalidRequest(f"statistics: {mistakes[0]}", "statistics")
    if mistakes:
        raise InvalidRequest(listing("The statistics have", mistakes, MAX_SHOWN), "statistics")


def _is_known(name: str, known: Collection[str], longest: int) -> bool:
    """Whether a name is known, or begins with a known one and a dot. None of these is longer than `longest`."""
    end = name.find(".")
    while 0 <= end <= longest:
        if name[:end] in known:
            return True
        end = name.find(".", end + 1)
    return name in known


def unknown_server(graph: WorkflowGraph, model: str) -> PlanSources:
    """What plans are made for where nothing is known of the server but the names of the models that a graph calls;
    `model` is that of calls that name none."""
    named = (node.request.get("model") for node in all_nodes(graph.nodes) if isinstance(node, LlmNode))
    models = dict.fromkeys([model, *(str(name) for name in named if name)])
    estimated = EstimatedPrompts()
    engines = [PlanEngine(model=name, kv_tokens=ASSUMED_KV_TOKENS) for name in models]
    return PlanSources(lambda name: estimated, engines, model, keeps_kv=False)


def _graph_of(graph: PlannableGraph) -> WorkflowGraph:
    if isinstance(graph, Mapping):
        return graph_from_dict(dict(graph))
    if not isinstance(graph, WorkflowGraph):
        return graph.graph
    mistakes = check(graph)
    if mistakes:
        raise InvalidGraph(mistakes)
    return graph


def _engines_of(engines: Sequence[Mapping[str, Any] | PlanEngine]) -> list[PlanEngine]:
    try:
        return [msgspec.convert(msgspec.to_builtins(engine), PlanEngine) for engine in engines]
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"engines: {error}", "engines") from None
