"""Requests and responses about workflows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from weft.core.objectives import Objective
from weft.endpoints.schemas.common import MAX_SALT_CHARS, Json
from weft.workflow.run.settings import PlanSettings

MAX_NAME_CHARS = 200
LINES = frozenset({"application/jsonl", "application/x-ndjson"})
"""Content types of bodies that are rows, one JSON object a line."""
MAX_PAGE = 1000
"""Results of one page."""
DEFAULT_PAGE = 100


class WorkflowUpload(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/workflows`: a graph to check and store."""

    graph: Annotated[
        Json, Meta(description="The graph: `version`, `inputs`, `nodes`, `outputs`, as [workflows](workflows.md#json).")
    ]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS, description="For lists; a later one replaces it.")] = ""


class WorkflowCard(msgspec.Struct, frozen=True, kw_only=True):
    """A stored workflow; lists leave its graph out."""

    id: str
    """Digest of the graph: equal graphs are one workflow."""
    object: Literal["workflow"] = "workflow"
    hash: str
    """The same."""
    name: str
    inputs: list[str]
    """Columns of its rows."""
    outputs: list[str]
    nodes: int
    """Nodes, those of bodies included."""
    size_bytes: int
    created: float
    """Seconds since 1970."""
    graph: Any = msgspec.UNSET
    """Canonical; absent in lists."""


class WorkflowList(msgspec.Struct, frozen=True, kw_only=True):
    """All workflows of the caller."""

    object: Literal["list"] = "list"
    data: list[WorkflowCard]


class WorkflowDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the deletion of a workflow: its id."""

    object: Literal["workflow.deleted"] = "workflow.deleted"
    id: str


class WorkflowLimits(msgspec.Struct, kw_only=True, frozen=True):
    """Bounds of a run. What goes past one fails with `limit_exceeded`, which names it."""

    calls: Annotated[int, Meta(ge=0, description="Calls of models.")] | None = None
    tokens: Annotated[int, Meta(ge=0, description="Tokens of prompts and outputs together.")] | None = None
    seconds: (
        Annotated[float, Meta(gt=0, description="While the run is in progress, over all interruptions.")] | None
    ) = None


class WorkflowRunRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A run of a workflow. A body of JSONL has the rows; the other fields are then query parameters."""

    shapes: ClassVar[Mapping[str, Any]] = {"limits": WorkflowLimits, "planning": PlanSettings}

    rows: Annotated[list[Json], Meta(description="Rows: objects with the inputs of the workflow.")] = msgspec.field(
        default_factory=list
    )
    limits: Annotated[Json, Meta(description="`calls`, `tokens` and `seconds` at most; what goes past one fails.")] = (
        msgspec.field(default_factory=dict)
    )
    cache: Annotated[
        bool, Meta(description="Whether calls that can only be answered in one way may have an earlier answer.")
    ] = True
    optimise: Annotated[bool, Meta(description="Whether the optimiser may rewrite the graph first.")] = True
    functions: Annotated[
        list[str],
        Meta(description="Functions of nodes that the client calls: the run waits for their results as variables."),
    ] = msgspec.field(default_factory=list)
    stream: Annotated[
        bool | list[str],
        Meta(
            description="Respond with server-sent events; a list: their outputs whose texts events tell as they are "
            "generated, with `background` those of `/v1/runs/{run}/events`."
        ),
    ] = False
    starts: Annotated[bool, Meta(description="Whether events tell the start of each call.")] = False
    background: Annotated[
        bool, Meta(description="Respond at once; the run continues after the connection has closed.")
    ] = False
    model: Annotated[str, Meta(description="A served name, for calls that name none.")] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000, description="Of the calls; lower runs earlier.")] = 0
    objective: (
        Annotated[
            Objective | dict[str, Objective],
            Meta(
                description="What the outputs are wanted for, for all or by name, the others for `throughput`; from it "
                "follow the calls' objectives. Absent: `workflows.objective` of the server."
            ),
        ]
        | None
    ) = None
    deadline_s: (
        Annotated[
            float, Meta(description="Of outputs with objective `deadline`: in how many seconds from the run's start.")
        ]
        | None
    ) = None
    planning: (
        Annotated[
            bool | Json,
            Meta(
                description="What the run does with its plans, `false`: it makes none; results are the same. Absent: "
                "`workflows.planning` of the server."
            ),
        ]
        | None
    ) = None
    cache_salt: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_SALT_CHARS,
                description="The run shares cached prefixes and answers only with requests of the same key and salt.",
            ),
        ]
        | None
    ) = None


class WorkflowExplainRequest(msgspec.Struct, kw_only=True, frozen=True):
    """What a run of a workflow would do."""

    rows: Annotated[list[Json], Meta(description="Rows: objects with the inputs of the workflow.")] = msgspec.field(
        default_factory=list
    )
    num_rows: (
        Annotated[int, Meta(ge=1, description="Instead of `rows`: how many, with `statistics` of the inputs.")] | None
    ) = None
    statistics: Annotated[
        Json, Meta(description="What is known of nodes and inputs, as for [plans](workflows.md#plans).")
    ] = msgspec.field(default_factory=dict)
    model: Annotated[str, Meta(description="A served name, for calls that name none.")] | None = None
    optimise: Annotated[bool, Meta(description="Whether the optimiser may rewrite the graph first.")] = True
    cache: Annotated[bool, Meta(description="Whether to say which calls have an answer in the prompt cache.")] = True
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS, description="That of the run.")] | None = (
        None
    )
    format: Annotated[
        Literal["json", "text", "mermaid", "svg"],
        Meta(description="The plan as JSON, text, a diagram in Mermaid's language, or a picture."),
    ] = "json"


class WorkflowExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and of a run what it did. Without a plan, `why_no_plan` stands in place of what only a plan has."""

    digest: str
    passes: list[Json]
    predicted: Json | None
    why_no_plan: str = ""
    tree: list[Json] = []
    objectives: Json = {}
    schedule: list[Json] = []
    pins: list[Json] = []
    by_node: Json = {}
    prompt_cache: Json = {}
    """Before a run: `calls` that have their answers, by node, and how many `rows` make no call."""
    actual: Json = {}
    """Of a run: the keys of `predicted`."""
    actual_by_node: Json = {}
    rows: Json = {}
    """Of a run: how many are `done` and `failed`."""
    timeline: list[Json] = []
    """Of a run: a line for each call that is kept."""


class NodeCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What calls of models have done."""

    calls: int
    """Requests that were answered."""
    merged_calls: int
    """Calls that had the answer of an equal one that was in flight."""
    cached_calls: int
    """Calls that had the answer of an equal earlier one."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompts, those whose KV was there."""
    output_tokens: int
    continued_tokens: int
    """Of the cached ones, those of the finished turns that prompts continue: their prompts and answers."""
    prefill_tokens: int
    """Of the prompts, those that went through a forward; more than the rest where some had to be computed twice."""


class VariableWait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value that a run waits for: `PUT /v1/variables/{id}` sets it."""

    id: str
    row: int
    node: str
    """Such as `notes[3].verdict`."""
    since: float
    """Seconds since 1970, as `until`."""
    until: float | None = None
    """When its row fails."""
    schema: Any = None
    """JSON schema that the value follows."""
    function: str | None = None
    """The function of the client whose result it is."""
    args: Any = None
    """Of the function; in events only."""


class PinCard(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the prefixes that a run had engines keep."""

    retained: int
    """Times that an engine agreed to keep one."""
    tokens: int
    """Of these, together."""
    broken: int
    """Those that engines gave up before their time: their calls computed them again."""
    refused: int
    refusal: str
    """Why, the last time."""


class WorkflowProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run of a workflow is."""

    id: str
    """The workflow."""
    rows: int
    done: int
    """Rows whose results can be read, failed ones included."""
    failed: int
    calls: NodeCalls
    by_node: dict[str, NodeCalls]
    """Of each node that called a model, by its label, such as `notes.summary`."""
    limits: WorkflowLimits
    pins: PinCard
    waits_for: list[VariableWait] = []
    """The first 100 values from outside that it waits for."""
    num_waits: int = 0
    """How many there are."""


class RowErrorCard(msgspec.Struct, frozen=True, kw_only=True):
    """Why a row has not all outputs."""

    row: int
    node: str
    """Where it began, such as `notes[3].summary`."""
    message: str
    kind: str


class RowCard(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a row."""

    number: int
    """The place in the order in which rows ended, from 1."""
    row: int
    """From 0, in the order of the rows."""
    outputs: dict[str, Any]
    """Without those that failed."""
    error: RowErrorCard | None = None


class RowList(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run, in the order in which its rows ended."""

    object: Literal["list"] = "list"
    data: list[RowCard]
    last: int
    """`after` of the next page."""
    has_more: bool
    """Whether there is a further result now."""
    status: Literal["queued", "running", "finished", "failed", "cancelled"]
    """Of the run; while it is in progress, more may come."""


class TextPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A further piece of the text of an output of a row in progress."""

    row: int
    output: str
    start: int
    """Characters before it. Fewer than were told: what follows them is replaced."""
    text: str


class StartedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model has begun with a call."""

    row: int
    node: str
    """Such as `notes[3].summary`."""
    at: float
    """Seconds since 1970."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Of the prompt, those whose KV was there."""
    continued_tokens: int | None
    """Of these, those of the finished turn that the prompt continues: its prompt and its answer."""


class WorkflowEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a workflow's run. `type` says which of the other fields is present. Its `id` is the number of the
    last result before it: a stream goes on behind it."""

    type: Literal["run", "row", "wait", "live", "progress", "end"]
    """`run`: the first event, with the present state of the run. `row`: the result of a row. `wait`: the run waits for
    a value from outside. `live`: further pieces of the texts that `stream` names, and calls that have started.
    `progress`: what calls have done by now. `end`: the run has ended; with the run."""
    run: Any = None
    """A run, as `GET /v1/runs/{run}` describes it."""
    row: RowCard | msgspec.Raw | None = None
    wait: VariableWait | None = None
    texts: list[TextPiece] = []
    starts: list[StartedCall] = []
    lost_starts: int = 0
    """Starts before these that were left out, because this reader is slow."""
    progress: WorkflowProgress | None = None
