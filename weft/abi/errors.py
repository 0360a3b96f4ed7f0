"""The tree of errors: one for the engine, the server, the program host and the programs themselves.

WeftError
├── InvalidRequest            the caller's mistake; `param` names the field
│   ├── ContextTooLong        prompt and output do not fit the model's context or the page pool
│   ├── Unsupported           a capability that Weft or this model does not have, by name
│   ├── UnknownModel          no model is served under that name
│   ├── UnknownProgram        no program of this tenant has that name or hash
│   ├── UnknownRun            no run of this tenant has that id, or its record has been dropped
│   ├── UnknownWorkflow       no workflow of this tenant has that id
│   ├── UnknownVariable       no variable of this tenant has that id
│   ├── NoValue               nothing can give a variable a value any more
│   ├── NotSettable           a variable that is computed, or that has its value already, was set
│   ├── RunEnded              the run has ended and takes no more messages
│   └── KeyReused             a request with this idempotency key asked for something else
├── ModelLoadError            a checkpoint that is missing, truncated, or of the wrong shape, dtype or architecture
├── ConfigError               a setting that cannot work on this machine
├── Overloaded                a queue is full; retry after `retry_after_s`
├── UnknownHandle             a sequence, page, queue or operation that was never opened, was released, or is another's
├── InvalidLogits             the model computed numbers that are NaN or infinite for this request
├── OutOfPages                a bounded wait for KV pages ended without any
├── LimitExceeded             a limit of a program is used up; `param` names the limit
├── QuotaExceeded             a tenant has stored or uploaded as much as it may
├── Cancelled                 an operation was ended by its engine, its host or another task
│   └── RunCancelled          a run was cancelled
├── ProgramFailed             a program's own code raised; `traceback` shows its lines
├── NoProgram                 a function of `weft.sdk` was called where no program runs
├── SlowListener              a subscriber did not read its messages, and the subscription has ended
├── StorageFailed             a value or a program could not be stored or read: a full disk, a folder without access
├── NetworkDenied             a program's request to a host or an address that it may not reach
├── NetworkFailed             a program's request that was allowed and did not succeed
├── EngineDead                the engine crashed or stopped answering; it is being restarted
├── EngineCrashed             the engine died each time that it computed this request; it is not to be repeated
├── HostDead                  the program host crashed or stopped answering; it is being restarted
└── Draining                  the server is shutting down and takes no new work

A message says what happened and what to do next. An error crosses a process or sandbox boundary as its `kind`, message,
`param`, `retry_after_s` and `traceback`; `from_kind` rebuilds it on the other side.
"""

from __future__ import annotations

from collections.abc import Iterator


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""

    kind = "internal"
    """Identifies the class on the wire."""

    def __init__(
        self, message: str, param: str | None = None, *, retry_after_s: float | None = None, traceback: str = ""
    ):
        super().__init__(message)
        self.param = param
        """The field or the limit at fault, where there is one."""
        self.retry_after_s = retry_after_s
        """Seconds after which a retry makes sense, where that is known."""
        self.traceback = traceback
        """Text of the program's own stack frames; empty where no program raised."""

    @property
    def message(self) -> str:
        """What happened and what to do next, without the name of the class."""
        return str(self)


class InvalidRequest(WeftError):
    """The caller's mistake. `param` names the offending field where there is one."""

    kind = "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt and output together do not fit the model's context or the page pool."""

    kind = "context_too_long"


class Unsupported(InvalidRequest):
    """A capability that Weft or the loaded model does not have; the message names it."""

    kind = "unsupported"


class UnknownModel(InvalidRequest):
    """No model is served under that name."""

    kind = "unknown_model"


class UnknownProgram(InvalidRequest):
    """No program of this tenant has that name or hash, or several have hashes that begin so."""

    kind = "unknown_program"


class UnknownRun(InvalidRequest):
    """No run of this tenant has that id, or its record has been dropped."""

    kind = "unknown_run"


class UnknownWorkflow(InvalidRequest):
    """No workflow of this tenant has that id, or several have ids that begin so."""

    kind = "unknown_workflow"


class UnknownVariable(InvalidRequest):
    """No variable of this tenant has that id."""

    kind = "unknown_variable"


class NoValue(InvalidRequest):
    """Nothing can give a variable a value any more: no call makes it, or its session is over. `param` names it."""

    kind = "no_value"


class NotSettable(InvalidRequest):
    """Only a variable whose value comes from outside is set, and only once. `param` names the variable."""

    kind = "not_settable"


class RunEnded(InvalidRequest):
    """The run has ended and takes no more messages."""

    kind = "run_ended"


class KeyReused(InvalidRequest):
    """An earlier request with the same idempotency key asked for something else."""

    kind = "key_reused"


class ModelLoadError(WeftError):
    """A checkpoint that cannot be loaded as it is; the message says which file or tensor and why."""

    kind = "model_load"


class ConfigError(WeftError):
    """A setting, or a combination of settings, that cannot work."""

    kind = "config"


class Overloaded(WeftError):
    """A queue is full. `retry_after_s` is 1 unless the raiser knows better."""

    kind = "overloaded"

    def __init__(
        self, message: str, param: str | None = None, *, retry_after_s: float | None = None, traceback: str = ""
    ):
        super().__init__(
            message, param, retry_after_s=1.0 if retry_after_s is None else retry_after_s, traceback=traceback
        )


class UnknownHandle(WeftError):
    """A handle that was never opened, was released, or belongs to another client or program."""

    kind = "unknown_handle"


class OutOfPages(WeftError):
    """A bounded wait for KV pages ended without any becoming free."""

    kind = "out_of_pages"


class InvalidLogits(WeftError):
    """The model computed logits, log-probabilities or hidden states for this request that are NaN or infinite."""

    kind = "invalid_logits"


class LimitExceeded(WeftError):
    """A limit of a program is used up. `param` names it, such as `cpu_s`."""

    kind = "limit_exceeded"


class QuotaExceeded(WeftError):
    """The tenant has stored or uploaded as much as it may; delete something first."""

    kind = "quota_exceeded"


class Cancelled(WeftError):
    """An operation was ended by its engine, its host, or another task of the program: a drain, a lost lease, a cancel.

    Not `asyncio.CancelledError`: the task that awaits the operation goes on and may try again.
    """

    kind = "cancelled"


class RunCancelled(Cancelled):
    """A run, of this program's child or of a client, was cancelled."""

    kind = "run_cancelled"


class ProgramFailed(WeftError):
    """A program's own code raised. `traceback` is the text of the program's own lines; it may be empty."""

    kind = "program_failed"


class NoProgram(WeftError):
    """A function of `weft.sdk` was called where no program runs."""

    kind = "no_program"


class SlowListener(WeftError):
    """A subscriber did not read its messages, and the subscription has ended."""

    kind = "slow_listener"


class StorageFailed(WeftError):
    """A value or a program could not be stored or read: a full disk, a folder without access."""

    kind = "storage_failed"


class NetworkDenied(WeftError):
    """A program's request to a host or an address that it may not reach."""

    kind = "network_denied"


class NetworkFailed(WeftError):
    """A program's request that was allowed: no connection, no complete answer in time, or too long an answer."""

    kind = "network_failed"


class EngineDead(WeftError):
    """The engine process crashed, or missed its progress deadline and was killed. Its KV is lost; tokens can be
    computed again."""

    kind = "engine_dead"


class EngineCrashed(WeftError):
    """The engine died each time that it computed one request, at last while it computed no other request."""

    kind = "engine_crashed"


class HostDead(WeftError):
    """The program host crashed or was killed, and the runs it carried out have ended with it."""

    kind = "host_dead"


class Draining(WeftError):
    """The server is shutting down and takes no new work."""

    kind = "draining"


def from_kind(
    kind: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
    traceback: str = "",
) -> WeftError:
    """Rebuild an error that crossed a boundary. An unknown kind becomes a plain `WeftError` of that kind."""
    cls = _BY_KIND.get(kind)
    error = (cls or WeftError)(message, param, retry_after_s=retry_after_s, traceback=traceback)
    if cls is None:
        error.kind = kind
    return error


def _descendants(cls: type[WeftError]) -> Iterator[type[WeftError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


# Only classes of this module: what others derive stays in its process, or crosses as the kind that it inherits.
_BY_KIND = {cls.kind: cls for cls in _descendants(WeftError)}
