"""Requests and responses about programs, their runs, and messages of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import MAX_SALT_CHARS, Json, ModelName
from weft.programs.quota.limits import Limits
from weft.programs.run.runs import RunUsage
from weft.server.schemas.workflows import RowList, WorkflowProgress

MAX_FIRST_MESSAGES = 100
RAW_KINDS: dict[str, Literal["python", "wasm"]] = {"application/wasm": "wasm", "text/x-python": "python"}
"""Content types of uploads whose body is the program itself."""


class ProgramUpload(msgspec.Struct, kw_only=True, frozen=True):
    """A Python program. Wasm modules are sent as they are, with `?name=`."""

    name: Annotated[str, Meta(description="A letter, then up to 63 characters of `A-Z a-z 0-9 . _ -`.")]
    source: Annotated[str, Meta(description="Python source with a function `main`.")]


class VersionCard(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a program."""

    hash: str
    """SHA-256 of its content."""
    kind: Literal["python", "wasm"]
    size_bytes: int
    created: float
    """When it was first uploaded, in seconds since 1970."""


class ProgramCard(msgspec.Struct, frozen=True, kw_only=True):
    """A program; `hash`, `kind`, `size_bytes` and `created` are those of the version that was asked for."""

    name: str
    object: Literal["program"] = "program"
    hash: str
    kind: Literal["python", "wasm"]
    size_bytes: int
    created: float
    versions: list[VersionCard] = []
    """Oldest first; the last is what the name means."""
    trusted: bool = False
    """Whether it is the operator's: it runs without a sandbox and cannot be deleted through the API."""


class ProgramList(msgspec.Struct, frozen=True, kw_only=True):
    """All programs of the caller."""

    object: Literal["list"] = "list"
    data: list[ProgramCard]


class ProgramDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a deletion: the program's name and the hashes of its deleted versions."""

    object: Literal["program.deleted"] = "program.deleted"
    name: str
    deleted: list[str]
    """Hashes of the deleted versions."""


class RunRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The options of a run."""

    shapes: ClassVar[Mapping[str, Any]] = {"limits": Limits}

    args: Annotated[Any, Meta(description="JSON value that `main` receives.")] = None
    limits: Annotated[Json, Meta(description="See [limits of a run](#limits-of-a-run).")] = msgspec.field(
        default_factory=dict
    )
    messages: Annotated[
        list[Any], Meta(max_length=MAX_FIRST_MESSAGES, description="Messages that the run finds when it starts.")
    ] = msgspec.field(default_factory=list)
    stream: Annotated[bool, Meta(description="Respond with server-sent events: the run's messages, then its end.")] = (
        False
    )
    background: Annotated[
        bool, Meta(description="Respond at once; the run continues after the connection has closed.")
    ] = False
    model: ModelName | None = None
    priority: Annotated[
        int, Meta(ge=-1000, le=1000, description="Priority of the run's sequences; lower runs earlier.")
    ] = 0
    reserve_pages: Annotated[
        int, Meta(ge=0, lt=1 << 31, description="The run's own KV pages, from its first use of pages.")
    ] = 0
    cache_salt: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_SALT_CHARS,
                description="The run shares cached prefixes only with requests of the same key and salt.",
            ),
        ]
        | None
    ) = None


class SourceRunRequest(RunRequest, kw_only=True, frozen=True):
    """A program that is run without being uploaded, or an uploaded one."""

    source: Annotated[str, Meta(description="Python source with a function `main`.")] | None = None
    program: Annotated[str, Meta(description="A name, `name@hash` or a hash; instead of `source`.")] | None = None


class RunError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run did not finish."""

    kind: str
    """`program_failed`, `limit_exceeded`, `run_cancelled`, `engine_dead`, `host_dead`, …"""
    message: str
    param: str | None = None
    """The limit that was exceeded."""
    traceback: str = ""
    """Traceback of the program's own lines."""


class RunCard(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Times are seconds since 1970."""

    id: str
    object: Literal["run"] = "run"
    program: str
    """The name under which it was launched; empty for a source that was not uploaded. Of a workflow: its name."""
    hash: str
    """SHA-256 of the program's content, or the id of the workflow."""
    kind: Literal["python", "wasm", "workflow"]
    trusted: bool = False
    model: str
    """The first served name; empty for a workflow of several models."""
    status: Literal["queued", "running", "finished", "failed", "cancelled"]
    result: Any = None
    """The value that `main` returned. A workflow has `results`."""
    error: RunError | None = None
    created: float
    started: float | None = None
    finished: float | None = None
    usage: RunUsage
    limits: Limits | None = None
    """Of a program."""
    workflow: WorkflowProgress | None = None
    """How far a run of a workflow is."""
    results: RowList | None = None
    """The first results of a run of a workflow, in the answer to the request that started it and waited for it."""
    parent: str | None = None
    """Id of the run that launched this one."""
    forgotten: bool = False
    """Whether its result, messages and log are no longer kept."""


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of the caller, newest first, without their results."""

    object: Literal["list"] = "list"
    data: list[RunCard]


class RunDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the deletion of a run."""

    object: Literal["run.deleted"] = "run.deleted"
    id: str


class MessageRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A message for a run."""

    message: Annotated[Any, Meta(description="Any JSON value.")]


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a run's log."""

    at: float
    level: Literal["debug", "info", "warning", "error"]
    text: str


class LogList(msgspec.Struct, frozen=True, kw_only=True):
    """A run's log, oldest first."""

    object: Literal["list"] = "list"
    data: list[LogEntry]
    lost: int = 0
    """Number of older lines that are no longer kept."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a stream or a WebSocket. `type` says which of the other fields is present."""

    type: Literal["run", "message", "end", "error"]
    """`run`: the first event, with the present state of the run. `message`: a message of the run. `end`: the run has
    ended; with the run and its result. `error`: a message or command of the client was refused."""
    run: RunCard | None = None
    message: msgspec.Raw | None = None
    missed: int = 0
    """With `run`: number of earlier messages that are no longer kept."""
    error: RunError | None = None


class RunCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command of the client over a WebSocket."""

    type: Literal["message", "cancel"]
    message: msgspec.Raw = msgspec.Raw(b"null")
