"""Why a variable has no value: the errors that reach those who get or set one.

WeftError
├── NodeFailed                a node failed, and the variable depends on it; `param` names the node
└── InvalidRequest
    ├── NoValue               nothing can give the variable a value any more
    └── NotSettable           a variable that is computed, or that has its value already, was set
"""

from __future__ import annotations

from weft.abi.errors import InvalidRequest, WeftError
from weft.workflow.graph.values import RowError
from weft.workflow.run.frames import RowFailure


class NodeFailed(WeftError):
    """A node failed. Every variable that depends on it gives this one exception; `param` is the path of the node where
    it began, such as `notes[3].summary`, and `__cause__` is what happened there."""

    kind = "node_failed"

    @classmethod
    def of(cls, failure: RowFailure) -> NodeFailed:
        """The exception of a failure."""
        error = failure.error
        text = error.message if isinstance(error, (RowError, WeftError)) else str(error)
        retry_after_s = error.retry_after_s if isinstance(error, WeftError) else None
        made = cls(f"{failure.node}: {text or type(error).__name__}", failure.node, retry_after_s=retry_after_s)
        made.__cause__ = error
        return made


class NoValue(InvalidRequest):
    """Nothing can give the variable a value any more: no call makes it, or its session is over. `param` names it."""

    kind = "no_value"


class NotSettable(InvalidRequest):
    """Only a variable of `ops.external` is set, and only once. `param` names the variable."""

    kind = "not_settable"
