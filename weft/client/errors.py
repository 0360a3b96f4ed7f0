"""Errors between a client and its server.

ClientError
├── ServerError       the server answered with an error; `status`, `code` and `param` are its own
└── RunFailedError    a run ended without a result; `run` has why
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.abi.errors import WeftError

if TYPE_CHECKING:
    from weft.client.values import Run


class ClientError(WeftError):
    """No server answers, or the answer is not that of a Weft server."""

    kind = "client"


class ServerError(ClientError):
    """The server answered with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status = status
        """The HTTP status."""
        self.code = code
        """A stable word for the kind of error, such as `program_not_found` or `overloaded`."""
        self.param = param


class RunFailedError(ClientError):
    """A run failed or was cancelled. `run.error` says why; `traceback` has the program's own lines."""

    def __init__(self, run: Run):
        error = run.error
        super().__init__(f"the run {run.id} {run.status}: {error.message if error is not None else 'no reason given'}")
        self.run = run
        self.traceback = error.traceback if error is not None else ""
