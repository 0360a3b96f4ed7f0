"""The OpenAPI document and a page to read it, from the structs that check requests and shape answers.

Owns the table of operations. A test holds it against the application's routes.
"""

from __future__ import annotations

import functools
import html
from typing import Any, NamedTuple

import msgspec

from weft.server.auth import OPEN_PATHS
from weft.server.errors import ErrorResponse
from weft.server.schemas.chat import ChatChunk, ChatRequest, ChatResponse
from weft.server.schemas.completion import CompletionRequest, CompletionResponse
from weft.server.schemas.embedding import EmbeddingRequest, EmbeddingResponse
from weft.server.schemas.programs import (
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
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    Status,
    TokenizeRequest,
    TokenizeResponse,
    Trace,
    Version,
)
from weft.version import __version__

Struct = type[msgspec.Struct]


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    summary: str
    request: Struct | None = None
    response: Struct | None = None
    """None: not JSON; `media` says what."""
    event: Struct | None = None
    """What each event of a stream is, where `stream` may be asked for."""
    media: str = "application/json"
    errors: tuple[int, ...] = ()


_WORK = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_ASK = (401,)

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
    Operation("POST", "/v1/programs", "Upload a program.", ProgramUpload, ProgramCard, errors=(*_WORK, 403, 507)),
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
    Operation("DELETE", "/v1/runs/{run}", "Forget a run that is over.", None, RunDeleted, errors=(400, 401, 404)),
    Operation("GET", "/v1/runs/{run}/logs", "What a run noted.", None, LogList, errors=(401, 404)),
    Operation(
        "GET",
        "/v1/runs/{run}/messages",
        "What a run says, from what is kept until its end.",
        None,
        None,
        RunEvent,
        media="text/event-stream",
        errors=(401, 404),
    ),
    Operation(
        "POST", "/v1/runs/{run}/messages", "Say something to a run.", MessageRequest, RunCard, errors=(*_WORK, 409)
    ),
    Operation("POST", "/v1/runs/{run}/cancel", "End a run.", None, RunCard, errors=(401, 404, 429, 503)),
    Operation("GET", "/health", "Whether the process answers.", None, Status),
    Operation("GET", "/ready", "Whether new requests are answered now.", None, Status),
    Operation("GET", "/version", "What is running.", None, Version),
    Operation("GET", "/metrics", "Counters and histograms, for Prometheus.", media="text/plain", errors=_ASK),
    Operation("GET", "/v1/traces/{request_id}", "A recent request's life.", None, Trace, errors=(401, 404)),
    Operation("GET", "/openapi.json", "This document.", media="application/json", errors=_ASK),
    Operation("GET", "/docs", "This document as a page.", media="text/html", errors=_ASK),
)

_STATUS_TEXT = {
    400: "A field is wrong, unknown or unsupported, or the prompt is too long; `param` names the field.",
    401: "No valid API key.",
    403: "You have uploaded as much as you may.",
    404: "No such model or thing.",
    408: "The body stopped coming.",
    409: "The run has ended.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "The server failed; the log has the cause under the request id.",
    503: "Starting, restarting or shutting down; `Retry-After` says when to come back.",
    507: "The server's disk is full.",
}


@functools.cache
def openapi() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    structs = [struct for op in OPERATIONS for struct in (op.request, op.response, op.event) if struct is not None]
    (*_, _), components = msgspec.json.schema_components(
        [*dict.fromkeys(structs), ErrorResponse], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Weft",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@functools.cache
def openapi_json() -> bytes:
    """The document as sent."""
    return msgspec.json.encode(openapi())


def _operation(op: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {op.media: {"schema": _ref(op.response)} if op.response is not None else {}}
    if op.event is not None:
        success["text/event-stream"] = {"schema": _ref(op.event)}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": success}}
    if op.path == "/ready":
        responses["503"] = {"description": "Not now.", "content": {op.media: {"schema": _ref(Status)}}}
    for status in op.errors:
        content = {"application/json": {"schema": _ref(ErrorResponse)}}
        responses[str(status)] = {"description": _STATUS_TEXT[status], "content": content}
    result: dict[str, Any] = {
        "summary": op.summary,
        "operationId": f"{op.method} {op.path}",
        "responses": responses,
        "security": [] if op.path in OPEN_PATHS else [{"key": []}],
    }
    if op.request is not None:
        result["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(op.request)}}}
    if "{" in op.path:
        name = op.path.partition("{")[2].rstrip("}")
        result["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return result


def _ref(struct: Struct) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "code{background:#f2f2f2;padding:.1em .3em;border-radius:3px}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left;vertical-align:top}h2{margin-top:2.5rem}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}code{background:#333}td,th{border-color:#444}}"
)


@functools.cache
def openapi_page() -> bytes:
    """The document as a page of its own: no scripts, nothing loaded."""
    parts = [f"<h1>Weft {html.escape(__version__)}</h1><p>The same as <code>/openapi.json</code>.</p>"]
    for op in OPERATIONS:
        parts.append(f"<h2><code>{op.method} {html.escape(op.path)}</code></h2><p>{html.escape(op.summary)}</p>")
        if op.request is not None:
            parts.append("<h3>Request</h3>" + _table(op.request))
        if op.response is not None:
            parts.append("<h3>Answer</h3>" + _table(op.response))
    body = "".join(parts)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Weft API</title><style>{_STYLE}</style>{body}</html>"
    ).encode()


def _table(struct: Struct) -> str:
    schema = openapi()["components"]["schemas"][struct.__name__]
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        kind = html.escape(type_text(field))
        text = "required" if name in required else default_text(field)
        default = f"<code>{html.escape(text)}</code>" if text else ""
        meaning = html.escape(description_of(field))
        rows.append(f"<tr><td><code>{name}</code><td>{kind}<td>{default}<td>{meaning}")
    return "<table><tr><th>Field<th>Type<th>Default<th>Meaning" + "".join(rows) + "</table>"


def type_text(field: dict[str, Any]) -> str:
    """A field's type in a few words."""
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
    """A field's default as JSON; empty where absence itself means something."""
    return msgspec.json.encode(field["default"]).decode() if field.get("default") is not None else ""


def description_of(field: dict[str, Any]) -> str:
    """What a field means, wherever the schema says it."""
    if "description" in field:
        return str(field["description"])
    return next((str(option["description"]) for option in field.get("anyOf", ()) if "description" in option), "")
