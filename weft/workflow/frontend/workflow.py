"""A workflow that can be run: a graph, and the Python functions that its nodes call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from weft.workflow.graph.digest import digest
from weft.workflow.graph.json import graph_from_dict, graph_from_json, graph_to_dict
from weft.workflow.graph.nodes import WorkflowGraph

if TYPE_CHECKING:
    from weft.workflow import api, targets
    from weft.workflow.explain.report import Explanation
    from weft.workflow.remote_explanation import ServedExplanation
    from weft.workflow.run.feed import RunNews
    from weft.workflow.run.results import RunResults


class Workflow:
    """A graph with methods to run it.

    `on` is a `weft.LLM`, the address of a server with OpenAI's API, or a `weft.client.Client` or `AsyncClient`: then
    the graph runs on that server, and functions of Python in this process. `options` are those of
    `weft.workflow.targets.RunOptions`. Each method has an asynchronous form, which takes the same.
    """

    name: str
    """For lists of a server."""

    def __init__(
        self, graph: WorkflowGraph, functions: Mapping[str, Callable[..., Any]] | None = None, *, name: str = ""
    ):
        self._graph = graph
        self._functions = functions or {}
        self.name = name

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """A workflow from a JSON file, after which it is named, or from decoded JSON. Raises `InvalidGraph` with every
        mistake and its place, and `OSError`."""
        if isinstance(source, Mapping):
            return cls(graph_from_dict(dict(source)))
        path = Path(source)
        return cls(graph_from_json(path.read_bytes()), name=path.stem if path.stem.isprintable() else "")

    @property
    def graph(self) -> WorkflowGraph:
        """The graph, checked and canonical."""
        return self._graph

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The Python functions that nodes of the graph call, by name."""
        return self._functions

    @property
    def digest(self) -> str:
        """The digest of the graph, the same for flows, semantic functions and JSON."""
        return digest(self.graph)

    def table(self, rows: Any) -> Any:
        """The rows as runs, plans and explanations take them; a number of rows is itself. Raises `InvalidRows`."""
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The graph in the JSON form that `POST /v1/workflows` takes."""
        return graph_to_dict(self.graph)

    def run(
        self,
        rows: Any,
        on: targets.RunTarget,
        *,
        out: str | Path | TextIO | None = None,
        progress: bool | None = None,
        listen: Callable[[RunNews], None] | None = None,
        **options: Any,
    ) -> RunResults:
        """Run the workflow over rows: a list of mappings, a mapping of columns, an iterable, the path of a .jsonl or
        .csv file, a DataFrame, an Arrow table. Returns the results in the order of the rows. With `out`, each one is
        also a line of that file as soon as it is there, and a run that was interrupted goes on when it is called
        again. `progress` shows bars on standard error (None: only on a terminal). `listen` is told what the options
        `stream` and `starts` ask for, as `stream` yields it. Raises `InvalidRows` and `InvalidGraph` before anything
        runs."""
        # Imported when something runs: what writes workflows pays for no HTTP client.
        from weft.workflow.api import run

        return run(
            self.graph,
            self.table(rows),
            on,
            name=self.name,
            out=out,
            progress=progress,
            listen=listen,
            **self._with_functions(options),
        )

    def explain(self, rows: Any, on: targets.RunTarget, **options: Any) -> Explanation | ServedExplanation:
        """What `run` would do, without a call: the plan as text (`print` it), as JSON (`to_dict`) and as a diagram
        (`mermaid`). `rows` may also be a number, with `statistics` of the inputs. `options`: `statistics`, `objective`,
        `deadline_s`, `optimise`, `pinned_part`, `model`, as `weft.workflow.plan` takes them, and `cache` and `api_key`
        as of `run`: with a cache it says which calls have their answers already. On a client the server explains, with
        `statistics`, `optimise` and `model`. Raises as `plan`."""
        from weft.workflow.api import explain

        return explain(self.graph, self.table(rows), on, **options)

    def stream(self, rows: Any, on: targets.RunTarget, **options: Any) -> Generator[api.RunEvent, None, None]:
        """Run the workflow over rows; yields results as they are there; with `stream=["name"]` also the texts of these
        outputs as they are generated, with `starts=True` starts of calls. Closing the generator cancels the run."""
        from weft.workflow.api import stream

        return stream(self.graph, self.table(rows), on, name=self.name, **self._with_functions(options))

    async def run_async(
        self,
        rows: Any,
        on: targets.RunTarget,
        *,
        out: str | Path | TextIO | None = None,
        progress: bool | None = None,
        listen: Callable[[RunNews], None] | None = None,
        **options: Any,
    ) -> RunResults:
        """As `run`, for code on an event loop, on which `listen` is called. Cancelling the task cancels the run; with
        `out` it can be gone on with."""
        from weft.workflow.asynchronous import run_async

        made = self._with_functions(options)
        return await run_async(self.graph, self.table(rows), on, self.name, out, progress, listen, made)

    async def explain_async(self, rows: Any, on: targets.RunTarget, **options: Any) -> Explanation | ServedExplanation:
        """As `explain`, for code on an event loop."""
        from weft.workflow.asynchronous import explain_async

        return await explain_async(self.graph, self.table(rows), on, options)

    def stream_async(self, rows: Any, on: targets.RunTarget, **options: Any) -> AsyncGenerator[api.RunEvent, None]:
        """As `stream`, for code on an event loop. Closing the generator, or cancelling the task, cancels the run."""
        from weft.workflow.asynchronous import stream_async

        return stream_async(self.graph, self.table(rows), on, self.name, self._with_functions(options))

    def _with_functions(self, options: dict[str, Any]) -> Any:
        given = options.get("functions") or {}
        # Anything but a mapping is refused where all options are checked.
        return {**options, "functions": {**self.functions, **given} if isinstance(given, Mapping) else given}
