"""Workflows: calls of models, functions and programs that are known in advance, as one graph over many rows.

`graph` is the data model that every way of writing a workflow makes, and its checks; `frontend` is what users write;
`passes` rewrite a graph into a cheaper one with the same results. `plan` decides the order of its calls; `escape` makes
a text of the user's safe in a template; `RowResult`, `TextDelta` and `CallStarted` are what `stream` yields.

Like `weft`, this module imports nothing until it is asked for: writing workflows does not load the planner.
"""

from typing import Any

_EXPORTS = {
    "CallStarted": "weft.workflow.run.feed",
    "RowResult": "weft.workflow.run.results",
    "TextDelta": "weft.workflow.run.feed",
    "escape": "weft.workflow.graph.templates",
    "plan": "weft.workflow.planning",
}

__all__ = ["CallStarted", "RowResult", "TextDelta", "escape", "plan"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'weft.workflow' has no attribute {name!r}")
