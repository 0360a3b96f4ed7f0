"""Errors as clients see them: one JSON shape, and the one table from `WeftError` to status, type and code.

Owns what is told to the outside. Messages of errors that Weft raises on purpose are written for the caller and are
passed on; anything else is told as an internal error with the request id, and the log has the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from weft.abi.errors import (
    Cancelled,
    ContextTooLong,
    Draining,
    EngineDead,
    HostDead,
    InvalidLogits,
    InvalidRequest,
    LimitExceeded,
    OutOfPages,
    Overloaded,
    QuotaExceeded,
    RunEnded,
    SlowListener,
    StorageFailed,
    UnknownProgram,
    UnknownRun,
    Unsupported,
    WeftError,
)
from weft.programs.recovery import EngineCrashed


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong and what to do about it."""

    message: str
    type: str
    param: str | None = None
    """The request's field that is to blame."""
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorBody


class HttpProblem(Exception):
    """An answer that is not a success, decided by the front itself. `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message=message, type=_type_of(status), param=param, code=code)
        self.headers = headers or {}


class ClientGone(Exception):
    """The client closed the connection before its answer was complete. Nobody is left to be told anything."""


class _Meaning(NamedTuple):
    status: int
    code: str | None
    retry_after_s: float | None = None
    message: str | None = None
    """Instead of the error's own, which may say how a process ended."""
    may_be_repeated: bool = True
    """Whether clients may send the request again by themselves, as they do with some statuses."""


_MEANINGS: dict[str, _Meaning] = {
    InvalidRequest.kind: _Meaning(400, None),
    Unsupported.kind: _Meaning(400, "unsupported_parameter"),
    ContextTooLong.kind: _Meaning(400, "context_length_exceeded"),
    Overloaded.kind: _Meaning(429, "overloaded"),
    OutOfPages.kind: _Meaning(503, "out_of_kv_pages", 1.0),
    InvalidLogits.kind: _Meaning(500, "invalid_logits"),
    EngineDead.kind: _Meaning(
        503,
        "engine_unavailable",
        5.0,
        "The model's engine is starting or restarting, and this request is not done; send it again.",
    ),
    EngineCrashed.kind: _Meaning(500, "engine_crashed", may_be_repeated=False),
    Draining.kind: _Meaning(503, "shutting_down", 5.0),
    Cancelled.kind: _Meaning(503, "interrupted", 1.0),
    UnknownProgram.kind: _Meaning(404, "program_not_found"),
    UnknownRun.kind: _Meaning(404, "run_not_found"),
    RunEnded.kind: _Meaning(409, "run_ended"),
    QuotaExceeded.kind: _Meaning(403, "quota_exceeded"),
    StorageFailed.kind: _Meaning(507, "storage_failed"),
    SlowListener.kind: _Meaning(429, "slow_listener"),
    HostDead.kind: _Meaning(503, "program_host_unavailable", 2.0),
    LimitExceeded.kind: _Meaning(400, "limit_exceeded"),
}
"""Every kind that is not here is our own fault and is told as an internal error."""


def problem_of(error: BaseException, request_id: str) -> HttpProblem:
    """The answer to an error. Only messages written for callers are passed on."""
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, WeftError) and error.kind in _MEANINGS:
        meaning = _MEANINGS[error.kind]
        retry_after_s = meaning.retry_after_s if error.retry_after_s is None else error.retry_after_s
        headers = retry_headers(retry_after_s) if retry_after_s is not None else {}
        if not meaning.may_be_repeated:
            headers["x-should-retry"] = "false"  # OpenAI's clients heed it
        return HttpProblem(
            meaning.status,
            meaning.message or error.message,
            code=meaning.code,
            param=error.param,
            headers=headers,
        )
    return HttpProblem(
        500,
        f"The server failed while answering. The request may be sent again; the log has the cause under {request_id}.",
        code="internal_error",
    )


def is_internal(error: BaseException) -> bool:
    """Whether the cause must be logged, because the caller is not told it."""
    return not isinstance(error, HttpProblem) and not (isinstance(error, WeftError) and error.kind in _MEANINGS)


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """`Retry-After` in whole seconds, as the standard has it, and in milliseconds for clients that read them."""
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1000))),
    }


def error_json(problem: HttpProblem) -> bytes:
    """The problem as the body of a response, or of a stream's last event."""
    return msgspec.json.encode(ErrorResponse(problem.body))


def error_response(problem: HttpProblem) -> Response:
    """The problem as a response."""
    return Response(error_json(problem), problem.status, problem.headers, "application/json")


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
