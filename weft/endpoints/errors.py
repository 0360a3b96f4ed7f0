"""The errors of the API: one JSON shape, and the one table from `WeftError` to status, type and code.

Owns what callers learn of an error. Messages of a `WeftError` in the table are written for the caller and are passed
on. Any other error becomes an internal error with the request id; the log has its cause.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.abi.errors import (
    Cancelled,
    ContextTooLong,
    Draining,
    EngineCrashed,
    EngineDead,
    HostDead,
    InvalidLogits,
    InvalidRequest,
    KeyReused,
    LimitExceeded,
    NotSettable,
    NoValue,
    OutOfPages,
    Overloaded,
    QuotaExceeded,
    RunEnded,
    SlowListener,
    StorageFailed,
    UnknownModel,
    UnknownProgram,
    UnknownRun,
    UnknownVariable,
    UnknownWorkflow,
    Unsupported,
    WeftError,
)

MAX_MISTAKES = 1000
"""Mistakes of one error that are listed."""


class ErrorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One of several mistakes of a request."""

    place: str
    """Such as `reply.messages[0].content`."""
    message: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error: what failed and what the caller can do."""

    message: str
    type: str
    param: str | None = None
    """The request's field that caused the error."""
    code: str | None = None
    mistakes: list[ErrorPlace] | msgspec.UnsetType = msgspec.UNSET
    """All mistakes of a workflow or its rows, at most 1000."""


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every response that is not a success."""

    error: ErrorBody


class ErrorAnswer(NamedTuple):
    """A response that is not a success, but for the headers of HTTP."""

    status: int
    body: ErrorBody
    retry_after_s: float | None = None
    may_be_repeated: bool = True
    """Whether clients may send the request again by themselves, as they do with some statuses."""


class _Meaning(NamedTuple):
    status: int
    code: str | None
    retry_after_s: float | None = None
    message: str | None = None
    """Replaces the error's own message, which may say how a process ended."""
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
    UnknownModel.kind: _Meaning(404, "model_not_found"),
    UnknownProgram.kind: _Meaning(404, "program_not_found"),
    UnknownRun.kind: _Meaning(404, "run_not_found"),
    UnknownWorkflow.kind: _Meaning(404, "workflow_not_found"),
    UnknownVariable.kind: _Meaning(404, "variable_not_found"),
    NoValue.kind: _Meaning(410, "no_value"),
    NotSettable.kind: _Meaning(409, "not_settable", may_be_repeated=False),
    RunEnded.kind: _Meaning(409, "run_ended"),
    KeyReused.kind: _Meaning(409, "idempotency_key_reused"),
    QuotaExceeded.kind: _Meaning(403, "quota_exceeded"),
    StorageFailed.kind: _Meaning(507, "storage_failed"),
    SlowListener.kind: _Meaning(429, "slow_listener"),
    HostDead.kind: _Meaning(503, "program_host_unavailable", 2.0),
    LimitExceeded.kind: _Meaning(400, "limit_exceeded"),
}
"""Kind of error -> response. Any other kind is a fault of the server and becomes an internal error."""


def answer_of(error: BaseException, request_id: str) -> ErrorAnswer:
    """The answer to an error. Only messages written for callers are passed on."""
    if isinstance(error, WeftError) and error.kind in _MEANINGS:
        meaning = _MEANINGS[error.kind]
        return ErrorAnswer(
            meaning.status,
            ErrorBody(
                message=meaning.message or error.message,
                type=type_of(meaning.status),
                param=error.param,
                code=meaning.code,
                mistakes=_mistakes_of(error),
            ),
            meaning.retry_after_s if error.retry_after_s is None else error.retry_after_s,
            meaning.may_be_repeated,
        )
    message = (
        f"The server failed while answering. The request may be sent again; the log has the cause under {request_id}."
    )
    return ErrorAnswer(500, ErrorBody(message=message, type=type_of(500), code="internal_error"))


def _mistakes_of(error: WeftError) -> list[ErrorPlace] | msgspec.UnsetType:
    """The mistakes of an error that has several: pairs of a place and a message in `mistakes`."""
    found = getattr(error, "mistakes", ())[:MAX_MISTAKES]
    return [ErrorPlace(place=place, message=message) for place, message in found] or msgspec.UNSET


def is_internal(error: BaseException) -> bool:
    """Whether the cause must be logged, because the response does not contain it."""
    return not (isinstance(error, WeftError) and error.kind in _MEANINGS)


def require(condition: bool, message: str, param: str) -> None:
    """Raise `InvalidRequest` about `param` unless the condition holds."""
    if not condition:
        raise InvalidRequest(message, param)


def type_of(status: int) -> str:
    """The `type` of errors with this status, as OpenAI names it."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
