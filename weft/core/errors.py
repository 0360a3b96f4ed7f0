"""The tree of errors. A message says what happened and what to do next; `kind` is what travels on the wire.

WeftError
├── InvalidRequest            the caller's mistake; the message names the field
│   ├── ContextTooLong        prompt and output do not fit the model or the page pool
│   └── Unsupported           a capability that Weft or this model does not have, by name
├── ModelLoadError            a checkpoint that is missing, truncated, or of the wrong shape, dtype or architecture
├── ConfigError               a setting that cannot work on this machine
├── Overloaded                the queue is full; retry after `retry_after_s`
├── UnknownHandle             a sequence, page or operation that the caller does not own (freed, forged, foreign)
├── OutOfPages                a bounded wait for KV pages ended without any
├── ProgramFailed             a program's own error: what its code raised, with the traceback
├── LimitExceeded             a program went over a limit; `param` names it
├── NetworkDenied             a program's request to a host or an address that it may not reach
├── NetworkFailed             a program's request that was allowed and did not succeed
├── EngineDead                the engine crashed or stopped answering; it is being restarted
└── Draining                  the server is shutting down and takes no new work
"""

from __future__ import annotations


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""

    kind = "internal"
    param: str | None = None
    """The field that is to blame, where one is."""
    retry_after_s: float | None = None
    """When to try again, where that is known."""

    @property
    def message(self) -> str:
        """What happened and what to do next, without the class name."""
        return str(self)


class InvalidRequest(WeftError):
    """The caller's mistake. `param` names the offending field where there is one."""

    kind = "invalid_request"

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt and output together do not fit the model's context or the page pool."""

    kind = "context_too_long"


class Unsupported(InvalidRequest):
    """A capability that Weft or the loaded model does not have; the message names it."""

    kind = "unsupported"


class ModelLoadError(WeftError):
    """A checkpoint that cannot be loaded as it is; the message says which file or tensor and why."""

    kind = "model_load"


class ConfigError(WeftError):
    """A setting, or a combination of settings, that cannot work."""

    kind = "config"


class Overloaded(WeftError):
    """The intake is full."""

    kind = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownHandle(WeftError):
    """A handle that its user does not own: never opened, already released, or somebody else's."""

    kind = "unknown_handle"


class OutOfPages(WeftError):
    """A bounded wait for KV pages ended without any becoming free."""

    kind = "out_of_pages"


class ProgramFailed(WeftError):
    """A program's own code failed. `traceback` is its text, of the program's own lines; it may be empty."""

    kind = "program_failed"

    def __init__(self, message: str, traceback: str = ""):
        super().__init__(message)
        self.traceback = traceback


class LimitExceeded(WeftError):
    """A program went over one of its limits and was ended. `param` names the limit, such as `cpu_s`."""

    kind = "limit_exceeded"

    def __init__(self, limit: str, message: str):
        super().__init__(message)
        self.param = limit


class NetworkDenied(WeftError):
    """A program's request to somewhere it may not reach."""

    kind = "network_denied"


class NetworkFailed(WeftError):
    """A program's request that was allowed: no connection, no complete answer in time, or too long an answer."""

    kind = "network_failed"


class EngineDead(WeftError):
    """The engine process crashed, or missed its progress deadline and was killed."""

    kind = "engine_dead"


class Draining(WeftError):
    """The server is shutting down."""

    kind = "draining"


_SIMPLE: dict[str, type[WeftError]] = {
    cls.kind: cls
    for cls in (
        ModelLoadError,
        ConfigError,
        UnknownHandle,
        OutOfPages,
        ProgramFailed,
        NetworkDenied,
        NetworkFailed,
        EngineDead,
        Draining,
    )
}
_WITH_PARAM: dict[str, type[InvalidRequest]] = {cls.kind: cls for cls in (InvalidRequest, ContextTooLong, Unsupported)}


def from_kind(kind: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> WeftError:
    """Rebuild the error that crossed a wire as (`kind`, `message`); an unknown kind becomes a plain `WeftError`."""
    if kind in _WITH_PARAM:
        return _WITH_PARAM[kind](message, param)
    if kind == Overloaded.kind:
        return Overloaded(message) if retry_after_s is None else Overloaded(message, retry_after_s)
    if kind == LimitExceeded.kind:
        return LimitExceeded(param or "", message)
    return _SIMPLE.get(kind, WeftError)(message)
