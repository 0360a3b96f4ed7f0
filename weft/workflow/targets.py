"""What runs and sessions are carried out on (`on`), how (their options), and what follows from both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypedDict
from urllib.parse import urlsplit

from weft.abi.errors import InvalidRequest, UnknownModel
from weft.config import WorkflowsConfig
from weft.loop_thread import LoopThread
from weft.store.answers import AnswerTable
from weft.store.database import Database
from weft.store.statistics import StatisticsTable
from weft.workflow.analysis.objectives import OutputObjectives
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.planning import unknown_server
from weft.workflow.remote import WorkflowServer
from weft.workflow.run.backend import ModelBackend
from weft.workflow.run.bounds import EvaluationBudget
from weft.workflow.run.driver import Concurrency, RunServices
from weft.workflow.run.functions import FUNCTION_TIMEOUT_S, External, value_from
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.known_statistics import KnownStatistics
from weft.workflow.run.planning import PlanSources
from weft.workflow.run.prompt_cache import PromptCache
from weft.workflow.run.settings import PlanSettings

DEFAULTS = WorkflowsConfig()
"""A run of this process has the bounds of one on a server, unless the caller says others."""


class WorkflowHost(NamedTuple):
    """An event loop, and what answers calls of models on it."""

    thread: LoopThread
    backend: ModelBackend
    model: str
    """What answers depend on besides the calls: the model and how it computes."""
    plans_for: PlanSources | None = None
    """What plans are made for; None: as for a server of which nothing is known."""
    names: tuple[str, ...] = ()
    """Of its models; empty: not known."""


class HasWorkflowHost(Protocol):
    """What `on` may be besides an address: `weft.LLM` for example."""

    def workflow_host(self) -> WorkflowHost:
        """The event loop and the backend for runs on this object; it owns both."""
        ...


class HasWorkflowServer(Protocol):
    """What `on` may be so that a whole graph runs on a server: `weft.client.Client` or `AsyncClient`."""

    def workflow_server(self) -> WorkflowServer:
        """The calls of the server that runs of whole graphs need."""
        ...


Target = HasWorkflowHost | str
"""`weft.LLM`, or the address of any server with OpenAI's API, such as `http://127.0.0.1:8000/v1`."""
RunTarget = Target | HasWorkflowServer
"""Of a run: also a server of ours, on which the graph itself runs."""


def check_target(on: Any, *, takes_client: bool = True) -> None:
    """Raise `InvalidRequest` for what nothing can run on. `takes_client`: whether `weft.client.Client` will do."""
    kinds = ["a weft.LLM", "the address of a server with OpenAI's API, such as http://127.0.0.1:8000"]
    kinds += ["a weft.client.Client or AsyncClient of a server of Weft"] * takes_client
    if isinstance(on, str):
        try:
            parts = urlsplit(on)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            is_address = False
        if is_address:
            return
        shown = f"the text {on!r:.60}, which is no address"
    elif hasattr(on, "workflow_host") or (takes_client and hasattr(on, "workflow_server")):
        return
    else:
        shown = "None" if on is None else f"of the type {type(on).__module__}.{type(on).__qualname__}"
    raise InvalidRequest(f"`on` is {', '.join(kinds[:-1])} or {kinds[-1]}; this is {shown}", "on")


class RunOptions(TypedDict, total=False):
    """How a graph is run."""

    functions: Mapping[str, Callable[..., Any]]
    """Functions that nodes call, by name, beside those of the flow."""
    external: External
    """Gives the values of `external` nodes: a plain function, which runs on a thread, or a coroutine function."""
    limits: RunLimits
    max_run_bytes: int
    """Bytes of the results that `run` holds until its end, as JSON (1 GiB); past them the run fails. `stream` holds
    none."""
    max_value_bytes: int
    """Bytes of the values of rows in progress (512 MiB); what is past them fails, and rows wait from half of it on."""
    concurrency: Concurrency
    function_timeout_s: float
    optimise: bool
    """Whether the optimiser may rewrite the graph first (it may); errors and counts name the nodes of what runs."""
    cache: str | Path | Literal[False]
    """A folder for answers of deterministic calls (`temperature` 0 or a `seed`): later runs have them
    again. It holds 1 GiB; the least recently used ones go first. It also has what runs measured of their nodes, so that
    the next one needs no sample. A server has its own cache, which a run uses unless this is False."""
    cache_salt: str
    """On a server of ours: cached prefixes and answers are shared only with runs and requests of this salt."""
    priority: int
    """On a server of ours: of the calls; lower runs earlier."""
    planning: PlanSettings | Mapping[str, Any] | bool
    """What the run does with its plans (all it can), as settings or their fields; False: it makes none, and calls run
    row by row. Results are the same."""
    objective: OutputObjectives
    """What the outputs are wanted for, for all or by name: `throughput` (if nothing is said), `latency`, `ttft`,
    `deadline` or `batch`."""
    deadline_s: float
    """Of outputs with a deadline: in how many seconds from the beginning of the run they should be there."""
    statistics: Mapping[str, Mapping[str, Any]]
    """Known figures for plans, as `weft.workflow.plan` takes them. Where they lack the length of an answer, a sample of
    the rows runs first and gives it."""
    stream: Sequence[str]
    """Outputs whose texts are told while they are generated."""
    starts: bool
    """Whether starts of calls are told."""
    model: str
    """On a server with several models: the one for calls that name none."""
    api_key: str


@asynccontextmanager
async def opened_services(options: RunOptions, backend: ModelBackend, model: str) -> AsyncIterator[RunServices]:
    """What the options let a run use, until the end of the block. `model` is what answers in the cache depend on."""
    folder, external = options.get("cache"), options.get("external")
    database = None if not folder else Database(Path(folder), place="the folder of the cache")
    try:
        yield RunServices(
            backend,
            options.get("functions", {}),
            external=None if external is None else partial(value_from, external),
            function_timeout_s=options.get("function_timeout_s", FUNCTION_TIMEOUT_S),
            cache=None if database is None else PromptCache(AnswerTable(database), model),
            statistics=None
            if database is None
            else lambda graph: KnownStatistics(StatisticsTable(database), graph, model),
        )
    finally:
        if database is not None:
            await asyncio.to_thread(database.close)


def value_budget(options: Mapping[str, Any]) -> EvaluationBudget:
    """What the values of a run or a session of this process may hold. Its nodes may be evaluated any number of times:
    they take no time from others."""
    return EvaluationBudget(options.get("max_value_bytes", DEFAULTS.max_value_bytes), "max_value_bytes", None)


def model_identity(on: Target, options: RunOptions) -> str:
    """What answers depend on besides the calls. Raises `UnknownModel` for an option that `on` has no model for."""
    named = options.get("model")
    if isinstance(on, str):
        return f"{on} {named}" if named else on
    host = on.workflow_host()
    if named and host.names and named not in host.names:
        raise UnknownModel(f"there is no model {named[:200]!r} here; there is {host.names[-1]}", "model")
    return host.model


def sources_of_target(graph: WorkflowGraph, on: Target, model: str) -> PlanSources:
    """What plans of runs on a target are made for; `model` is that of calls that name none."""
    host = None if isinstance(on, str) else on.workflow_host()
    return unknown_server(graph, model) if host is None or host.plans_for is None else host.plans_for
