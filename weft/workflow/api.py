"""Running graphs from Python: on a model of this process, or on a server."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO, Unpack, cast

from weft.abi.errors import ConfigError, EngineDead, InvalidRequest, StorageFailed, Unsupported
from weft.loop_thread import LoopThread, shared_loop_thread, streamed
from weft.store.database import FILE, Database
from weft.workflow import planning
from weft.workflow.actuals import RowTrace, RunActuals, RunCounts
from weft.workflow.analysis.objectives import WantedOutputs
from weft.workflow.backend.openai import OpenAIBackend
from weft.workflow.bars import bars
from weft.workflow.explain.report import Explanation
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph.digest import journal_digest, rows_digest
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, FunctionNode, LlmNode, WorkflowGraph
from weft.workflow.graph.streamed import check_streamed, streamed_calls
from weft.workflow.options import EXPLAIN_OPTIONS, RUN_OPTIONS, checked_options
from weft.workflow.passes import optimise
from weft.workflow.planning import check_statistics, explain_run
from weft.workflow.remote import ServerRun
from weft.workflow.remote_explanation import ServedExplanation
from weft.workflow.run.backend import ModelBackend
from weft.workflow.run.cached_calls import CachedCalls, cached_calls
from weft.workflow.run.calls import EveryCallRefused
from weft.workflow.run.driver import Driver
from weft.workflow.run.feed import FeedReader, RunFeed, RunNews
from weft.workflow.run.folder import check_out, held_folder
from weft.workflow.run.instructions import FeedChanged, RowDone
from weft.workflow.run.journal import RunDescription, RunJournal
from weft.workflow.run.known_statistics import with_given
from weft.workflow.run.order import row_by_row
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.planning import PlanSources, RunPlanner
from weft.workflow.run.refusals import check_runs_here
from weft.workflow.run.results import HeldResults, RowResult, RunResults, result_of
from weft.workflow.run.row_reader import RowReader
from weft.workflow.run.settings import check_wanted, plan_settings
from weft.workflow.run.state import RunState, retries_of
from weft.workflow.targets import (
    DEFAULTS,
    RunOptions,
    RunTarget,
    Target,
    check_target,
    model_identity,
    opened_services,
    sources_of_target,
    value_budget,
)

RunEvent = RowResult | RunNews
"""What a run tells while it goes on. The pieces of a text come before the result that has it."""


_OF_SERVERS = {"cache_salt", "priority"}
"""Options that only a run on a server has."""


class GraphRun:
    """One run of a graph over rows that this process carries out; `ServerRun` is its twin on a server."""

    def __init__(self, graph: WorkflowGraph, rows: Any, on: Target, options: RunOptions):
        """Reads and checks the rows. Raises `InvalidRows`, and `InvalidGraph` also for what cannot run here."""
        for name in _OF_SERVERS & options.keys():
            raise Unsupported(f"{name} is for a run on a server of Weft: here, calls take it", name)
        check_runs_here(graph, options.get("functions", {}), has_external="external" in options)
        table = Rows(rows)
        self.graph = graph
        self.optimised = optimise(graph) if options.get("optimise", True) else None
        """The graph that runs, and what the passes did to it; None: the graph runs as it is."""
        self.rows = table.check(graph)
        self.num_rows = table.count()
        """None where the rows can be read once only."""
        self._runs = graph if self.optimised is None else self.optimised.graph
        check_statistics(options.get("statistics", {}), graph, self._runs)
        self._settings = plan_settings(options.get("planning", True))
        self._wanted = WantedOutputs(options.get("objective", "throughput"), options.get("deadline_s"))
        check_wanted(self._wanted, graph.outputs)
        self._order = PlannedOrder(row_by_row(self._runs), self._settings, self._wanted, lambda: self._elapsed_s or 0.0)
        self._on = on
        self._options = options
        self.state = self._state()
        self.planner: RunPlanner | None = None
        """None: calls run row by row."""
        self.journal: RunJournal | None = None
        self._feed = _feed_of(graph, self._runs, options)
        self._reader: FeedReader | None = None
        self._is_announced = False
        self._traces: list[RowTrace] = []
        self._began_s: float | None = None
        """On the monotonic clock, as the next."""
        self._ended_s: float | None = None
        self._served: str | None = None
        """What calls that name no model go to, once it was asked for."""
        self._is_cancelled = False
        self._streaming: Future[None] | None = None

    def _state(self, before: RunCounts | None = None) -> RunState:
        """The state of the run, which goes on from these counts."""
        limits, budget = self._options.get("limits"), value_budget(self._options)
        return RunState(self._runs, self._order, limits, self._order.hints, before, budget)

    @property
    def counts(self) -> RunCounts:
        """What the run has done so far."""
        return self.state.counts

    def measured(self) -> dict[str, dict[str, Any]]:
        """What the run measured of its nodes, as `RunResults.statistics`."""
        return self.state.measured()

    @contextmanager
    def kept(self, folder: Path) -> Iterator[None]:
        """Within the block, a folder keeps what the run computes, so that the same call goes on after an interruption;
        it is removed at the end. Raises `ConfigError` where the folder is of another run, or another run uses it."""
        description = self.description()
        with held_folder(folder):
            if any(folder.iterdir()) and not (folder / FILE).exists():
                # It would be removed at the end.
                raise ConfigError(f"{folder} is not of a run of a workflow: move it, or choose another file")
            database = Database(folder, place="the folder of the run")
            is_over = False
            try:
                try:
                    self.journal = RunJournal.open(database, "run", description)
                except ConfigError as error:
                    raise ConfigError(
                        f"{error.message}: finish that run, remove {folder}, or choose another file"
                    ) from None
                self.state = self._state(self.journal.counts)
                try:
                    yield
                except EveryCallRefused:
                    # The folder would only refuse the same rows with another model.
                    is_over = self.journal.is_empty
                    raise
                with suppress(StorageFailed):  # a full disk refuses even that, but not the removal of the folder
                    self.journal.forget()
                is_over = True
            finally:
                database.close()
                if is_over:
                    shutil.rmtree(folder)

    def cancel(self) -> None:
        """Cancel what is in progress, from another thread than that of `results`, which raises `CancelledError`."""
        self._is_cancelled = True
        if self._streaming is not None:
            self._streaming.cancel()

    def _starts(self, streaming: Future[None]) -> None:
        self._streaming = streaming
        if self._is_cancelled:
            streaming.cancel()

    def results(self) -> Generator[RunEvent, None, None]:
        """Rows as they end, first those of the journal, and the news that the options ask for. Closing the generator
        cancels what is in progress."""
        known = {} if self.journal is None else self.journal.rows
        yield from known.values()
        rows = ((number, row) for number, row in enumerate(self.rows) if number not in known)
        if not isinstance(self._on, str):
            host = self._on.workflow_host()
            yield from self._read_on(host.thread, lambda: self._on_loop(rows, host.backend))
            return
        yield from self._read_on(shared_loop_thread(), lambda: self._over_http(rows))

    def _read_on(
        self, thread: LoopThread, items: Callable[[], AsyncGenerator[RowResult | FeedChanged, None]]
    ) -> Generator[RunEvent, None, None]:
        """The results of a loop, and what its feed has by the time at which they are taken here."""
        for item in streamed(thread, items, self._starts):
            if self._feed is not None:
                yield from thread.run(self._read(item))
            if isinstance(item, RowResult):
                yield item

    async def _read(self, item: RowResult | FeedChanged) -> list[RunNews]:
        assert self._reader is not None
        self._is_announced = False
        news = self._reader.read()
        rest = self._reader.rest(item.row, item.outputs) if isinstance(item, RowResult) else []
        return [*news.starts, *news.texts, *rest]

    async def _over_http(
        self, rows: Iterator[tuple[int, Mapping[str, Any]]]
    ) -> AsyncGenerator[RowResult | FeedChanged, None]:
        assert isinstance(self._on, str)
        async with (
            _opened_backend(self._on, self._options, self._served) as backend,
            aclosing(self._on_loop(rows, backend)) as results,
        ):
            async for result in results:
                yield result

    async def on_loop(
        self, rows: Iterator[tuple[int, Mapping[str, Any]]], backend: ModelBackend
    ) -> AsyncGenerator[RunEvent, None]:
        """As `results`, on the event loop that runs."""
        async with aclosing(self._on_loop(rows, backend)) as items:
            async for item in items:
                if self._feed is not None:
                    for news in await self._read(item):
                        yield news
                if isinstance(item, RowResult):
                    yield item

    async def _on_loop(
        self, rows: Iterator[tuple[int, Mapping[str, Any]]], backend: ModelBackend
    ) -> AsyncGenerator[RowResult | FeedChanged, None]:
        """Rows as they end, and signs that the feed has something to read."""
        self._began_s = time.monotonic()
        async with opened_services(self._options, backend, self._model()) as services:
            known = None if services.statistics is None else services.statistics(self._runs)
            if self._settings.needs_plans:
                stored = {} if known is None else await asyncio.to_thread(known.load)
                self.planner = RunPlanner(
                    self._runs,
                    self._order,
                    self._plan_sources(),
                    with_given(stored, self._options.get("statistics", {})),
                    settings=self._settings,
                    wanted=self._wanted,
                )
            concurrency = self._options.get("concurrency")
            driver = Driver(
                self.state,
                RowReader(rows) if self.num_rows is None else rows,
                services,
                concurrency,
                self.journal,
                self.planner,
                self._feed,
                ends_on=(EveryCallRefused,),
            )
            if self._feed is not None:
                self._reader = self._feed.reader(on_news=lambda: self._announce(driver))
            try:
                async with aclosing(driver.results()) as results:
                    async for done in results:
                        if isinstance(done, FeedChanged):
                            yield done
                            continue
                        assert isinstance(done, RowDone)
                        result = result_of(done)
                        self._note(done)
                        if self.journal is not None:
                            self.journal.end(result, done.by_node)
                        yield result
            finally:
                if known is not None:
                    known.keep(self.state.measured())
        self._ended_s = time.monotonic()

    def _note(self, done: RowDone) -> None:
        if done.calls:
            self._traces.append(RowTrace(done.row, done.calls))

    def explain(self) -> Explanation:
        """What the run was expected to do, and what it did by now. Reads the rows again. Raises `Unsupported` where
        they can be read once only."""
        if self.num_rows is None:
            raise Unsupported("rows of an iterator cannot be read again: explain the run of a list or a file", "rows")
        actual = RunActuals(self.counts, self._elapsed_s, tuple(self._traces))
        statistics = self._options.get("statistics")
        is_optimised = self._options.get("optimise", True)
        sources = self._plan_sources()
        options = {**self._wanted._asdict(), "pinned_part": self._settings.planned_part}
        return explain_run(
            self.graph, list(self.rows), sources, actual, statistics, optimise=is_optimised, plan_options=options
        )

    @property
    def _elapsed_s(self) -> float | None:
        """Seconds that the run has taken; None before it begins."""
        return None if self._began_s is None else (self._ended_s or time.monotonic()) - self._began_s

    def _announce(self, driver: Driver) -> None:
        """There is news. Said once until it is read, so that a slow reader has one sign and not one for each token."""
        if not self._is_announced:
            self._is_announced = True
            driver.announce()

    def _plan_sources(self) -> PlanSources:
        return sources_of_target(self._runs, self._on, self._options.get("model", ""))

    def _model(self) -> str:
        return model_identity(self._on, self._options)

    def description(self) -> RunDescription:
        """What the run computes. Reads the rows, and asks a server of which only the address is known for its model,
        where calls name none. Raises `WeftError` where that is not known."""
        model = self._model()
        if isinstance(self._on, str) and "model" not in self._options:
            away = EngineDead("the server is away")
            retries = [retries_of(node, away) for node in all_nodes(self._runs.nodes) if _names_no_model(node)]
            if retries:
                self._served = shared_loop_thread().run(_served_model(self._on, self._options, max(retries)))
                model = f"{model} {self._served}"
        return RunDescription(journal_digest(self._runs), rows_digest(self.rows), model)


@asynccontextmanager
async def _opened_backend(
    url: str, options: RunOptions, model: str | None = None
) -> AsyncGenerator[OpenAIBackend, None]:
    """A backend for an address, until the end of the block. `model`: for calls that name none, where the options say
    nothing."""
    backend = OpenAIBackend(url, options.get("model", model), options.get("api_key"))
    try:
        yield backend
    finally:
        await backend.close()


async def _served_model(url: str, options: RunOptions, retries: int) -> str:
    async with _opened_backend(url, options) as backend:
        return await backend.wait_for_model(retries)


def _names_no_model(node: AnyNode) -> bool:
    """Whether a node asks the server for the only model that it has."""
    if isinstance(node, LlmNode):
        return not node.request.get("model")
    return isinstance(node, FunctionNode) and node.name == "split"


def explain(graph: WorkflowGraph, rows: Any, on: RunTarget, **options: Any) -> Explanation | ServedExplanation:
    """What a run would do, without a call of a model. As `Workflow.explain`."""
    check_target(on)
    options = checked_options(options, EXPLAIN_OPTIONS, "explain")
    if not isinstance(on, str) and hasattr(on, "workflow_server"):
        return ServedExplanation.before(graph, rows, on.workflow_server(), options)
    taken = cast(RunOptions, {name: options.pop(name) for name in ("cache", "api_key", "model") if name in options})
    tokens, engines, model, keeps_kv = sources_of_target(graph, on, taken.get("model", ""))
    given: list[Mapping[str, Any]] | int = rows if isinstance(rows, int) else [*Rows(rows).check(graph)]
    cached = _cached_before(graph, given, on, taken, is_optimised=options.get("optimise", True))
    return planning.explain(graph, given, model, engines, tokens=tokens, keeps_kv=keeps_kv, cached=cached, **options)


def _cached_before(
    graph: WorkflowGraph, rows: list[Mapping[str, Any]] | int, on: Target, options: RunOptions, *, is_optimised: bool
) -> CachedCalls | None:
    """What the folder of the cache has of a run; None: there is none."""
    folder = options.get("cache")
    if not folder:
        return None
    runs = optimise(graph).graph if is_optimised else graph
    known = None if isinstance(rows, int) else rows

    async def asked(backend: ModelBackend) -> CachedCalls:
        async with opened_services(options, backend, model_identity(on, options)) as services:
            assert services.cache is not None
            return await cached_calls(runs, known, services.backend, services.cache, value_budget({}))

    async def over_http(url: str) -> CachedCalls:
        async with _opened_backend(url, options) as backend:
            return await asked(backend)

    if not (Path(folder) / FILE).exists():
        return CachedCalls()  # it is not made for this
    if not isinstance(on, str):
        host = on.workflow_host()
        return host.thread.run(asked(host.backend))
    return shared_loop_thread().run(over_http(on))


def _feed_of(graph: WorkflowGraph, runs: WorkflowGraph, options: RunOptions) -> RunFeed | None:
    """What is told while a graph runs; None: nothing. Raises `InvalidRequest` for outputs that cannot be streamed."""
    names = options.get("stream", ())
    check_streamed(graph, names)
    starts = options.get("starts", False)
    if not names and not starts:
        return None
    return RunFeed(names, streamed_calls(runs, names), name=secrets.token_hex(8), starts=starts)


def stream(
    graph: WorkflowGraph, rows: Any, on: RunTarget, *, name: str = "", **options: Unpack[RunOptions]
) -> Generator[RunEvent, None, None]:
    """Run a graph over rows; yields results as they are there, in no order. With `stream`, names of outputs, also a
    `TextDelta` for each further piece of their texts; with `starts` a `CallStarted` for each call of a model. A server
    lists the workflow as `name`. Closing the generator cancels what is in progress. Raises what concerns the whole run;
    what concerns a row is its `error`."""
    return checked_run(graph, rows, on, options, name).results()


def _checked(options: Mapping[str, Any]) -> RunOptions:
    return cast(RunOptions, checked_options(options, RUN_OPTIONS, "a run"))


def checked_run(
    graph: WorkflowGraph, rows: Any, on: RunTarget, options: Mapping[str, Any], name: str
) -> GraphRun | ServerRun:
    """A run that has not begun. Raises what `run` raises before anything runs."""
    return _run_on(graph, rows, on, _checked(options), name)


def _run_on(graph: WorkflowGraph, rows: Any, on: RunTarget, options: RunOptions, name: str) -> GraphRun | ServerRun:
    check_target(on)
    if isinstance(on, str) or not hasattr(on, "workflow_server"):
        return GraphRun(graph, rows, on, options)
    return ServerRun(graph, rows, on.workflow_server(), options, name)


def run(
    graph: WorkflowGraph,
    rows: Any,
    on: RunTarget,
    *,
    name: str = "",
    out: str | Path | TextIO | None = None,
    progress: bool | None = None,
    listen: Callable[[RunNews], None] | None = None,
    **options: Unpack[RunOptions],
) -> RunResults:
    """Run a graph over rows. Returns the results in the order of the rows. With `out`, each one is also a line of that
    file as soon as it is there: `{"row", "outputs", "error"}`, in no order. `progress` shows bars on standard error
    (None: only on a terminal). `listen` is told what `stream` and `starts` ask for. A server lists the workflow as
    `name`.

    A run that writes to a named file can be interrupted: until it has ended, a folder beside the file, `OUT.run`, has
    what was computed, or names the run on a server, and the same call goes on from there; here, rows that had failed
    begin anew. Rows of an iterator cannot be read again, so their run begins anew."""
    return prepared(graph, rows, on, name, out, progress, listen, options).carry_out()


class PreparedRun(NamedTuple):
    """A run that was checked and has not begun."""

    cancel: Callable[[], None]
    """Ends `carry_out`, from another thread."""
    carry_out: Callable[[], RunResults]


def prepared(
    graph: WorkflowGraph, rows: Any, on: RunTarget, name: str, out: str | Path | TextIO | None, progress: bool | None,
    listen: Callable[[RunNews], None] | None, options: Mapping[str, Any],
) -> PreparedRun:  # fmt: skip
    """What `run` carries out. Raises what it raises before anything runs."""
    options = _checked(options)
    if (options.get("stream") or options.get("starts")) and listen is None:
        raise InvalidRequest("stream and starts are told to `listen`: give one, or call stream()", "listen")
    table = Rows(rows)
    if isinstance(out, (str, Path)):
        check_out(Path(out), table.path)
    one = _run_on(graph, table, on, options, name)
    shows = sys.stderr.isatty() if progress is None else progress
    held = HeldResults(options.get("max_run_bytes", DEFAULTS.max_run_bytes))
    return PreparedRun(one.cancel, partial(_collected, one, held, out, listen, shows=shows))


def _collected(
    one: GraphRun | ServerRun, held: HeldResults, out: str | Path | TextIO | None,
    listen: Callable[[RunNews], None] | None, *, shows: bool,
) -> RunResults:  # fmt: skip
    is_kept = False
    with ExitStack() as stack:
        if isinstance(out, (str, Path)):
            if one.num_rows is not None:
                stack.enter_context(one.kept(Path(f"{out}.run")))
                is_kept = True
            out = stack.enter_context(_opened(Path(out)))
        show = stack.enter_context(bars(one.num_rows, one.counts)) if shows else lambda counts: None
        for result in stack.enter_context(closing(one.results())):
            if not isinstance(result, RowResult):
                if listen is not None:
                    listen(result)
                continue
            line = held.add(result)
            show(one.counts)
            if out is not None:
                try:
                    out.write(line.decode() + "\n")
                    out.flush()
                except OSError as error:
                    raise _unwritten(error, is_kept) from error
        show(one.counts)  # a server tells them after the last row
    return RunResults(held.rows, one.counts, one.measured(), one.explain, outputs=one.graph.outputs)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A file to be written. What a full disk has refused once is not written when it is closed."""
    file = path.open("w", encoding="utf-8")
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            file.close()
        raise
    file.close()


def _unwritten(error: OSError, may_go_on: bool) -> StorageFailed:
    """The error of a run whose results cannot be written."""
    later = "what was computed is kept: run it again to go on from there" if may_go_on else "the run has ended"
    return StorageFailed(f"the results cannot be written: {error.strerror}; {later}")


async def stream_on_loop(
    graph: WorkflowGraph, rows: Any, backend: ModelBackend, **options: Unpack[RunOptions]
) -> AsyncGenerator[RunEvent, None]:
    """Run a graph over rows on the current event loop, with a backend of it; otherwise like `stream`."""
    one = GraphRun(graph, rows, "", _checked(options))
    async with aclosing(one.on_loop(iter(enumerate(one.rows)), backend)) as results:
        async for result in results:
            yield result
