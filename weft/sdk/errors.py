"""The errors of the library: those of `weft.abi.errors`, with the base class `ProgramError`.

A function of the library raises `InvalidRequest` for an invalid argument, `UnknownHandle` for a released resource, and
the host's error for everything else. `kind` and `param` say what failed; `str(error)` says what to do.
"""

from __future__ import annotations

from weft.abi.errors import (
    Cancelled,
    ContextTooLong,
    Draining,
    EngineDead,
    InvalidRequest,
    LimitExceeded,
    NetworkDenied,
    NetworkFailed,
    NoProgram,
    OutOfPages,
    Overloaded,
    ProgramFailed,
    QuotaExceeded,
    RunCancelled,
    SlowListener,
    StorageFailed,
    UnknownHandle,
    UnknownProgram,
    Unsupported,
)
from weft.abi.errors import WeftError as ProgramError

__all__ = [
    "Cancelled",
    "ContextTooLong",
    "Draining",
    "EngineDead",
    "InvalidRequest",
    "LimitExceeded",
    "NetworkDenied",
    "NetworkFailed",
    "NoProgram",
    "OutOfPages",
    "Overloaded",
    "ProgramError",
    "ProgramFailed",
    "QuotaExceeded",
    "RunCancelled",
    "SlowListener",
    "StorageFailed",
    "UnknownHandle",
    "UnknownProgram",
    "Unsupported",
]
