"""Errors of uploaded programs and their runs, beside those of `weft.abi.errors`.

WeftError
├── UnknownProgram    no program of this tenant has that name or hash, or several have hashes that begin so
├── UnknownRun        no run of this tenant has that id, or it is so long ago that it was forgotten
├── RunEnded          the run has ended and takes nothing more
├── RunCancelled      the run was cancelled
├── QuotaExceeded     a tenant has uploaded as much as it may
├── StorageFailed     what was uploaded cannot be kept: a full disk, a folder that cannot be written
├── SlowListener      somebody who listens to a run does not read what it says
└── HostDead          the program host crashed or stopped answering; it is being restarted
"""

from __future__ import annotations

import logging
from pathlib import Path

from weft.abi.errors import InvalidRequest, LimitExceeded, ProgramFailed, WeftError, from_kind

logger = logging.getLogger("weft.programs")


class UnknownProgram(InvalidRequest):
    """No program of this tenant is called so."""

    kind = "unknown_program"


class UnknownRun(InvalidRequest):
    """No run of this tenant has this id."""

    kind = "unknown_run"


class RunEnded(InvalidRequest):
    """The run has ended."""

    kind = "run_ended"


class RunCancelled(WeftError):
    """Somebody ended the run."""

    kind = "run_cancelled"


class QuotaExceeded(InvalidRequest):
    """No more programs, or bytes of them, for this tenant."""

    kind = "quota_exceeded"


class StorageFailed(WeftError):
    """The disk is full, or the folder of programs cannot be written."""

    kind = "storage_failed"


def storage_failed(message: str, path: Path) -> StorageFailed:
    """The error to raise. Its message reaches clients; only the log says where on the server's disk it failed."""
    logger.error("storage failed at %s: %s", path, message)
    return StorageFailed(message)


class SlowListener(WeftError):
    """What a run says was not read, and has been given up."""

    kind = "slow_listener"


class HostDead(WeftError):
    """The program host is gone, and with it the runs it had."""

    kind = "host_dead"


_SIMPLE: dict[str, type[WeftError]] = {cls.kind: cls for cls in (RunCancelled, StorageFailed, SlowListener, HostDead)}
_WITH_PARAM: dict[str, type[InvalidRequest]] = {
    cls.kind: cls for cls in (UnknownProgram, UnknownRun, RunEnded, QuotaExceeded)
}


def from_kind(
    kind: str, message: str, *, param: str | None = None, traceback: str = "", retry_after_s: float | None = None
) -> WeftError:
    """An error that crossed a wire, as what it was."""
    if kind in _SIMPLE:
        return _SIMPLE[kind](message)
    if kind in _WITH_PARAM:
        return _WITH_PARAM[kind](message, param)
    if kind == ProgramFailed.kind:
        return ProgramFailed(message, traceback)
    if kind == LimitExceeded.kind:
        return LimitExceeded(param or "", message)
    return from_kind(kind, message, param=param, retry_after_s=retry_after_s)
