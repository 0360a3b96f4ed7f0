"""What can go wrong in a program. `kind` is what travels between a program and its host.

ProgramError
├── InvalidRequest            a value that cannot be; `param` names the field where there is one
│   ├── ContextTooLong        more tokens than the model or the page pool takes
│   ├── Unsupported           a capability that Weft or this model does not have, by name
│   └── UnknownProgram        no program of this name
├── UnknownHandle             a sequence, page, queue, ... that was never opened, was given back, or is somebody else's
├── OutOfPages                a bounded wait for KV pages ended without any
├── EngineDead                the engine crashed and is being restarted; contexts can be restored from their tokens
├── LimitExceeded             a limit of this program is used up; `param` names the limit
│   └── QuotaExceeded         the tenant's store is full
├── Cancelled                 somebody ended the call: the host, or this program in another task
│   └── RunCancelled          a child was cancelled
├── SlowListener              a subscription ended because its messages were not read
├── StorageFailed             a value could not be kept or read
├── NetworkDenied             a request to an address that the program's allow-list does not have
├── NetworkFailed             a request that was allowed and did not succeed
├── ProgramFailed             a child program ended with an error
├── Overloaded, Draining      the server takes no new work now; try again later
└── NoProgram                 a function of the library was called outside a program

An error of a kind that is not listed is a plain `ProgramError`; its `kind` says which.
"""

from __future__ import annotations


class ProgramError(Exception):
    """Base of all errors that the library raises on purpose. `str(error)` says what happened and what to do next."""

    kind = "internal"

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param
        """The field or limit that is to blame, where one is."""

    @property
    def message(self) -> str:
        """What happened, without the name of the class."""
        return str(self)


class InvalidRequest(ProgramError):
    """A value that cannot be; `param` names it where there is a name."""

    kind = "invalid_request"


class ContextTooLong(InvalidRequest):
    """More tokens than the model's context or the page pool takes."""

    kind = "context_too_long"


class Unsupported(InvalidRequest):
    """A capability that Weft or this model does not have; the message names it."""

    kind = "unsupported"


class UnknownHandle(ProgramError):
    """A handle that was never opened, was given back, or belongs to another program."""

    kind = "unknown_handle"


class OutOfPages(ProgramError):
    """A bounded wait for KV pages ended without any becoming free."""

    kind = "out_of_pages"


class EngineDead(ProgramError):
    """The engine crashed. What it held is lost; tokens that the program knows can be computed again."""

    kind = "engine_dead"


class LimitExceeded(ProgramError):
    """A limit of this program is used up; `param` names it."""

    kind = "limit_exceeded"


class Cancelled(ProgramError):
    """The call was ended by somebody else. (A task of this program that is cancelled gets `asyncio.CancelledError`.)"""

    kind = "cancelled"


class UnknownProgram(InvalidRequest):
    """There is no program of this name."""

    kind = "unknown_program"


class QuotaExceeded(LimitExceeded):
    """The tenant's store has no room for the value; delete others."""

    kind = "quota_exceeded"


class RunCancelled(Cancelled):
    """A child was cancelled."""

    kind = "run_cancelled"


class SlowListener(ProgramError):
    """A subscription has ended because its messages were not read."""

    kind = "slow_listener"


class StorageFailed(ProgramError):
    """A value could not be kept or read; try again."""

    kind = "storage_failed"


class NetworkDenied(ProgramError):
    """A request to an address that this program may not reach."""

    kind = "network_denied"


class NetworkFailed(ProgramError):
    """A request that was allowed and did not succeed: no connection, no answer in time, too long an answer."""

    kind = "network_failed"


class ProgramFailed(ProgramError):
    """A program ended with an error."""

    kind = "program_failed"


class Overloaded(ProgramError):
    """The server takes no more work now."""

    kind = "overloaded"


class Draining(ProgramError):
    """The server is shutting down."""

    kind = "draining"


class NoProgram(ProgramError):
    """A function of the library was called where no program runs."""

    kind = "no_program"


_BY_KIND: dict[str, type[ProgramError]] = {
    cls.kind: cls
    for cls in (
        InvalidRequest,
        ContextTooLong,
        Unsupported,
        UnknownHandle,
        OutOfPages,
        EngineDead,
        LimitExceeded,
        Cancelled,
        NetworkDenied,
        NetworkFailed,
        ProgramFailed,
        Overloaded,
        Draining,
        NoProgram,
        UnknownProgram,
        QuotaExceeded,
        RunCancelled,
        SlowListener,
        StorageFailed,
    )
}


def from_kind(kind: str, message: str, param: str | None = None) -> ProgramError:
    """The error that the host sent; one of an unknown kind is a `ProgramError` with that kind."""
    cls = _BY_KIND.get(kind)
    if cls is not None:
        return cls(message, param)
    error = ProgramError(message, param)
    error.kind = kind
    return error
