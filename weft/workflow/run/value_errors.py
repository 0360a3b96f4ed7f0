"""The error of a variable that depends on a node which failed."""

from __future__ import annotations

from weft.abi.errors import WeftError
from weft.workflow.graph.values import RowError
from weft.workflow.run.frames import RowFailure

MAX_MESSAGE_CHARS = 1 << 16
MAX_KIND_CHARS = 100
"""As servers take them."""


class NodeFailed(WeftError):
    """A node failed. Every variable that depends on it gives this one exception; `param` is the path of the node where
    it began, such as `notes[3].summary`, and `__cause__` is what happened there."""

    kind = "node_failed"
    cause_kind = ""
    """The kind of a `WeftError`, the name of another exception's class."""

    @classmethod
    def of(cls, failure: RowFailure) -> NodeFailed:
        """The exception of a failure."""
        error = failure.error
        text = error.message if isinstance(error, (RowError, WeftError)) else message_of(error)
        retry_after_s = error.retry_after_s if isinstance(error, WeftError) else None
        made = cls(f"{failure.node}: {text or kind_of(error)}", failure.node, retry_after_s=retry_after_s)
        made.__cause__ = error
        made.cause_kind = kind_of(error)
        return made


def kind_of(error: BaseException) -> str:
    """What an error is called outside: the kind of a `WeftError`, the name of another exception's class."""
    return error.kind if isinstance(error, WeftError) else type(error).__name__[:MAX_KIND_CHARS]


def message_of(error: BaseException) -> str:
    """What an error says, shortened where it is long: that of a function may say megabytes, or fail to say anything."""
    try:
        said = str(error)
    except Exception:
        return ""
    return said if len(said) <= MAX_MESSAGE_CHARS else f"{said[: MAX_MESSAGE_CHARS - 1]}…"
