"""A run on a server of ours, from Python: the graph runs there, functions of Python run here.

Values of functions and of `external` nodes are exchanged as variables of the run. Where the connection is lost, the
stream goes on behind the last result.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from weft.abi.errors import ConfigError, Unsupported, WeftError, from_kind
from weft.loop_thread import LoopThread, shared_loop_thread
from weft.workflow.actuals import CallCounts, PinCounts, RunCounts
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph.builtin_functions import client_functions
from weft.workflow.graph.digest import digest, rows_digest
from weft.workflow.graph.json import graph_to_dict
from weft.workflow.graph.nodes import ExternalNode, WorkflowGraph
from weft.workflow.graph.streamed import check_streamed
from weft.workflow.run.feed import CallStarted, RunNews, TextDelta, TextKey
from weft.workflow.run.folder import held_folder
from weft.workflow.run.functions import FUNCTION_TIMEOUT_S, called_function, value_from
from weft.workflow.run.instructions import AwaitExternal, RunLimits, TaskName
from weft.workflow.run.results import RowMistake, RowResult
from weft.workflow.run.settings import plan_settings
from weft.workflow.run.value_errors import kind_of, message_of

if TYPE_CHECKING:
    from weft.workflow.explain.report import Explanation

MAX_LOST = 8
"""Connections lost one after the other, without a new event, after which this process gives up."""
FIRST_PAUSE_S = 0.2
"""Between two attempts; each is twice as long as the one before."""
MAX_PAUSE_S = 5.0
"""Between two attempts to hand a value on."""
FILE = "server.json"
"""Names the run, in a folder beside the file of its results."""
_NOT_NEEDED = (404, 409, 410)
"""Statuses that say of a value: the row or the run has ended, or the value is set."""
_HERE = {
    "concurrency": "the server decides how much is in progress",
    "api_key": "the client has its own key",
    "statistics": "the server plans its runs itself",
    "max_value_bytes": "the server has a bound of its own (workflows.max_value_bytes)",
}
"""Options of runs on models -> why a run on a server has none."""


class WorkflowServer(Protocol):
    """A server, such as `weft.client.Client.workflows`."""

    def create(self, graph: Any, name: str = "") -> Any:
        """Store a graph; the result has its `id`."""

    def start(self, workflow: str, rows: Iterable[Mapping[str, Any]], *, key: str | None = None, **options: Any) -> Any:
        """Start a run; the result has its `id`."""

    def events(self, run_id: str, after: int | str = 0) -> Generator[Any, None, None]:
        """The events of a run, behind the one of this `id`."""

    def resume(self, run_id: str) -> Any:
        """Go on with a run that failed or was cancelled."""

    def cancel(self, run_id: str) -> Any:
        """Cancel a run; what it has computed stays, so that it can be resumed."""

    def get_run(self, run_id: str) -> Any:
        """A run as it is now."""

    def explain(self, workflow: str, rows: Any, format: str = "json", **options: Any) -> Any:
        """What a run over these rows, or so many, would do, in this format."""

    def set_variable(
        self, variable_id: str, value: Any = None, *, error: str | None = None, kind: str | None = None
    ) -> None:
        """Give a run the value that it waits for, or an error of this `kind`, which fails its row."""


class _KeptRun(msgspec.Struct, frozen=True):
    """What a folder says of a run."""

    run: str
    """Empty: its start was asked for, and not answered."""
    graph: str
    rows: str
    model: str | None = None
    limits: RunLimits | None = None
    key: str = ""
    """With which it is asked for: the second time gives the same run."""


def _is_refusal(error: WeftError) -> bool:
    """Whether a server has refused a request for good. Other errors say nothing of the run: no connection, a server
    that ends or is busy, a proxy without one."""
    status = getattr(error, "status", None) or 0
    return 400 <= status < 500 and status != 429


class ServerRun:
    """One run of a graph over rows, on a server."""

    def __init__(
        self, graph: WorkflowGraph, rows: Any, server: WorkflowServer, options: Mapping[str, Any], name: str = ""
    ):
        """Reads and checks the rows. `name` is the workflow's, for the server's lists. Raises `InvalidRows`,
        `InvalidGraph`, and `Unsupported` for options that have no effect there."""
        for option in _HERE.keys() & options.keys():
            raise Unsupported(f"{option} is not for a run on a server: {_HERE[option]}", option)
        if options.get("cache"):
            raise Unsupported("a run on a server takes no folder as cache: the server keeps its own", "cache")
        check_streamed(graph, options.get("stream", ()))
        table = Rows(rows)
        self.graph = graph
        self.rows = table.check(graph)
        self.num_rows = table.count()
        """None where the rows can be read once only."""
        self.counts = RunCounts()
        self._server = server
        self._name = name
        self._options = options
        self._functions = client_functions(graph) & options.get("functions", {}).keys()
        self._folder: Path | None = None
        self._run_id: str | None = None
        self._key: str | None = None
        """Without a folder nobody would know the run: there it ends with the connection that starts it."""
        self._taken: set[str] = set()
        """Variables that are answered here."""
        self._answering: set[Future[None]] = set()
        self._cancelled = threading.Event()
        self._fault: Exception | None = None
        """Why a value could not even be sent."""
        self._told: dict[TextKey, int] = {}
        """Characters of texts of rows in progress that were told."""

    def measured(self) -> dict[str, dict[str, Any]]:
        """Nothing: the server plans its runs itself."""
        return {}

    def explain(self) -> Explanation:
        """Raises `Unsupported`: the server knows."""
        raise Unsupported(f"the server explains its runs: client.workflows.explain_run({self._run_id!r})")

    def cancel(self) -> None:
        """Cancel the run, from another thread than that of `results`, which raises."""
        self._cancelled.set()
        if self._run_id is not None:
            with suppress(WeftError):
                self._server.cancel(self._run_id)

    def results(self) -> Generator[RowResult | RunNews, None, None]:
        """Rows as they end, and the news that the options ask for. Closing the generator cancels the run. Raises what
        ended it."""
        run_id = self._run_id = self._begin()
        thread = shared_loop_thread()
        ended: Any = None
        last, lost = "0", 0
        try:
            while ended is None:
                try:
                    if self._cancelled.is_set():
                        raise CancelledError
                    with closing(self._server.events(run_id, last)) as events:
                        for event in events:
                            if event.id != last:
                                lost, last = 0, event.id
                            if event.row is not None:
                                result = _result(event.row)
                                yield from self._rest(result)
                                yield result
                            elif event.wait is not None:
                                self._take(thread, event.wait)
                            yield from self._news(event)
                            self._count(event)
                            ended = event.run if event.type == "end" else None
                    if ended is None:
                        raise WeftError("the stream of the run's events ended before the run did")
                except WeftError as error:
                    if _is_refusal(error) or lost == MAX_LOST or self._cancelled.wait(FIRST_PAUSE_S * 2**lost):
                        raise
                    lost += 1
        finally:
            if ended is None:
                with suppress(WeftError):
                    self._server.cancel(run_id)
            for answering in list(self._answering):  # they end on another thread
                answering.cancel()
        if self._fault is not None:
            raise self._fault
        if ended.status != "finished":
            raise from_kind(ended.error.kind, ended.error.message, param=ended.error.param)

    @contextmanager
    def kept(self, folder: Path) -> Iterator[None]:
        """Within the block, a folder names the run, so that the same call goes on with it after an interruption; it is
        removed at the end. Raises `ConfigError` where the folder is of another run, or another run uses it."""
        with held_folder(folder):
            if (folder / FILE).exists():
                kept = msgspec.json.decode((folder / FILE).read_bytes(), type=_KeptRun)
                if kept != self._kept(kept.run, kept.key):
                    raise ConfigError(
                        "another run was interrupted here, with another graph, other rows, another model or other "
                        f"limits: finish that run, remove {folder}, or choose another file"
                    )
                self._run_id, self._key = kept.run or None, kept.key
            elif any(folder.iterdir()):
                raise ConfigError(f"{folder} is not of a run on a server: finish that run, or choose another file")
            self._folder = folder
            yield
            shutil.rmtree(folder)

    def _begin(self) -> str:
        """Start the run, or go on with the one that the folder names."""
        if self._run_id is not None:
            try:
                if self._server.get_run(self._run_id).status in ("failed", "cancelled"):
                    self._server.resume(self._run_id)
                return self._run_id
            except WeftError as error:
                if getattr(error, "status", None) != 404:
                    raise
                # It was deleted, or was so long ago that it is forgotten.
        if self._folder is None:
            return self._start()
        self._key = self._key or secrets.token_hex(16)
        self._keep(self._folder, "", self._key)
        try:
            run_id = self._start()
        except Exception as error:
            if getattr(error, "status", None) == 409:
                raise ConfigError(
                    "a run was begun here with other options, and its start was not answered: give the same options, "
                    f"remove {self._folder}, or choose another file"
                ) from error
            if not isinstance(error, WeftError) or _is_refusal(error):  # else it may have begun
                (self._folder / FILE).unlink()
            raise
        self._keep(self._folder, run_id, self._key)
        return run_id

    def _start(self) -> str:
        limits, planning = self._options.get("limits"), self._options.get("planning")
        run = self._server.start(
            self._server.create(graph_to_dict(self.graph), self._name).id,
            self.rows,
            key=self._key,
            limits=None if limits is None else limits._asdict(),
            optimise=self._options.get("optimise"),
            cache=self._options.get("cache"),
            cache_salt=self._options.get("cache_salt"),
            priority=self._options.get("priority"),
            model=self._options.get("model"),
            functions=sorted(self._functions) or None,
            stream=list(self._options.get("stream", ())) or None,
            starts=self._options.get("starts") or None,
            objective=self._options.get("objective"),
            deadline_s=self._options.get("deadline_s"),
            # What is not said is the server's to decide.
            planning=planning
            if planning is None or isinstance(planning, bool)
            else msgspec.to_builtins(plan_settings(planning)),
        )
        run_id: str = run.id
        return run_id

    def _keep(self, folder: Path, run_id: str, key: str) -> None:
        temporary = folder / f"{FILE}.new"
        temporary.write_bytes(msgspec.json.encode(self._kept(run_id, key)))
        temporary.replace(folder / FILE)

    def _kept(self, run_id: str, key: str) -> _KeptRun:
        """What tells this run from others. Reads the rows."""
        options = self._options
        model, limits = options.get("model"), options.get("limits")
        return _KeptRun(run_id, digest(self.graph), rows_digest(self.rows), model, limits, key)

    def _count(self, event: Any) -> None:
        progress = event.progress or (event.run.workflow if event.run is not None else None)
        if progress is not None:
            calls = CallCounts(**progress["calls"])
            by_node = {name: CallCounts(**each) for name, each in progress["by_node"].items()}
            pins = PinCounts(**progress["pins"])
            self.counts = RunCounts(progress["done"], progress["failed"], calls, by_node, pins)

    def _news(self, event: Any) -> Iterator[RunNews]:
        for each in event.starts:
            yield CallStarted(
                each.row, each.node, each.at, each.prompt_tokens, each.cached_tokens, each.continued_tokens
            )
        for each in event.texts:
            self._told[each.row, each.output] = each.start + len(each.text)
            yield TextDelta(each.row, each.output, each.start, each.text)

    def _rest(self, result: RowResult) -> Iterator[TextDelta]:
        """What was not told of the texts of a row that has ended: it may have ended before this process began to
        read, or while the connection was lost."""
        for output in self._options.get("stream", ()):
            start, text = self._told.pop((result.row, output), 0), result.outputs.get(output)
            if isinstance(text, str) and start < len(text):
                yield TextDelta(result.row, output, start, text[start:])

    # ---- variables

    def _take(self, thread: LoopThread, wait: Any) -> None:
        """Answer a variable, if that is to be done here; others wait for someone else."""
        is_here = wait.function in self._functions if wait.function is not None else "external" in self._options
        if is_here and wait.id not in self._taken:
            self._taken.add(wait.id)
            answering = thread.submit(self._answer(wait))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)

    async def _answer(self, wait: Any) -> None:
        try:
            given: dict[str, Any] = {"value": await self._value(wait)}
        except Exception as error:
            kind = kind_of(error)
            given = {"error": message_of(error) or kind, "kind": kind}
        try:
            await self._set(wait.id, given)
        except Exception as error:  # of this process: nothing else would end the run, which waits for the value
            assert self._run_id is not None, "it is the run that waits"
            self._fault = error
            with suppress(WeftError):
                await asyncio.to_thread(self._server.cancel, self._run_id)

    async def _value(self, wait: Any) -> Any:
        if wait.function is None:
            node = ExternalNode(id=wait.node.rpartition(".")[2], schema=wait.schema)
            return await value_from(self._options["external"], AwaitExternal(TaskName(wait.row, wait.node), node))
        seconds = self._options.get("function_timeout_s", FUNCTION_TIMEOUT_S)
        return await called_function(self._options["functions"], wait.function, wait.args or {}, seconds)

    async def _set(self, id: str, given: Mapping[str, Any]) -> None:
        """Until the server has the value, or says that it needs none. The end of the run cancels this."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await asyncio.to_thread(partial(self._server.set_variable, id, **given))
                return
            except WeftError as error:
                if getattr(error, "status", None) in _NOT_NEEDED:
                    return
                if not _is_refusal(error):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
                elif "value" in given:
                    given = {"error": message_of(error), "kind": kind_of(error)}
                else:
                    raise


def _result(row: Any) -> RowResult:
    return RowResult(row.row, row.outputs, None if row.error is None else RowMistake(**row.error))
