"""The OpenAPI document, from the structs that check requests and shape answers.

Owns the table of operations. A test holds it against the application's routes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from weft.endpoints.errors import ErrorResponse
from weft.endpoints.fields import ADVISORY, REFUSED, advisory_schema, shapes_of
from weft.endpoints.schemas.chat import ChatChunk, ChatRequest, ChatResponse
from weft.endpoints.schemas.completion import CompletionRequest, CompletionResponse
from weft.endpoints.schemas.embedding import EmbeddingRequest, EmbeddingResponse
from weft.endpoints.schemas.models import ModelCard, ModelList
from weft.endpoints.schemas.nested import NESTED_ADVISORY, NESTED_SHAPES
from weft.endpoints.schemas.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from weft.programs.quota.limits import Limits
from weft.server.auth import OPEN_PATHS
from weft.server.schemas.programs import (
    RAW_KINDS,
    LogList,
    MessageRequest,
    ProgramCard,
    ProgramDeleted,
    ProgramList,
    ProgramUpload,
    RunCard,
    RunDeleted,
    RunEvent,
    RunList,
    RunRequest,
    SourceRunRequest,
)
from weft.server.schemas.service import (
    ServerVersion,
    Status,
    Trace,
)
from weft.server.schemas.sessions import DEFAULT_LIMIT, MAX_LIMIT, SessionCards
from weft.server.schemas.variables import (
    MAX_TIMEOUT_S,
    CallReceipt,
    CallRequest,
    SessionEnded,
    VariableCard,
    VariableUpdate,
)
from weft.server.schemas.workflows import (
    DEFAULT_PAGE,
    LINES,
    MAX_PAGE,
    RowList,
    WorkflowCard,
    WorkflowDeleted,
    WorkflowEvent,
    WorkflowExplainRequest,
    WorkflowExplanation,
    WorkflowLimits,
    WorkflowList,
    WorkflowRunRequest,
    WorkflowUpload,
)
from weft.version import __version__
from weft.workflow.graph import WorkflowGraph
from weft.workflow.graph.json_schema import graph_components
from weft.workflow.run.settings import PlanSettings
from weft.workflow.service.call_request import CallPlaceholder

Struct = type[msgspec.Struct]
SHAPES: tuple[Struct, ...] = (*NESTED_SHAPES, Limits, WorkflowLimits, PlanSettings, CallPlaceholder)
"""All structs inside requests, with those of runs."""
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)}")


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    summary: str
    request: Struct | None = None
    response: Struct | None = None
    """Shape of the JSON response; None: not JSON, but the content type `media`."""
    event: Struct | None = None
    """Shape of each event of a stream; None: the operation has no stream."""
    media: str = "application/json"
    errors: tuple[int, ...] = ()
    query: Mapping[str, dict[str, Any]] = {}
    """Schemas of the query parameters, by name, with their descriptions."""


_WORK = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_ASK = (401,)
_AFTER = {
    "type": "integer",
    "minimum": 0,
    "default": 0,
    "description": "The number of the last result that is known.",
}


def _seconds(description: str) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S, "description": description}


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST", "/v1/chat/completions", "Continue a conversation.", ChatRequest, ChatResponse, ChatChunk, errors=_WORK
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue texts or token ids.",
        CompletionRequest,
        CompletionResponse,
        CompletionResponse,
        errors=_WORK,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Turn texts or token ids into vectors.",
        EmbeddingRequest,
        EmbeddingResponse,
        errors=_WORK,
    ),
    Operation("GET", "/v1/models", "List the served names.", None, ModelList, errors=_ASK),
    Operation("GET", "/v1/models/{model}", "Describe a served name.", None, ModelCard, errors=(401, 404)),
    Operation(
        "POST", "/tokenize", "Token ids of a text or a conversation.", TokenizeRequest, TokenizeResponse, errors=_WORK
    ),
    Operation("POST", "/detokenize", "The text of token ids.", DetokenizeRequest, DetokenizeResponse, errors=_WORK),
    Operation(
        "POST",
        "/v1/programs",
        "Upload a program.",
        ProgramUpload,
        ProgramCard,
        errors=(*_WORK, 403, 507),
        query={"name": {"type": "string", "description": "Name of the program, where the body is the program itself."}},
    ),
    Operation("GET", "/v1/programs", "List your programs.", None, ProgramList, errors=_ASK),
    Operation("GET", "/v1/programs/{program}", "Describe a program.", None, ProgramCard, errors=(401, 404)),
    Operation(
        "DELETE", "/v1/programs/{program}", "Delete a program.", None, ProgramDeleted, errors=(400, 401, 404, 507)
    ),
    Operation("POST", "/v1/programs/{program}/runs", "Run a program.", RunRequest, RunCard, RunEvent, errors=_WORK),
    Operation(
        "POST", "/v1/runs", "Run a source, or a program by name.", SourceRunRequest, RunCard, RunEvent, errors=_WORK
    ),
    Operation("GET", "/v1/runs", "List your runs, newest first.", None, RunList, errors=_ASK),
    Operation("GET", "/v1/runs/{run}", "Describe a run.", None, RunCard, errors=(401, 404, 503)),
    Operation("DELETE", "/v1/runs/{run}", "Delete an ended run.", None, RunDeleted, errors=(400, 401, 404)),
    Operation("GET", "/v1/runs/{run}/logs", "The log of a run.", None, LogList, errors=(401, 404)),
    Operation(
        "GET",
        "/v1/runs/{run}/messages",
        "The messages of a run: those kept, then new ones until its end.",
        None,
        None,
        RunEvent,
        media="text/event-stream",
        errors=(401, 404, 429),
    ),
    Operation(
        "POST", "/v1/runs/{run}/messages", "Send a message to a run.", MessageRequest, RunCard, errors=(*_WORK, 409)
    ),
    Operation("POST", "/v1/runs/{run}/cancel", "Cancel a run.", None, RunCard, errors=(401, 404, 429, 503)),
    Operation(
        "POST", "/v1/workflows", "Check and store a graph.", WorkflowUpload, WorkflowCard, errors=(*_WORK, 403, 507)
    ),
    Operation("GET", "/v1/workflows", "List your workflows.", None, WorkflowList, errors=(401, 507)),
    Operation("GET", "/v1/workflows/{workflow}", "Describe a workflow.", None, WorkflowCard, errors=(401, 404, 507)),
    Operation(
        "DELETE", "/v1/workflows/{workflow}", "Delete a workflow.", None, WorkflowDeleted, errors=(400, 401, 404, 507)
    ),
    Operation(
        "POST",
        "/v1/workflows/{workflow}/runs",
        "Run a workflow over rows.",
        WorkflowRunRequest,
        RunCard,
        WorkflowEvent,
        errors=(*_WORK, 403, 409, 507),
    ),
    Operation(
        "POST",
        "/v1/workflows/{workflow}/explain",
        "Say what a run of a workflow would do, without a call of a model.",
        WorkflowExplainRequest,
        WorkflowExplanation,
        errors=_WORK,
    ),
    Operation(
        "GET",
        "/v1/runs/{run}/explain",
        "Say what a workflow's run was expected to do, and what it did.",
        None,
        WorkflowExplanation,
        errors=(400, 401, 404, 507),
        query={
            "format": {
                "enum": ["json", "text", "mermaid", "svg"],
                "default": "json",
                "description": "The form of the answer.",
            }
        },
    ),
    Operation(
        "GET",
        "/v1/runs/{run}/events",
        "The events of a workflow's run: results of rows, progress, its end.",
        None,
        None,
        WorkflowEvent,
        media="text/event-stream",
        errors=(400, 401, 404, 429, 507),
        query={"after": _AFTER},
    ),
    Operation(
        "GET",
        "/v1/runs/{run}/results",
        "Results of a workflow's run, in the order in which rows ended.",
        None,
        RowList,
        errors=(400, 401, 404, 507),
        query={
            "after": _AFTER,
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_PAGE,
                "default": DEFAULT_PAGE,
                "description": "Results in the answer.",
            },
        },
    ),
    Operation(
        "POST",
        "/v1/runs/{run}/resume",
        "Go on with a workflow's run that failed or was cancelled.",
        None,
        RunCard,
        errors=(400, 401, 404, 429, 503, 507),
    ),
    Operation(
        "GET",
        "/v1/sessions",
        "Your sequences that wait, and where their KV is.",
        None,
        SessionCards,
        errors=(400, 401, 404, 503),
        query={
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": DEFAULT_LIMIT,
                "description": "Sessions in the answer.",
            },
            "model": {"type": "string", "description": "A served name; absent: all models."},
        },
    ),
    Operation(
        "POST",
        "/v1/calls",
        "Submit calls to a session; answers with variables at once.",
        CallRequest,
        CallReceipt,
        errors=(*_WORK, 403),
    ),
    Operation(
        "GET",
        "/v1/variables/{variable}",
        "Wait for the value of a variable.",
        None,
        VariableCard,
        errors=(400, 401, 404, 410, 429, 503),
        query={
            "criterion": {
                "enum": ["latency", "ttft", "throughput", "deadline"],
                "description": "What the value is wanted for, with all that it needs.",
            },
            "deadline_s": _seconds("With `criterion` `deadline`: seconds until the value should be there."),
            "timeout_s": _seconds("Seconds to wait at most; absent: until there is a value."),
        },
    ),
    Operation(
        "PUT",
        "/v1/variables/{variable}",
        "Give a variable from outside its value.",
        VariableUpdate,
        VariableCard,
        errors=(400, 401, 404, 408, 409, 410, 413, 415, 429),
    ),
    Operation(
        "DELETE",
        "/v1/sessions/{session}",
        "End a session of calls: cancel what is in progress, forget its values.",
        None,
        SessionEnded,
        errors=(401, 410),
    ),
    Operation("GET", "/health", "Whether the process answers.", None, Status),
    Operation("GET", "/ready", "Whether new requests are answered now.", None, Status),
    Operation("GET", "/version", "The version of the server.", None, ServerVersion),
    Operation("GET", "/metrics", "Counters and histograms, for Prometheus.", media="text/plain", errors=_ASK),
    Operation("GET", "/v1/traces/{request_id}", "The trace of a recent request.", None, Trace, errors=(401, 404)),
    Operation("GET", "/", "The start page: HTML for browsers, else plain text.", media="text/html"),
    Operation("GET", "/openapi.json", "This document.", media="application/json"),
    Operation("GET", "/docs", "This document as a page.", media="text/html"),
)

_STATUS_TEXT = {
    400: "A field is wrong, unknown or unsupported, or the prompt is too long; `param` names the field.",
    401: "No valid API key.",
    403: "Your uploads have reached their limit.",
    404: "The model or object does not exist.",
    408: "The body did not arrive in time.",
    409: "The run has ended, the variable is computed or has its value, or the idempotency key was used otherwise.",
    410: "The session is over, or nothing gives the variable a value.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "The server failed; the log has the cause under the request id.",
    503: "Starting, restarting or shutting down; `Retry-After` says when to come back.",
    507: "The server's disk is full.",
}


_OTHER_ERRORS = "Any other error: an invalid HTTP request, a foreign host or origin."
_KEY = (
    "Where the server was started with API keys, send one as `Authorization: Bearer <key>`; a WebSocket may have it as "
    "`?api_key=<key>`."
)


@functools.cache
def openapi(*, needs_key: bool = False) -> dict[str, Any]:
    """The document, OpenAPI 3.1, of a server that was started with keys or without."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Weft",
            "version": __version__,
            "description": _KEY,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {},
        "components": {"schemas": _schemas()},
    }
    for op in OPERATIONS:
        operation = _operation(op)
        if needs_key and op.path not in OPEN_PATHS:
            operation["security"] = [{"key": []}]
        document["paths"].setdefault(op.path, {})[op.method.lower()] = operation
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": _KEY}}
    return document


@functools.cache
def openapi_json(*, needs_key: bool) -> bytes:
    """The document as the UTF-8 bytes that `/openapi.json` answers with."""
    return msgspec.json.encode(openapi(needs_key=needs_key))


def _schemas() -> dict[str, Any]:
    """JSON schemas of all structs in the document, with the advisory and refused fields of `weft.endpoints.fields`."""
    structs = [struct for op in OPERATIONS for struct in (op.request, op.response, op.event) if struct is not None]
    _, components = msgspec.json.schema_components([*SHAPES, *dict.fromkeys(structs), ErrorResponse], ref_template=_REF)
    for op in OPERATIONS:
        if op.request is None:
            continue
        fields = components[op.request.__name__]["properties"]
        for name, shape in shapes_of(op.request).items():
            fields[name] = _schema_of(shape) | {"description": description_of(fields[name])}
    for op in OPERATIONS:
        if op.request is not None:
            refused = REFUSED.get(op.request, {})
            _close(components[op.request.__name__], ADVISORY)
            components[op.request.__name__]["properties"] |= {name: refused[name].schema for name in refused}
    for shape in SHAPES:
        _close(components[shape.__name__], NESTED_ADVISORY.get(shape, {}))
    upload = components[WorkflowUpload.__name__]["properties"]
    upload["graph"] = _ref(WorkflowGraph) | {"description": description_of(upload["graph"])}
    graphs = graph_components(_REF)
    assert not components.keys() & graphs.keys(), "two schemas have one name"
    return components | graphs


def _schema_of(shape: Any) -> dict[str, Any]:
    """JSON schema of a shape inside a request: lists and unions of structs, which msgspec accepts only with tags."""
    origin, options = get_origin(shape), get_args(shape)
    if origin is list:
        return {"type": "array", "items": _schema_of(options[0])}
    if origin is Literal:
        return {"enum": list(options)}
    if origin is not None:
        return {"anyOf": [_schema_of(option) for option in options]}
    return {"type": "null"} if shape is type(None) else _ref(shape)


def _close(schema: dict[str, Any], advisory: Mapping[str, str]) -> None:
    """State in a schema that it has no other fields, and describe its advisory ones."""
    schema["properties"] |= {
        name: advisory_schema(why) for name, why in advisory.items() if name not in schema["properties"]
    }
    schema["additionalProperties"] = False


def _operation(op: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {op.media: {"schema": _ref(op.response)} if op.response is not None else {}}
    if op.event is not None:
        success["text/event-stream"] = {"x-event": _ref(op.event)}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": success}}
    if op.request in (RunRequest, SourceRunRequest, WorkflowRunRequest):
        responses["202"] = {"description": "With `background`: it runs.", "content": {op.media: success[op.media]}}
    if op.path == "/ready":
        responses["503"] = {"description": "Not now.", "content": {op.media: {"schema": _ref(Status)}}}
    error = {"application/json": {"schema": _ref(ErrorResponse)}}
    for status in op.errors:
        responses[str(status)] = {"description": _STATUS_TEXT[status], "content": error}
    responses["default"] = {"description": _OTHER_ERRORS, "content": error}
    result: dict[str, Any] = {"summary": op.summary, "operationId": f"{op.method} {op.path}", "responses": responses}
    if op.request is not None:
        content: dict[str, Any] = {"application/json": {"schema": _ref(op.request)}}
        if op.request is ProgramUpload:
            content |= {kind: {} for kind in RAW_KINDS}
        if op.request is WorkflowRunRequest:
            content |= {kind: {} for kind in sorted(LINES)}
        result["requestBody"] = {"required": True, "content": content}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(op.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in op.query.items()]
    if parameters:
        result["parameters"] = parameters
    return result


def _ref(struct: Struct) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def type_text(field: dict[str, Any]) -> str:
    """The type of a field in a few words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(type_text(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field:
        return " or ".join(msgspec.json.encode(value).decode() for value in field["enum"])
    if "const" in field:
        return msgspec.json.encode(field["const"]).decode()
    kind = str(field.get("type", "any"))
    if kind != "array" or not field.get("items"):
        return kind
    items = type_text(field["items"])
    return f"list of ({items})" if " or " in items else f"list of {items}"


def default_text(field: dict[str, Any]) -> str:
    """The default of a field as JSON; empty if an absent field has its own meaning."""
    return msgspec.json.encode(field["default"]).decode() if field.get("default") is not None else ""


def description_of(field: dict[str, Any]) -> str:
    """The description of a field, from any place in its schema."""
    if "description" in field:
        return str(field["description"])
    return next((str(option["description"]) for option in field.get("anyOf", ()) if "description" in option), "")
