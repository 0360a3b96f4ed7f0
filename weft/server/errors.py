"""Errors as HTTP responses.

`weft.endpoints.errors` decides status and body; this module adds headers, and the errors that only HTTP has.
"""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from weft.endpoints import errors
from weft.endpoints.errors import ErrorBody, ErrorResponse, answer_of, type_of


class HttpProblem(Exception):
    """A response that is not a success, for an error that only HTTP has. `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message=message, type=type_of(status), code=code)
        self.headers = headers or {}


class ClientGone(Exception):
    """The client closed the connection before its response was complete, so there is no response."""


def problem_of(error: BaseException, request_id: str) -> HttpProblem:
    """The answer to an error. Only messages written for callers are passed on."""
    if isinstance(error, HttpProblem):
        return error
    told = answer_of(error, request_id)
    headers = {} if told.retry_after_s is None else retry_headers(told.retry_after_s)
    if not told.may_be_repeated:
        headers["x-should-retry"] = "false"  # OpenAI's clients follow it
    body = told.body
    problem = HttpProblem(told.status, body.message, headers=headers)
    problem.body = body
    return problem


def is_internal(error: BaseException) -> bool:
    """Whether the cause must be logged, because the response does not contain it."""
    return not isinstance(error, HttpProblem) and errors.is_internal(error)


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """`Retry-After` in whole seconds, as in the standard, and in milliseconds for clients that read them."""
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
