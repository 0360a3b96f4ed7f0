"""`weft workflow`: workflows over tables, on a model in this process or on a server."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.abi.errors import WeftError
from weft.cli.local import local_llm
from weft.cli.options import ENGINE_KEYS, takes_settings
from weft.cli.run import refuse_flags_of_engines
from weft.cli.run_values import EXIT_FAILED, ApiKey, Url, pair
from weft.cli.settings import Settings, parse_size, with_setting
from weft.cli.workflow_flags import Deadline, PinnedPart, Planned, Wanted, planned_options
from weft.cli.workflow_runs import (
    PREFIX,
    cancel,
    client_of,
    explain_served,
    list_runs,
    results,
    resume,
    set_value,
    show_run,
)
from weft.core.wording import plural

if TYPE_CHECKING:
    from weft.workflow.frontend.workflow import Workflow
    from weft.workflow.run.results import RunResults
    from weft.workflow.targets import RunTarget

HELP = """Run workflows: many calls of models that are known in advance.

`run` runs one in this process (a model here, or any server with OpenAI's API: --on), or on a server of Weft (--url),
where runs can outlive this command: `list`, `show`, `results`, `set`, `resume` and `cancel` are about those. The server
is --url, WEFT_URL, or, but for `run`, http://127.0.0.1:8000."""

EXAMPLES = """A workflow is a JSON file, or a Python file with a flow:

  import weft

  from weft import ops

  @weft.flow

  def summary(text):

  \u00a0\u00a0\u00a0\u00a0draft = ops.llm(f"Summarise: {text}", max_tokens=80)

  \u00a0\u00a0\u00a0\u00a0return ops.llm(\\[draft.chat, ops.user("Shorter.")], max_tokens=40)

Examples:

  weft workflow run summary.py --rows articles.jsonl -o summaries.jsonl

  weft workflow run summary.py --row text='A long story.'

  weft workflow run flows.py:summary --rows articles.csv --on http://127.0.0.1:8000

  weft workflow run summary.py --rows articles.jsonl -o summaries.jsonl --url http://127.0.0.1:8000

  weft workflow show summary.py

  weft workflow set wvar-0123456789abcdef0123456789abcdef yes
"""

WorkflowFile = Annotated[
    str,
    typer.Argument(metavar="FILE[:NAME]", help="JSON, or Python; NAME: which flow, if the file has several."),
]


def register(app: typer.Typer) -> None:
    """Add the group `workflow` to the application."""
    group = typer.Typer(no_args_is_help=True, help=HELP)
    group.command("run", epilog=EXAMPLES, no_args_is_help=True)(run)
    group.command("show", no_args_is_help=True)(show)
    group.command("explain", no_args_is_help=True)(explain)
    group.command("schema")(schema)
    of_runs: dict[str, Any] = {
        "list": list_runs,
        "results": results,
        "set": set_value,
        "resume": resume,
        "cancel": cancel,
    }
    for name, command in of_runs.items():
        group.command(name)(command)
    app.add_typer(group, name="workflow")


@takes_settings(*ENGINE_KEYS)
def run(
    context: typer.Context,
    settings: Settings,
    file: WorkflowFile,
    rows: Annotated[
        Path | None, typer.Option("--rows", "-r", help="The table: .jsonl or .csv.", show_default=False)
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="NAME=VALUE", help="A column of the only row, instead of --rows; repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a line of JSON per row here. (standard output)")
    ] = None,
    named_model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="weft-tiny, a directory, a GGUF file, or a hub id.", show_default=False),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="Send its calls to this server with OpenAI's API.", show_default=False),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="WEFT_URL", help="Run the graph itself on this server of Weft.", show_default=False
        ),
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", "-b", help="With --url: write the run's id and return.")
    ] = False,
    api_key: ApiKey = None,
    max_calls: Annotated[int | None, typer.Option(min=0, help="Calls of models that the run may make.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens, prompts included, that it may use.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Seconds that it may take.", show_default=False)] = None,
    max_run_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Results that are held until the end, such as 4GiB; more fails. (1GiB)"),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep answers of greedy and seeded calls here, for later runs.", show_default=False),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="With --url: compute all, whatever the server's prompt cache has.")
    ] = False,
    priority: Annotated[
        int | None, typer.Option(help="With --url: of its calls; lower runs earlier. (0)", show_default=False)
    ] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="NAME", help="Show this output on standard error while it is written."),
    ] = None,
    plan: Planned = None,
    pinned_part: PinnedPart = None,
    objective: Wanted = None,
    deadline: Deadline = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars, run's id and summary.")] = False,
) -> None:
    """Run a workflow over rows; writes `{"row", "outputs", "error"}` for each as soon as it is there.

    Without --on, --url or WEFT_URL the model is loaded into this process. With --url only functions of Python run here;
    the command writes the run's id and how to set the values that the run waits for, and when a signal ends it (Ctrl-C,
    SIGTERM, a closed terminal), it cancels the run. Flows in a Python file, and the functions they call, have all your
    permissions. Standard error gets bars and a summary. The exit status is 1 if a row fails.
    """
    from weft.cli.signals import ended_by_signals
    from weft.cli.workflow_remote import ToldWorkflows
    from weft.cli.workflow_text import TextDisplay
    from weft.workflow.frontend.rows import Rows
    from weft.workflow.remote import ServerRun
    from weft.workflow.run.instructions import RunLimits

    if (rows is None) == (not row):
        raise typer.BadParameter("give either --rows FILE or --row NAME=VALUE")
    workflow = load_workflow(file)
    if url is not None and on is not None:
        if _is_url_flag(context):
            raise typer.BadParameter("give either --on or --url: --on runs the graph here, --url on the server")
        url = None
    if max_seconds is not None and not 0 < max_seconds < math.inf:
        raise typer.BadParameter("--max-seconds takes a number above 0")
    table = Rows(rows if rows is not None else [_only_row(row or [])])
    options: dict[str, Any] = {"limits": RunLimits(max_calls, max_tokens, max_seconds)}
    options |= {"cache": cache} if cache else {}
    options |= {"max_run_bytes": _size(max_run_size)} if max_run_size else {}
    options |= planned_options(plan, pinned_part, objective, deadline)
    if (no_cache or priority is not None) and url is None:
        raise typer.BadParameter("--no-cache and --priority need --url: they are of a run on a server")
    if no_cache and cache:
        raise typer.BadParameter("give either --cache or --no-cache")
    options |= ({"cache": False} if no_cache else {}) | ({"priority": priority} if priority is not None else {})
    display = None
    if stream:
        options["stream"] = stream
        display = TextDisplay(_write_err, alone=len(stream) == 1 and table.count() == 1)
    if background and max_run_size:
        raise typer.BadParameter("--background holds no results: workflows.max_run_bytes of the server bounds them")
    if background and (url is None or output is not None or workflow.functions):
        raise typer.BadParameter("--background needs --url, no --output, and no functions of Python, which run here")
    with ExitStack() as scope:
        target: RunTarget
        if url is not None:
            refuse_flags_of_engines(settings)
            client = scope.enter_context(client_of(url, api_key))
            options |= {"model": named_model} if named_model else {}
            if background:
                # Made for its checks: what it refuses is refused here too.
                checked = ServerRun(workflow.graph, workflow.table(table), client.workflow_server(), options)
                options["limits"] = options["limits"]._asdict()
                typer.echo(client.workflows.start(client.workflows.create(workflow).id, checked.rows, **options).id)
                return
            tell = _write_line if display is None else display.note
            target = ToldWorkflows(client, tell, tells_id=not quiet)
            scope.enter_context(ended_by_signals())
        elif on is not None:
            refuse_flags_of_engines(settings)
            target = on
            options |= {"model": named_model} if named_model else {}
            options |= {"api_key": api_key} if api_key else {}
        else:
            if named_model is not None:
                settings = with_setting(settings, "engine.model", named_model, "flag --model")
            target = scope.enter_context(local_llm(settings.config.engine))
        started_s = time.monotonic()
        out = sys.stdout if output is None else output
        shows_bars = False if quiet or display is not None else None
        listen = None if display is None else display.show
        done = workflow.run(table, target, out=out, progress=shows_bars, listen=listen, **options)
        if display is not None:
            display.end()
        if not quiet:
            _summarise(done, time.monotonic() - started_s)
    if done.errors:
        raise typer.Exit(EXIT_FAILED)


def _is_url_flag(context: typer.Context) -> bool:
    """Whether the URL was given on the command line; otherwise it is that of the environment."""
    source = context.get_parameter_source("url")
    return source is not None and source.name == "COMMANDLINE"


def _only_row(fields: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in (pair(field, "--row") for field in fields):
        if name in row:
            raise typer.BadParameter(f"--row gives {name} twice: give each column once, or several rows with --rows")
        row[name] = value
    return row


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def show(
    file: Annotated[
        str, typer.Argument(metavar="FILE[:NAME] | RUN", help="A workflow, or the id of a run on a server.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Write the graph, or the run, as JSON.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Check a workflow and show its graph: inputs, nodes with what they need, outputs, digest.

    Of a run on a server: how far it is, and what it waits for.
    """
    from weft.workflow.graph.outline import outline

    if file.startswith(PREFIX) and not Path(file).exists():
        show_run(file, url, api_key, as_json=as_json)
        return
    workflow = load_workflow(file)
    typer.echo(json.dumps(workflow.to_dict(), indent=2, ensure_ascii=False) if as_json else outline(workflow.graph))


def explain(
    file: Annotated[
        str, typer.Argument(metavar="FILE[:NAME] | RUN", help="A workflow, or the id of a run on a server.")
    ],
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows", "-r", help="The table (.jsonl or .csv), or how many rows there are.", show_default=False
        ),
    ] = None,
    named_model: Annotated[
        str, typer.Option("--model", "-m", help="Its tokenizer counts; no weights are loaded.")
    ] = "weft-tiny",
    engines: Annotated[
        Path | None,
        typer.Option(
            help='JSON: [{"model": ..., "kv_tokens": ...}, ...]. (one engine of the model, of 65,536 KV tokens)',
            show_default=False,
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            help='JSON: {"NODE": {"output_tokens": ...}, ...}; what is not given has a default.', show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the plan as JSON.")] = False,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Write the calls as a Mermaid diagram.")] = False,
    as_svg: Annotated[bool, typer.Option("--svg", help="Write the schedule, or the calls of a run, as SVG.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show what a run would do, without a call: what the optimiser does, which prompts begin alike, the order of the
    calls, and expected tokens and times beside the least that any order takes.

    Of a run on a server: the same, beside what it did, in progress or after its end.
    """
    from weft.workflow.planning import ASSUMED_KV_TOKENS
    from weft.workflow.planning import explain as explained

    if as_json + as_mermaid + as_svg > 1:
        raise typer.BadParameter("give one of --json, --mermaid and --svg")
    if file.startswith(PREFIX) and not Path(file).exists():
        if rows is not None or engines is not None or statistics is not None:
            raise typer.BadParameter("a run has its rows and engines: give none")
        form = "json" if as_json else "mermaid" if as_mermaid else "svg" if as_svg else "text"
        explain_served(file, form, url, api_key)
        return
    if rows is None:
        raise typer.BadParameter("give --rows: a table, or how many rows there are")
    given = int(rows) if rows.isdecimal() else Path(rows)
    figures = None if statistics is None else _read_json(statistics)
    listed = _read_json(engines) if engines else [{"model": named_model, "kv_tokens": ASSUMED_KV_TOKENS}]
    made = explained(load_workflow(file), given, named_model, listed, figures)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=2, ensure_ascii=False))
    else:
        typer.echo(made.mermaid() if as_mermaid else made.svg() if as_svg else str(made), nl=as_mermaid)


def schema() -> None:
    """Write the JSON Schema of workflows in JSON."""
    from weft.workflow.graph.json_schema import graph_schema

    typer.echo(json.dumps(graph_schema(), indent=2, ensure_ascii=False))


def _write_err(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _write_line(line: str) -> None:
    _write_err(f"{line}\n")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeftError(f"{path} is no JSON: {error}") from error


def load_workflow(text: str) -> Workflow:
    """The workflow of a file. Raises `WeftError` for a file that has none, or that cannot be read or executed."""
    from weft.workflow.frontend.workflow import Workflow

    name, flow = (text, "") if Path(text).exists() else _split(text)
    path = Path(name)
    if path.suffix != ".py":
        try:
            return Workflow.load(path)
        except OSError as error:
            raise WeftError(f"{path} cannot be read: {error.strerror}") from error
    found = {key: value for key, value in _executed(path).items() if isinstance(value, Workflow)}
    if flow:
        if flow not in found:
            raise WeftError(f"{path} has no flow {flow!r}; it has {', '.join(found) or 'none'}")
    elif len(found) != 1:
        raise WeftError(
            f"{path} has the flows {', '.join(found)}: write {path}:NAME" if found else f"{path} has no flow"
        )
    else:
        flow = next(iter(found))
    with _errors_of(path, f"the flow {flow}"):
        found[flow].graph  # noqa: B018  Its function runs here, once.
    return found[flow]


def _split(text: str) -> tuple[str, str]:
    name, _, flow = text.rpartition(":")
    return (name, flow) if name.endswith(".py") else (text, "")


def _executed(path: Path) -> Mapping[str, Any]:
    """The names that a Python file defines. What it imports from its own directory is found, as in a script, also by
    functions of the workflow while it runs."""
    import runpy

    if not path.is_file():
        raise WeftError(f"{path} cannot be read: there is no such file")
    sys.path.insert(0, str(path.resolve().parent))
    with _errors_of(path, "the file"):
        return runpy.run_path(str(path), run_name="__weft__")


@contextmanager
def _errors_of(path: Path, what: str) -> Iterator[None]:
    """Raises `WeftError`, with the line, for every other exception of the code of a file."""
    from weft.workflow.frontend.marks import NeedsValueError
    from weft.workflow.frontend.trace import FlowError

    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        if isinstance(error, FlowError | NeedsValueError):
            has_line = str(error).startswith(f"{path.name}:")
            raise WeftError(str(error) if has_line else f"{place}: {error}") from error
        raise WeftError(f"{place}: {what} cannot be executed: {type(error).__name__}: {error}") from error


def _summarise(results: RunResults, seconds: float) -> None:
    calls = results.counts.calls
    cached = f" ({calls.cached_tokens / calls.prompt_tokens:.0%} cached)" if calls.prompt_tokens else ""
    again = f", {plural(calls.cached_calls, 'answer')} from the cache" if calls.cached_calls else ""
    merged = f", {calls.merged_calls:,} more merged with equal ones" if calls.merged_calls else ""
    typer.echo(
        f"{plural(len(results), 'row')} in {seconds:.1f} s, {len(results.errors):,} failed; "
        f"{plural(calls.calls, 'call')}{merged}{again}; "
        f"{plural(calls.prompt_tokens, 'prompt token')}{cached}, {plural(calls.output_tokens, 'output token')}",
        err=True,
    )
    for error in results.errors[:3]:
        typer.echo(f"row {error.row} failed at {error.node}: {error.message}", err=True)
    if len(results.errors) > 3:
        typer.echo(f"and {plural(len(results.errors) - 3, 'more row')}", err=True)
