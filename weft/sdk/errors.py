"""Errors that a program meets. They are those of `weft.abi.errors`; `ProgramError` is the base of all.

A function of the library raises `InvalidRequest` for a bad argument, `UnknownHandle` for something that was released,
and what the host answered for everything else. `kind` and `param` say what failed; `str(error)` says what to do.
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
